"""FedAvg: Communication-Efficient Learning of Deep Networks from Decentralized Data.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas; AISTATS 2017; https://arxiv.org/abs/1602.05629

    server: theta^0
    each round t: sample a set S of clients
        each client i in S:  theta_i <- E epochs of minibatch SGD from theta^t
        theta^{t+1} = sum_{i in S} n_i theta_i / sum_{i in S} n_i

Differs from the paper: clients may drop out (they are not averaged); running statistics of normalisation layers follow
the federation's policy. The deliverable of every client is the global model.
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
from fedjax_pfl.models.model import Predicate, Variables, partition


class State(NamedTuple):
    """shared: the averaged variables. Rows, leaves ``(slots, ...)``: private, what stays at its client, or None;
    optimizer, the clients' optimisers, or None where they start anew every round."""

    shared: Variables
    private: Variables | None
    optimizer: Any = None


@dataclasses.dataclass(frozen=True)
class Options:
    """FedAvg (McMahan et al. 2017): one global model, the sample-weighted mean of the clients' models."""


def fedavg(fed: Federation, options: Options = Options()) -> Algorithm:
    """FedAvg in a federation."""
    return averaging(fed, "fedavg")


def averaging(
    fed: Federation,
    name: str,
    private: Predicate = lambda name: False,
    penalty: local.Penalty | None = None,
    **hyper: float,
) -> Algorithm:
    """FedAvg in which the variables named by ``private`` never leave their client, with a penalty on the local loss.

    penalty: ``(variables, (shared variables as received, hyper)) -> scalar``.
    """

    def stays(name: str) -> bool:
        return private(name) or fed.stays(name)

    def init(env: Env, key: jax.Array) -> State:
        private, shared = partition(fed.model.init(key), stays)
        rows = fed.initial_rows(env, private)
        return State(shared, rows or None, local.first_optimizers(fed, env, rows, shared))

    def begin(client: Client, row: Any, common: Any) -> local.Training:
        (private, optimizer), (theta, lr, hyper) = row, common
        anchor = (theta, hyper) if penalty else None
        return local.begin(fed, lr, theta | (private or {}), optimizer=optimizer, anchor=anchor)

    def step(carry: local.Training, batch: Any, t: jax.Array, key: jax.Array) -> local.Training:
        return local.step(fed, carry, batch, key, penalty)

    def end(client: Client, carry: local.Training, row: Any) -> Any:
        private, theta_i = partition(carry.variables, stays)
        kept = private or None, local.kept_optimizer(fed, carry)
        return kept, (tree.scale(client.samples, theta_i), local.metrics(client, carry))

    def round_(env: Env, state: State, cohort: Cohort, key: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        common = (state.shared, fed.learning_rate(env, cohort.round), env.hyper)
        rows, (sums, metrics), reported = run_clients(
            begin, step, end, rows=(state.private, state.optimizer), common=common, data=env.data, work=fed.work(),
            key=key, who=cohort.trains & cohort.reports,
        )  # fmt: skip
        theta = mean_of_sums(sums, metrics.weight, otherwise=state.shared)
        return State(theta, *rows), local.information(metrics, reported)

    delivery = global_model(fed, stays)
    return Algorithm(
        name, init, round_, delivery.received, delivery.received, delivery.shared, fed.scores,
        rows=("private", "optimizer"), floats=delivery.floats, hyper=fed.hyper(**hyper), newcomer=delivery.newcomer,
        keeps_optimizer=True,
    )  # fmt: skip
