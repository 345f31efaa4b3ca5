"""A round, and several rounds, as pure functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.engine import random
from fedjax_pfl.engine.cohort import Cohort
from fedjax_pfl.engine.federation import Algorithm, Env, Federation

State = Any
Info = dict[str, Any]


def one_round(
    fed: Federation, algorithm: Algorithm, env: Env, state: State, key: jax.Array, round_: Any, rounds: Any
) -> tuple[State, Info]:
    """Round number ``round_`` of ``rounds`` from the root key: cohort, local work, aggregation. Pure, traceable.

    The Info gains ``trains`` (sampled) and ``failed`` (worked, but not to a finite result), ``(slots,)`` bool.
    """
    cohort: Cohort = fed.participation.draw(env.data, key, round_, rounds)
    new, info = algorithm.round(env, state, cohort, random.stream(key, random.ROUND, round_))
    failed = cohort.trains & cohort.reports & ~info["reported"]
    return new, info | {"trains": cohort.trains, "failed": failed}


def rollout(
    fed: Federation, algorithm: Algorithm, env: Env, state: State, key: jax.Array, rounds: int, first: int = 0
) -> tuple[State, Info]:
    """``rounds`` rounds as a static scan: with ``fed.differentiable`` a gradient flows through all of them.

    Rounds count from ``first``, and ``first + rounds`` is the length of the whole run (see ``Cohort.progress``).
    Returns the state and the Info stacked over rounds.
    """
    numbers = jnp.arange(first, first + rounds, dtype=jnp.int32)
    return jax.lax.scan(lambda s, r: one_round(fed, algorithm, env, s, key, r, first + rounds), state, numbers)
