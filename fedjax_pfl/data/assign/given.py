"""Partitions by what the source says: its own clients, or one or several clients for each of its data sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from fedjax_pfl.data.assign.base import Assignment, Pool
from fedjax_pfl.data.assign.labels import dirichlet
from fedjax_pfl.data.assign.sizes import iid
from fedjax_pfl.data.config import PartitionConfig

Method = Callable[[Pool, PartitionConfig, np.random.Generator], Assignment]


def natural(pool: Pool, config: PartitionConfig, rng: np.random.Generator) -> Assignment:
    """The given client ids, in ascending order; ``clients`` of them after a seeded draw, or all where it is None.

    Clients with fewer than ``min_samples`` samples are left out before the draw.
    """
    if pool.client is None:
        raise ValueError("natural: this source has no clients of its own: choose another (tables: client=COLUMN)")
    ids, inverse, sizes = np.unique(pool.client, return_inverse=True, return_counts=True)
    fit = np.flatnonzero(sizes >= config.min_samples)
    wanted = len(fit) if config.clients is None else config.clients
    if wanted > len(fit) or not len(fit):
        least = np.sort(sizes)[::-1][min(max(wanted, 1), len(ids)) - 1]
        fewer = f"ask for at most {len(fit)} clients, or leave clients out to take all"
        remedy = f"lower min_samples to {least}" if wanted <= len(ids) else fewer
        raise ValueError(
            f"natural: {len(fit)} of {len(ids)} clients have at least {config.min_samples} samples, "
            f"{max(wanted, 1)} are asked for: {remedy}"
        )
    chosen = fit if config.clients is None else np.sort(rng.permutation(fit)[:wanted])
    order = np.argsort(inverse, kind="stable")
    parts = np.split(order, np.cumsum(sizes)[:-1])
    notes = [f"left out {len(ids) - len(fit)} clients with fewer than {config.min_samples} samples"]
    return Assignment([parts[client] for client in chosen], notes if len(fit) < len(ids) else [])


def dataset_per_client(pool: Pool, config: PartitionConfig, rng: np.random.Generator) -> Assignment:
    """One client per data set of the source."""
    return _per_dataset(pool, dataclasses.replace(config, clients_per_dataset=1), rng, iid)


def chunks_of_dataset(pool: Pool, config: PartitionConfig, rng: np.random.Generator) -> Assignment:
    """Several clients per data set, each with a random share of it."""
    return _per_dataset(pool, config, rng, iid)


def skewed_chunks_of_dataset(pool: Pool, config: PartitionConfig, rng: np.random.Generator) -> Assignment:
    """Several clients per data set, among which its classes are shared by Dirichlet(alpha) proportions."""
    return _per_dataset(pool, config, rng, dirichlet)


def _per_dataset(pool: Pool, config: PartitionConfig, rng: np.random.Generator, method: Method) -> Assignment:
    """``method`` within each data set; groups are the data sets."""
    dataset = np.zeros(len(pool.labels), np.int32) if pool.dataset is None else pool.dataset
    names, each = pool.datasets or ("the data set",), config.clients_per_dataset
    clients = each * len(names)
    if config.clients not in (None, clients):
        raise ValueError(
            f"{config.method}: {len(names)} data sets with {each} clients each are {clients} clients, found "
            f"{config.clients}: leave clients out"
        )
    parts: list[np.ndarray] = []
    notes: list[str] = []
    for number, name in enumerate(names):
        rows = np.flatnonzero(dataset == number)
        try:
            dealt = method(Pool(pool.labels[rows], pool.num_classes), dataclasses.replace(config, clients=each), rng)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        parts += [rows[part] for part in dealt.parts]
        notes += [f"{name}: {note}" for note in dealt.notes]
    return Assignment(parts, notes, np.repeat(np.arange(len(names), dtype=np.int32), each))
