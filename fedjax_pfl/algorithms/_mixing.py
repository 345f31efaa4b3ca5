"""What FedAPA and its control share: every client trains from its own mixture of all bodies, with its own head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.aggregation import cosine_matrix, weighted_mean
from fedjax_pfl.engine import local, tree
from fedjax_pfl.engine.clients import Client, run_client, run_clients, sample_order
from fedjax_pfl.engine.cohort import Cohort
from fedjax_pfl.engine.federation import Env, Federation
from fedjax_pfl.models.model import Variables, partition

Tree = Any


class Row(NamedTuple):
    """A client's part in local training: body and head, and the optimiser's state where it lives on, else None.

    change: before, the body that the client receives; after, what training changed of it (for those who report). It is
    taken client by client, while the models are at hand: a pass over all of them less.
    """

    theta: Variables
    phi: Variables
    change: Variables
    optimizer: Tree = None


def split(fed: Federation, variables: Variables) -> tuple[Variables, Variables]:
    """``(theta, phi)``: what is shared, the body; and what stays, the head and statistics that are not averaged."""
    phi, theta = partition(variables, lambda name: fed.model.head(name) or fed.stays(name))
    return theta, phi


def body_floats(fed: Federation) -> int:
    """Floats of what a client sends, and of what it receives: the body."""
    return fed.model.count(lambda name: not fed.model.head(name) and not fed.stays(name))


def personal(env: Env, state: Any, i: jax.Array) -> Variables:
    """The model of a client after its last local training: its own body and head."""
    return tree.take(state.theta, i) | tree.take(state.phi, i)


def mean_body(env: Env, theta: Variables) -> Variables:
    """Mean of the bodies of all clients, padding left out."""
    return weighted_mean(theta, env.data.real.astype(jnp.result_type(float)))


def newcomer(env: Env, state: Any, fresh: Variables) -> Variables:
    """What a client that the server has never seen gets: the mean of all bodies, with a new head."""
    return fresh | mean_body(env, state.theta)


def initial_rows(fed: Federation, env: Env, key: jax.Array) -> tuple[Variables, Variables, Tree]:
    """All clients start from one initial model: bodies, heads, optimiser states or None, leaves ``(slots, ...)``."""
    rows = fed.initial_rows(env, fed.model.init(key))
    return (*split(fed, rows), local.first_optimizers(fed, env, rows))


def _stages(fed: Federation) -> tuple[Callable[..., Any], ...]:
    def begin(client: Client, row: Row, lr: jax.Array) -> local.Training:
        return local.begin(fed, lr, row.change | row.phi, optimizer=row.optimizer)

    def step(carry: local.Training, batch: Any, t: jax.Array, key: jax.Array) -> local.Training:
        return local.step(fed, carry, batch, key)

    def end(client: Client, carry: local.Training, row: Row) -> tuple[Row, local.Metrics]:
        theta, phi = split(fed, carry.variables)
        change = tree.subtract(theta, row.change)
        return Row(theta, phi, change, local.kept_optimizer(fed, carry)), local.metrics(client, carry)

    return begin, step, end


def train_all(
    fed: Federation, env: Env, cohort: Cohort, key: jax.Array, rows: Row
) -> tuple[Row, local.Metrics, jax.Array]:
    """The cohort trains at once from ``rows.change``: ``(rows, metrics, reported)``; others keep their row."""
    lr = fed.learning_rate(env, cohort.round)
    return run_clients(
        *_stages(fed), rows=rows, common=lr, data=env.data, work=fed.work(), key=key,
        who=cohort.trains & cohort.reports,
    )  # fmt: skip


def train_one(
    fed: Federation, env: Env, cohort: Cohort, key: jax.Array
) -> Callable[[jax.Array, Row, jax.Array], tuple[Row, local.Metrics]]:
    """The training of one client, ``(slot, row, active) -> (row, metrics)``, for a server that takes turns."""
    lr, work = fed.learning_rate(env, cohort.round), fed.work()
    order = sample_order(env.data, work, key)
    return lambda slot, row, active: run_client(
        *_stages(fed), slot=slot, row=row, common=lr, data=env.data, work=work, key=key, order=order, active=active
    )


def label_similarity(env: Env) -> jax.Array:
    """Cosine between the clients' label histograms, ``(slots, slots)``; NaN on the diagonal and for padding."""
    pair = env.data.real[:, None] & env.data.real[None, :] & ~jnp.eye(env.data.slots, dtype=bool)
    return jnp.where(pair, cosine_matrix(env.data.label_histogram()), jnp.nan)


def selectivity(weights: jax.Array, similarity: jax.Array) -> jax.Array:
    """Mean weight to clients with label similarity above 0.5 over the mean weight to those at most 0.05; else NaN."""
    alike, unlike = similarity > 0.5, similarity <= 0.05
    mean = lambda which: jnp.where(which, weights, 0).sum() / which.sum()  # noqa: E731
    return mean(alike) / mean(unlike)


def weight_diagnostics(env: Env, weights: jax.Array) -> dict[str, jax.Array]:
    """Mean self weight, selectivity, and the share of off-diagonal weights at 0 (below 1e-6, to rounding)."""
    similarity = label_similarity(env)
    pair, real = ~jnp.isnan(similarity), env.data.real
    return {
        "self_weight": jnp.where(real, jnp.diagonal(weights), 0).sum() / real.sum(),
        "selectivity": selectivity(weights, similarity),
        "share_at_zero": (pair & (weights < 1e-6)).sum() / jnp.maximum(pair.sum(), 1),
    }
