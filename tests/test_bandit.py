"""Bandits against a table by hand and a loop in NumPy."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.numerics import Bandit, discounted_ucb, mean_rewards, random_arm, ucb1

KEY = jax.random.key(0)


def play(bandit: Bandit, table: Any) -> np.ndarray:
    """The arms taken when ``table[t, arm]`` is what arm would give in round t."""

    def one(state: Any, now: Any) -> Any:
        rewards, key = now
        arm = bandit.choose(state, key)
        return bandit.update(state, arm, rewards[arm]), arm

    table = jnp.asarray(table)
    return np.asarray(jax.lax.scan(one, bandit.init(table.shape[1]), (table, jax.random.split(KEY, len(table))))[1])


def reference(table: np.ndarray, c: float, discount: float) -> list[int]:
    arms, n = [], table.shape[1]
    for t in range(len(table)):
        if t < n:
            arms.append(t)
            continue
        score = []
        for arm in range(n):
            weights = [discount ** (t - 1 - s) if arms[s] == arm else 0.0 for s in range(t)]
            count = sum(weights)
            total = sum(discount ** (t - 1 - s) for s in range(t))
            mean = sum(w * table[s, arm] for s, w in enumerate(weights)) / count
            score.append(mean + c * math.sqrt(math.log(total) / count))
        arms.append(int(np.argmax(score)))
    return arms


def test_by_hand() -> None:
    """After one play each: bonus sqrt(2 ln 2) for both, then arm 1 has sqrt(2 ln 3 / 2) = 1.048, arm 0 1.482."""
    bandit = ucb1()
    state = bandit.init(2)
    for arm, reward in ((0, 0.4), (1, 0.5), (1, 0.5), (0, 0.4)):
        assert bandit.choose(state, KEY) == arm
        state = bandit.update(state, jnp.array(arm), reward)
    np.testing.assert_array_equal(state.plays, [2, 2])
    np.testing.assert_allclose(mean_rewards(state), [0.4, 0.5], rtol=1e-6)


def test_each_arm_is_taken_once_first_in_order() -> None:
    for bandit in (ucb1(0.0), discounted_ucb(1.0, 0.01)):
        np.testing.assert_array_equal(play(bandit, np.ones((5, 5), np.float32))[:5], range(5))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("discount", [1.0, 0.95, 0.6])
@pytest.mark.parametrize("c", [0.0, 0.2, math.sqrt(2)])
def test_equals_the_loop(c: float, discount: float) -> None:
    for seed in range(3):
        table = np.random.default_rng(seed).random((80, 5)) * np.linspace(0.5, 1, 5)
        bandit = ucb1(c) if discount == 1 else discounted_ucb(c, discount)
        np.testing.assert_array_equal(play(bandit, table), reference(table, c, discount))


def test_finds_the_best_arm_and_the_discounted_one_follows_a_change() -> None:
    rng = np.random.default_rng(0)
    means = np.where(np.arange(1000)[:, None] < 900, [0.2, 0.3, 0.9], [0.2, 0.9, 0.5])
    table = (rng.random((1000, 3)) < means).astype(np.float32)
    plain, faded = play(ucb1(0.5), table), play(discounted_ucb(0.5, 0.95), table)
    assert (plain[100:900] == 2).mean() > 0.9
    assert (faded[100:900] == 2).mean() > 0.7
    assert (faded[900:] == 1).mean() > 0.5
    assert (plain[900:] == 1).mean() < 0.3


def test_an_arm_of_long_ago_is_tried_again_and_all_stays_finite() -> None:
    bandit = discounted_ucb(0.0001, 0.5)
    arms = play(bandit, np.tile(np.float32([1.0, 0.0]), (600, 1)))
    assert (arms[:300] == 0).mean() > 0.9
    assert (arms[2:] == 1).any()
    state = bandit.init(2)
    for _ in range(2):
        state = jax.lax.fori_loop(0, 500, lambda _, s: bandit.update(s, jnp.array(0), 1.0), state)
        state = bandit.update(state, jnp.array(1), 0.5)
    assert np.isfinite(mean_rewards(state)).all()
    assert bandit.choose(jax.lax.fori_loop(0, 500, lambda _, s: bandit.update(s, jnp.array(0), 1.0), state), KEY) == 1


def test_a_forgotten_arm_has_no_bonus_without_a_constant() -> None:
    bandit = discounted_ucb(0.0, 0.5)
    state = bandit.update(bandit.init(2), jnp.array(1), 1.0)
    state = jax.lax.fori_loop(0, 500, lambda _, s: bandit.update(s, jnp.array(0), 0.5), state)
    assert state.counts[1] == 0
    assert bandit.choose(state, KEY) == 0


def test_random_arms() -> None:
    arms = play(random_arm(), np.zeros((4000, 4), np.float32))
    np.testing.assert_allclose(np.bincount(arms, minlength=4) / 4000, 0.25, atol=0.03)
    state = random_arm().init(3)
    state = random_arm().update(state, jnp.array(2), 0.5)
    np.testing.assert_array_equal(state.plays, [0, 0, 1])
    np.testing.assert_array_equal(mean_rewards(state), [0, 0, 0.5])


def test_vmap_over_seeds_and_constants() -> None:
    tables = np.random.default_rng(0).random((3, 40, 4)).astype(np.float32)
    constants = np.float32([0.0, 0.3, 2.0])

    def arms(table: Any, c: Any) -> Any:
        bandit = discounted_ucb(c, jnp.float32(0.9))
        step = lambda s, r: (bandit.update(s, a := bandit.choose(s, KEY), r[a]), a)  # noqa: E731
        return jax.lax.scan(step, bandit.init(4), table)[1]

    together = jax.jit(jax.vmap(arms))(tables, constants)
    for i in range(3):
        np.testing.assert_array_equal(together[i], play(discounted_ucb(float(constants[i]), 0.9), tables[i]))


def test_types_are_kept() -> None:
    bandit = discounted_ucb()
    state = bandit.init(3)
    new = bandit.update(state, bandit.choose(state, KEY), np.float64(0.5))
    assert [x.dtype for x in new] == [x.dtype for x in state] == [jnp.int32, jnp.float32, jnp.float32]
    assert bandit.choose(state, KEY).dtype == jnp.int32


def test_wrong_arguments_are_named() -> None:
    for message, call in {
        "c must be a number >= 0, found -1": lambda: ucb1(-1.0),
        "c must be a number >= 0, found nan": lambda: ucb1(math.nan),
        r"the discount must lie in \(0, 1\], found 0": lambda: discounted_ucb(1.0, 0),
        r"the discount must lie in \(0, 1\], found 1.5": lambda: discounted_ucb(1.0, 1.5),
        "arms must be at least 1, found 0": lambda: ucb1().init(0),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
