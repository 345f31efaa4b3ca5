"""Who learns from whom: aggregation weights beside the similarity of the clients' labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_pfl.experiment.plots.partition import MAX_CELLS, client_order, colour_bar, grouped_means, sequential_map
from fedjax_pfl.experiment.plots.style import (
    BLANK,
    MUTED,
    PALETTE,
    SEQUENTIAL,
    SURFACE,
    WIDTH,
    few_ticks,
    figure_of,
    new_figure,
    printable,
    styled,
)  # fmt: skip

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MANY = 40
"""From this many clients on, the colour scale is that of all but the most extreme weights."""


@styled
def plot_weights(
    A: np.ndarray,
    similarity: np.ndarray | None = None,
    ax: Axes | None = None,
    order: np.ndarray | None = None,
    title: str | None = None,
) -> Figure:
    """Aggregation weights as a heat map, beside the clients' similarity in the same order.

    A: ``(M, M)``, row i the weights with which client i's model is mixed; similarity: ``(M, M)`` in 0..1 or None;
    ax: draw the weights alone there; order: permutation of the clients, by similarity (else by A) by default. The
    colour scale is that of the weights of others: the self weights (diagonal) are left grey and drawn as bars.

    Raises:
        ValueError: A or similarity is not a square matrix of the same size.
    """
    A = np.asarray(A, float)
    if A.ndim != 2 or A.shape[0] != A.shape[1] or not A.size:
        raise ValueError(f"A must be a square matrix (clients, clients), found shape {A.shape}")
    if similarity is not None and np.shape(similarity) != A.shape:
        raise ValueError(f"similarity must have A's shape {A.shape}, found {np.shape(similarity)}")
    order = client_order(A if similarity is None else np.asarray(similarity)) if order is None else order
    if ax is not None:
        _weights(ax, A, order, title)
        return figure_of(ax)
    figure = new_figure(WIDTH, 4.9)
    axes = figure.subplots(1, 1 if similarity is None else 2, squeeze=False)[0]
    _weights(axes[0], A, order, title)
    if similarity is not None:
        image = _heat(axes[1], np.asarray(similarity, float), order, sequential_map(), (0.0, 1.0))
        axes[1].set_title("Label similarity")
        _client_ticks(axes[1], order, "client")
        colour_bar(axes[1], image, "cosine of label histograms", below=True)
    return figure


def off_diagonal(A: np.ndarray) -> np.ndarray:
    """The entries of a square matrix that are not on its diagonal: ``(M * (M - 1),)``."""
    return A[~np.eye(len(A), dtype=bool)]


def _weights(ax: Axes, A: np.ndarray, order: np.ndarray, title: str | None) -> None:
    low, high = _limits(off_diagonal(A))
    colours, limits = (_diverging_map(), (-max(high, -low), max(high, -low))) if low < -1e-9 else (None, (low, high))
    hidden = np.where(np.eye(len(A), dtype=bool), np.nan, A)
    image = _heat(ax, hidden, order, colours or sequential_map(), limits)
    ax.set_title(printable(title or "Weights of the other clients", 52))
    _client_ticks(ax, order, "client that gives")
    ax.set_ylabel("client that receives")
    colour_bar(ax, image, "weight of another client", below=True, extend="max" if len(A) > MANY else "neither")
    _self_weights(ax, np.diag(A)[order])


def _limits(others: np.ndarray) -> tuple[float, float]:
    """Ends of the colour scale, from 0 unless all weights lie close together; of many the most extreme few are cut."""
    finite = others[np.isfinite(others)]
    if not finite.size:
        return 0.0, 1.0
    ends = (0.002, 0.998) if finite.size > MANY * MANY else (0.0, 1.0)
    low, high = np.quantile(finite, ends)
    narrow = 0 < 0.25 * high < low < high
    return float(low) if narrow or low < 0 else 0.0, max(float(high), 1e-12)


def _heat(ax: Axes, matrix: np.ndarray, order: np.ndarray, cmap: Any, limits: tuple[float, float]) -> Any:
    grouped = grouped_means(grouped_means(matrix[np.ix_(order, order)], MAX_CELLS).T, MAX_CELLS).T
    clients = len(matrix)
    ax.set_facecolor(BLANK)
    ax.spines[:].set_visible(False)
    return ax.imshow(grouped, cmap=cmap, vmin=limits[0], vmax=limits[1], interpolation="none", aspect="equal",
                     extent=(-0.5, clients - 0.5, clients - 0.5, -0.5))  # fmt: skip


def _self_weights(beside: Axes, weights: np.ndarray) -> None:
    ax = beside.inset_axes((1.04, 0.0, 0.17, 1.0))
    grouped = grouped_means(weights[:, None], MAX_CELLS)[:, 0]
    height = len(weights) / len(grouped)
    centres = (np.arange(len(grouped)) + 0.5) * height - 0.5
    ax.barh(centres, grouped, height=height * (0.7 if height * len(grouped) <= 60 else 1.0), color=MUTED)
    ax.set_ylim(beside.get_ylim())
    ax.set_xlabel("self")
    ax.axvline(0, color=MUTED, linewidth=0.6)
    finite = weights[np.isfinite(weights)]
    low, high = (min(0.0, finite.min()), max(finite.max(), 1e-12)) if len(finite) else (0.0, 1.0)
    ax.set_xlim(low, high * 1.05)
    ax.xaxis.set_major_locator(few_ticks(2))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    ax.tick_params(axis="y", labelleft=False)
    ax.grid(axis="x")


def _client_ticks(ax: Axes, order: np.ndarray, name: str) -> None:
    if len(order) <= 30:
        names = [str(i) for i in order]
        ax.set_xticks(range(len(order)), names, fontsize=6.5 if len(order) > 20 else 7.5)
        ax.set_yticks(range(len(order)), names, fontsize=6.5 if len(order) > 20 else 7.5)
        if len(order) > 20:
            ax.tick_params(axis="x", labelrotation=90)
    else:
        ax.set_xticks([])
        ax.set_yticks([])
    ax.tick_params(length=0)
    ax.set_xlabel(name)


def _diverging_map() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    colours = ["#5a2b00", PALETTE[1], "#f9d9b5", SURFACE, *SEQUENTIAL[1:4], SEQUENTIAL[5]]
    return LinearSegmentedColormap.from_list("fedjax_pfl_signed", colours).with_extremes(bad=(0, 0, 0, 0))
