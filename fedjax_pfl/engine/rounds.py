"""A round, and several rounds, as pure functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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

    Raises:
        ValueError: the federation keeps optimisers, and the algorithm cannot.
    """
    fed.check_optimizers(algorithm)
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


def floats_sent(info: Info, floats: tuple[int, int]) -> dict[str, np.ndarray]:
    """``floats_up`` of all who report and ``floats_down`` of all who train, int64, one entry a round.

    info: on the host, the masks ``reported`` and ``trains`` ``(..., clients)``; where the Info has an entry
        ``floats_up`` or ``floats_down`` ``(...)``, the mean that a participant sent or got in that round, it replaces
        floats, the method's constants.
    """
    told = [info.get(name, whole) for name, whole in zip(("floats_up", "floats_down"), floats, strict=True)]
    count = [info[who].sum(-1) for who in ("reported", "trains")]
    up, down = (np.rint(n * np.asarray(mean, np.float64)).astype(np.int64) for n, mean in zip(count, told, strict=True))
    return {"floats_up": up, "floats_down": down}
