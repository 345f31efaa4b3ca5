"""How data is dealt: samples of every class at every client, similar clients side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_pfl.experiment.plots.style import (
    MUTED,
    PALETTE,
    SEQUENTIAL,
    WIDTH,
    few_ticks,
    figure_of,
    new_figure,
    printable,
    quantity,
    styled,
)  # fmt: skip

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_BUBBLES = 60
"""Up to this many clients the partition is drawn as bubbles, beyond as a heat map of class shares."""
MAX_TREE = 2000
"""Up to this many clients similar ones are found by a tree, which costs M * M."""
MAX_CELLS = 240
"""Rows of a heat map: more clients are averaged in groups of neighbours."""


def label_similarity(histogram: np.ndarray) -> np.ndarray:
    """Cosine of the clients' label histograms: ``(M, C) -> (M, M)`` in 0..1; 0 for a client without samples."""
    histogram = np.asarray(histogram, float)
    norm = np.linalg.norm(histogram, axis=1, keepdims=True)
    unit = histogram / np.where(norm > 0, norm, 1.0)
    return np.clip(unit @ unit.T, 0.0, 1.0)


def client_order(similarity: np.ndarray) -> np.ndarray:
    """A permutation ``(M,)`` that puts similar clients side by side (average-linkage tree of 1 - similarity).

    Above 2,000 clients the tree is replaced by sorting along the leading eigenvectors' angle.
    """
    clients = len(similarity)
    if clients < 3:
        return np.arange(clients)
    distance = np.clip(1.0 - np.nan_to_num((similarity + similarity.T) / 2), 0.0, None)
    if clients > MAX_TREE:
        return np.argsort(_angle(similarity), kind="stable")
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    condensed = squareform(distance, checks=False)
    return leaves_list(linkage(condensed, "average", optimal_ordering=clients <= 300))


def _label_order(counts: np.ndarray) -> np.ndarray:
    """As ``client_order`` of the label similarity; from 2,000 clients by main class and its share (no M x M matrix)."""
    if len(counts) <= MAX_TREE:
        return client_order(label_similarity(counts))
    share = counts.max(1) / np.maximum(counts.sum(1), 1)
    return np.lexsort((-share, counts.argmax(1)))


def _angle(similarity: np.ndarray) -> np.ndarray:
    block = np.random.default_rng(0).normal(size=(len(similarity), 3))
    for _ in range(12):
        block, _ = np.linalg.qr(similarity @ block)
    return np.arctan2(block[:, 2], block[:, 1])


@styled
def plot_partition(counts: np.ndarray, ax: Axes | None = None, class_names: Sequence[str] | None = None) -> Figure:
    """How many samples of each class each client has, with the clients' sizes above (when it makes the figure).

    counts: ``(M, C)``; class_names: C names, numbers by default. Up to 60 clients a bubble's area is the count;
    beyond, colour is a class's share of the client and similar clients are neighbours.

    Raises:
        ValueError: counts is not a matrix with at least one client and class.
    """
    counts = np.asarray(counts, float)
    if counts.ndim != 2 or not counts.size:
        raise ValueError(f"counts must be a matrix (clients, classes), found shape {counts.shape}")
    many = max(counts.shape) > MAX_BUBBLES
    shown = counts[_label_order(counts)] if many else counts
    if ax is None:
        height = 1.5 + (2.6 if many else min(4.2, max(1.4, 0.24 * counts.shape[1])))
        figure = new_figure(WIDTH, height)
        sizes_ax, ax = figure.subplots(2, 1, sharex=True, height_ratios=[0.9, height - 1.4])
        _sizes(sizes_ax, shown.sum(1))
    (_shares if many else _bubbles)(ax, shown)
    _class_ticks(ax, class_names, counts.shape[1])
    ax.set_ylabel("class")
    ax.set_xlabel("clients, similar ones side by side" if many else "client")
    return figure_of(ax)


def _sizes(ax: Axes, sizes: np.ndarray) -> None:
    centres = np.arange(len(sizes))
    if len(sizes) > MAX_BUBBLES:
        grouped = grouped_means(sizes[:, None], MAX_CELLS * 2)[:, 0]
        edges = np.linspace(-0.5, len(sizes) - 0.5, len(grouped) + 1)
        sizes = grouped
        ax.stairs(grouped, edges, fill=True, color=PALETTE[0], alpha=0.85)
    else:
        ax.bar(centres, sizes, width=0.62, color=PALETTE[0])
    ax.set_ylabel("samples")
    ax.set_ylim(0, max(sizes.max() * 1.12, 1))
    ax.grid(axis="y")
    ax.tick_params(axis="x", length=0, labelbottom=False)
    ax.yaxis.set_major_formatter(lambda value, _: quantity(value))
    ax.yaxis.set_major_locator(few_ticks(3, integer=True))


def _bubbles(ax: Axes, counts: np.ndarray) -> None:
    clients, classes = counts.shape
    client, label = np.nonzero(counts)
    cell = min(500 / max(clients, 8), 300 / max(classes, 8), 16)  # points between neighbours
    area = counts[client, label] / counts.max() * (cell * 1.05) ** 2
    ax.scatter(client, label, s=np.maximum(area, 1.2), color=PALETTE[0], alpha=0.8, linewidths=0)
    ax.set_xlim(-0.7, max(clients, 6) - 0.3)
    ax.set_ylim(classes - 0.3, -0.7)
    ax.grid(alpha=0.9)
    step = max(1, -(-clients // 30))
    ax.set_xticks(np.arange(0, clients, step), np.arange(0, clients, step).astype(str))
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    _bubble_key(ax, counts.max(), cell)


def _bubble_key(ax: Axes, largest: float, cell: float) -> None:
    from matplotlib.lines import Line2D

    chosen = sorted({_round_down(largest), _round_down(largest / 4), _round_down(largest / 16)} - {0})
    handles = [
        Line2D([], [], linestyle="none", marker="o", markeredgewidth=0, color=PALETTE[0], alpha=0.8,
               markersize=max(1.2, np.sqrt(size / largest) * cell * 1.05), label=quantity(size))
        for size in chosen
    ]  # fmt: skip
    ax.legend(handles=handles, title="samples", loc="upper left", bbox_to_anchor=(1.0, 1.0), labelspacing=0.9,
              borderaxespad=0.0, handletextpad=0.8)  # fmt: skip


def _round_down(value: float) -> int:
    if value < 1:
        return 0
    scale = 10 ** int(np.log10(value))
    return int(next(step for step in (5, 2, 1) if step * scale <= value) * scale)


def _shares(ax: Axes, counts: np.ndarray) -> None:
    size = counts.sum(1, keepdims=True)
    share = grouped_means(counts / np.where(size > 0, size, 1), MAX_CELLS * 2)
    clients, classes = counts.shape
    top = next(one for one in (0.1, 0.2, 0.5, 1.0) if share.max() <= one + 1e-9)  # many classes: all shares are small
    image = ax.imshow(share.T, cmap=sequential_map(), vmin=0, vmax=top, aspect="auto", interpolation="none",
                      extent=(-0.5, clients - 0.5, classes - 0.5, -0.5))  # fmt: skip
    colour_bar(ax, image, "share of the client's samples", percent=True)


def _class_ticks(ax: Axes, names: Sequence[str] | None, classes: int) -> None:
    step = max(1, -(-classes // 20))
    at = range(0, classes, step)
    ax.set_yticks(at, [printable(str(i) if names is None else names[i], 16) for i in at])


def grouped_means(values: np.ndarray, limit: int) -> np.ndarray:
    """Means of neighbouring rows (NaN left out) so that at most ``limit`` remain: ``(n, k) -> (min(n, limit), k)``."""
    if len(values) <= limit:
        return values
    starts = np.linspace(0, len(values), limit, endpoint=False).astype(int)
    count = np.add.reduceat((~np.isnan(values)).astype(float), starts)
    return np.where(count > 0, np.add.reduceat(np.nan_to_num(values), starts) / np.maximum(count, 1), np.nan)


def colour_bar(
    ax: Axes, image: Any, label: str, percent: bool = False, below: bool = False, extend: str = "neither"
) -> None:
    """The colours' key, at the right of the axes or below them."""
    shape: dict[str, Any] = {"shrink": 0.7, "aspect": 34} if below else {"aspect": 22}
    location = "bottom" if below else "right"
    bar = figure_of(ax).colorbar(image, ax=ax, location=location, pad=0.02, extend=extend, **shape)
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.ax.tick_params(length=0, labelcolor=MUTED)
    (bar.ax.xaxis if below else bar.ax.yaxis).set_major_locator(few_ticks(4))
    (bar.ax.xaxis if below else bar.ax.yaxis).set_major_formatter(
        lambda value, _: f"{value:.0%}" if percent else f"{value:.3g}"
    )
    bar.set_label(label, color=MUTED)


def sequential_map() -> Any:
    """One hue from the page's ground (nothing) to deep blue (most)."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("fedjax_pfl", list(SEQUENTIAL)).with_extremes(bad=(0, 0, 0, 0))
