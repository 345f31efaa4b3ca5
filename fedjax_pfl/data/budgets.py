"""The sizes of micro-batches for given graphs, chosen on the host so that little of them is padding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedjax_pfl.data.graphs import Budget

BATCH = 128  # graphs of a typical batch
BATCHES = 4  # looked at in each data set
SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)
DENSE = 512  # nodes at most, whose matrix of all pairs stays in a core's cache
FEWER = 0.97  # one more budget, which is one more program to compile, must save three per cent
MOST = 5


class Cost(NamedTuple):
    """Microseconds of a training step for a node, an edge and a micro-batch, as measured on a CPU (GIN, 3 x 64); where
    neighbours are summed by a product with the adjacency matrix, for a pair of nodes and for an edge of the matrix."""

    node: float = 2.5
    edge: float = 0.2
    batch: float = 100.0
    pair: float = 0.01
    entry: float = 0.02

    def of(self, budget: Budget) -> float:
        """Of a micro-batch, with the cheaper kind of sums."""
        sums = self._by_matrix(budget) if self.dense(budget) else self.edge * budget.edges
        return self.batch + self.node * budget.nodes + sums

    def dense(self, budget: Budget) -> bool:
        """Whether the matrix is cheaper."""
        return budget.nodes <= DENSE and self._by_matrix(budget) < self.edge * budget.edges

    def _by_matrix(self, budget: Budget) -> float:
        return self.pair * budget.nodes**2 + self.entry * budget.edges


class Waste(NamedTuple):
    """What was packed: micro-batches, their slots for nodes and edges, and how many nodes and edges were there."""

    micro_batches: int
    node_slots: int
    edge_slots: int
    nodes: int
    edges: int

    def share(self, cost: Cost = Cost()) -> float:
        """The share of padding in nodes and edges, weighted by their cost: in [0, 1)."""
        filled = cost.node * self.nodes + cost.edge * self.edges
        return 1 - filled / (cost.node * self.node_slots + cost.edge * self.edge_slots)


def budgets_for(x: np.ndarray, cost: Cost = Cost()) -> tuple[Budget, ...]:
    """Budgets for graph rows ``x (n, 5)``: the last one suits every graph, those before it are for most of them.

    Budgets are added one by one, each the one that makes batches of 128 graphs of one data set cheapest.
    """
    batches = sample_batches(x)
    tables = x[np.concatenate(batches)][:, [1, 3]].astype(np.int64)
    largest = x[:, 1].max() + 1, x[:, 3].max()
    chosen: tuple[Budget, ...] = (_budget(int(largest[0]), int(largest[1]), float("inf"), tables),)
    best = _price(x, batches, chosen, cost)
    candidates = _candidates(x, tables, chosen[0])
    while len(chosen) < MOST and candidates:
        tried = [_with_one_more(x, chosen, one, tables) for one in candidates if one not in chosen]
        prices = [_price(x, batches, budgets, cost) for budgets in tried]
        if not prices or min(prices) > FEWER * best:
            break
        best, chosen = min(prices), tried[int(np.argmin(prices))]
    return tuple(one._replace(dense=cost.dense(one)) for one in _with_bounds(x, chosen))


def sample_batches(x: np.ndarray) -> list[np.ndarray]:
    """Rows of a few batches of each data set, the same in every process."""
    rng = np.random.Generator(np.random.PCG64(0))
    found = []
    for dataset in np.unique(x[:, 4]):
        rows = rng.permutation(np.flatnonzero(x[:, 4] == dataset))[: BATCH * BATCHES]
        found += [rows[begin : begin + BATCH] for begin in range(0, len(rows), BATCH)]
    return found


def waste(x: np.ndarray, batches: Sequence[np.ndarray], budgets: Sequence[Budget]) -> Waste:
    """What batches of rows need when they are packed as on the device."""
    many = micro_batches(x, batches, budgets)
    nodes, edges = (x[np.concatenate(batches), column].sum(dtype=np.int64) for column in (1, 3))
    of_nodes, of_edges = many @ np.array([[one.nodes, one.edges] for one in budgets])
    return Waste(int(many.sum()), int(of_nodes), int(of_edges), int(nodes), int(edges))


def micro_batches(x: np.ndarray, batches: Sequence[np.ndarray], budgets: Sequence[Budget]) -> np.ndarray:
    """How many micro-batches of each budget the batches need, all together: ``(len(budgets),)`` integers."""
    found = np.zeros(len(budgets), np.int64)
    for rows in batches:
        nodes, edges = x[rows, 1].astype(np.int64), x[rows, 3].astype(np.int64)
        left = np.ones(len(rows), bool)
        for place, budget in enumerate(budgets):
            own = left & budget.suits(nodes, edges) if place + 1 < len(budgets) else left
            left = left & ~own
            found[place] += count(nodes[own].tolist(), edges[own].tolist(), budget)
    return found


def count(nodes: Sequence[int], edges: Sequence[int], budget: Budget) -> int:
    """How many micro-batches of a budget graphs need, taken in order, as many at once as fit."""
    micro, n, e, g = 0, budget.nodes, 0, 0
    for more_nodes, more_edges in zip(nodes, edges, strict=True):
        n, e, g = n + more_nodes, e + more_edges, g + 1
        if n >= budget.nodes or e > budget.edges or g > budget.graphs:
            micro, n, e, g = micro + 1, more_nodes, more_edges, 1
    return micro


def _price(x: np.ndarray, batches: Sequence[np.ndarray], budgets: Sequence[Budget], cost: Cost) -> float:
    return float(micro_batches(x, batches, budgets) @ np.array([cost.of(one) for one in budgets]))


def _candidates(x: np.ndarray, tables: np.ndarray, last: Budget) -> list[Budget]:
    """Budgets of the usual sizes, for graphs up to some densities."""
    density_of = tables[:, 1] / np.maximum(tables[:, 0], 1)
    rates = sorted({round(float(rate), 1) + 0.1 for rate in np.quantile(density_of, (0.1, 0.3, 0.5, 0.7, 0.9, 0.97))})
    found = []
    for nodes, rate, slack in itertools.product(SIZES, rates, (1.0, 1.3, 3.0)):
        edges = -(-int(nodes * rate) // 64) * 64
        if edges <= max(last.edges, SIZES[-1]):
            found.append(_budget(nodes, edges, rate * slack, tables))
    for rate in rates:  # and one for all graphs up to a density
        own = x[x[:, 3] <= rate * x[:, 1]]
        if len(own):
            found.append(_budget(int(own[:, 1].max()) + 1, int(own[:, 3].max()), rate, tables))
    return found


def _budget(nodes: int, edges: int, density: float, tables: np.ndarray) -> Budget:
    own = Budget(nodes, edges, 1, density)
    suited = own.suits(tables[:, 0], tables[:, 1])
    graphs = 1.5 * nodes / max(tables[suited, 0].mean(), 1) if suited.any() else 1
    return own._replace(graphs=max(8, int(graphs)))


def _with_one_more(x: np.ndarray, budgets: tuple[Budget, ...], more: Budget, tables: np.ndarray) -> tuple[Budget, ...]:
    """One more budget, sparse and small ones first; the last one is as large as the largest of its graphs demand."""
    *before, last = sorted((more, *budgets), key=lambda one: (one.density, one.nodes + one.edges))
    left = x[~np.any([one.suits(x[:, 1], x[:, 3]) for one in before], axis=0)]
    if not len(left):
        return tuple(before)
    return *before, _budget(int(left[:, 1].max()) + 1, int(left[:, 3].max()), last.density, tables)


def _with_bounds(x: np.ndarray, budgets: Sequence[Budget]) -> list[Budget]:
    """The budgets that some graph needs, with the number of graphs that always fit."""
    left, found = np.ones(len(x), bool), []
    for place, budget in enumerate(budgets):
        own = left & budget.suits(x[:, 1], x[:, 3]) if place + 1 < len(budgets) else left
        left = left & ~own
        if own.any():
            found.append(budget._replace(together=budget.fitting(int(x[own, 1].max()), int(x[own, 3].max()))))
    return found
