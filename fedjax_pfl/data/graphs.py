"""Batches of graphs: rows that point into tables, packed on the device into micro-batches of a few fixed sizes.

Graphs of one batch differ in size a hundredfold, and compiled programs have fixed shapes. So each graph belongs to the
first of a few *budgets* that suits it, and the graphs of a budget are taken in order, as many at once as fit. How many
micro-batches there are depends on the batch; no graph is ever dropped or cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.data.pointing import Pointing

if TYPE_CHECKING:
    import jraph

Array = Any

COLUMNS = 5  # first node, nodes, first edge, edges, number of the data set


class Budget(NamedTuple):
    """The size of a micro-batch: so many nodes (one of them padding), edges and graphs (a padding graph comes extra).

    density: graphs with more edges a node than this belong to a later budget. together: so many graphs of the data that
    the budget suits fit whichever they are, which bounds static loops. dense: sums over neighbours are products with
    the adjacency matrix ``(nodes, nodes)``, which is faster where there are many edges.
    """

    nodes: int
    edges: int
    graphs: int
    density: float = float("inf")
    together: int = 1
    dense: bool = False

    def suits(self, nodes: Array, edges: Array) -> Array:
        """Whether graphs of so many nodes and edges may go into such a micro-batch; elementwise, NumPy or JAX."""
        most = self.density * (nodes + (nodes == 0))  # a graph may lack nodes, and the density be infinite
        return (nodes < self.nodes) & (edges <= self.edges) & (edges <= most)

    def fitting(self, nodes: int, edges: int) -> int:
        """How many graphs of at most so many nodes and edges always fit, at least 1."""
        return max(min(self.graphs, (self.nodes - 1) // max(nodes, 1), self.edges // max(edges, 1)), 1)

    def most(self, samples: int) -> int:
        """The largest number of micro-batches that so many graphs need (static)."""
        return -(-samples // self.together)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GraphBatch(Pointing):
    """A batch of graphs that is not packed yet: rows ``(..., 5)`` int32 and the tables that they point into.

    budgets: see ``Budget``; the last one takes what no other takes. scan: loops are static, so that every derivative
    can be taken through them, instead of dynamic (see ``models.graph_model``).
    """

    rows: Array
    tables: dict[str, Array]
    budgets: tuple[Budget, ...] = dataclasses.field(metadata={"static": True})
    scan: bool = dataclasses.field(default=False, metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class GraphReader:
    """Reader of graphs: rows ``(..., 5)`` -> ``GraphBatch``; budgets: see ``data.budgets.budgets_for``."""

    budgets: tuple[Budget, ...]

    def __call__(self, x: Array, tables: Mapping[str, Array]) -> GraphBatch:
        return GraphBatch(x, dict(tables), self.budgets)

    def check(self, x: Array) -> None:
        """Refuse budgets of other data (host).

        Raises:
            ValueError: no budget is large enough for a graph of ``x (n, 5)``.
        """
        x = np.asarray(x)
        lost = ~np.any([one.suits(x[:, 1], x[:, 3]) for one in self.budgets], axis=0)
        if lost.any():
            first = int(lost.argmax())
            raise ValueError(
                f"graph {first} has {x[first, 1]} nodes and {x[first, 3]} edges, more than the budgets {self.budgets} "
                "take: choose them with fedjax_pfl.data.budgets.budgets_for(x)"
            )
        left = np.ones(len(x), bool)
        for place, one in enumerate(self.budgets):
            own = left & one.suits(x[:, 1], x[:, 3]) if place + 1 < len(self.budgets) else left
            left = left & ~own
            if own.any() and one.together > one.fitting(int(x[own, 1].max()), int(x[own, 3].max())):
                raise ValueError(f"{one}: fewer graphs than together={one.together} fit, whichever they are: choose "
                                 "budgets with fedjax_pfl.data.budgets.budgets_for(x)")  # fmt: skip


class Packed(NamedTuple):
    """The graphs of a batch in the order in which they are packed.

    place: ``(B,)`` int32, which graph of the batch comes where: those of the first budget first, padding rows last.
    rows: ``(B, 5)`` int32 in that order. nodes, edges: ``(B + 1,)`` int32, how many come before each.
    bounds: ``(len(budgets) + 1,)`` int32, where the graphs of each budget begin and the last ones end.
    """

    place: Array
    rows: Array
    nodes: Array
    edges: Array
    bounds: Array


def pack(batch: GraphBatch, mask: Array | None = None) -> Packed:
    """Sort the graphs of a batch (rows ``(B, 5)``, mask ``(B,)``) by budget; those masked out are not packed at all."""
    rows = batch.rows
    budget = jnp.full(rows.shape[0], len(batch.budgets) - 1, jnp.int32)
    for number, one in reversed(list(enumerate(batch.budgets[:-1]))):
        budget = jnp.where(one.suits(rows[:, 1], rows[:, 3]), number, budget)
    if mask is not None:
        budget = jnp.where(mask, budget, len(batch.budgets))
    place = jnp.argsort(budget, stable=True).astype(jnp.int32)
    bounds = (budget[:, None] < jnp.arange(len(batch.budgets) + 1)).sum(0, dtype=jnp.int32)
    rows = rows[place]
    nodes, edges = (jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(rows[:, c])]) for c in (1, 3))
    return Packed(place, rows, nodes, edges, bounds)


def last_of(packed: Packed, budget: Budget, first: Array, end: Array) -> Array:
    """Where a micro-batch that begins with graph ``first`` ends: as many as fit into the budget, ``end`` at most."""
    graphs = jnp.arange(1, packed.nodes.shape[0])
    fits = packed.nodes[1:] - packed.nodes[first] < budget.nodes
    fits &= packed.edges[1:] - packed.edges[first] <= budget.edges
    fits &= (graphs <= jnp.minimum(end, first + budget.graphs)) & (graphs > first)
    return jnp.maximum(first + fits.sum(dtype=jnp.int32), jnp.minimum(first + 1, end))  # never without end


def micro_batch(
    batch: GraphBatch, packed: Packed, budget: Budget, first: Array, last: Array
) -> tuple[jraph.GraphsTuple, Array]:
    """The graphs ``first`` .. ``last - 1`` of a packed batch, padded to the budget; and their places in the batch.

    Returns:
        ``(graphs, place)``: a ``GraphsTuple`` whose last graph owns all padding, with the ``adjacency`` matrix (edges
        from column to row) among its globals where the budget is dense; and ``(graphs,)`` int32, which is ``B`` for
        absent graphs.
    """
    number = jnp.minimum(first + jnp.arange(budget.graphs), packed.place.shape[0] - 1)
    live = first + jnp.arange(budget.graphs) < last
    rows = jnp.where(live[:, None], packed.rows[number], 0)
    node, n_node = _slots(rows[:, 0], rows[:, 1], budget.nodes)
    edge, n_edge = _slots(rows[:, 2], rows[:, 3], budget.edges)
    graph_of_edge = edge.graph
    before = jnp.append(node.before, budget.nodes - n_node[-1])  # the first padding node, where padding edges lead
    tables = batch.tables
    senders, receivers = (
        before[graph_of_edge] + jnp.where(edge.live, tables[name][edge.index], 0) for name in ("senders", "receivers")
    )
    nodes = {"label": tables["node_label"], "degree": tables["degree"], "walk": tables["walk"]}
    if "node_attributes" in tables:
        nodes["attributes"] = tables["node_attributes"]
    kind = jnp.result_type(float)
    nodes = {name: _filled(table, node, kind) for name, table in nodes.items()}
    classes = jnp.append(tables["classes_of_dataset"][rows[:, 4]], tables["classes_of_dataset"].max())
    told = {"classes": classes}
    if budget.dense:
        told["adjacency"] = jnp.zeros((budget.nodes, budget.nodes), kind).at[receivers, senders].add(1)
    import jraph  # loaded only where there are graphs

    graphs = jraph.GraphsTuple(
        nodes=nodes, edges=None, senders=senders, receivers=receivers, globals=told, n_node=n_node, n_edge=n_edge
    )
    return graphs, jnp.where(live, packed.place[number], packed.place.shape[0])


class _Slots(NamedTuple):
    """Which entry of a table is in which slot of a micro-batch: graph, index and live ``(slots,)``; before ``(G,)``."""

    graph: Array
    index: Array
    live: Array
    before: Array


def _slots(start: Array, count: Array, slots: int) -> tuple[_Slots, Array]:
    """Ranges of a table laid one behind the other into slots, and how many each has, padding last: ``(G + 1,)``."""
    before = jnp.cumsum(count) - count
    total = count.sum()
    ends = jnp.zeros(slots, jnp.int32).at[before + count].add(1, mode="drop")
    graph = jnp.cumsum(ends)  # empty ranges end where they begin, and are passed over
    slot = jnp.arange(slots, dtype=jnp.int32)
    live = slot < total
    index = jnp.where(live, slot + jnp.append(start - before, 0)[graph], 0)
    return _Slots(graph, index, live, before), jnp.append(count, slots - total)


def _filled(table: Array, node: _Slots, kind: Any) -> Array:
    """The entries of a table in their slots, zeros in padding; floats in the default float."""
    values = table[node.index]
    values = jnp.where(node.live.reshape(-1, *[1] * (values.ndim - 1)), values, 0)
    return values.astype(kind) if jnp.issubdtype(values.dtype, jnp.floating) else values


def facts_of(data: Any) -> dict[str, Array]:
    """Labels and classes of each slot's data set, that of its first training sample: leaves ``(slots,)`` int32.

    data: ``ClientData`` of graphs.
    """
    rows, start = (leaf.reshape(data.shards, -1) for leaf in (data.train.rows, data.train.start))
    x = data.examples["x"].reshape(data.shards, -1, COLUMNS)
    number = jax.vmap(lambda x, rows, start: x[rows[jnp.minimum(start, rows.shape[0] - 1)], 4])(x, rows, start)
    return {
        name: jnp.asarray(data.tables[f"{name}_of_dataset"])[number.reshape(-1)] for name in ("labels", "classes")
    }  # fmt: skip
