"""Features that differ between groups of clients: quarter turns, or noise."""

from __future__ import annotations

import numpy as np

from fedjax_pfl.data.config import PartitionConfig
from fedjax_pfl.data.sources import Source

BLOCK = 1024  # samples whose noise is drawn at once, each block from its own stream
STREAM = 4


def check_shift(source: Source, config: PartitionConfig) -> None:
    """Refuse a shift of what has no features that could be shifted.

    Raises:
        ValueError: samples that only point into a table, rotation of what is no square image, more than four groups of
            it, noise on whole numbers.
    """
    x = source.x
    if source.reader is not None or source.kind != "array":
        what = "tokens" if source.kind == "tokens" else "places in a table"
        raise ValueError(f"feature_shift changes the samples' own numbers, {source.name} holds {what}: use another")
    if config.shift == "rotation" and (x.ndim != 4 or x.shape[1] != x.shape[2]):
        raise ValueError(
            f"feature_shift: only square images can be rotated, found samples of shape {x.shape[1:]}: use shift='noise'"
        )
    if config.shift == "rotation" and config.groups > 4:
        raise ValueError(f"feature_shift: there are 4 quarter turns, found {config.groups} groups: use shift='noise'")
    if config.shift == "noise" and x.dtype != np.uint8 and x.dtype.kind != "f":
        raise ValueError(f"feature_shift: noise needs features, found whole numbers of dtype {x.dtype}")


def shifted(x: np.ndarray, rows: list[np.ndarray], groups: np.ndarray, config: PartitionConfig) -> np.ndarray:
    """A copy of ``x (n, ...)`` in which the samples ``rows[i]`` of client ``i`` look as group ``groups[i]`` sees them.

    rotation: group g turns images by g quarter turns. noise: group g adds Gaussian noise of deviation
    ``shift_noise g / (groups - 1)``, in units of the deviation of all features; uint8 is rounded and clipped. A
    sample's noise depends on the seed and its number only. What can be shifted says ``check_shift``.
    """
    group = np.zeros(len(x), np.int64)
    for own, number in zip(rows, groups, strict=True):
        group[own] = number
    return _rotated(x, group, config) if config.shift == "rotation" else _noisy(x, group, config)


def _rotated(x: np.ndarray, group: np.ndarray, config: PartitionConfig) -> np.ndarray:
    out = np.array(x)
    for turn in range(1, config.groups):
        own = np.flatnonzero(group == turn)
        out[own] = np.rot90(x[own], turn, axes=(1, 2))
    return out


def _noisy(x: np.ndarray, group: np.ndarray, config: PartitionConfig) -> np.ndarray:
    deviation = _deviation(x) * config.shift_noise / max(config.groups - 1, 1)
    out = np.empty_like(x)
    for start in range(0, len(x), BLOCK):
        here = slice(start, start + BLOCK)
        stream = np.random.SeedSequence(config.seed, spawn_key=(STREAM, start // BLOCK))
        noise = np.random.Generator(np.random.PCG64(stream)).standard_normal(x[here].shape, np.float32)
        level = (deviation * group[here]).astype(np.float32).reshape(-1, *[1] * (x.ndim - 1))
        moved = x[here] + level * noise
        out[here] = np.clip(np.rint(moved), 0, 255) if x.dtype == np.uint8 else moved
    return out


def _deviation(x: np.ndarray) -> float:
    """Standard deviation of all numbers, block by block: a large array is never copied whole."""
    sums = np.zeros(2)
    for start in range(0, len(x), BLOCK):
        block = np.asarray(x[start : start + BLOCK], np.float64)
        sums += block.sum(), (block**2).sum()
    mean, square = sums / x.size
    return float(np.sqrt(max(square - mean**2, 0.0)))
