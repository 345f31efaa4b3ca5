"""The pictures of who is near whom: the clients' graph where a method has one, else the sizes of its clusters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fedjax_pfl.experiment.plots.clusters import MAX_BARS, plot_clusters
from fedjax_pfl.experiment.plots.style import Look, printable
from fedjax_pfl.experiment.plots.topology import FEW, MOST, checked, plot_topology
from fedjax_pfl.experiment.report.data import Run
from fedjax_pfl.experiment.report.picture import Picture


def topology(runs: Sequence[Run], looks: dict[str, Look]) -> Iterator[Picture]:
    """A graph of the clients, or bars of their clusters, of the first seed of every run that has one.

    Raises:
        ValueError: arrays of wrong shape or values; the message names the folder.
    """
    drawable = [run for run in runs if {"topology", "cluster"} & run.arrays.keys()]
    for i, run in enumerate(drawable):
        try:
            found = _picture(run, f"topology{'' if len(drawable) == 1 else f'-{i + 1}'}")
        except (ValueError, IndexError) as error:
            raise ValueError(f"{run.folder}: arrays.npz is damaged ({error})") from error
        if found is not None:
            yield found


def _picture(run: Run, name: str) -> Picture | None:
    """Of the first seed; None where there is nothing to see, as before the first round."""
    distance, cluster = _first(run, "topology", 3), _first(run, "cluster", 2)
    if distance is not None:
        connected = int(np.isfinite(checked(distance)).any(1).sum())
        if 2 <= connected <= MOST:
            ends = _first(run, "path_ends", 3)
            figure = plot_topology(distance, cluster, ends, _names(run, len(distance)), title=printable(run.label, 33))
            caption = _caption(run, len(distance), connected, ends)
            return Picture("topology", name, figure, caption, f"Graph of {connected} clients. {caption}")
    if cluster is None or (cluster < 0).all():
        return None
    names = _names(run, len(cluster))
    figure, count = plot_clusters(cluster, names, title=printable(run.label, 33)), len(np.unique(cluster[cluster >= 0]))
    caption = f"{run.label}: the clusters of the clients after the last round{_seed(run)}, {count:,} in all"
    caption += f", of which the {MAX_BARS} largest are drawn." if count > MAX_BARS else "."
    if distance is not None:
        caption += f" Of more than {MOST} clients, and of those without an edge, no graph is drawn."
    return Picture("topology", name, figure, caption, f"Bars of cluster sizes. {caption}")


def _first(run: Run, name: str, axes: int) -> np.ndarray | None:
    """An array of the first seed, or None where the run has none."""
    found = run.arrays.get(name)
    if found is not None and (found.ndim != axes or not len(found)):
        raise ValueError(f"{name} needs {axes} axes, seeds first, found shape {found.shape}")
    return None if found is None else found[0]


def _names(run: Run, clients: int) -> list[str]:
    return run.names if len(run.names) == clients else [str(i) for i in range(clients)]


def _seed(run: Run) -> str:
    return f" of seed {run.seeds[0]}" if len(run.seeds) > 1 else ""


def _caption(run: Run, clients: int, connected: int, ends: np.ndarray | None) -> str:
    caption = (
        f"{run.label}: the clients by the distance of their models in the last round{_seed(run)}, near ones near each "
        f"other as far as a plane allows, coloured by cluster; faint lines are the {3 if connected <= FEW else 2} "
        "shortest edges of every client."
    )
    if ends is not None and (ends >= 0).all(1).any():
        caption += (
            " Strong lines are the shortest paths between the ends that were chosen; their length is the sum of the "
            "distances along them, not that on the page."
        )
    if left := clients - connected:
        caption += f" Left out: {left:,} client{'s' * (left > 1)} without an edge, for want of a report."
    return caption
