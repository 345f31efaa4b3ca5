"""Figures of runs, usable from a notebook: each draws on the axes given, or on a new figure, and returns the figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedjax_pfl.experiment.plots.curves import Looks, plot_communication, plot_curves
from fedjax_pfl.experiment.plots.partition import client_order, label_similarity, plot_partition
from fedjax_pfl.experiment.plots.style import (
    INK,
    MUTED,
    SURFACE,
    Look,
    axes_or_new,
    figure_of,
    looks_of,
    percent_axis,
    printable,
    styled,
)  # fmt: skip
from fedjax_pfl.experiment.plots.weights import plot_weights

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_DOTS = 300
"""More clients than this are drawn as an evenly spaced sample of their ranks (density and quartiles use all)."""
LEAST_SPAN = 0.01
"""Width of the axis of results at least: what differs by rounding should not look different."""
KIND_MARKERS = {"shared": ("D", False, 0.2), "received": ("o", False, 0.0), "personal": ("o", True, -0.2)}


@styled
def plot_clients(
    values: Mapping[str, np.ndarray], ax: Axes | None = None, title: str | None = None, looks: Looks | None = None
) -> Figure:
    """Distribution over clients: a dot a client, quartiles as a bar, the mean as a diamond, the density above.

    values: ``{label: (M,)}`` shares such as accuracy, NaN left out.
    """
    ax = axes_or_new(ax, 0.8 + 0.62 * max(len(values), 1))
    looks = looks or looks_of(values)
    for place, (label, of_clients) in enumerate(values.items()):
        present = np.asarray(of_clients, float)
        _cloud(ax, place, present[~np.isnan(present)], looks[label])
    ax.set_yticks(range(len(values)), [printable(label, 30) for label in values], color=INK)
    ax.set_ylim(len(values) - 0.5, -0.62)
    ax.grid(axis="x")
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("accuracy of a client")
    percent_axis(ax.xaxis)
    if title:
        ax.set_title(title)
    return figure_of(ax)


def _cloud(ax: Axes, place: int, values: np.ndarray, look: Look) -> None:
    if not len(values):
        return
    values = np.sort(values)
    dots = values if len(values) <= MAX_DOTS else values[np.linspace(0, len(values) - 1, MAX_DOTS).astype(int)]
    jitter = (np.arange(len(dots)) * 0.618034) % 1.0
    size = 22 if len(dots) <= 40 else 12 if len(dots) <= 120 else 7
    ax.scatter(dots, place + 0.17 + 0.24 * jitter, s=size, color=look.colour, alpha=0.6, linewidths=0)
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    if len(values) >= 8 and values[-1] > values[0]:
        grid, density = _density(values)
        ax.fill_between(grid, place, place - 0.46 * density / density.max(), color=look.colour, alpha=0.26, linewidth=0)
    ax.plot([low, high], [place + 0.06] * 2, color=look.colour, linewidth=4.2, solid_capstyle="butt")
    ax.plot([middle] * 2, [place - 0.03, place + 0.15], color=INK, linewidth=1.5)
    ax.plot(
        values.mean(), place + 0.06, marker="D", markersize=5, color=SURFACE, markeredgecolor=INK, markeredgewidth=1
    )


def _density(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gaussian kernel density, reflected at 0 and 1 so that none of it leaves the range of a share."""
    width = max(0.9 * values.std() * len(values) ** -0.2, 0.008)
    low, high = max(0.0, values[0] - 3 * width), min(1.0, values[-1] + 3 * width)
    grid = np.linspace(low, high, 160)
    counts, edges = np.histogram(values, bins=400, range=(0.0, max(1.0, values[-1])))
    middle = (edges[1:] + edges[:-1]) / 2
    mirrored = np.concatenate([middle, -middle, 2 - middle])
    kernel = np.exp(-0.5 * ((grid[:, None] - mirrored) / width) ** 2)
    return grid, kernel @ np.tile(counts, 3)


@styled
def plot_results(
    results: Mapping[str, Mapping[str, tuple[float | None, float | None]]],
    ax: Axes | None = None,
    title: str | None = None,
    looks: Looks | None = None,
) -> Figure:
    """The headline: mean accuracy of each kind of model, with one standard deviation over seeds.

    results: ``{label: {kind: (mean, std)}}`` with kinds received, personal, shared; None where absent.
    """
    ax = axes_or_new(ax, 0.9 + 0.34 * max(len(results), 1))
    looks = looks or looks_of(results)
    for place, (label, kinds) in enumerate(results.items()):
        for kind, (marker, filled, shift) in KIND_MARKERS.items():
            mean, spread = kinds.get(kind, (None, None))
            if mean is None:
                continue
            colour = looks[label].colour
            ax.errorbar(mean, place + shift, xerr=spread or None, fmt=marker, color=colour, markersize=6.5,
                        markerfacecolor=colour if filled else SURFACE, markeredgewidth=1.4, elinewidth=1.3)  # fmt: skip
    ax.set_yticks(range(len(results)), [printable(label, 30) for label in results], color=INK)
    ax.set_ylim(len(results) - 0.5, -0.5)
    ax.spines["left"].set_visible(False)
    ax.grid(axis="both")
    ax.set_xlabel("test accuracy, weighted by samples")
    low, high = ax.get_xlim()
    missing = max(LEAST_SPAN - (high - low), 0.0) / 2
    ax.set_xlim(low - missing, high + missing)
    percent_axis(ax.xaxis)
    told = {kind for kinds in results.values() for kind, (mean, _) in kinds.items() if mean is not None}
    _kind_key(ax, [kind for kind in ("personal", "received", "shared") if kind in told])
    if title:
        ax.set_title(title)
    return figure_of(ax)


@styled
def plot_data_sets(
    results: Mapping[str, Mapping[str, tuple[float | None, float | None]]],
    ax: Axes | None = None,
    title: str | None = None,
    looks: Looks | None = None,
) -> Figure:
    """Accuracy on each data set, a line of the figure each, a mark a method, with one standard deviation over seeds.

    results: ``{label: {data set: (mean, std)}}``; None where absent.
    """
    names = list(dict.fromkeys(name for found in results.values() for name in found))
    ax = axes_or_new(ax, 0.9 + 0.1 * len(names) * (2 + len(results)))
    looks = looks or looks_of(results)
    for number, (label, found) in enumerate(results.items()):
        shift = 0.7 * ((number + 0.5) / len(results) - 0.5)
        told = [(place, *found.get(name, (None, None))) for place, name in enumerate(names)]
        rows = [(place + shift, mean, spread) for place, mean, spread in told if mean is not None]
        if rows:
            places, means, spreads = zip(*rows, strict=True)
            ax.errorbar(means, places, xerr=[spread or 0 for spread in spreads], fmt=looks[label].marker, markersize=5,
                        color=looks[label].colour, elinewidth=1.1, linestyle="none")  # fmt: skip
    ax.set_yticks(range(len(names)), [printable(name, 30) for name in names], color=INK)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_yticks(np.arange(len(names) - 1) + 0.5, minor=True)
    ax.tick_params(axis="y", which="minor", length=0)
    ax.grid(axis="x")
    ax.grid(axis="y", which="minor")
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("test accuracy")
    percent_axis(ax.xaxis)
    if title:
        ax.set_title(title)
    return figure_of(ax)


def _kind_key(ax: Axes, kinds: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], linestyle="none", marker=KIND_MARKERS[kind][0], color=MUTED, markeredgewidth=1.4, markersize=6.5,
               markerfacecolor=MUTED if KIND_MARKERS[kind][1] else SURFACE, label=kind)
        for kind in kinds
    ]  # fmt: skip
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.0)


__all__ = [
    "client_order", "label_similarity", "looks_of", "plot_clients", "plot_communication", "plot_curves",
    "plot_data_sets", "plot_partition", "plot_results", "plot_weights",
]  # fmt: skip
