"""FedAvg + fine-tuning: the global model, adapted by every client at evaluation.

Yu, Bagdasaryan, Shmatikov: Salvaging Federated Learning by Local Adaptation; 2020; https://arxiv.org/abs/2002.04758

    rounds: FedAvg
    deliverable of client i: K epochs of minibatch SGD on all variables, starting from the global model

The rounds are FedAvg's, bit for bit; only ``personal`` differs. Differs from the paper: fine-tuning is the plain one
(no freezing, multi-task or distillation variants), with the constant client learning rate.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from fedjax_pfl.algorithms.fedavg import State, fedavg
from fedjax_pfl.engine import local, random
from fedjax_pfl.engine.clients import Client, run_client
from fedjax_pfl.engine.federation import Algorithm, Env, Federation
from fedjax_pfl.models.model import Variables


@dataclasses.dataclass(frozen=True)
class Options:
    """FedAvg whose global model every client fine-tunes at evaluation (Yu et al. 2020)."""

    epochs: int = 1
    """Epochs K of fine-tuning at evaluation."""


def fedavg_ft(fed: Federation, options: Options = Options()) -> Algorithm:
    """FedAvg with fine-tuning in a federation.

    Raises:
        ValueError: fewer than one epoch.
    """
    if options.epochs < 1:
        raise ValueError(f"fedavg_ft needs at least 1 epoch of fine-tuning, found {options.epochs}")
    base = fedavg(fed)
    work = fed.work(epochs=options.epochs)

    def personal(env: Env, state: State, i: jax.Array) -> Variables:
        def begin(client: Client, row: None, variables: Variables) -> local.Training:
            return local.begin(fed, env.hyper["lr"], variables)

        def step(carry: local.Training, batch: Any, t: jax.Array, key: jax.Array) -> local.Training:
            return local.step(fed, carry, batch, key)

        def end(client: Client, carry: local.Training, row: None) -> tuple[None, Variables]:
            return None, carry.variables

        key = random.stream(jax.random.key(0), random.EVALUATION)  # the same draws at every evaluation
        received = base.received(env, state, i)
        return run_client(
            begin, step, end, slot=i, row=None, common=received, data=env.data, work=work, key=key
        )[1]  # fmt: skip

    return base._replace(name="fedavg_ft", personal=personal)
