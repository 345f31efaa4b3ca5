"""Whole-number plans ``(clients, classes)`` of who gets how many of which class, and the deal by a plan."""

from __future__ import annotations

import heapq

import numpy as np


def apportion(totals: np.ndarray, shares: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Whole numbers near ``totals[:, None] * shares`` with row sums ``totals``: largest remainders, ties at random.

    totals: ``(C,)`` integers; shares: ``(C, M)``, rows that sum to one (a row of zeros needs the total 0).
    """
    exact = totals[:, None] * shares
    whole = np.maximum(np.floor(exact - 1e-9), 0).astype(np.int64)
    order = np.lexsort((rng.random(shares.shape), whole - exact), axis=-1)
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(shares.shape[1])[None, :], axis=-1)
    return whole + (rank < (totals - whole.sum(1))[:, None])


def level(counts: np.ndarray, low: int, high: int) -> tuple[np.ndarray, int]:
    """Move samples from the largest to the smallest rows of ``(M, C)`` until all sizes lie in ``low..high``.

    Column sums stay. A row receives a class that it already has where the giver has it too, else the giver's largest,
    so skewed rows stay skewed. Needs ``low * M <= total <= high * M``. Returns the new counts and the number moved.
    """
    counts, moved = counts.copy(), 0
    sizes = counts.sum(1)
    while True:
        giver, taker = int(sizes.argmax()), int(sizes.argmin())
        if sizes[taker] < low:
            amount = min(low - sizes[taker], sizes[giver] - low, (sizes[giver] - sizes[taker] + 1) // 2)
        elif sizes[giver] > high:
            amount = min(sizes[giver] - high, high - sizes[taker])
        else:
            return counts, moved
        both = np.minimum(counts[giver], counts[taker])
        label = int(both.argmax()) if both.any() else int(counts[giver].argmax())
        amount = int(min(amount, counts[giver, label]))
        counts[giver, label] -= amount
        counts[taker, label] += amount
        sizes[giver] -= amount
        sizes[taker] += amount
        moved += amount


def deal(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Random samples by the plan ``counts (M, C)``: one ascending index array per client, surplus samples left out."""
    clients, classes = counts.shape
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    surplus = np.bincount(labels, minlength=classes) - counts.sum(0)
    plan = np.concatenate([counts, surplus[None]]).T
    owner = np.repeat(np.tile(np.arange(clients + 1), classes), plan.ravel())
    order = order[np.lexsort((order, owner))]
    return np.split(order, np.cumsum(counts.sum(1)))[:clients]


def holders(supply: np.ndarray, clients: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Which client holds which class: ``(M, C)`` bool, rows with exactly k, columns in proportion to the supply.

    Raises:
        ValueError: fewer classes with samples than ``k``, or too few samples for every place.
    """
    present, most = int((supply > 0).sum()), int(np.minimum(supply, clients).sum())
    if k > present:
        raise ValueError(f"pathological: {k} classes per client, but only {present} classes have samples")
    if clients * k > most:
        raise ValueError(
            f"pathological: {clients} clients with {k} classes each need {clients * k} places, the classes have only "
            f"{most}: use fewer clients or classes per client"
        )
    slots = np.zeros(len(supply), np.int64)
    queue = [(-np.inf, float(rng.random()), c) for c in np.flatnonzero(supply)]
    heapq.heapify(queue)
    for _ in range(clients * k):
        _, tie, c = heapq.heappop(queue)
        slots[c] += 1
        if slots[c] < min(supply[c], clients):
            heapq.heappush(queue, (-supply[c] / (slots[c] + 1), tie, c))
    holds = np.zeros((clients, len(supply)), bool)
    for turn, client in enumerate(rng.permutation(clients)):
        forced = slots == clients - turn
        keys = np.where(slots > 0, rng.random(len(supply)) ** (1 / np.maximum(slots, 1)), -1) + 2 * forced
        chosen = np.argsort(-keys, kind="stable")[:k]
        holds[client, chosen] = True
        slots[chosen] -= 1
    return holds


def largest_common_size(holds: np.ndarray, supply: np.ndarray) -> int:
    """The largest size that all clients can have at once; at least the number of classes each holds."""
    k = int(holds[0].sum())
    low, high = k, max(k, int(supply[holds.any(0)].sum()) // len(holds))
    while low < high:
        middle = (low + high + 1) // 2
        met = route(holds, supply, np.full(len(holds), middle)).sum() == middle * len(holds)
        low, high = (middle, high) if met else (low, middle - 1)
    return low


def route(holds: np.ndarray, supply: np.ndarray, want: np.ndarray, given: np.ndarray | None = None) -> np.ndarray:
    """Counts ``(M, C)`` by maximum flow: at least one where ``holds``, rows up to ``want``, columns up to ``supply``.

    ``given`` is a feasible start whose row sums do not shrink, by default what splits each row and column evenly.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    clients, classes = holds.shape
    if given is None:
        even = np.minimum(supply // np.maximum(holds.sum(0), 1), want[:, None] // holds.sum(1, keepdims=True))
        given = np.where(holds, np.maximum(even, 1), 0)
    source, sink = clients + classes, clients + classes + 1
    who, what = np.nonzero(holds)
    tails = np.concatenate([np.full(classes, source), clients + what, who, np.arange(clients)])
    heads = np.concatenate([np.arange(clients, clients + classes), who, clients + what, np.full(clients, sink)])
    room = np.concatenate([supply - given.sum(0), supply[what], given[who, what] - 1, want - given.sum(1)])
    graph = csr_array((room.astype(np.int32), (tails, heads)), shape=(sink + 1, sink + 1))
    flow = maximum_flow(graph, source, sink).flow.tocoo()
    dealt = (flow.row >= clients) & (flow.row < source) & (flow.col < clients)
    counts = given.copy()
    np.add.at(counts, (flow.col[dealt], flow.row[dealt] - clients), flow.data[dealt])
    return counts
