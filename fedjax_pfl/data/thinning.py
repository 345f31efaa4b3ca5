"""A part of a source, for machines or trials that all of it would be too much for."""

from __future__ import annotations

import dataclasses

import numpy as np

from fedjax_pfl.data.dealing import apportion
from fedjax_pfl.data.sources.base import Source

PER_SAMPLE = ("x", "y", "client", "group", "official_test", "segment", "dataset")


def thinned(source: Source, samples: int, seed: int = 0) -> Source:
    """At most ``samples`` samples of each data set, in the order of the source.

    They are drawn at random, and each class of the training and of the published test samples has its share, rounded
    up or down. What a run draws otherwise does not change them. Tables (graphs, text) stay whole.

    Raises:
        ValueError: samples below 1, or nodes of one graph, of which a part would be another graph.
    """
    if samples < 1:
        raise ValueError(f"samples must be at least 1, found {samples}")
    if source.kind == "nodes":
        raise ValueError(f"{source.name}: the nodes of one graph cannot be thinned out: leave out --samples")
    rng = np.random.default_rng(seed)
    alike = np.zeros(len(source), np.int32)
    dataset, test = (alike if leaf is None else leaf for leaf in (source.dataset, source.official_test))
    kept = np.ones(len(source), bool)
    for one in np.unique(dataset):
        own = np.flatnonzero(dataset == one)
        if len(own) > samples:
            kept[own] = _drawn(np.stack([test[own], source.y[own]]), samples, rng)
    if kept.all():
        return source
    at = np.flatnonzero(kept)
    followers = np.searchsorted(at, at + source.overlap, "right") - np.arange(len(at)) - 1
    return dataclasses.replace(
        source, name=f"{source.name}, {len(at):,} of {len(source):,} samples", overlap=int(followers.max()),
        **{name: leaf[kept] for name in PER_SAMPLE if (leaf := getattr(source, name)) is not None},
    )  # fmt: skip


def _drawn(kinds: np.ndarray, samples: int, rng: np.random.Generator) -> np.ndarray:
    """Which of the columns of ``kinds (k, n)`` are drawn, ``(n,)`` bool: so many, of each kind its share."""
    _, kind, count = np.unique(kinds, axis=1, return_inverse=True, return_counts=True)
    kind = kind.reshape(-1)
    quota = apportion(np.array([samples]), count[None] / len(kind), rng)[0]
    order = np.lexsort((rng.random(len(kind)), kind))
    place = np.empty(len(kind), np.int64)
    place[order] = np.arange(len(kind)) - np.repeat(np.cumsum(count) - count, count)
    return place < quota[kind]
