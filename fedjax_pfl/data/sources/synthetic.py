"""Generated clients in known groups, so that it is known which clients should help each other."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_pfl.data.sources.base import Source, SourceEntry, parse_options


class SyntheticConfig(NamedTuple):
    """Options of ``synthetic:KEY=VALUE,...``.

    samples: the mean number of samples of a client. skew: the deviation of the logarithm of the sizes (0: equal).
    separation: the distance of class means from the origin, in units of the noise's deviation.
    """

    clients: int = 20
    groups: int = 4
    features: int = 32
    classes: int = 10
    samples: int = 40
    skew: float = 0.0
    separation: float = 4.0
    seed: int = 0


def parse(options: str) -> SyntheticConfig:
    """The configuration of ``"clients=20,groups=4"``.

    Raises:
        ValueError: unknown key (with the nearest one), bad value, a number out of range.
    """
    given: dict[str, int | float] = {}
    items = [part for part in options.split(",") if part.strip()]
    for key, value in parse_options(items, SyntheticConfig._fields, "synthetic").items():
        kind = type(SyntheticConfig._field_defaults[key])
        try:
            given[key] = kind(value)
        except ValueError as error:
            raise ValueError(f"synthetic: {key} needs a value of type {kind.__name__}, found {value!r}") from error
    config = SyntheticConfig(**given)  # type: ignore[arg-type]
    for key in ("clients", "groups", "features", "classes", "samples"):
        if getattr(config, key) < 1:
            raise ValueError(f"synthetic: {key} must be at least 1, found {getattr(config, key)}")
    if config.groups > config.clients:
        raise ValueError(f"synthetic: {config.groups} groups need at least as many clients, found {config.clients}")
    if config.seed < 0 or not 0 <= config.skew <= 3 or not 0 <= config.separation <= 1e6:
        raise ValueError("synthetic: seed must not be negative, skew lies in 0..3, separation in 0..1e6")
    return config


def synthetic(options: str = "") -> Source:
    """Gaussian classes that all clients share, with labels permuted by group.

    A sample of hidden class c is ``separation * mean[c] + noise``; a client of group g calls it ``mapping[g][c]``.
    Group 0 has the identity, so clients can share features but share classifiers only within a group.

    Raises:
        ValueError: see ``parse``; more groups than there are distinct mappings.
    """
    config = parse(options)
    rng = np.random.default_rng(np.random.SeedSequence(config.seed, spawn_key=(100,)))
    means = rng.standard_normal((config.classes, config.features))
    means *= config.separation / np.linalg.norm(means, axis=1, keepdims=True)
    mapping = _mappings(config, rng)
    factor = np.exp(config.skew * rng.standard_normal(config.clients))
    sizes = np.maximum(1, np.rint(config.samples * config.clients * factor / factor.sum())).astype(np.int64)
    client = np.repeat(np.arange(config.clients, dtype=np.int32), sizes)
    group = (np.arange(config.clients) * config.groups // config.clients).astype(np.int32)[client]
    hidden = rng.integers(config.classes, size=len(client))
    x = (means[hidden] + rng.standard_normal((len(client), config.features))).astype(np.float32)
    y = mapping[group, hidden].astype(np.int32)
    name = f"synthetic:{options}" if options else "synthetic"
    return Source(name, x, y, config.classes, client, group, licence=SYNTHETIC.licence, where="generated")


def _mappings(config: SyntheticConfig, rng: np.random.Generator) -> np.ndarray:
    """Distinct permutations of the classes, ``(groups, classes)``, the first the identity."""
    found = [tuple(range(config.classes))]
    for _ in range(100 * config.groups):
        if len(found) == config.groups:
            break
        candidate = tuple(int(c) for c in rng.permutation(config.classes))
        if candidate not in found:
            found.append(candidate)
    if len(found) < config.groups:
        raise ValueError(f"synthetic: {config.classes} classes have too few mappings for {config.groups} groups")
    return np.array(found)


def _load(argument: str, data_dir: Path | None) -> Source:
    return synthetic(argument)


SYNTHETIC = SourceEntry(
    "synthetic",
    "synthetic[:KEY=VALUE,...]",
    f"generated clients in known groups that share a mapping of labels; keys {', '.join(SyntheticConfig._fields)}",
    "Apache-2.0, generated here",
    _load,
)
