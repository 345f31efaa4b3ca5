"""Figures: what they draw, on which axes, and that they leave matplotlib's settings alone."""

from __future__ import annotations

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from fedjax_pfl.experiment import plots
from fedjax_pfl.experiment.plots import MAX_DOTS, _density
from fedjax_pfl.experiment.plots.clusters import MAX_BARS, plot_clusters
from fedjax_pfl.experiment.plots.curves import MAX_POINTS, _apart, plot_choices
from fedjax_pfl.experiment.plots.partition import MAX_CELLS, grouped_means
from fedjax_pfl.experiment.plots.style import DASHES, PALETTE, inline_svg, looks_of, printable, quantity
from fedjax_pfl.experiment.plots.topology import FEW, layout, plot_topology

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
    if name == "data sets":
        return plots.plot_data_sets({"a": {"MUTAG": (0.9, 0.1), "BZR": (0.8, None)}, "b": {}}, ax)  # type: ignore[arg-type]
    draw_curves = {"curves": plots.plot_curves, "communication": plots.plot_communication}[name]
    return draw_curves(curves, ax)  # type: ignore[arg-type]


NAMES = ["partition", "weights", "clients", "results", "data sets", "curves", "communication"]


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


def test_each_data_set_has_its_line_and_each_method_its_mark() -> None:
    ax = Figure().subplots()
    plots.plot_data_sets(
        {"a": {"ONE": (0.5, None), "TWO": (0.25, 0.1)}, "b": {"TWO": (1.0, None), "ONE": (None, None)}}, ax
    )
    assert [label.get_text() for label in ax.get_yticklabels()] == ["ONE", "TWO"]
    (xa, ya), (xb, yb) = (bars[0].get_data() for bars in ax.containers)
    assert (list(xa), list(xb)) == ([0.5, 0.25], [1.0])
    assert np.round(np.array(ya, float)).tolist() == [0, 1]
    assert np.round(np.array(yb, float)).tolist() == [1]
    assert ya[1] < yb[0], "methods do not cover each other"


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


def on_a_line(places: list[float]) -> np.ndarray:
    """Distances of clients on a line, infinite on the diagonal."""
    d = np.abs(np.subtract.outer(places, places)).astype(float)
    return np.where(np.eye(len(d), dtype=bool), np.inf, d)


def test_topology_draws_the_shortest_path_and_tells_its_length() -> None:
    d = on_a_line([0.0, 1.0, 2.5, 9.0])
    d[0, 2] = d[2, 0] = 4.0  # dearer than by way of 1
    ax = Figure().subplots()
    ends = np.array([[0, 2], [-1, -1]])
    plot_topology(d, np.array([0, 0, 1, -1]), ends, ["A", "B", "C", "D"], ax)
    dots = np.concatenate([np.asarray(one.get_offsets()) for one in ax.collections if one.get_label()[0] != "_"])
    by_name = {text.get_text(): text.xy for text in ax.texts}  # type: ignore[attr-defined]
    assert sorted(map(tuple, dots)) == sorted(map(tuple, by_name.values()))
    (path,) = ax.lines
    np.testing.assert_array_equal(path.get_xydata(), [by_name[name] for name in "ABC"])
    told = [text.get_text() for text in ax.get_legend().get_texts()]
    assert told == ["A \N{RIGHTWARDS ARROW} C: length 2.5, 2 edges", "no cluster (1)", "cluster 1 (2)", "cluster 2 (1)"]


@pytest.mark.parametrize("clients", [2, 3, 13, 50])
def test_near_clients_lie_near_each_other(clients: int) -> None:
    group = np.arange(clients) % 2
    rng = np.random.default_rng(clients)
    noise = np.abs(np.subtract.outer(rng.uniform(size=clients), rng.uniform(size=clients)))
    d = np.where(group[:, None] == group, 0.01, 1.0) + 0.05 * (noise + noise.T)
    d[np.diag_indices(clients)] = np.inf
    places = layout(d)
    np.testing.assert_array_equal(places, layout(d))
    apart = np.linalg.norm(places[:, None] - places, axis=-1)
    assert apart[~np.eye(clients, dtype=bool)].min() > 0.03 * apart.max()  # none hides another
    if clients > 3:
        assert (group[np.where(np.eye(clients), np.inf, apart).argmin(1)] == group).all()
    figure = plot_topology(d, group)
    edges = figure.axes[0].collections[0].get_segments()  # type: ignore[attr-defined]
    assert len(edges) <= clients * (3 if clients <= FEW else 2)
    assert len(figure.axes[0].texts) == clients


def test_topology_without_clients_that_have_no_edge() -> None:
    d = np.full((5, 5), np.inf)
    d[1, 4] = d[4, 1] = 0.0
    ax = Figure().subplots()
    plot_topology(d, ends=np.array([[0, 1], [1, 4]]), ax=ax)
    assert [text.get_text() for text in ax.texts] == ["1", "4"]
    assert len(ax.lines) == 1  # there is no path from 0 to 1


def test_bad_topologies() -> None:
    good = on_a_line([0.0, 1.0, 3.0])
    with pytest.raises(ValueError, match=r"square matrix .* found shape \(2, 3\)"):
        plot_topology(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="not be negative or NaN"):
        plot_topology(np.where(good == 1, np.nan, good))
    with pytest.raises(ValueError, match="must be symmetric"):
        plot_topology(np.triu(good, 1))
    with pytest.raises(ValueError, match=r"3 clients need as many clusters and names, found \(2,\)"):
        plot_topology(good, np.zeros(2, int))
    with pytest.raises(ValueError, match="pairs of clients below 3"):
        plot_topology(good, ends=np.array([[0, 3]]))
    with pytest.raises(ValueError, match="2 to 200 clients with an edge, found 0"):
        plot_topology(np.full((3, 3), np.inf))
    with pytest.raises(ValueError, match=r"vector \(clients,\), found \(2, 2\)"):
        plot_clusters(np.zeros((2, 2), int))


def test_bars_of_clusters() -> None:
    ax = Figure().subplots()
    plot_clusters(np.array([2, 0, 2, -1, 2]), list("abcde"), ax)
    assert [bar.get_width() for bar in ax.patches] == [1, 1, 3]  # type: ignore[attr-defined]
    assert [text.get_text() for text in ax.texts] == ["d", "b", "a, c, e"]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["none", "cluster 1", "cluster 3"]
    many = Figure().subplots()
    plot_clusters(np.append(np.arange(300), 299), ax=many)
    assert len(many.patches) == MAX_BARS
    assert many.patches[-1].get_width() == 2  # type: ignore[attr-defined]


def test_choices_are_dots_with_counts() -> None:
    ax = Figure().subplots()
    values = np.array([0.1, 0.5, np.nan, 0.1])
    plot_choices({"a": (np.arange(4), values)}, ax)
    assert [text.get_text() for text in ax.texts] == ["2\N{MULTIPLICATION SIGN}", "1\N{MULTIPLICATION SIGN}"]
    np.testing.assert_array_equal(ax.get_yticks(), [0.1, 0.5])
    long = Figure().subplots()
    one = (np.arange(5000), np.tile([0.1, 0.9], 2500))
    plot_choices({"a": one, "b": one}, long)
    first, second = (np.asarray(dots.get_offsets()) for dots in long.collections)
    assert len(first) <= MAX_POINTS
    assert 0 < (second - first)[:, 1].min() < 0.8 / 4  # side by side, nearer than the next choice
    assert not long.texts
