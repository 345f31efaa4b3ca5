"""Clients that never trained: what the trained state gives them, before and after a few local steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from fedjax_pfl.data.clients import ClientData
from fedjax_pfl.engine import local, random, tree
from fedjax_pfl.engine.clients import Client, run_clients
from fedjax_pfl.engine.federation import Algorithm, Env, Federation
from fedjax_pfl.evaluation import EVALUATED, Scores, scores_of
from fedjax_pfl.models.model import Variables


class Given(NamedTuple):
    """common: the variables that every newcomer is given; own: the same, adapted by each, leaves ``(slots, ...)``."""

    common: Variables
    own: Variables


def adapt(
    fed: Federation, algorithm: Algorithm, env: Env, state: Any, data: ClientData, key: jax.Array, steps: int
) -> dict[str, dict[str, Scores]]:
    """Accuracy and loss of the clients in ``data`` before and after ``steps`` minibatch steps on all variables.

    They start from what ``algorithm.newcomer`` gives a client that the server has never seen, and train with the
    constant client learning rate and a fresh optimiser. key: the root key of the run.

    Returns:
        ``split -> "before" | "after" -> Scores``, leaves ``(slots,)``; a split without samples is absent.
    """
    give = require_newcomer(algorithm)
    fed = fed.replace(data=data)
    common = give(env, state, fed.model.init(random.stream(key, random.INITIAL_MODEL)))

    def begin(client: Client, row: Variables, given: Any) -> local.Training:
        return local.begin(fed, given[1], given[0])

    def step(carry: local.Training, batch: Any, t: jax.Array, key: jax.Array) -> local.Training:
        return local.step(fed, carry, batch, key)

    def end(client: Client, carry: local.Training, row: Variables) -> tuple[Variables, None]:
        return carry.variables, None

    work = fed.work(epochs=steps, steps=steps, most=None)
    own, _, _ = run_clients(
        begin, step, end, rows=tree.broadcast(common, data.slots), common=(common, env.hyper["lr"]), data=data,
        work=work, key=random.stream(key, random.EVALUATION),
    )  # fmt: skip
    given, env = Given(common, own), Env(data, env.hyper)
    method = algorithm._replace(rows=("own",))
    deliver = {"before": lambda env, given, i: given.common, "after": lambda env, given, i: tree.take(given.own, i)}
    return {
        split: {when: scores_of(fed, method, env, given, which, split) for when, which in deliver.items()}
        for split in EVALUATED
        if fed.has(split)
    }


def require_newcomer(algorithm: Algorithm) -> Any:
    """The method's ``newcomer``.

    Raises:
        ValueError: it has none.
    """
    if algorithm.newcomer is None:
        raise ValueError(f"{algorithm.name} has no model for a client that it has never seen: hold out no clients")
    return algorithm.newcomer
