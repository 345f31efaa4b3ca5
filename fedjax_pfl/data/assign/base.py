"""What a partition method is given, and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedjax_pfl.data.config import DEFAULT_CLIENTS, PartitionConfig


class Pool(NamedTuple):
    """The samples to deal out.

    labels: ``(n,)`` in ``0..num_classes-1``; client: ``(n,)`` natural client ids or None; dataset: ``(n,)`` which of
    ``datasets`` (names) a sample is from, or None where there is one only. edges: ``(E, 2)`` pairs of linked positions,
    each once, where samples are nodes of a graph; else None.
    """

    labels: np.ndarray
    num_classes: int
    client: np.ndarray | None = None
    dataset: np.ndarray | None = None
    datasets: tuple[str, ...] = ()
    edges: np.ndarray | None = None


class Assignment(NamedTuple):
    """One array of pool positions per client (disjoint, ascending), and what a reader of the result should know.

    groups: ``(M,)`` the group of each client where the method itself makes groups.
    """

    parts: list[np.ndarray]
    notes: list[str]
    groups: np.ndarray | None = None


class PartitionEntry(NamedTuple):
    """One row of the registry.

    options: the fields of ``PartitionConfig`` that this method reads and not all others do.
    shift: the method also changes features (see ``shifts.py``). apart: it keeps several data sets apart.
    linked: it follows the edges between samples, and so deals those of a published test set too.
    """

    name: str
    description: str
    options: tuple[str, ...]
    assign: Callable[[Pool, PartitionConfig, np.random.Generator], Assignment]
    shift: bool = False
    apart: bool = False
    linked: bool = False


def number_of_clients(pool: Pool, config: PartitionConfig) -> int:
    """The number of clients.

    Raises:
        ValueError: the samples cannot give each client its minimum.
    """
    total, clients = len(pool.labels), DEFAULT_CLIENTS if config.clients is None else config.clients
    if clients > total:
        raise ValueError(f"{config.method}: {clients} clients need as many samples, found {total}: ask for fewer")
    if config.min_samples * clients > total:
        raise ValueError(
            f"{config.method}: {clients} clients with at least {config.min_samples} samples need "
            f"{config.min_samples * clients}, found {total}: the largest minimum that can be met is {total // clients}"
        )
    return clients


def groups_of(clients: int, config: PartitionConfig) -> np.ndarray:
    """The group of each client, equal in size within one: ``(M,)`` int32.

    Raises:
        ValueError: more groups than clients.
    """
    if config.groups > clients:
        raise ValueError(f"{config.method}: {config.groups} groups need at least as many clients, found {clients}")
    return (np.arange(clients) * config.groups // clients).astype(np.int32)
