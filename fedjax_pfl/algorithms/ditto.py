"""Ditto: Fair and Robust Federated Learning Through Personalization.

Li, Hu, Beirami, Smith; ICML 2021; https://arxiv.org/abs/2012.04221

    server: global model w^0; every client i: its own v_i
    each round t, each client i of the cohort S, from the w^t that it received:
        w_i <- E epochs of minibatch SGD from w^t
        v_i <- v_i - eta (grad F_i(v_i) + lambda (v_i - w^t)), on the same minibatches
    w^{t+1} = sum_{i in S} n_i w_i / sum_{i in S} n_i

Differs from the paper: both models are trained for the federation's epochs, each minibatch serving both (as in the
released code), so that lambda = 0 is Local and the global part is FedAvg, with the same draws. ``personal`` is v_i;
``loss`` is that of v_i, ``loss_shared`` that of w_i. Running statistics of v_i are its own; those of w follow the
federation's policy. What stays at its client in w too was received from nobody, and bears no penalty. A client costs
twice the computation of FedAvg.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax

from fedjax_pfl.aggregation import mean_of_sums
from fedjax_pfl.algorithms._global import global_model
from fedjax_pfl.engine import local, tree
from fedjax_pfl.engine.clients import Client, run_clients
from fedjax_pfl.engine.cohort import Cohort
from fedjax_pfl.engine.federation import Algorithm, Env, Federation
from fedjax_pfl.models.model import Variables, partition


class State(NamedTuple):
    """shared: the global model w. Rows, leaves ``(slots, ...)``: v, the personal models; private, what of w stays at
    its client, or None; optimizers, of w and v, both None where they start anew every round."""

    shared: Variables
    v: Variables
    private: Variables | None
    optimizers: tuple[Any, Any] = (None, None)


@dataclasses.dataclass(frozen=True)
class Options:
    """Ditto (Li et al. 2021): besides FedAvg every client trains its own model, held near the global one."""

    lam: float = 1.0
    """Weight lambda of the personal models' penalty lambda/2 ||v_i - w^t||^2; 0 is local training."""


def ditto(fed: Federation, options: Options = Options()) -> Algorithm:
    """Ditto in a federation.

    Raises:
        ValueError: lam is negative, infinite or NaN.
    """
    if not 0 <= options.lam < float("inf"):
        raise ValueError(f"ditto needs lam >= 0 and finite, found {options.lam}")

    def penalty(v: Variables, anchor: Any) -> jax.Array:
        w, lam = anchor
        difference = {name: v[name] - w[name] for name in v if not fed.stays(name)}
        return lam / 2 * tree.dot(difference, difference)

    def init(env: Env, key: jax.Array) -> State:
        variables = fed.model.init(key)
        private, shared = partition(variables, fed.stays)
        v, private = fed.initial_rows(env, variables), fed.initial_rows(env, private)
        return State(shared, v, private or None, (local.first_optimizers(fed, env, v),) * 2)

    def begin(client: Client, row: Any, common: Any) -> tuple[local.Training, local.Training]:
        (v, private, (of_w, of_v)), (shared, lr, lam) = row, common
        w = shared | (private or {})
        return local.begin(fed, lr, w, optimizer=of_w), local.begin(fed, lr, v, optimizer=of_v, anchor=(w, lam))

    def step(carry: Any, batch: Any, t: jax.Array, key: jax.Array) -> tuple[local.Training, local.Training]:
        w, v = carry
        return local.step(fed, w, batch, key), local.step(fed, v, batch, key, penalty)

    def end(client: Client, carry: Any, row: Any) -> Any:
        w, v = carry
        private, w_i = partition(w.variables, fed.stays)
        optimizers = local.kept_optimizer(fed, w), local.kept_optimizer(fed, v)
        return (v.variables, private or None, optimizers), (
            tree.scale(client.samples, w_i), local.metrics(client, w), local.metrics(client, v)
        )  # fmt: skip

    def round_(env: Env, state: State, cohort: Cohort, key: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        common = (state.shared, fed.learning_rate(env, cohort.round), env.hyper["lam"])
        rows, (sums, of_w, of_v), reported = run_clients(
            begin, step, end, rows=(state.v, state.private, state.optimizers), common=common, data=env.data,
            work=fed.work(), key=key, who=cohort.trains & cohort.reports,
        )  # fmt: skip
        w = mean_of_sums(sums, of_w.weight, otherwise=state.shared)
        info = {"loss_shared": local.information(of_w, reported)["loss"]} | local.information(of_v, reported)
        return State(w, *rows), info

    def personal(env: Env, state: State, i: jax.Array) -> Variables:
        return tree.take(state.v, i)

    delivery = global_model(fed, fed.stays)
    return Algorithm(
        "ditto", init, round_, delivery.received, personal, delivery.shared, fed.scores,
        rows=("v", "private", "optimizers"), floats=delivery.floats, hyper=fed.hyper(lam=options.lam),
        newcomer=delivery.newcomer, trains=(fed, fed), keeps_optimizer=True,
    )  # fmt: skip
