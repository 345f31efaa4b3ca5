"""Graph networks as models: a loop over the micro-batches of a batch, and its gradient by a second loop.

A batch of graphs has a number of micro-batches that is known only when it is drawn, and reverse mode cannot look back
through such a loop. So the gradient is taken micro-batch by micro-batch: ``accumulate`` runs loss and gradient of each
in one loop, where the loss is a sum over graphs; ``apply`` keeps nothing, and its gradient runs every micro-batch once
more. Where ``GraphBatch.scan`` is set, loops are static, and derivatives of any order are the plain ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jraph

from fedjax_pfl.data.graphs import Budget, GraphBatch, Packed, last_of, micro_batch, pack
from fedjax_pfl.models.model import Model, Predicate, Variables, _as_default_float, _flat, _head_predicate, _nested

Array = Any
Work = Callable[[Any, jraph.GraphsTuple, Array, Array], Any]  # (carry, graphs, places, key) -> carry


def graph_model(
    module: nn.Module,
    sample: GraphBatch,
    *,
    private: Predicate = lambda name: False,
    fit: Callable[..., Variables] | None = None,
    related: Callable[[str], Model] | None = None,
    head: str = "head",
    name: str | None = None,
) -> Model:
    """A model from a Flax module that is called as ``module(graphs, train=False) -> scores (G + 1, C)``.

    module: given ``jraph.GraphsTuple``s whose last graph is padding (see ``data.graphs.micro_batch``); its dropout has
        the stream ``dropout``. It must not keep running statistics, which would depend on the packing.
    sample: any batch of the data. private, fit, related: see ``Model``. head: path of the head's module.

    Raises:
        ValueError: a module with other variables than parameters, or without the head.
    """
    first = jax.tree.map(jnp.asarray, _first_micro_batch(sample))

    @jax.jit
    def init(key: jax.Array) -> Variables:
        keys = dict(zip(("params", "dropout"), jax.random.split(key), strict=True))
        return _as_default_float(_flat(module.init(keys, first, train=False)))

    def scores_of(variables: Variables, graphs: jraph.GraphsTuple, key: Array | None, train: bool) -> Array:
        rngs = None if key is None else {"dropout": key}
        return module.apply(_nested(variables), graphs, train=train, rngs=rngs)[:-1]

    run = _Graphs(scores_of)

    def apply(variables: Variables, x: GraphBatch, *, mask: Any = None, key: Any = None, train: bool = False) -> Any:
        return run.scores(variables, x, mask, key, train), variables

    model = Model(
        name or type(module).__name__, init, apply, _head_predicate(head), private=private, fit=fit, related=related,
        accumulate=run.accumulate,
    )  # fmt: skip
    check(model)
    return model


def _first_micro_batch(sample: GraphBatch) -> jraph.GraphsTuple:
    """The shapes of a micro-batch as an array of zeros and ones would have them: parameters depend on those alone."""

    def first(batch: GraphBatch) -> jraph.GraphsTuple:
        return micro_batch(batch, pack(batch), batch.budgets[0], jnp.int32(0), jnp.int32(1))[0]

    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(first, sample))


def check(model: Model) -> None:
    """Refuse a graph network that cannot be a model.

    Raises:
        ValueError: it has other variables than parameters, or none in its head.
    """
    names = list(model.shapes())
    others = [name for name in names if not name.startswith("params/")]
    if others:
        raise ValueError(f"graph model {model.name!r} keeps {others[0]}, which would depend on how graphs are packed")
    if not any(map(model.head, names)):
        raise ValueError(f"graph model {model.name!r} has no parameter in its head; its parameters: {', '.join(names)}")


class _Graphs:
    """Scores and gradients of a batch from a function of one micro-batch."""

    def __init__(self, scores_of: Callable[..., Array]) -> None:
        self.scores_of = scores_of

    def scores(self, variables: Variables, batch: GraphBatch, mask: Any, key: Any, train: bool) -> Array:
        """The scores of all graphs at their places, ``(B, C)``; zeros for those masked out."""
        if batch.scan:
            return self._forward(variables, batch, mask, key, train)

        @jax.custom_vjp
        def run(variables: Variables, batch: GraphBatch, mask: Any, key: Any) -> Array:
            return self._forward(variables, batch, mask, key, train)

        def forward(*args: Any) -> tuple[Array, Any]:
            return run(*args), args

        def backward(saved: Any, cotangent: Array) -> tuple[Any, ...]:
            variables, batch, mask, key = saved
            return self._backward(variables, batch, mask, key, train, cotangent), None, None, None

        run.defvjp(forward, backward)
        return run(variables, batch, mask, key)

    def _forward(self, variables: Variables, batch: GraphBatch, mask: Any, key: Any, train: bool) -> Array:
        packed = pack(batch, mask)
        shape = jax.eval_shape(
            lambda: self.scores_of(variables, *_example(batch, packed), key, train)
        )  # fmt: skip

        def work(scores: Array, graphs: jraph.GraphsTuple, place: Array, key: Any) -> Array:
            return scores.at[place].set(self.scores_of(variables, graphs, key, train), mode="drop")

        return _each(work, jnp.zeros((batch.rows.shape[0], shape.shape[-1]), shape.dtype), batch, packed, key)

    def _backward(
        self, variables: Variables, batch: GraphBatch, mask: Any, key: Any, train: bool, cotangent: Array
    ) -> Variables:
        packed = pack(batch, mask)

        def work(gradient: Variables, graphs: jraph.GraphsTuple, place: Array, key: Any) -> Variables:
            _, pull = jax.vjp(lambda v: self.scores_of(v, graphs, key, train), variables)
            own = cotangent.at[place].get(mode="fill", fill_value=0)
            return jax.tree.map(jnp.add, gradient, pull(own)[0])

        return _each(work, jax.tree.map(jnp.zeros_like, variables), batch, packed, key)

    def accumulate(
        self, variables: Variables, x: GraphBatch, y: Array, loss: Callable[[Array, Array], Array], *, mask: Array,
        key: Any,
    ) -> tuple[Array, Variables]:  # fmt: skip
        """The sum of the losses of all graphs in training mode and its gradient: see ``Model.accumulate``."""
        packed = pack(x, mask)

        def work(carry: tuple[Array, Variables], graphs: jraph.GraphsTuple, place: Array, key: Any) -> Any:
            labels = y.at[place].get(mode="fill", fill_value=0)

            def total(variables: Variables) -> Array:
                losses = loss(self.scores_of(variables, graphs, key, True), labels)
                return jnp.where(place < y.shape[0], losses, 0).sum()

            return jax.tree.map(jnp.add, carry, jax.value_and_grad(total)(variables))

        zero = jnp.zeros((), jnp.result_type(float))
        return _each(work, (zero, jax.tree.map(jnp.zeros_like, variables)), x, packed, key)


def _example(batch: GraphBatch, packed: Packed) -> tuple[jraph.GraphsTuple]:
    return (micro_batch(batch, packed, batch.budgets[0], jnp.int32(0), jnp.int32(0))[0],)


def _each(work: Work, carry: Any, batch: GraphBatch, packed: Packed, key: Any) -> Any:
    """``work`` for every micro-batch of every budget; the key is that of its budget and number."""
    for number, budget in enumerate(batch.budgets):
        stream = None if key is None else jax.random.fold_in(key, number)
        carry = _of_budget(work, carry, batch, packed, budget, packed.bounds[number], packed.bounds[number + 1], stream)
    return carry


def _of_budget(
    work: Work, carry: Any, batch: GraphBatch, packed: Packed, budget: Budget, begin: Array, end: Array, key: Any
) -> Any:
    def advance(state: tuple[Any, Array, Array]) -> tuple[Any, Array, Array]:
        carry, first, k = state
        last = last_of(packed, budget, first, end)
        graphs, place = micro_batch(batch, packed, budget, first, last)
        own = None if key is None else jax.random.fold_in(key, k)
        return work(carry, graphs, place, own), last, k + 1

    state = (carry, begin, jnp.int32(0))
    if batch.scan:  # an empty micro-batch, all of it padding, adds nothing
        most = budget.most(batch.rows.shape[0])
        return jax.lax.scan(lambda s, _: (advance(s), None), state, length=most)[0][0]
    return jax.lax.while_loop(lambda s: s[1] < end, advance, state)[0]
