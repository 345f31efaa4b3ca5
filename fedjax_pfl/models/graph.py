"""Classifiers of graphs and of their nodes: one stack of message-passing layers, and FedStar's two streams.

A batch is a `jraph.GraphsTuple` of G + 1 graphs, the last of which is padding and owns all padding nodes and edges.
`nodes` is a dict: "label" `(N,)` int32, "walk" `(N, 16)` float (return probabilities of a random walk after 1 to 16
steps), "degree" `(N,)` int32 (0 to 15: the degree clipped to [1, 16], less one), and "attributes" `(N, F)` float for
models that ask for them.  `globals["classes"]` `(G + 1,)` int32 is the number of classes of a graph's data set.
For classifiers of nodes (`pool="none"`) there are no labels and classes, and scores are those of all N nodes.

Set-up (layers, widths, dropout, what stays private) as in the public code of GCFL
(https://github.com/Oxfordblue7/GCFL) and FedStar (https://github.com/yuetan031/FedStar).  All weights and biases start
uniform within +-1/sqrt(inputs); a look-up counts as a product with the one-hot symbol.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jraph
from flax import linen as nn

from fedjax_pfl.models.graph_inputs import FeatureInput, LabelInput, StructureInput
from fedjax_pfl.models.graph_layers import GAT, GCN, GIN, Dropout, GraphSAGE, linear

Layer = Literal["gin", "gcn", "graphsage", "gat"]
Pool = Literal["sum", "mean", "max", "none"]
Stream = Literal["raw", "structure"]

LAYERS: dict[str, Callable[..., nn.Module]] = {"gin": GIN, "gcn": GCN, "graphsage": GraphSAGE, "gat": GAT}
POOLS: dict[str, Callable[..., jax.Array]] = {
    "sum": jraph.segment_sum,
    "mean": jraph.segment_mean,
    "max": jraph.segment_max_or_constant,  # zero for a graph without nodes
}
MASKED = -1e9  # score of a class that the graph's data set does not have


def pool(x: jax.Array, graphs: jraph.GraphsTuple, how: Pool) -> jax.Array:
    """Sum, mean or maximum over each graph's nodes: `(N, H)` -> `(G + 1, H)`; zero for a graph without nodes."""
    count = graphs.n_node.shape[0]
    graph = jnp.repeat(jnp.arange(count), graphs.n_node, total_repeat_length=x.shape[0])
    return POOLS[_known("pool", how, POOLS)](x, graph, count)


class Core(nn.Module):
    """The part that clients with different features and classes can share: layer, ReLU, dropout, `layers` times.

    `(N, hidden)` -> `(N, hidden)`; parameters `layer1/...`, `layer2/...`.  Three GIN layers of 64 hold 24,960 floats.

    Attributes:
      layer: "gin", "gcn", "graphsage" or "gat". heads: heads of each "gat" layer.
    """

    layer: Layer = "gin"
    layers: int = 3
    hidden: int = 64
    dropout: float = 0.5
    heads: int = 1

    @nn.compact
    def __call__(
        self, x: jax.Array, graphs: jraph.GraphsTuple, *, train: bool = False, beside: Sequence[jax.Array] = ()
    ) -> jax.Array:
        """beside: arrays `(N, W)`, one a layer, that are appended to the layer's input."""
        build = LAYERS[_known("layer", self.layer, LAYERS)]
        options: dict[str, Any] = {"heads": self.heads} if self.layer == "gat" else {}
        for i in range(self.layers):
            x = jnp.concatenate([x, beside[i]], -1) if beside else x
            x = nn.relu(build(self.hidden, name=f"layer{i + 1}", **options)(x, graphs))
            x = Dropout(self.dropout, deterministic=not train)(x)
        return x


class GNN(nn.Module):
    """Graph classifier: input, `Core`, pooling, dense and ReLU, dropout, head: batch -> scores `(G + 1, num_classes)`.

    Parameters `input/...`, `core/...`, `post/...`, `head/...`.  Scores of classes that a graph's data set lacks are
    -1e9, without gradient.  The last row is padding.

    Attributes:
      vocabulary: number of node labels; 0: nodes have attributes only.
      layer, layers, hidden, dropout, heads: as in `Core`.
      pool: "sum", "mean" or "max" over a graph's nodes; "none": scores `(N, num_classes)` of the nodes themselves.
      stream: "raw" (labels, attributes) or "structure" (walk and degree).
      attributes: width of the node attributes (0: none).
    """

    num_classes: int
    vocabulary: int
    layer: Layer = "gin"
    layers: int = 3
    hidden: int = 64
    dropout: float = 0.5
    pool: Pool = "sum"
    stream: Stream = "raw"
    attributes: int = 0
    heads: int = 1

    @nn.compact
    def __call__(self, graphs: jraph.GraphsTuple, *, train: bool = False) -> jax.Array:
        if _known("stream", self.stream, ("raw", "structure")) == "raw":
            x = _raw(self.hidden, self.vocabulary, self.attributes)(graphs.nodes)
        else:
            x = StructureInput(self.hidden, name="input")(graphs.nodes)
        core = Core(self.layer, self.layers, self.hidden, self.dropout, self.heads, name="core")
        x = core(x, graphs, train=train)
        return _readout(x, graphs, self.pool, self.num_classes, self.dropout, train)


class Structure(nn.Module):
    """FedStar's structure stream: its input and the tanh of each GCN layer, `layers + 1` arrays `(N, hidden)`."""

    layers: int = 3
    hidden: int = 64

    @nn.compact
    def __call__(self, graphs: jraph.GraphsTuple) -> list[jax.Array]:
        states = [StructureInput(self.hidden, name="input")(graphs.nodes)]
        for i in range(self.layers):
            states.append(jnp.tanh(GCN(self.hidden, name=f"layer{i + 1}")(states[-1], graphs)))
        return states


class TwoStream(nn.Module):
    """FedStar's network: a GIN layer sees the nodes beside the structure stream; batch -> `(G + 1, num_classes)`.

    Only `structure/...` (14,592 floats with 3 layers of 64) is meant to be shared; `input/...`, `nodes/...` (the GIN
    layers), `merge/...`, `post/...` and `head/...` are the client's own.  Masking and padding as in `GNN`.
    Tan et al., "Federated learning on non-IID graphs via structural knowledge sharing", AAAI 2023.
    """

    num_classes: int
    vocabulary: int
    layers: int = 3
    hidden: int = 64
    dropout: float = 0.5
    pool: Pool = "sum"
    attributes: int = 0

    @nn.compact
    def __call__(self, graphs: jraph.GraphsTuple, *, train: bool = False) -> jax.Array:
        *before, last = Structure(self.layers, self.hidden, name="structure")(graphs)
        x = _raw(self.hidden, self.vocabulary, self.attributes)(graphs.nodes)
        nodes = Core("gin", self.layers, self.hidden, self.dropout, name="nodes")
        x = nodes(x, graphs, train=train, beside=before)
        x = linear(self.hidden, 2 * self.hidden, "merge")(jnp.concatenate([x, last], -1))
        return _readout(x, graphs, self.pool, self.num_classes, self.dropout, train)


def _raw(hidden: int, vocabulary: int, attributes: int) -> nn.Module:
    """The first layer of the raw stream, inside a module."""
    if vocabulary:
        return LabelInput(hidden, vocabulary, attributes, name="input")
    return FeatureInput(hidden, attributes, name="input")


def _readout(
    x: jax.Array, graphs: jraph.GraphsTuple, how: Pool, classes: int, dropout: float, train: bool
) -> jax.Array:
    """Pooling and the layers after it, inside a module: `(N, H)` -> scores `(G + 1, classes)`, or of all nodes."""
    x = x if how == "none" else pool(x, graphs, how)
    x = nn.relu(linear(x.shape[-1], x.shape[-1], "post")(x))
    x = Dropout(dropout, deterministic=not train)(x)
    scores = linear(classes, x.shape[-1], "head")(x)
    if how == "none":
        return scores
    return jnp.where(jnp.arange(classes) < graphs.globals["classes"][:, None], scores, MASKED)


def _known(what: str, value: str, known: Any) -> str:
    if value not in known:
        raise ValueError(f"unknown {what} {value!r}; choose one of {', '.join(known)}")
    return value
