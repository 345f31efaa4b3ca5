"""Bandits: one of n arms a round, each with rewards in 0..1.

    UCB1: Auer, Cesa-Bianchi, Fischer, Finite-time analysis of the multiarmed bandit problem, Machine Learning, 2002
    discounted UCB: Garivier, Moulines, On upper-confidence bound policies for switching bandit problems, ALT 2011

    take each arm once; then  a = argmax_b  S_b / N_b + c sqrt(ln(sum_b N_b) / N_b)
    after each round:         N, S <- discount N, discount S;  N_a <- N_a + 1;  S_a <- S_a + reward

c = sqrt(2) and discount = 1 are UCB1; c = 2 B sqrt(xi) is the second paper's constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.aggregation import safe_divide
from fedjax_pfl.numerics import _checks

Scalar = jax.Array | float


class BanditState(NamedTuple):
    """plays: how often each arm was taken, ``(n,)`` int32. counts and sums: N and S, ``(n,)``."""

    plays: jax.Array
    counts: jax.Array
    sums: jax.Array


class Bandit(NamedTuple):
    """A policy. init: ``(n) -> state``. choose: ``(state, key) -> arm``, int32. update: ``(state, arm, reward) ->
    state``; a reward that is not finite would stay in the state: the caller keeps it out."""

    init: Callable[[int], BanditState]
    choose: Callable[[BanditState, jax.Array], jax.Array]
    update: Callable[[BanditState, jax.Array, Scalar], BanditState]


def ucb1(c: Scalar = math.sqrt(2)) -> Bandit:
    """UCB1 with constant c, a number or a traced scalar.

    Raises:
        ValueError: c is negative or not finite.
    """
    return discounted_ucb(c, 1.0)


def discounted_ucb(c: Scalar = math.sqrt(2), discount: Scalar = 0.95) -> Bandit:
    """Discounted UCB with constant c and discount, numbers or traced scalars: the past fades, for rewards that drift.

    Raises:
        ValueError: c is negative or not finite, or the discount is not in (0, 1].
    """
    if not isinstance(c, jax.Array) and not 0 <= c < math.inf:
        raise ValueError(f"bandit: the constant c must be a number >= 0, found {c}")
    if not isinstance(discount, jax.Array) and not 0 < discount <= 1:
        raise ValueError(f"bandit: the discount must lie in (0, 1], found {discount}")

    def choose(state: BanditState, key: jax.Array) -> jax.Array:
        counts = jnp.maximum(state.counts, jnp.finfo(state.counts.dtype).tiny)  # of an arm forgotten long ago
        width = c * jnp.sqrt(jnp.log(jnp.maximum(state.counts.sum(), 1)) / counts)
        score = jnp.where(state.plays == 0, jnp.inf, mean_rewards(state) + width)
        return score.argmax().astype(jnp.int32)

    return Bandit(_init, choose, lambda state, arm, reward: _update(state, arm, reward, discount))


def random_arm() -> Bandit:
    """An arm drawn uniformly by the key."""

    def choose(state: BanditState, key: jax.Array) -> jax.Array:
        return jax.random.randint(key, (), 0, len(state.plays), jnp.int32)

    return Bandit(_init, choose, _update)


def mean_rewards(state: BanditState) -> jax.Array:
    """``S / N`` of every arm, ``(n,)``; 0 for one never taken."""
    return safe_divide(state.sums, state.counts)


def _init(n: int) -> BanditState:
    _checks.at_least(1, arms=n)
    return BanditState(jnp.zeros(n, jnp.int32), jnp.zeros(n), jnp.zeros(n))


def _update(state: BanditState, arm: jax.Array, reward: Scalar, discount: Scalar = 1.0) -> BanditState:
    fade = lambda x, new: (x * discount).at[arm].add(new).astype(x.dtype)  # noqa: E731
    return BanditState(state.plays.at[arm].add(1), fade(state.counts, 1), fade(state.sums, reward))
