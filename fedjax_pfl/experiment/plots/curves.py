"""Curves: over rounds, and over what was communicated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedjax_pfl.experiment.plots.style import (
    INK,
    SURFACE,
    Look,
    axes_or_new,
    few_ticks,
    figure_of,
    legend,
    looks_of,
    percent_axis,
    printable,
    quantity,
    styled,
)  # fmt: skip

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = tuple[np.ndarray, np.ndarray]
"""Positions ``(K,)`` and values ``(K,)`` or ``(K, S)``, one column a seed, NaN where absent."""
Looks = Mapping[str, Look]
MAX_POINTS = 240
"""Longer curves are averaged over neighbouring rounds."""
MAX_TICKS = 8
"""Up to this many choices each has a tick and a count of its own."""


@styled
def plot_curves(
    curves: Mapping[str, Curve],
    ax: Axes | None = None,
    title: str | None = None,
    looks: Looks | None = None,
    percent: bool = True,
    name_lines: bool = True,
) -> Figure:
    """Curves over rounds with a band of one standard deviation over seeds.

    curves: ``{label: (rounds (K,), values (K, S))}``, NaN left out; percent: values are shares; name_lines: write the
    labels beside the lines' ends instead of in a legend.
    """
    ax = axes_or_new(ax, 3.4)
    looks = looks or looks_of(curves)
    ends: list[tuple[float, str]] = []
    for place, (label, (rounds, values)) in enumerate(curves.items()):
        shift = place / len(curves)  # of the markers, so that those of close lines do not hide each other
        end = _curve(ax, *_shorter(np.asarray(rounds, float), _columns(values)), looks[label], shift)
        if end is not None:
            ends.append((end, label))
    ax.set_xlabel("round")
    ax.xaxis.set_major_locator(few_ticks(6, integer=True))
    ax.grid(axis="y")
    ax.margins(x=0.015)
    if title:
        ax.set_title(title)
    if percent:
        percent_axis(ax.yaxis)
    else:
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:.4g}")
    if name_lines:
        _name_ends(ax, ends, looks)
    return figure_of(ax)


def _columns(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, float)
    return values[:, None] if values.ndim == 1 else values


def _shorter(rounds: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if len(rounds) <= MAX_POINTS:
        return rounds, values
    groups = np.array_split(np.arange(len(rounds)), MAX_POINTS)
    return np.array([rounds[g].mean() for g in groups]), np.array([mean_present(values[g].T) for g in groups])


def mean_present(values: np.ndarray) -> np.ndarray:
    """Mean over the last axis, NaN left out; NaN where all are."""
    present = (~np.isnan(values)).sum(-1)
    return np.where(present > 0, np.nansum(values, axis=-1) / np.maximum(present, 1), np.nan)


def _curve(ax: Axes, rounds: np.ndarray, values: np.ndarray, look: Look, shift: float) -> float | None:
    mean = mean_present(values)
    kept = ~np.isnan(mean)
    if not kept.any():
        return None
    rounds, values, mean = rounds[kept], values[kept], mean[kept]
    step = max(1, len(rounds) // 8)
    spread = np.sqrt(mean_present((values - mean[:, None]) ** 2))
    ax.plot(rounds, mean, color=look.colour, linestyle=look.dash, linewidth=1.7, marker=look.marker, markersize=4.2,
            markevery=(int(shift * step), step), markeredgecolor=SURFACE, markeredgewidth=0.6)  # fmt: skip
    if values.shape[1] > 1:
        ax.fill_between(rounds, mean - spread, mean + spread, color=look.colour, alpha=0.16, linewidth=0)
    return float(mean[-1])


def _name_ends(ax: Axes, ends: Sequence[tuple[float, str]], looks: Looks) -> None:
    """Labels right of the axes at their lines' heights, moved apart where they would overlap."""
    low, high = ax.get_ylim()
    ax.set_ylim(low, high)
    ordered = sorted(ends)
    height = ax.get_position().height * figure_of(ax).get_figheight() * 72
    wanted = [(y - low) / (high - low) for y, _ in ordered]
    for place, (y, label) in zip(_apart(wanted, 13 / max(height, 60)), ordered, strict=True):
        look = looks[label]
        ax.annotate(
            printable(label, 34), xy=(1.0, (y - low) / (high - low)), xytext=(1.045, place), xycoords="axes fraction",
            va="center", fontsize=8.5, color=INK, annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": look.colour, "linewidth": 1.1, "shrinkA": 1, "shrinkB": 0,
                        "relpos": (0, 0.5)},
        )  # fmt: skip


def _apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Ascending places as near to those wanted as a gap allows, by merging neighbours that collide."""
    blocks: list[list[float]] = []  # [sum of wanted minus offset, size]
    for place in wanted:
        blocks.append([place, 1])
        while len(blocks) > 1 and _centre(blocks[-1]) - _centre(blocks[-2]) < gap * (blocks[-1][1] + blocks[-2][1]) / 2:
            last = blocks.pop()
            blocks[-1] = [blocks[-1][0] + last[0], blocks[-1][1] + last[1]]
    places = [_centre(block) + (k - (block[1] - 1) / 2) * gap for block in blocks for k in range(int(block[1]))]
    above = 1.0
    for k in reversed(range(len(places))):  # none above the axes
        places[k] = min(places[k], above)
        above = places[k] - gap
    return places


def _centre(block: Sequence[float]) -> float:
    return block[0] / block[1]


@styled
def plot_choices(
    choices: Mapping[str, tuple[np.ndarray, np.ndarray]],
    ax: Axes | None = None,
    title: str | None = None,
    looks: Looks | None = None,
) -> Figure:
    """A value that takes few values, a dot a round; of a single label how often each was taken stands beside it.

    choices: ``{label: (rounds (K,), values (K,))}``, NaN left out. Of more than 240 rounds every n-th is drawn.
    """
    ax = axes_or_new(ax, 3.4)
    looks = looks or looks_of(choices)
    taken = np.concatenate([np.asarray(values, float) for _, values in choices.values()] or [np.zeros(0)])
    distinct, count = np.unique(np.round(taken[~np.isnan(taken)], 6), return_counts=True)
    apart = float(np.diff(distinct).min()) / 4 if len(distinct) > 1 else 0.02
    middle = (len(choices) - 1) / 2
    for place, (label, (rounds, values)) in enumerate(choices.items()):
        step, shift = max(1, -(-len(rounds) // MAX_POINTS)), (place - middle) / len(choices) * apart
        ax.scatter(rounds[::step], np.asarray(values, float)[::step] + shift, s=14, linewidths=0,
                   color=looks[label].colour, marker=looks[label].marker)  # fmt: skip
    if len(distinct) <= MAX_TICKS:
        ax.set_yticks(distinct, [f"{value:.4g}" for value in distinct])
        if len(choices) == 1:
            _counts_beside(ax, distinct, count)
    ax.set_xlabel("round")
    ax.xaxis.set_major_locator(few_ticks(6, integer=True))
    ax.grid(axis="y")
    ax.margins(x=0.015, y=0.12)
    if title:
        ax.set_title(title)
    return figure_of(ax)


def _counts_beside(ax: Axes, values: np.ndarray, counts: np.ndarray) -> None:
    for value, count in zip(values, counts, strict=True):
        told = f"{count}\N{MULTIPLICATION SIGN}"
        ax.annotate(told, (1.0, value), (6, 0), xycoords=ax.get_yaxis_transform(), textcoords="offset points",
                    va="center", fontsize=8.0, color=INK, annotation_clip=False)  # fmt: skip


@styled
def plot_communication(
    points: Mapping[str, Curve], ax: Axes | None = None, title: str | None = None, looks: Looks | None = None
) -> Figure:
    """Accuracy against the floats sent until then, up and down together.

    points: ``{label: (floats (K,), accuracy (K, S))}``. A method that sends nothing is a horizontal line at its last
    accuracy. The axis is logarithmic where methods differ more than thirtyfold.
    """
    ax = axes_or_new(ax, 3.4)
    looks = looks or looks_of(points)
    totals = [np.max(floats) for floats, _ in points.values() if len(floats) and np.max(floats) > 0]
    wide = bool(totals) and max(totals) > 30 * min(totals)
    if wide:
        ax.set_xscale("log")
    for label, (floats, values) in points.items():
        mean = mean_present(_columns(values))
        kept = ~np.isnan(mean)
        if not kept.any():
            continue
        floats, mean, look = np.asarray(floats, float)[kept], mean[kept], looks[label]
        if floats.max() > 0:
            sent = (floats > 0) | (not wide)
            ax.plot(floats[sent], mean[sent], color=look.colour, linestyle=look.dash, marker=look.marker,
                    markersize=4.2, linewidth=1.6, markeredgecolor=SURFACE, markeredgewidth=0.6,
                    markevery=max(1, int(sent.sum()) // 12))  # fmt: skip
        else:
            ax.axhline(mean[-1], color=look.colour, linestyle=(0, (1, 2)), linewidth=1.4)
    if not wide:
        ax.set_xlim(left=0)
    ax.set_xlabel("floats sent until then (up + down)")
    ax.xaxis.set_major_formatter(lambda value, _: quantity(value))
    ax.set_ylabel("accuracy")
    percent_axis(ax.yaxis)
    ax.grid()
    if title:
        ax.set_title(title)
    legend(figure_of(ax), {label: looks[label] for label in points})
    return figure_of(ax)
