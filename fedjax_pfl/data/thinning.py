"""A part of a source, for machines or trials that all of it would be too much for."""

from __future__ import annotations

import dataclasses

import numpy as np

from fedjax_pfl.data.sources.base import Source

PER_SAMPLE = ("x", "y", "client", "group", "official_test", "segment", "dataset")


def thinned(source: Source, samples: int, seed: int = 0) -> Source:
    """At most ``samples`` samples of each data set, in the order of the source.

    They are drawn at random, and from each class of the training and of the published test samples its share, to one
    sample. What a run draws otherwise does not change them.

    Raises:
        ValueError: samples below 1, or nodes of one graph, of which a part would be another graph.
    """
    if samples < 1:
        raise ValueError(f"samples must be at least 1, found {samples}")
    if source.kind == "nodes":
        raise ValueError(f"{source.name}: the nodes of one graph cannot be thinned out: leave out --samples")
    alike = np.zeros(len(source), np.int32)
    dataset, test = (alike if leaf is None else leaf for leaf in (source.dataset, source.official_test))
    place, size = _places((np.random.default_rng(seed).permutation(len(source)), source.y, test, dataset))
    kept = _places(((place + 0.5) / size, dataset))[0] < samples
    if kept.all():
        return source
    where = f"{source.where}; " if source.where else ""
    parts = {name: leaf[kept] for name in PER_SAMPLE if (leaf := getattr(source, name)) is not None}
    return dataclasses.replace(source, **parts, where=f"{where}a part: {kept.sum():,} of {len(source):,} samples")


def _places(keys: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The place of each sample, by the first key, among those that are alike in all others, and how many those are."""
    order = np.lexsort(keys)
    others = np.stack(keys[1:])[:, order]
    begins = np.append(True, (others[:, 1:] != others[:, :-1]).any(0))
    first, group = np.flatnonzero(begins), np.cumsum(begins) - 1
    place, size = np.empty(len(order), np.int64), np.empty(len(order), np.int64)
    place[order] = np.arange(len(order)) - first[group]
    size[order] = np.bincount(group)[group]
    return place, size
