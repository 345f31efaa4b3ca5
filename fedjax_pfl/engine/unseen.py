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
    """What newcomers are given, the same for all, or rows where the model is fitted to each one's data set; and what
    each makes of it: leaves ``(slots, ...)``."""

    first: Variables
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
    env, trained_on = Env(data, env.hyper), env
    fresh = fed.model.init(random.stream(key, random.INITIAL_MODEL))
    fitted = fed.model.fit is not None
    if fitted:
        first = jax.vmap(lambda fresh: give(trained_on, state, fresh))(fed.initial_rows(env, fresh))
    else:
        first = give(trained_on, state, fresh)
    rows = first if fitted else tree.broadcast(first, data.slots)

    def begin(client: Client, row: Variables, lr: jax.Array) -> local.Training:
        return local.begin(fed, lr, row)

    def step(carry: local.Training, batch: Any, t: jax.Array, key: jax.Array) -> local.Training:
        return local.step(fed, carry, batch, key)

    def end(client: Client, carry: local.Training, row: Variables) -> tuple[Variables, None]:
        return carry.variables, None

    work = fed.work(epochs=steps, steps=steps, most=None)
    own, _, _ = run_clients(
        begin, step, end, rows=rows, common=env.hyper["lr"], data=data, work=work,
        key=random.stream(key, random.EVALUATION),
    )  # fmt: skip
    method = algorithm._replace(rows=("first", "own") if fitted else ("own",))
    given = Given(first, own)
    deliver = {
        "before": lambda env, given, i: tree.take(given.first, i) if fitted else given.first,
        "after": lambda env, given, i: tree.take(given.own, i),
    }
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
