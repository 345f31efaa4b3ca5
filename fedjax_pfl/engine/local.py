"""Plain local training, the client side that most methods share: minibatch descent on a (penalised) loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_pfl.engine import tree
from fedjax_pfl.engine.clients import Client
from fedjax_pfl.engine.federation import Env, Federation
from fedjax_pfl.models.model import Variables, is_trainable, partition

Tree = Any
# (variables, anchor) -> scalar added to the minibatch loss
Penalty = Callable[[Variables, Tree], jax.Array]


class Training(NamedTuple):
    """The carry of local training: variables, optimiser state, what the penalty needs, and the loss so far."""

    variables: Variables
    optimizer: Tree
    anchor: Tree
    lr: jax.Array
    loss: jax.Array
    samples: jax.Array


class Metrics(NamedTuple):
    """Sums over clients: the weight ``n_i`` of those who report, minibatch losses times samples, samples seen."""

    weight: jax.Array
    loss: jax.Array
    samples: jax.Array


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of ``values (B,)`` where ``mask (B,)`` holds; 0 where it holds nowhere."""
    return jnp.where(mask, values, 0).sum() / jnp.maximum(mask.sum(), 1)


def begin(
    fed: Federation, lr: jax.Array, variables: Variables, *, optimizer: Tree = None, anchor: Tree = None
) -> Training:
    """Start from the received variables, with a fresh optimiser unless a kept state is given."""
    variables = variables | fed.fresh_statistics
    if optimizer is None:
        optimizer = fed.optimizer(lr).init(partition(variables, is_trainable)[0])
    zero = jnp.zeros((), jnp.result_type(float))
    return Training(variables, optimizer, anchor, lr, zero, zero)


def first_optimizers(fed: Federation, env: Env, rows: Variables, shared: Variables | None = None) -> Tree:
    """Where the federation keeps optimisers: those of all clients before they train, leaves ``(slots, ...)``; or None.

    rows: the clients' own variables, leaves ``(slots, ...)``; shared: what is the same for all of them.
    """
    if not fed.keep_optimizer:
        return None
    first = fed.optimizer(env.hyper["lr"]).init
    one = lambda own: first(partition((shared or {}) | own, is_trainable)[0])  # noqa: E731
    return jax.vmap(one, axis_size=env.data.slots)(rows)


def kept_optimizer(fed: Federation, carry: Training) -> Tree:
    """The optimiser's state after training, where the federation keeps it; or None."""
    return carry.optimizer if fed.keep_optimizer else None


def step(
    fed: Federation, carry: Training, batch: dict[str, jax.Array], key: jax.Array, penalty: Penalty | None = None
) -> Training:
    """One optimiser step on the minibatch loss (plus the penalty): ``w <- w - lr grad L(w; batch)``."""
    return step_with_gradient(fed, carry, batch, key, penalty)[0]


def step_with_gradient(
    fed: Federation, carry: Training, batch: dict[str, jax.Array], key: jax.Array, penalty: Penalty | None = None
) -> tuple[Training, Variables]:
    """The same, and the gradient that the optimiser was given, of the trainable variables."""
    trainable, statistics = partition(carry.variables, is_trainable)
    mask = batch["mask"]
    if fed.model.accumulate is not None and not fed.differentiable:
        gradient, loss = _accumulated(fed, carry, trainable, batch, key, penalty)
    else:
        gradient, loss, statistics = _gradient(fed, carry, trainable, statistics, batch, key, penalty)
    updates, optimizer = fed.optimizer(carry.lr).update(gradient, carry.optimizer, trainable)
    variables = optax.apply_updates(trainable, updates) | statistics
    samples = mask.sum().astype(carry.samples.dtype)
    return carry._replace(
        variables=variables, optimizer=optimizer, loss=carry.loss + loss * samples, samples=carry.samples + samples
    ), gradient


def _gradient(
    fed: Federation, carry: Training, trainable: Variables, statistics: Variables, batch: dict[str, jax.Array],
    key: jax.Array, penalty: Penalty | None,
) -> tuple[Variables, jax.Array, Variables]:  # fmt: skip
    """The gradient of loss and penalty, the loss, and the new running statistics."""
    mask = batch["mask"]

    def objective(trainable: Variables) -> tuple[jax.Array, tuple[jax.Array, Variables]]:
        scores, variables = fed.model.apply(
            trainable | statistics, fed.prepare(batch), mask=mask, key=key, train=True
        )  # fmt: skip
        loss = masked_mean(fed.loss(scores, batch["y"]), mask)
        extra = 0.0 if penalty is None else penalty(trainable, carry.anchor)
        return loss + extra, (loss, partition(variables, is_trainable)[1])

    gradient, (loss, statistics) = jax.grad(objective, has_aux=True)(trainable)
    return gradient, loss, statistics


def _accumulated(
    fed: Federation, carry: Training, trainable: Variables, batch: dict[str, jax.Array], key: jax.Array,
    penalty: Penalty | None,
) -> tuple[Variables, jax.Array]:  # fmt: skip
    """The same gradient and loss from a model that takes a batch in parts."""
    assert fed.model.accumulate is not None
    total, gradient = fed.model.accumulate(
        trainable, fed.prepare(batch), batch["y"], fed.loss, mask=batch["mask"], key=key
    )
    share = 1 / jnp.maximum(batch["mask"].sum(), 1).astype(total.dtype)
    gradient = tree.scale(share, gradient)
    if penalty is not None:
        gradient = tree.add(gradient, jax.grad(penalty)(trainable, carry.anchor))
    return gradient, total * share


def metrics(client: Client, carry: Training) -> Metrics:
    """A client's share of the round's sums."""
    return Metrics(client.samples, carry.loss, carry.samples)


def information(sums: Metrics, reported: jax.Array) -> dict[str, jax.Array]:
    """The diagnostics of every method: mean training loss (NaN where nobody reports) and who reported."""
    loss = jnp.where(sums.samples > 0, sums.loss / jnp.maximum(sums.samples, 1), jnp.nan)
    return {"loss": loss, "reported": reported}
