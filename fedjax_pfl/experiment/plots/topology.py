"""Clients as a graph: near ones near each other, coloured by cluster, with the shortest paths between chosen ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedjax_pfl.experiment.plots.clusters import look_of, members
from fedjax_pfl.experiment.plots.style import (
    BLANK,
    DASHES,
    INK,
    MUTED,
    SURFACE,
    axes_or_new,
    figure_of,
    printable,
    styled,
)  # fmt: skip

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 200
"""Clients of a graph at most: more would be no picture."""
FEW = 20
"""Up to this many clients three edges of each are drawn, beyond two."""
MAX_PATHS, MAX_CLUSTERS = 6, 12
"""Paths and clusters in the key at most."""


class Path(NamedTuple):
    """A shortest path: its nodes from end to end, and its length."""

    nodes: list[int]
    length: float


def checked(distance: np.ndarray) -> np.ndarray:
    """Distances between clients, ``(M, M)`` float64, symmetric to the last bit, infinite on the diagonal.

    Raises:
        ValueError: not square, negative or NaN, or not symmetric to rounding.
    """
    d = np.asarray(distance, np.float64)
    if d.ndim != 2 or d.shape[0] != d.shape[1]:
        raise ValueError(f"distances must be a square matrix (clients, clients), found shape {d.shape}")
    d = np.where(np.eye(len(d), dtype=bool), np.inf, d)
    if not (d >= 0).all():
        raise ValueError("distances must not be negative or NaN")
    if not np.allclose(d, d.T, rtol=1e-3, atol=1e-5):
        raise ValueError("distances must be symmetric")
    return (d + d.T) / 2


def shortest_paths(distance: np.ndarray, ends: np.ndarray) -> list[Path]:
    """The shortest path between each pair of clients by Dijkstra's algorithm; nothing for a pair without one.

    distance: ``(M, M)``, infinite for no edge; ends: ``(P, 2)``, -1 for no pair. Of equally long paths it may be
    another than the method's own.
    """
    import networkx as nx

    graph = _graph(distance)
    pairs = [(i, j) for i, j in ends.tolist() if min(i, j) >= 0 and nx.has_path(graph, i, j)]
    found = [nx.single_source_dijkstra(graph, i, j) for i, j in pairs]
    return [Path(nodes, float(length)) for length, nodes in found]


def layout(distance: np.ndarray) -> np.ndarray:
    """Places ``(M, 2)`` at which clients are about as far apart as their distances ``(M, M)``, the same every time.

    Kamada and Kawai, Information Processing Letters 1989, from places on a circle. A third of the largest distance is
    added to all of them, so that no two clients lie on one place; without an edge they are half as far again as the
    farthest.
    """
    import networkx as nx

    size, finite = len(distance), np.isfinite(distance)
    top = float(distance[finite].max()) if finite.any() else 1.0
    wanted = np.where(finite, distance, 1.5 * top) + (top or 1.0) / 3
    told = {i: {j: float(wanted[i, j]) for j in range(size) if j != i} for i in range(size)}
    places = nx.kamada_kawai_layout(_graph(distance), dist=told)
    return np.array([places[i] for i in range(size)])


def _graph(distance: np.ndarray) -> Any:
    import networkx as nx

    graph = nx.Graph()
    graph.add_nodes_from(range(len(distance)))
    i, j = np.nonzero(np.triu(np.isfinite(distance), 1))
    graph.add_weighted_edges_from(zip(i.tolist(), j.tolist(), distance[i, j].tolist(), strict=True))
    return graph


@styled
def plot_topology(
    distance: np.ndarray,
    cluster: np.ndarray | None = None,
    ends: np.ndarray | None = None,
    names: Sequence[str] | None = None,
    ax: Axes | None = None,
    title: str | None = None,
) -> Figure:
    """Clients as dots coloured by cluster, the shortest edges of each faint, the paths between ``ends`` strong.

    distance: ``(M, M)``, infinite for no edge; clients without any edge are left out. cluster: ``(M,)`` integers from
    0, -1 for none. ends: ``(P, 2)`` clients, -1 for no path. names: of the clients, their numbers by default.

    Raises:
        ValueError: distances of wrong shape or values, fewer than two clients with an edge, more than 200 clients,
            cluster or names of another length, ends that are no clients.
    """
    d = checked(distance)
    cluster = np.full(len(d), -1) if cluster is None else np.asarray(cluster)
    ends = np.zeros((0, 2), int) if ends is None else np.asarray(ends)
    names = [str(i) for i in range(len(d))] if names is None else names
    _check(len(d), cluster, ends, names)
    shown = np.flatnonzero(np.isfinite(d).any(1))
    if not 2 <= len(shown) <= MOST:
        raise ValueError(f"a graph needs 2 to {MOST} clients with an edge, found {len(shown)}")
    places = np.full((len(d), 2), np.nan)
    places[shown] = layout(d[np.ix_(shown, shown)])
    ax = axes_or_new(ax, 4.6 if len(shown) <= FEW else 6.4)
    _edges(ax, d, places, 3 if len(shown) <= FEW else 2)
    paths = shortest_paths(d, ends)
    for number, path in enumerate(paths):
        _path(ax, path, places, number, names)
    _nodes(ax, places, cluster, names, shown)
    ax.set_axis_off()
    ax.set_aspect("equal", adjustable="datalim")
    ax.margins(x=0.16, y=0.1)  # room for the names
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), labelspacing=0.7, title=_more(paths, cluster))
    if title:
        ax.set_title(title)
    return figure_of(ax)


def _check(clients: int, cluster: np.ndarray, ends: np.ndarray, names: Sequence[str]) -> None:
    if cluster.shape != (clients,) or len(names) != clients:
        raise ValueError(f"{clients} clients need as many clusters and names, found {cluster.shape} and {len(names)}")
    if ends.ndim != 2 or ends.shape[1] != 2 or (ends.size and (ends.min() < -1 or ends.max() >= clients)):
        raise ValueError(f"ends of paths must be pairs of clients below {clients}, or -1, found {ends.tolist()}")


def _edges(ax: Axes, d: np.ndarray, places: np.ndarray, each: int) -> None:
    """The ``each`` shortest edges of every client."""
    from matplotlib.collections import LineCollection

    near = np.argsort(d, axis=1, kind="stable")[:, :each]
    pairs = {(min(i, j), max(i, j)) for i in range(len(d)) for j in near[i].tolist() if np.isfinite(d[i, j])}
    lines = [places[[i, j]] for i, j in sorted(pairs)]
    ax.add_collection(LineCollection(lines, colors=BLANK, linewidths=0.9, zorder=1))


def _path(ax: Axes, path: Path, places: np.ndarray, number: int, names: Sequence[str]) -> None:
    told = f"{printable(names[path.nodes[0]], 14)} \N{RIGHTWARDS ARROW} {printable(names[path.nodes[-1]], 14)}: "
    told += f"length {path.length:.3g}, {len(path.nodes) - 1} edge{'s' * (len(path.nodes) > 2)}"
    label = told if number < MAX_PATHS else "_further"
    x, y = places[path.nodes].T
    colour, dash = (INK, MUTED)[number // len(DASHES) % 2], DASHES[number % len(DASHES)]
    ax.plot(x, y, color=colour, linestyle=dash, linewidth=2.2, zorder=2, label=label)


def _nodes(ax: Axes, places: np.ndarray, cluster: np.ndarray, names: Sequence[str], shown: np.ndarray) -> None:
    beside = len(shown) <= FEW or max(len(names[i]) for i in shown) > 3
    for number, own in members(cluster[shown]):
        x, y = places[shown[own]].T
        colour, marker = look_of(number)
        label = f"no cluster ({len(own)})" if number < 0 else f"cluster {number + 1} ({len(own)})"
        ax.scatter(x, y, s=70 if beside else 120, color=colour, marker=marker, edgecolors=SURFACE, linewidths=1.1,
                   zorder=3, label=label if number < MAX_CLUSTERS else "_further")  # fmt: skip
    if beside:
        _names_beside(ax, places[shown], [printable(names[i], 16) for i in shown])
        return
    size = 6.5 if len(shown) <= 100 else 4.8
    for i in shown:
        ax.annotate(names[i], places[i], ha="center", va="center", fontsize=size, color=SURFACE, zorder=4)


def _names_beside(ax: Axes, places: np.ndarray, names: Sequence[str]) -> None:
    """Every name on the side of its dot that is turned away from the nearest dots."""
    apart = np.linalg.norm(places[:, None] - places, axis=-1)
    near = np.argsort(apart, axis=1, kind="stable")[:, 1:5]
    away = places - places[near].mean(1)
    away /= np.maximum(np.linalg.norm(away, axis=1, keepdims=True), 1e-12)
    size = 8.5 if len(names) <= FEW else 6.0
    for name, place, (x, y) in zip(names, places, away, strict=True):
        side = "left" if x >= 0 else "right"
        ax.annotate(name, place, (7 * x, 7 * y), textcoords="offset points", ha=side, va="center", fontsize=size,
                    bbox={"facecolor": SURFACE, "edgecolor": "none", "alpha": 0.7, "pad": 0.6}, zorder=2.5)  # fmt: skip


def _more(paths: Sequence[Path], cluster: np.ndarray) -> str | None:
    """What the key leaves out."""
    left = {"paths": len(paths) - MAX_PATHS, "clusters": int((np.unique(cluster) >= MAX_CLUSTERS).sum())}
    told = [f"{count} more {name}" for name, count in left.items() if count > 0]
    return f"not in this key: {', '.join(told)}" if told else None
