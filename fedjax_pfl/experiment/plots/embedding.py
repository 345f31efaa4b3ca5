"""Client embeddings in the plane."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedjax_pfl.experiment.plots.style import PALETTE, axes_or_new, figure_of, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST = 5  # clients below which a map says nothing
MARKERS = "osD^vP"


def flattened(embedding: np.ndarray) -> np.ndarray:
    """t-SNE of embeddings ``(M, E)`` into ``(M, 2)``, started at the principal components: the same every time.

    van der Maaten and Hinton, JMLR 2008.

    Raises:
        ValueError: fewer than five embeddings, or a shape that is no matrix.
    """
    from sklearn.manifold import TSNE

    embedding = np.asarray(embedding, np.float64)
    if embedding.ndim != 2 or len(embedding) < LEAST:
        raise ValueError(f"a map needs embeddings (clients, size) of at least {LEAST} clients, found {embedding.shape}")
    perplexity = min(30.0, (len(embedding) - 1) / 3)
    return TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(embedding)


@styled
def plot_embedding(
    embedding: np.ndarray, labels: np.ndarray, ax: Axes | None = None, title: str | None = None
) -> Figure:
    """A dot a client, near each other where embeddings are alike, coloured by the client's most frequent class.

    embedding: ``(M, E)``; labels: ``(M,)`` integers. Twelve classes have a colour and a mark of their own in the key;
    the others are grey.
    """
    places, labels = flattened(embedding), np.asarray(labels)
    ax = axes_or_new(ax, 4.2)
    classes, counts = np.unique(labels, return_counts=True)
    named = np.sort(classes[np.argsort(-counts, kind="stable")][:12])
    others = ~np.isin(labels, named)
    ax.scatter(places[others, 0], places[others, 1], s=26, color="0.75", linewidths=0)
    for number, label in enumerate(named):
        own = labels == label
        colour, marker = PALETTE[number % len(PALETTE)], MARKERS[number // len(PALETTE) % len(MARKERS)]
        ax.scatter(places[own, 0], places[own, 1], s=34, color=colour, marker=marker, alpha=0.85, label=str(label))
    ax.set_xticks([])
    ax.set_yticks([])
    ax.set_aspect("equal", adjustable="datalim")
    ax.legend(title="main class", loc="center left", bbox_to_anchor=(1.0, 0.5))
    if title:
        ax.set_title(title)
    return figure_of(ax)
