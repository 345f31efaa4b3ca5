"""The figures of a report: which runs go into each, and the sentence that says how to read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fedjax_pfl.evaluation import KINDS
from fedjax_pfl.experiment.plots import (
    MAX_DOTS,
    label_similarity,
    looks_of,
    plot_clients,
    plot_communication,
    plot_curves,
    plot_data_sets,
    plot_partition,
    plot_results,
    plot_weights,
)  # fmt: skip
from fedjax_pfl.experiment.plots.curves import MAX_POINTS
from fedjax_pfl.experiment.plots.embedding import LEAST, plot_embedding
from fedjax_pfl.experiment.plots.partition import MAX_BUBBLES, MAX_CELLS
from fedjax_pfl.experiment.plots.style import WIDTH, Look, legend, new_figure, printable, styled
from fedjax_pfl.experiment.plots.weights import off_diagonal
from fedjax_pfl.experiment.report.data import Run
from fedjax_pfl.experiment.report.diagnostics import diagnostics
from fedjax_pfl.experiment.report.picture import Picture
from fedjax_pfl.experiment.report.topology import topology

MAX_DIRECT = 26
"""Labels up to this long stand beside their curves instead of in a legend."""


def pictures(runs: Sequence[Run]) -> Iterator[Picture]:
    """The figures that these runs have data for, in the order of the page."""
    looks = looks_of(run.label for run in runs)
    for make in (
        _results, _data_sets, _curves, _clients, _partition, _weights, topology, _embedding, _communication,
        diagnostics,
    ):  # fmt: skip
        yield from make(runs, looks)


def _results(runs: Sequence[Run], looks: dict[str, Look]) -> Iterator[Picture]:
    rows = {
        run.label: {kind: (run.test(kind, "weighted_mean"), run.spread(kind, "weighted_mean")) for kind in KINDS}
        for run in runs
    }
    if all(mean is None for kinds in rows.values() for mean, _ in kinds.values()):
        return
    bars = "; bars are one standard deviation over seeds" if max(len(run.seeds) for run in runs) > 1 else ""
    caption = (
        f"Test accuracy after the last round, each client weighted by its number of test samples{bars}. The distance "
        "from the open to the filled circle is what personalisation on the client adds to the model it was sent."
    )
    yield Picture("results", "results", plot_results(rows, looks=looks), caption, _alt_results(runs))


def _alt_results(runs: Sequence[Run]) -> str:
    told = [f"{run.label} {mean:.1%}" for run in runs if (mean := run.test("personal", "weighted_mean")) is not None]
    return "Dot plot of test accuracy. Personal models: " + ", ".join(told)


@styled
def _data_sets(runs: Sequence[Run], looks: dict[str, Look]) -> list[Picture]:
    names = list(dict.fromkeys(name for run in runs for name in run.summary.get("datasets") or ()))
    if not names:
        return []
    of = {
        run.label: {
            name or "mean": (
                run.of_data_set(name, "personal", "mean"),
                run.of_data_set(name, "personal", "std_over_seeds"),
            )
            for name in (*names, None)
        }
        for run in runs
    }
    figure = plot_data_sets(of, looks=looks)
    legend(figure, looks, lines=False)
    bars = "; bars are one standard deviation over seeds" if max(len(run.seeds) for run in runs) > 1 else ""
    caption = f"Test accuracy of the personal models on each data set after the last round, and their mean{bars}."
    return [Picture("results", "data-sets", figure, caption, f"Dot plot. {caption}")]


@styled
def _curves(runs: Sequence[Run], looks: dict[str, Look]) -> list[Picture]:
    kinds = [kind for kind in ("received", "personal") if any(len(run.curve(kind)[0]) for run in runs)]
    if not kinds:
        return []
    figure = new_figure(WIDTH, 4.1)
    axes = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    direct = max(map(len, looks)) <= MAX_DIRECT
    for ax, kind in zip(axes, kinds, strict=True):
        curves = {run.label: run.curve(kind) for run in runs if len(run.curve(kind)[0])}
        title = {"received": "Received model (before local training)", "personal": "Personal model (the deliverable)"}
        plot_curves(curves, ax, title[kind], looks, name_lines=direct and kind == kinds[-1])
    axes[0].set_ylabel("test accuracy")
    if not direct:
        legend(figure, looks)
    seeds = max(len(run.seeds) for run in runs)
    band = f" Lines are means, bands one standard deviation over {seeds} seeds." if seeds > 1 else ""
    caption = f"Test accuracy over all clients, weighted by samples, at every evaluated round.{band}" + _thinned(runs)
    alt = f"Learning curves of {len(runs)} runs: {' and '.join(kinds)} models"
    return [Picture("curves", "curves", figure, caption, alt)]


def _thinned(runs: Sequence[Run]) -> str:
    longest = max(len(run.curve(kind)[0]) for run in runs for kind in KINDS)
    return f" Neighbouring rounds are averaged to {MAX_POINTS} points." if longest > MAX_POINTS else ""


def _clients(runs: Sequence[Run], looks: dict[str, Look]) -> Iterator[Picture]:
    found = {run.label: run.clients_at_end("personal") for run in runs}
    values = {label: of_clients for label, of_clients in found.items() if of_clients is not None}
    if not values:
        return
    most = max(len(of_clients) for of_clients in values.values())
    sample = f" Of {most:,} clients {MAX_DOTS} are dots, evenly spaced in rank;" if most > MAX_DOTS else ""
    rest = " density, quartiles and mean use all." if sample else ""
    caption = (
        "Test accuracy of each client's personal model at the last evaluation, mean over seeds: one dot a client, the "
        "thick bar from the lower to the upper quartile, a tick at the median, a diamond at the uniform mean. A long "
        f"tail to the left is clients left behind.{sample}{rest}"
    )
    alt = "Distribution over clients of personal test accuracy. Medians: " + ", ".join(
        f"{label} {np.nanmedian(v):.0%}" for label, v in values.items() if not np.isnan(v).all()
    )
    yield Picture("clients", "clients", plot_clients(values, looks=looks), caption, alt)


def _partition(runs: Sequence[Run], looks: dict[str, Look]) -> Iterator[Picture]:
    seen: set[object] = set()
    for run in runs:
        counts, name = run.arrays.get("label_histogram"), run.summary.get("partition_sha256")
        if counts is None or counts.ndim != 2 or not counts.size or name in seen:
            continue
        seen.add(name)
        size = counts.sum(1)
        caption = (
            f"How the training samples are dealt: {len(counts):,} client{'s' * (len(counts) > 1)}, {counts.shape[1]} "
            f"classes, {int(size.min()):,} to {int(size.max()):,} samples a client (median {int(np.median(size)):,}), "
            f"{(counts > 0).sum(1).mean():.3g} classes a client on average. "
        )
        caption += (
            "Columns are clients, similar ones side by side; colour is the class's share of the client's samples"
            + (", mean over neighbours, as are the sizes above." if len(counts) > 2 * MAX_CELLS else ".")
            if max(counts.shape) > MAX_BUBBLES
            else "The area of a bubble is the number of samples of that class; bars above are the clients' totals."
        )
        which = "" if len(seen) == 1 else f"-{len(seen)}"
        yield Picture("data", f"partition{which}", plot_partition(counts), caption, caption)


def _weights(runs: Sequence[Run], looks: dict[str, Look]) -> Iterator[Picture]:
    with_weights = [run for run in runs if run.arrays.get("aggregation_weights") is not None]
    for i, run in enumerate(with_weights):
        A = np.nanmean(np.atleast_3d(run.arrays["aggregation_weights"].T).T.astype(float), axis=0)
        if A.shape[0] < 2:
            continue
        counts = run.arrays.get("label_histogram")
        similarity = label_similarity(counts) if counts is not None and len(counts) == len(A) else None
        figure = plot_weights(A, similarity, title=f"{printable(run.label, 33)}: weights of others")
        which = "" if len(with_weights) == 1 else f"-{i + 1}"
        yield Picture("weights", f"weights{which}", figure, _weights_caption(run, A, similarity),
                      f"Heat map of the aggregation weights of {run.label}" + _correlation(A, similarity))  # fmt: skip


def _embedding(runs: Sequence[Run], looks: dict[str, Look]) -> Iterator[Picture]:
    drawable = [run for run in runs if (found := run.arrays.get("embedding")) is not None and found.ndim == 3]
    for i, run in enumerate(drawable):
        embedding, counts = run.arrays["embedding"][0], run.arrays.get("label_histogram")
        if counts is None or len(counts) != len(embedding) or len(embedding) < LEAST:
            continue
        seed = f" of seed {run.seeds[0]}" if len(run.seeds) > 1 else ""
        caption = (
            f"{run.label}: the embeddings{seed} of the {len(embedding):,} clients after the last round, brought into "
            "the plane by t-SNE; a colour and mark is a client's most frequent class. Distances between far groups "
            "mean nothing."
        )
        figure = plot_embedding(embedding, counts.argmax(1), title=printable(run.label, 33))
        yield Picture("embedding", f"embedding{'' if len(drawable) == 1 else f'-{i + 1}'}", figure, caption, caption)


def _weights_caption(run: Run, A: np.ndarray, similarity: np.ndarray | None) -> str:
    average = ", mean over seeds" if len(run.seeds) > 1 else ""
    caption = (
        f"{run.label}: row i holds the weights with which client i's model is mixed after the last round{average}. "
        f"The self weights (mean {np.nanmean(np.diag(A)):.3g}) are bars apart, so that the colour scale is that of "
        f"the other clients' (mean {np.nanmean(off_diagonal(A)):.3g})."
    )
    if similarity is not None:
        caption += (
            " Right: cosine of label histograms, clients in the same order: blocks that recur on the left mean that "
            "clients with similar labels learn from each other" + _correlation(A, similarity) + "."
        )
    if len(A) > MAX_CELLS:
        caption += f" Each cell is the mean over about {len(A) / MAX_CELLS:.1f} neighbouring clients a side."
    return caption


def _correlation(A: np.ndarray, similarity: np.ndarray | None) -> str:
    if similarity is None or len(A) < 3:
        return ""
    a, s = off_diagonal(A), off_diagonal(similarity)
    kept = np.isfinite(a) & np.isfinite(s)
    if kept.sum() < 3 or np.ptp(a[kept]) < 1e-9 or np.ptp(s[kept]) < 1e-9:
        return ""
    return f" (correlation of weight and similarity {np.corrcoef(a[kept], s[kept])[0, 1]:.2f})"


def _communication(runs: Sequence[Run], looks: dict[str, Look]) -> Iterator[Picture]:
    points = {}
    for run in runs:
        rounds, accuracy = run.curve("personal")
        at, floats = run.floats()
        if len(rounds) and len(at):
            after = np.searchsorted(at, rounds, side="right")
            points[run.label] = (np.concatenate([[0.0], floats])[after], accuracy)
    if not any(floats.max() > 0 for floats, _ in points.values()):
        return
    silent = any(floats.max() == 0 for floats, _ in points.values())
    caption = (
        "Personal test accuracy against all floats sent by and to the clients until then (a float32 is 4 bytes): "
        "higher and further left is better."
        + (" A dotted horizontal line is a method that sends nothing." if silent else "")
    )
    yield Picture("communication", "communication", plot_communication(points, looks=looks), caption,
                  "Accuracy against cumulative communication of " + ", ".join(points))  # fmt: skip
