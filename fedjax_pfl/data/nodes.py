"""Batches of nodes: each sample is a node of its client's own graph, and a batch brings that graph along.

A model of graphs gives scores for all nodes of a client's graph at once; those of the batch are picked from them. All
samples of a batch must belong to one client, as those of local work and of evaluation do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.data.pointing import Pointing

if TYPE_CHECKING:
    import jraph

Array = Any

COLUMNS = 5  # first node, nodes, first edge, edges of the client's graph, and the sample's place among its nodes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NodeBatch(Pointing):
    """Nodes of one client: rows ``(B, 5)`` int32 and the tables that they point into.

    nodes, edges: slots of the graph that is made of them: more than the largest client has nodes, as many as edges.
    """

    rows: Array
    tables: dict[str, Array]
    nodes: int = dataclasses.field(metadata={"static": True})
    edges: int = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class NodeReader:
    """Reader of nodes: rows ``(..., 5)`` -> ``NodeBatch``; nodes, edges: see there."""

    nodes: int
    edges: int

    def __call__(self, x: Array, tables: Mapping[str, Array]) -> NodeBatch:
        return NodeBatch(x, dict(tables), self.nodes, self.edges)

    def check(self, x: Array) -> None:
        """Refuse slots that were counted for other data (host).

        Raises:
            ValueError: a row of ``x (n, 5)`` needs more of them.
        """
        x = np.asarray(x)
        lost = (x[:, 1] >= self.nodes) | (x[:, 3] > self.edges) | (x[:, 4] < 0) | (x[:, 4] > np.maximum(x[:, 1] - 1, 0))
        if lost.any():
            row = int(lost.argmax())
            raise ValueError(
                f"sample {row} is node {x[row, 4]} of {x[row, 1]} nodes and {x[row, 3]} edges, which do not fit into "
                f"{self}: make both with fedjax_pfl.data.subgraphs(source, partition)"
            )


def client_graph(batch: NodeBatch) -> jraph.GraphsTuple:
    """The graph of the client whose nodes a batch holds, and a second one that owns all padding.

    nodes: "attributes" ``(N, F)`` in the default float, "walk" ``(N, 16)``, "degree" ``(N,)`` int32; zeros in padding.
    """
    tables, (first, nodes, begin, edges) = batch.tables, batch.rows[0, :4]
    slot, link = (jnp.arange(many, dtype=jnp.int32) for many in (batch.nodes, batch.edges))
    live, linked = slot < nodes, link < edges
    place = jnp.where(live, first + slot, 0)
    kind = jnp.result_type(float)

    def filled(table: Array, index: Array) -> Array:
        values = jnp.where(live.reshape(-1, *[1] * (table.ndim - 1)), table[index], 0)
        return values if jnp.issubdtype(table.dtype, jnp.signedinteger) else values.astype(kind)

    senders, receivers = (
        jnp.where(linked, tables[name][jnp.where(linked, begin + link, 0)], nodes) for name in ("senders", "receivers")
    )
    values = {name: filled(tables[name], place) for name in ("walk", "degree")}
    values["attributes"] = filled(tables["features"], tables["node"][place])
    import jraph  # loaded only where there are graphs

    return jraph.GraphsTuple(
        nodes=values, edges=None, senders=senders, receivers=receivers, globals=None,
        n_node=jnp.stack([nodes, batch.nodes - nodes]), n_edge=jnp.stack([edges, batch.edges - edges]),
    )  # fmt: skip
