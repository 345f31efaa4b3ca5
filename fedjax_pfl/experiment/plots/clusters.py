"""The clusters of clients: how each is drawn, and bars of their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedjax_pfl.experiment.plots.style import (
    INK,
    MUTED,
    PALETTE,
    axes_or_new,
    few_ticks,
    figure_of,
    printable,
    styled,
)  # fmt: skip

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_BARS, MAX_NAMES = 24, 80
"""Bars of clusters, and letters of their members' names beside one, at most."""
MARKERS = "osD^vP"


def members(cluster: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Every number in ``cluster (M,)`` with the places of its members, ascending."""
    return [(int(number), np.flatnonzero(cluster == number)) for number in np.unique(cluster)]


def look_of(number: int) -> tuple[str, str]:
    """Colour and mark of a cluster; grey for -1, clients without one."""
    if number < 0:
        return MUTED, "o"
    return PALETTE[number % len(PALETTE)], MARKERS[number // len(PALETTE) % len(MARKERS)]


@styled
def plot_clusters(
    cluster: np.ndarray, names: Sequence[str] | None = None, ax: Axes | None = None, title: str | None = None
) -> Figure:
    """The sizes of clusters (the 24 largest) as bars, beside them the names of their members as far as they fit.

    cluster: ``(M,)`` integers from 0, -1 for none; names: of the clients, their numbers by default.

    Raises:
        ValueError: cluster is no vector with at least one client, or names of another length.
    """
    cluster = np.asarray(cluster)
    names = [str(i) for i in range(len(cluster))] if names is None else names
    if cluster.ndim != 1 or not cluster.size or len(names) != len(cluster):
        raise ValueError(f"clusters must be a vector (clients,), found {cluster.shape} for {len(names)} names")
    largest = sorted(members(cluster), key=lambda group: -len(group[1]))[:MAX_BARS]
    groups = sorted(largest, key=lambda group: group[0])
    ax = axes_or_new(ax, 0.9 + 0.3 * len(groups))
    most = max(len(own) for _, own in groups)
    for place, (number, own) in enumerate(groups):
        ax.barh(place, len(own), height=0.62, color=look_of(number)[0])
        text = printable(", ".join(names[i] for i in own), MAX_NAMES)
        ax.annotate(text, (len(own), place), (6, 0), textcoords="offset points", va="center", fontsize=7.5, color=INK)
    ax.set_yticks(range(len(groups)), ["none" if n < 0 else f"cluster {n + 1}" for n, _ in groups], color=INK)
    ax.set_ylim(len(groups) - 0.5, -0.5)
    ax.set_xlim(0, 2.6 * most)  # room for the names
    ax.set_xticks([tick for tick in few_ticks(4, integer=True).tick_values(0, most) if tick <= most])
    ax.set_xlabel("clients", loc="left")
    ax.spines["left"].set_visible(False)
    if title:
        ax.set_title(title)
    return figure_of(ax)
