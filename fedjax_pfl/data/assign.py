"""Partition methods: which client gets which sample. One function each, on the host, driven by one seeded generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedjax_pfl.data.dealing import apportion, deal, holders, largest_common_size, level, route

if TYPE_CHECKING:
    from fedjax_pfl.data.partition import PartitionConfig

TRIES = 10


class Pool(NamedTuple):
    """The samples to deal out: labels ``(n,)`` in ``0..num_classes-1``, optional natural client ids ``(n,)``."""

    labels: np.ndarray
    num_classes: int
    client: np.ndarray | None = None


class Assignment(NamedTuple):
    """One array of pool positions per client (disjoint, ascending), and what a reader of the result should know.

    groups: ``(M,)`` the group of each client where the method itself makes groups.
    """

    parts: list[np.ndarray]
    notes: list[str]
    groups: np.ndarray | None = None


class PartitionEntry(NamedTuple):
    """One row of the registry. options: the fields of ``PartitionConfig`` that this method reads and others may not."""

    name: str
    description: str
    options: tuple[str, ...]
    assign: Callable[[Pool, PartitionConfig, np.random.Generator], Assignment]


def iid(pool: Pool, config: PartitionConfig, rng: np.random.Generator) -> Assignment:
    """A random deal: every client has the global distribution, sizes within one of each other."""
    clients = _clients(pool, config)
    parts = np.array_split(rng.permutation(len(pool.labels)), clients)
    return Assignment([np.sort(part) for part in parts], [])


def dirichlet(pool: Pool, config: PartitionConfig, rng: np.random.Generator) -> Assignment:
    """Each class is shared among the clients by proportions from Dirichlet(alpha) (Yurochkin et al., 2019).

    Ends always: of at most ``TRIES`` draws the one with the largest minimum is taken, then samples move from the
    largest clients to those below the minimum. ``balance`` moves samples in the same way until sizes are within one.
    """
    clients, total = _clients(pool, config), len(pool.labels)
    supply = np.bincount(pool.labels, minlength=pool.num_classes)
    low, high = (total // clients, -(-total // clients)) if config.balance else (config.min_samples, total)
    best = np.zeros((clients, pool.num_classes), np.int64)
    for attempt in range(1 if config.balance else TRIES):
        shares = rng.dirichlet(np.full(clients, min(config.alpha, 1e8)), size=pool.num_classes)
        drawn = apportion(supply, shares, rng).T
        if attempt == 0 or drawn.sum(1).min() > best.sum(1).min():
            best = drawn
        if best.sum(1).min() >= low:
            break
    before = int(best.sum(1).min())
    counts, moved = level(best, low, high)
    notes = [f"levelled: moved {moved} samples for equal sizes"] if config.balance and moved else []
    if moved and not config.balance:
        notes = [
            f"repaired: moved {moved} samples from the largest clients to raise the minimum from {before} to {low}"
        ]
    return Assignment(deal(pool.labels, counts, rng), notes)


def pathological(pool: Pool, config: PartitionConfig, rng: np.random.Generator) -> Assignment:
    """Exactly ``classes_per_client`` classes per client; a class is held by clients in proportion to its size.

    ``balance``: sizes within one of each other, as large as the classes allow. Otherwise all samples of the classes
    held are dealt out, each class by shares drawn uniformly from the simplex, on top of the minimum.
    """
    clients, k = _clients(pool, config), config.classes_per_client
    supply = np.bincount(pool.labels, minlength=pool.num_classes)
    holds = holders(supply, clients, k, rng)
    largest = largest_common_size(holds, supply)
    if max(config.min_samples, k) > largest:
        raise ValueError(
            f"pathological: no client size above {largest} can be met by {clients} clients with {k} classes each, "
            f"the minimum is {max(config.min_samples, k)}: lower min_samples or the number of clients"
        )
    counts = route(holds, supply, np.full(clients, largest if config.balance else max(config.min_samples, k)))
    if config.balance:
        counts = route(holds, supply, counts.sum(1) + 1, counts)
    else:
        shares = np.zeros((pool.num_classes, clients))
        for c in range(pool.num_classes):
            shares[c, holds[:, c]] = rng.dirichlet(np.ones(max(1, holds[:, c].sum())))[: holds[:, c].sum()]
        counts = counts + apportion(np.where(holds.any(0), supply - counts.sum(0), 0), shares, rng).T
    lost, absent = len(pool.labels) - int(counts.sum()), np.flatnonzero((supply > 0) & ~holds.any(0))
    notes = [f"classes {absent.tolist()} belong to no client"] if absent.size else []
    if lost:
        notes.append(f"left out {lost} of {len(pool.labels)} samples")
    return Assignment(deal(pool.labels, counts, rng), notes)


def natural(pool: Pool, config: PartitionConfig, rng: np.random.Generator) -> Assignment:
    """The given client ids, in ascending order; ``clients`` of them after a seeded draw, or all where it is None.

    Clients with fewer than ``min_samples`` samples are left out before the draw.
    """
    if pool.client is None:
        raise ValueError("natural: this source has no client ids: choose another partition or give a client column")
    ids, inverse, sizes = np.unique(pool.client, return_inverse=True, return_counts=True)
    fit = np.flatnonzero(sizes >= config.min_samples)
    wanted = len(fit) if config.clients is None else config.clients
    if wanted > len(fit) or not len(fit):
        least = np.sort(sizes)[::-1][min(max(wanted, 1), len(ids)) - 1]
        fewer = f"ask for at most {len(fit)} clients, or for all (--clients 0)"
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


PARTITIONS: dict[str, PartitionEntry] = {
    entry.name: entry
    for entry in (
        PartitionEntry("iid", "a random deal, sizes within one", (), iid),
        PartitionEntry(
            "dirichlet", "each class shared by Dirichlet(alpha) proportions", ("alpha", "balance"), dirichlet
        ),
        PartitionEntry("pathological", "exactly k classes per client", ("classes_per_client", "balance"), pathological),
        PartitionEntry("natural", "the source's own clients", (), natural),
    )
}


def _clients(pool: Pool, config: PartitionConfig) -> int:
    """The number of clients, refused where the samples cannot give each its minimum."""
    total, clients = len(pool.labels), config.clients
    if clients is None:
        raise ValueError(f"{config.method}: say how many clients (only natural has a number of its own)")
    if clients > total:
        raise ValueError(f"{config.method}: {clients} clients need as many samples, found {total}: ask for fewer")
    if config.min_samples * clients > total:
        raise ValueError(
            f"{config.method}: {clients} clients with at least {config.min_samples} samples need "
            f"{config.min_samples * clients}, found {total}: the largest minimum that can be met is {total // clients}"
        )
    return clients
