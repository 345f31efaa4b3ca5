"""Graph networks as models of nodes: one pass over the graph of a client, of which a batch picks its nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pfl.data.nodes import NodeBatch, client_graph
from fedjax_pfl.models.graph_model import check
from fedjax_pfl.models.model import Model, Variables, _as_default_float, _flat, _head_predicate, _nested

Array = Any


def node_model(
    module: nn.Module,
    sample: NodeBatch,
    *,
    related: Callable[[str], Model] | None = None,
    head: str = "head",
    name: str | None = None,
) -> Model:
    """A model from a Flax module that is called as ``module(graphs, train=False) -> scores (N, C)`` of all nodes.

    module: given the graph of ``data.nodes.client_graph``; its dropout has the stream ``dropout``. It must not keep
        running statistics, in which padding would count. All samples of a batch must belong to one client.
    sample: any batch of the data. related: see ``Model``. head: path of the head's module.

    Raises:
        ValueError: a module with other variables than parameters, or without the head.
    """
    shapes = jax.eval_shape(client_graph, sample)
    first = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    @jax.jit
    def init(key: jax.Array) -> Variables:
        keys = dict(zip(("params", "dropout"), jax.random.split(key), strict=True))
        return _as_default_float(_flat(module.init(keys, first, train=False)))

    def apply(variables: Variables, x: NodeBatch, *, mask: Any = None, key: Any = None, train: bool = False) -> Any:
        rngs = None if key is None else {"dropout": key}
        scores = module.apply(_nested(variables), client_graph(x), train=train, rngs=rngs)
        return scores[x.rows[:, 4]], variables

    model = Model(name or type(module).__name__, init, apply, _head_predicate(head), related=related)
    check(model)
    return model
