"""Partitions that do not look at labels: a random deal of equal or of skewed sizes, and one with shifted features."""

from __future__ import annotations

import numpy as np

from fedjax_pfl.data.assign.base import Assignment, Pool, groups_of, number_of_clients
from fedjax_pfl.data.config import PartitionConfig
from fedjax_pfl.data.dealing import apportion


def iid(pool: Pool, config: PartitionConfig, rng: np.random.Generator) -> Assignment:
    """A random deal: every client has the global distribution, sizes within one of each other."""
    clients = number_of_clients(pool, config)
    parts = np.array_split(rng.permutation(len(pool.labels)), clients)
    return Assignment([np.sort(part) for part in parts], [])


def quantity(pool: Pool, config: PartitionConfig, rng: np.random.Generator) -> Assignment:
    """A random deal of unequal sizes: every client has its minimum, and a share of the rest.

    Shares are ``exp(size_skew z)`` with standard normal z (lognormal), or ``rank^-size_skew`` of a random rank.
    """
    clients = number_of_clients(pool, config)
    if config.sizes == "lognormal":
        exponent = config.size_skew * rng.standard_normal(clients)
    else:
        exponent = -config.size_skew * np.log1p(rng.permutation(clients))
    shares = np.exp(exponent - exponent.max())
    rest = np.array([len(pool.labels) - clients * config.min_samples])
    sizes = config.min_samples + apportion(rest, shares[None] / shares.sum(), rng)[0]
    parts = np.split(rng.permutation(len(pool.labels)), np.cumsum(sizes)[:-1])
    return Assignment([np.sort(part) for part in parts], [])


def feature_shift(pool: Pool, config: PartitionConfig, rng: np.random.Generator) -> Assignment:
    """An IID deal to groups of clients whose features then differ (see ``shifts.py``): labels alike, inputs not."""
    return iid(pool, config, rng)._replace(groups=groups_of(number_of_clients(pool, config), config))
