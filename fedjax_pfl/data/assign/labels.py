"""Partitions by label: Dirichlet proportions, few classes per client, shards, groups of classes."""

from __future__ import annotations

import numpy as np

from fedjax_pfl.data.assign.base import Assignment, Pool, groups_of, number_of_clients
from fedjax_pfl.data.config import PartitionConfig
from fedjax_pfl.data.dealing import apportion, deal, holders, largest_common_size, level, route

TRIES = 10


def dirichlet(pool: Pool, config: PartitionConfig, rng: np.random.Generator) -> Assignment:
    """Each class is shared among the clients by proportions from Dirichlet(alpha) (Yurochkin et al., 2019).

    ``dirichlet_by="client"``: each client draws the proportions of its classes, and all are equal in size (Hsu et al.,
    2019).
    Ends always: of at most ``TRIES`` draws the one with the largest minimum is taken, then samples move from the
    largest clients to those below the minimum. ``balance`` moves samples in the same way until sizes are within one.
    """
    if config.dirichlet_by == "client":
        return _dirichlet_by_client(pool, config, rng)
    clients, total = number_of_clients(pool, config), len(pool.labels)
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


def _dirichlet_by_client(pool: Pool, config: PartitionConfig, rng: np.random.Generator) -> Assignment:
    """Client after client draws q ~ Dirichlet(alpha C p), p the global proportions, and takes samples as q says.

    Classes that are used up fall out of q, so late clients get what is left.
    """
    clients, total = number_of_clients(pool, config), len(pool.labels)
    left = np.bincount(pool.labels, minlength=pool.num_classes)
    sizes = np.diff(np.arange(clients + 1) * total // clients)
    concentration = np.maximum(np.minimum(config.alpha, 1e8) * pool.num_classes * left / total, 1e-12)
    counts = np.zeros((clients, pool.num_classes), np.int64)
    for client in range(clients):
        proportions = rng.dirichlet(concentration)
        while (missing := int(sizes[client] - counts[client].sum())) > 0:
            if (proportions * (left > 0)).sum() < 1e-9:  # its classes are used up: it draws among the others
                proportions = np.zeros(len(left))
                proportions[left > 0] = rng.dirichlet(concentration[left > 0])
            exact = missing * proportions * (left > 0) / (proportions * (left > 0)).sum()
            whole = np.floor(exact).astype(np.int64)
            part = np.maximum(exact - whole, 0) + 1e-300  # rounding at random: else late clients get the same residue
            drawn = np.minimum(whole + rng.multinomial(missing - whole.sum(), part / part.sum()), left)
            counts[client] += drawn
            left = left - drawn
    return Assignment(deal(pool.labels, counts, rng), [])


def shards(pool: Pool, config: PartitionConfig, rng: np.random.Generator) -> Assignment:
    """Samples sorted by label are cut into shards, equal within one, and dealt at random (McMahan et al., 2017)."""
    clients, each = number_of_clients(pool, config), config.shards_per_client
    if clients * each > len(pool.labels):
        raise ValueError(
            f"shards: {clients} clients with {each} shards need {clients * each} samples, found {len(pool.labels)}: "
            "lower clients or shards_per_client"
        )
    order = rng.permutation(len(pool.labels))
    pieces = np.array_split(order[np.argsort(pool.labels[order], kind="stable")], clients * each)
    turn = rng.permutation(clients * each).reshape(clients, each)
    return Assignment([np.sort(np.concatenate([pieces[shard] for shard in own])) for own in turn], [])


def label_groups(pool: Pool, config: PartitionConfig, rng: np.random.Generator) -> Assignment:
    """Known clusters: the classes are dealt to groups of clients; within a group every client has the same mixture."""
    clients = number_of_clients(pool, config)
    groups = groups_of(clients, config)
    present = np.unique(pool.labels)
    if config.groups > len(present):
        raise ValueError(
            f"label_groups: {config.groups} groups need as many classes, found {len(present)}: lower groups"
        )
    parts: list[np.ndarray] = []
    for group, classes in enumerate(np.array_split(rng.permutation(present), config.groups)):
        rows, members = np.flatnonzero(np.isin(pool.labels, classes)), int((groups == group).sum())
        if len(rows) < config.min_samples * members:
            raise ValueError(
                f"label_groups: group {group} has {len(rows)} samples for {members} clients, the minimum is "
                f"{config.min_samples}: lower min_samples, clients or groups"
            )
        parts += [np.sort(part) for part in np.array_split(rng.permutation(rows), members)]
    return Assignment(parts, [], groups)


def pathological(pool: Pool, config: PartitionConfig, rng: np.random.Generator) -> Assignment:
    """Exactly ``classes_per_client`` classes per client; a class is held by clients in proportion to its size.

    ``balance``: sizes within one of each other, as large as the classes allow. Otherwise all samples of the classes
    held are dealt out, each class by shares drawn uniformly from the simplex, on top of the minimum.
    """
    clients, k = number_of_clients(pool, config), config.classes_per_client
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
