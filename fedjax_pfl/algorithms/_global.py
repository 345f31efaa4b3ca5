"""What methods with one averaged model have in common: who is given it, and how many floats it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fedjax_pfl.engine import tree
from fedjax_pfl.engine.federation import Env, Federation
from fedjax_pfl.evaluation import one_for_all
from fedjax_pfl.models.model import Predicate, Variables


class GlobalModel(NamedTuple):
    """Parts of an ``Algorithm`` whose State has ``shared`` variables and ``private`` ones (rows, or None)."""

    received: Callable[[Env, Any, jax.Array], Variables]
    shared: Callable[[Env, Any], Variables] | None
    newcomer: Callable[[Env, Any, Variables], Variables]
    floats: tuple[int, int]


def global_model(fed: Federation, stays: Predicate) -> GlobalModel:
    """The averaged model where the variables named by ``stays`` never leave their client.

    Where nothing stays, every client receives the one global model, which is then evaluated once.
    """

    def received(env: Env, state: Any, i: jax.Array) -> Variables:
        return state.shared | (tree.take(state.private, i) if state.private else {})

    def shared(env: Env, state: Any) -> Variables:
        return state.shared

    def newcomer(env: Env, state: Any, fresh: Variables) -> Variables:
        return fresh | state.shared

    whole = not any(stays(name) for name in fed.model.shapes())
    sent = fed.model.count(lambda name: not stays(name))
    deliver = one_for_all(shared) if whole else received
    return GlobalModel(deliver, shared if whole else None, newcomer, (sent, sent))
