"""Figures: what they draw, on which axes, and that they leave matplotlib's settings alone."""

from __future__ import annotations

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from fedjax_pfl.experiment import plots
from fedjax_pfl.experiment.plots import MAX_DOTS, _density
from fedjax_pfl.experiment.plots.curves import MAX_POINTS, _apart
from fedjax_pfl.experiment.plots.partition import MAX_CELLS, grouped_means
from fedjax_pfl.experiment.plots.style import DASHES, PALETTE, inline_svg, looks_of, printable, quantity

RNG = np.random.default_rng(0)
GROUPS = np.array([0, 1, 2, 0, 1, 2, 0, 1])
COUNTS = np.eye(3, dtype=int)[GROUPS] * 20 + 1
WEIGHTS = np.where(GROUPS[:, None] == GROUPS, 0.05, 0.01) + np.diag(np.full(8, 0.7))


def draw(name: str, ax: object = None) -> Figure:
    """One figure of each kind."""
    curves = {"a $x_{": (np.arange(5), RNG.uniform(size=(5, 3))), "_b": (np.arange(5), RNG.uniform(size=5))}
    if name == "partition":
        return plots.plot_partition(COUNTS, ax)  # type: ignore[arg-type]
    if name == "weights":
        return plots.plot_weights(WEIGHTS, plots.label_similarity(COUNTS), ax)  # type: ignore[arg-type]
    if name == "clients":
        return plots.plot_clients({"a": RNG.uniform(size=9), "b": np.full(4, np.nan)}, ax)  # type: ignore[arg-type]
    if name == "results":
        return plots.plot_results({"a": {"personal": (0.9, 0.1), "shared": (None, None)}}, ax)  # type: ignore[arg-type]
    draw_curves = {"curves": plots.plot_curves, "communication": plots.plot_communication}[name]
    return draw_curves(curves, ax)  # type: ignore[arg-type]


NAMES = ["partition", "weights", "clients", "results", "curves", "communication"]


@pytest.mark.parametrize("name", NAMES)
def test_new_figure_or_given_axes(name: str) -> None:
    before = dict(matplotlib.rcParams)
    figure = draw(name)
    assert isinstance(figure, Figure)
    assert figure.axes
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    mine = Figure()
    ax = mine.subplots()
    assert draw(name, ax) is mine
    assert ax.has_data()
    assert dict(matplotlib.rcParams) == before
    assert inline_svg(figure, name, '"<&').startswith('<svg class="plot" role="img" aria-label="&quot;&lt;&amp;"')


def test_similar_clients_become_neighbours() -> None:
    order = plots.client_order(plots.label_similarity(COUNTS))
    assert sorted(order) == list(range(8))
    assert np.count_nonzero(np.diff(GROUPS[order])) == 2  # three runs of equal groups
    assert list(plots.client_order(np.ones((2, 2)))) == [0, 1]


def test_order_of_very_many_clients_needs_no_tree() -> None:
    groups = RNG.integers(0, 3, 2100)
    order = plots.client_order(plots.label_similarity(np.eye(3)[groups] + 0.01))
    assert np.count_nonzero(np.diff(groups[order])) <= 3


def test_label_similarity_of_an_empty_client_is_zero() -> None:
    similarity = plots.label_similarity(np.array([[1, 0], [2, 0], [0, 0]]))
    np.testing.assert_allclose(similarity, [[1, 1, 0], [1, 1, 0], [0, 0, 0]])


def test_colours_of_weights_are_those_of_others() -> None:
    ax = Figure().subplots()
    plots.plot_weights(WEIGHTS, ax=ax, order=np.arange(8))
    image = ax.images[0]
    assert image.get_clim() == pytest.approx((0.0, 0.05))  # not the 0.7 of the diagonal
    assert np.ma.getmaskarray(image.get_array()).diagonal().all() or np.isnan(image.get_array().diagonal()).all()


def test_weights_that_lie_close_together_fill_the_colours() -> None:
    ax = Figure().subplots()
    plots.plot_weights(np.where(GROUPS[:, None] == GROUPS, 0.03, 0.02), ax=ax)
    assert ax.images[0].get_clim() == pytest.approx((0.02, 0.03))
    constant = Figure().subplots()
    plots.plot_weights(np.full((4, 4), 0.25), ax=constant)
    assert constant.images[0].get_clim() == pytest.approx((0.0, 0.25))


def test_negative_weights_get_a_symmetric_scale() -> None:
    ax = Figure().subplots()
    plots.plot_weights(WEIGHTS - 0.03, ax=ax)
    assert ax.images[0].get_clim() == pytest.approx((-0.02, 0.02))


def test_many_clients_are_averaged_in_groups() -> None:
    ax = Figure().subplots()
    plots.plot_weights(np.full((300, 300), 0.1), ax=ax)
    assert ax.images[0].get_array().shape == (MAX_CELLS, MAX_CELLS)
    np.testing.assert_allclose(grouped_means(np.array([[1.0], [3.0], [np.nan], [5.0]]), 2), [[2.0], [5.0]])
    assert np.isnan(grouped_means(np.full((4, 1), np.nan), 2)).all()


def test_partition_of_many_clients_and_with_names() -> None:
    figure = plots.plot_partition(RNG.integers(0, 9, (1000, 3)), class_names=["cat", "dog", "$cow"])
    assert [tick.get_text() for tick in figure.axes[1].get_yticklabels()] == ["cat", "dog", "$cow"]


def test_bad_matrices() -> None:
    with pytest.raises(ValueError, match=r"square matrix .* found shape \(2, 3\)"):
        plots.plot_weights(np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"A's shape \(2, 2\), found \(3, 3\)"):
        plots.plot_weights(np.zeros((2, 2)), np.zeros((3, 3)))
    with pytest.raises(ValueError, match=r"\(clients, classes\), found shape \(4,\)"):
        plots.plot_partition(np.zeros(4))


def test_curves_skip_absent_values_and_thin_long_ones() -> None:
    ax = Figure().subplots()
    values = np.array([[0.1, 0.3], [np.nan, np.nan], [0.5, np.nan]])
    plots.plot_curves({"a": (np.array([0, 5, 10]), values), "b": (np.arange(3), np.full(3, np.nan))}, ax)
    (line,) = ax.lines
    np.testing.assert_allclose(line.get_xydata(), [[0, 0.2], [10, 0.5]])
    long = Figure().subplots()
    plots.plot_curves({"a": (np.arange(5000), np.arange(5000.0))}, long, percent=False)
    assert len(long.lines[0].get_xdata()) == MAX_POINTS


def test_communication_of_a_silent_method_is_a_line() -> None:
    ax = Figure().subplots()
    accuracy = np.array([0.5, 0.7])
    plots.plot_communication({"a": (np.array([10.0, 99.0]), accuracy), "b": (np.zeros(2), accuracy)}, ax)
    assert ax.get_xscale() == "linear"
    assert list(ax.lines[1].get_ydata()) == [0.7, 0.7]
    wide = Figure().subplots()
    plots.plot_communication({"a": (np.array([1.0, 2.0]), accuracy), "b": (np.array([0.0, 1e6]), accuracy)}, wide)
    assert wide.get_xscale() == "log"
    assert list(wide.lines[1].get_xdata()) == [1e6]


def test_results_that_differ_by_rounding_look_equal() -> None:
    ax = Figure().subplots()
    plots.plot_results({"a": {"personal": (0.98, 0.0), "received": (0.98 + 1e-8, 0.0)}}, ax)
    low, high = ax.get_xlim()
    assert high - low == pytest.approx(plots.LEAST_SPAN)
    assert low < 0.98 < high


def test_clients_beyond_the_limit_are_sampled() -> None:
    ax = Figure().subplots()
    plots.plot_clients({"a": RNG.uniform(size=5000)}, ax)
    assert len(ax.collections[0].get_offsets()) == MAX_DOTS


def test_density_stays_a_share() -> None:
    values = np.sort(np.append(RNG.uniform(0.8, 1, 50), np.ones(50)))
    grid, density = _density(values)
    assert grid[0] >= 0
    assert grid[-1] <= 1
    assert density.argmax() > 150


def test_labels_keep_apart_and_in_order() -> None:
    places = np.array(_apart([0.2, 0.5, 0.51, 0.52, 1.0], 0.1))
    assert np.diff(places).min() >= 0.1 - 1e-9
    assert places[-1] == 1.0
    assert places[0] == 0.2
    assert _apart([], 0.1) == []


def test_looks_are_distinct() -> None:
    looks = looks_of(f"method {i}" for i in range(len(PALETTE) * len(DASHES)))
    assert len({(look.colour, look.dash) for look in looks.values()}) == len(looks)


def test_texts() -> None:
    shown = {0: "0", 12.345: "12.3", 999.9: "1 k", 1234: "1.23 k", 5e6: "5 M", float("nan"): ""}
    assert {value: quantity(value) for value in shown} == shown
    assert printable("a\x00b") == "a\N{REPLACEMENT CHARACTER}b"
    assert printable("x" * 99, 5) == "xxxx…"


def test_embeddings_of_alike_clients_are_neighbours() -> None:
    from fedjax_pfl.experiment.plots.embedding import flattened, plot_embedding

    rng = np.random.default_rng(0)
    labels = np.repeat([4, 7, 9], 12)
    embedding = 5 * np.eye(10)[labels] + 0.1 * rng.normal(size=(36, 10))
    places = flattened(embedding)
    np.testing.assert_array_equal(places, flattened(embedding))
    distance = np.linalg.norm(places[:, None] - places, axis=-1) + 1e9 * np.eye(36)
    assert (labels[distance.argmin(1)] == labels).all()
    figure = plot_embedding(embedding, labels)
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["4", "7", "9"]
    with pytest.raises(ValueError, match="at least 5 clients"):
        flattened(embedding[:4])
