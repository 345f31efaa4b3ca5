"""The DDPG agent: every piece against NumPy, and two control problems whose best policies are known."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import solve_discrete_are

from fedjax_pfl.models.actor_critic import Agent, AgentState
from fedjax_pfl.models.replay import Moments, observed, places

RNG = np.random.default_rng(0)
SMALL = Agent(3, (-1.0, 0.0), (3.0, 0.5), hidden=(6, 5), batch=8, capacity=32, warm_up=10, tau=0.1, reward_scale=0.5)


def _transitions(agent: Agent, n: int) -> tuple[np.ndarray, ...]:
    s, s2 = RNG.normal(size=(2, n, agent.state_size)) * [1, 5, 0.2] + [0, 3, -1]
    a = RNG.uniform(agent.low, agent.high, (n, len(agent.low)))
    return s, a, RNG.normal(size=n), s2


def _filled(agent: Agent, n: int, seed: int = 0) -> AgentState:
    store = jax.jit(lambda *batch: agent.store(agent.init(jax.random.key(seed)), *batch))
    padded = [np.resize(leaf, (32, *leaf.shape[1:])) for leaf in _transitions(agent, max(n, 1))]
    return store(*padded, np.arange(32) < n, RNG.random(32) < 0.3)


def _same(a: Any, b: Any) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() and x.dtype == y.dtype for x, y in pairs)


def _mlp(params: Any, x: np.ndarray) -> np.ndarray:
    layers = jax.tree.map(np.asarray, params)["params"]
    for name in sorted(set(layers) - {"out"}):
        x = np.maximum(x @ layers[name]["kernel"] + layers[name]["bias"], 0)
    return x @ layers["out"]["kernel"] + layers["out"]["bias"]


def _mu(agent: Agent, actor: Any, s: np.ndarray) -> np.ndarray:
    low, high = np.array(agent.low), np.array(agent.high)
    return low + (high - low) * (1 + np.tanh(_mlp(actor, s))) / 2


def _q(agent: Agent, critic: Any, s: np.ndarray, a: np.ndarray) -> np.ndarray:
    low, high = np.array(agent.low), np.array(agent.high)
    return _mlp(critic, np.concatenate([s, 2 * (a - low) / (high - low) - 1], 1))[:, 0]


# ---------------------------------------------------------------- one update


def _slopes(function: Any, tree: Any) -> list[np.ndarray]:
    """Central differences of a scalar NumPy function in every parameter."""
    leaves, structure = jax.tree.flatten(jax.tree.map(lambda leaf: np.array(leaf), tree))
    slopes = [np.zeros_like(leaf) for leaf in leaves]
    for leaf, slope in zip(leaves, slopes, strict=True):
        for at in np.ndindex(leaf.shape):
            kept, values = leaf[at], []
            for step in (1e-6, -1e-6):
                leaf[at] = kept + step
                values.append(function(jax.tree.unflatten(structure, leaves)))
            leaf[at] = kept
            slope[at] = (values[0] - values[1]) / 2e-6
    return slopes


@pytest.mark.usefixtures("float64")
def test_one_update_equals_the_equations_in_numpy() -> None:
    agent, n = SMALL, SMALL.batch
    networks = jax.tree.map(  # four networks that differ, with policies off the bounds
        lambda leaf: leaf + 0.3 * RNG.normal(size=leaf.shape) if leaf.dtype == jnp.float64 and leaf.ndim else leaf,
        agent.init(jax.random.key(0)).networks,
    )
    networks = networks._replace(
        **{k: getattr(agent.init(jax.random.key(0)).networks, k) for k in networks._fields[4:]}
    )
    s, a, r, s2 = _transitions(dataclasses.replace(agent, reward_scale=1.0), n)
    done = np.arange(n) % 3 == 0
    y = 0.5 * r + 0.9 * ~done * _q(agent, networks.target_critic, s2, _mu(agent, networks.target_actor, s2))
    np.testing.assert_allclose(agent.target(networks, r, s2, done), y, rtol=1e-10)
    new, report = jax.jit(agent.update)(networks, s, a, r, s2, done)

    q = _q(agent, networks.critic, s, a)
    np.testing.assert_allclose(report["critic_loss"], np.mean((y - q) ** 2), rtol=1e-10)
    np.testing.assert_allclose(report["mean_q"], q.mean(), rtol=1e-10)
    objective = lambda actor: _q(agent, new.critic, s, _mu(agent, actor, s)).mean()  # noqa: E731
    np.testing.assert_allclose(report["actor_objective"], objective(networks.actor), rtol=1e-10)

    slopes = {
        "critic": _slopes(lambda critic: np.mean((y - _q(agent, critic, s, a)) ** 2), networks.critic),
        "actor": [-slope for slope in _slopes(objective, networks.actor)],
    }
    for name, lr in (("critic", agent.critic_lr), ("actor", agent.actor_lr)):
        old, moved = jax.tree.leaves(getattr(networks, name)), jax.tree.leaves(getattr(new, name))
        first = jax.tree.leaves(getattr(new, f"{name}_optimizer")[0].mu)  # 0.1 times the gradient
        for before, after, momentum, slope in zip(old, moved, first, slopes[name], strict=True):
            np.testing.assert_allclose(momentum, 0.1 * slope, rtol=1e-5, atol=1e-8)
            g = np.asarray(momentum) / 0.1
            np.testing.assert_allclose(after - before, -lr * g / (np.abs(g) + 1e-8), rtol=1e-6, atol=1e-12)
        for before, now, after in zip(
            *(jax.tree.leaves(t) for t in (getattr(networks, f"target_{name}"), getattr(new, name))),
            jax.tree.leaves(getattr(new, f"target_{name}")), strict=True,
        ):  # fmt: skip
            np.testing.assert_allclose(after, 0.1 * np.asarray(now) + 0.9 * np.asarray(before), rtol=1e-12)


def test_learning_never_draws_a_place_that_was_not_written() -> None:
    """Places that were never written hold NaN here: one draw of them would show."""
    state = _filled(SMALL, 12)
    poisoned = [f.at[12:].set(jnp.nan) for f in state.replay[:5]]
    state = state._replace(replay=state.replay._replace(**dict(zip(state.replay._fields, poisoned, strict=False))))
    new, report = jax.jit(SMALL.learn, static_argnums=2)(state, jax.random.key(1), 20)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((new.networks, report)))
    assert int(report["fill"]) == 12
    assert int(new.networks.actor_optimizer[0].count) == int(new.networks.critic_optimizer[0].count) == 20
    assert _same(new._replace(networks=None), state._replace(networks=None))


def test_minibatches_are_uniform_over_what_is_stored() -> None:
    """With discount 0 and a critic near 0, the loss of one transition is the square of its reward, here its place."""
    agent, n = dataclasses.replace(SMALL, hidden=(2,), batch=1, discount=0.0, reward_scale=1.0), 12
    s, a, _, s2 = _transitions(agent, n)
    state = agent.store(agent.init(jax.random.key(0)), s, a, np.arange(1.0, n + 1), s2, np.ones(n, bool))
    keys = jax.random.split(jax.random.key(4), 400)
    draw = jax.jit(jax.vmap(lambda key: agent.learn(state, key, 1)[1]["critic_loss"]))
    place = np.sqrt(draw(keys))
    np.testing.assert_allclose(place, np.round(place), atol=0.1)
    hits = np.bincount(np.round(place).astype(int), minlength=n + 1)[1:]
    assert hits.sum() == 400
    assert ((hits - 400 / n) ** 2 / (400 / n)).sum() < 31.3  # chi-squared, 11 degrees of freedom, at 0.001


def test_nothing_is_learned_before_the_warm_up_is_over() -> None:
    learn = jax.jit(SMALL.learn, static_argnums=2)
    for n, learns in ((0, False), (9, False), (10, True)):
        state = _filled(SMALL, n)
        new, report = learn(state, jax.random.key(1), 3)
        assert _same(new.networks, state.networks) == (not learns)
        assert [bool(np.isfinite(report[k])) for k in ("critic_loss", "mean_q", "actor_objective")] == [learns] * 3
        assert int(report["fill"]) == n


def test_an_outcome_that_is_not_finite_is_dropped() -> None:
    state = _filled(SMALL, 12)
    huge = jax.tree.map(lambda leaf: leaf + 1e30, state.networks.critic)
    state = state._replace(networks=state.networks._replace(critic=huge))
    new, report = SMALL.learn(state, jax.random.key(1), 2)
    assert _same(new, state)
    assert np.isnan(report["critic_loss"])


def test_a_new_agent_can_be_donated_and_starts_with_its_targets_equal() -> None:
    state = SMALL.init(jax.random.key(0))
    assert _same(state.networks[:2], state.networks[2:4])
    assert float(jnp.abs(_mlp(state.networks.actor, RNG.normal(size=(50, 3)))).max()) < 0.05
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    assert len(set(pointers)) == len(pointers)


# ---------------------------------------------------------------- buffer and moments


@pytest.mark.parametrize(("capacity", "n"), [(1, 3), (3, 5), (7, 5), (5, 5), (4, 13), (50, 6)])
def test_ring_buffer_equals_a_deque(capacity: int, n: int) -> None:
    """Batches smaller and larger than the buffer, with holes; transition k lies in place k modulo capacity."""
    agent = Agent(3, (-1.0, 0.0), (3.0, 0.5), capacity=capacity, warm_up=1)
    state, store, rng = agent.init(jax.random.key(0)), jax.jit(agent.store), np.random.default_rng(capacity)
    want: collections.deque[np.ndarray] = collections.deque(maxlen=capacity)
    total = 0
    for turn in range(12):
        s, a, r, s2 = _transitions(agent, n)
        done = rng.random(n) < 0.5
        valid = rng.random(n) < (1.0, 0.6, 0.1, 0.0)[turn % 4]
        state = store(state, s, a, r, s2, valid, done)
        want.extend(np.concatenate([s, a, r[:, None], s2, done[:, None]], 1)[valid])
        total += valid.sum()
        replay = state.replay
        assert (int(replay.fill), int(replay.head), int(replay.refused)) == (len(want), total % capacity, 0)
        rows = np.concatenate([np.asarray(f).reshape(capacity, -1) for f in replay[:5]], 1)
        places = [(total - len(want) + k) % capacity for k in range(len(want))]
        np.testing.assert_allclose(rows[places], np.array(want).reshape(-1, rows.shape[1]), rtol=1e-6)
        assert (rows[len(want) :] == 0).all()


@pytest.mark.parametrize(("capacity", "n"), [(1, 3), (4, 13), (5, 5), (50, 6)])
def test_no_place_is_written_twice_by_one_batch(capacity: int, n: int) -> None:
    """On an accelerator it is open which of two writes would stay, so the deque above could not show it everywhere."""
    for turn in range(20):
        head, valid = turn % capacity, RNG.random(n) < (1.0, 0.5)[turn % 2]
        order = [(head + k) % capacity for k in range(valid.sum())]
        want = [capacity] * (len(order) - len(order[-capacity:])) + order[-capacity:]
        got = np.asarray(places(jnp.int32(head), jnp.asarray(valid), capacity))
        assert got[valid].tolist() == want
        assert (got[~valid] == capacity).all()
        assert len(set(want) - {capacity}) == min(len(order), capacity)


def test_transitions_that_are_not_finite_are_refused_and_counted() -> None:
    store, new = jax.jit(SMALL.store), SMALL.init(jax.random.key(0))
    for part in range(4):
        for bad in (np.nan, np.inf, -1e10):
            batch = _transitions(SMALL, 5)
            batch[part][2] = bad
            state = store(new, *batch, np.array([1, 1, 1, 0, 1], bool))
            assert (int(state.replay.fill), int(state.replay.refused), int(state.moments.seen)) == (3, 1, 3)
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
            np.testing.assert_allclose(state.replay.s[:3], batch[0][[0, 1, 4]], rtol=1e-6)


@pytest.mark.usefixtures("float64")
def test_moments_equal_those_of_all_states_at_once() -> None:
    moments, seen = Moments(jnp.int32(0), jnp.zeros(3), jnp.zeros(3)), []
    step = jax.jit(observed)
    for turn in range(20):
        s = RNG.normal(size=(6, 3)) * [1, 50, 1e-3] + [0, 1000, 1]
        valid = RNG.random(6) < (0.5, 0.0, 1.0)[turn % 3]
        moments = step(moments, np.where(valid[:, None], s, np.nan), valid)
        seen.extend(s[valid])
    assert int(moments.seen) == len(seen)
    np.testing.assert_allclose(moments.mean, np.mean(seen, 0), rtol=1e-12)
    np.testing.assert_allclose(moments.squares / len(seen), np.var(seen, 0), rtol=1e-8)
    s = np.array(seen[:4])
    want = (s - np.mean(seen, 0)) / np.sqrt(np.var(seen, 0) + 1e-8)
    np.testing.assert_allclose(SMALL.scaled(moments, s), want, rtol=1e-8, atol=1e-10)
    np.testing.assert_array_equal(SMALL.scaled(moments, s + 1e6), np.full((4, 3), 10.0))
    np.testing.assert_array_equal(dataclasses.replace(SMALL, normalise=False).scaled(moments, s), s)
    none = Moments(jnp.int32(0), jnp.zeros(3), jnp.zeros(3))
    np.testing.assert_allclose(SMALL.scaled(none, np.eye(3)), np.eye(3), rtol=1e-7)


# ---------------------------------------------------------------- acting


def _warm(agent: Agent, rows: int = 1) -> AgentState:
    state = agent.init(jax.random.key(0), rows)
    return state._replace(replay=state.replay._replace(fill=jnp.int32(agent.warm_up)))


def test_actions_are_uniform_first_and_then_the_policy_with_noise_inside_the_bounds() -> None:
    s, low, high = RNG.normal(size=(4000, 3)), np.array(SMALL.low), np.array(SMALL.high)
    a, state = SMALL.act(SMALL.init(jax.random.key(0)), s, jax.random.key(1))
    share = (np.asarray(a) - low) / (high - low)
    assert share.min() >= 0
    assert share.max() <= 1
    for part in share.T:
        np.testing.assert_allclose(np.histogram(part, 5, (0, 1))[0] / 4000, 0.2, atol=0.025)
    assert abs(np.corrcoef(share.T)[0, 1]) < 0.06
    assert int(state.acts) == 0

    agent = dataclasses.replace(SMALL, sigma=0.1, fading=0.5)
    state = _warm(agent)
    mean, same = agent.act(state, s, jax.random.key(2), explore=False)
    assert _same(state, same)
    np.testing.assert_allclose(mean, _mu(agent, state.networks.actor, s), rtol=1e-5)
    for sigma in (0.1, 0.05, 0.025):  # in half ranges, halved at every call
        a, state = agent.act(state, s, jax.random.key(2))
        np.testing.assert_allclose((a - mean).std(0), sigma * (high - low) / 2, rtol=0.05)
    a, _ = dataclasses.replace(agent, sigma=50.0).act(_warm(agent), s, jax.random.key(2))
    assert (np.asarray(a).min(0), np.asarray(a).max(0)) == (pytest.approx(low), pytest.approx(high))
    assert (a >= jnp.array(agent.low)).all()
    assert (a <= jnp.array(agent.high)).all()


def test_a_saturated_policy_stays_inside_bounds_that_float32_rounds() -> None:
    for low, high in ((0.1, 0.7), (-0.3, 0.9), (0.0, 1.0)):
        agent = Agent(1, (low,), (high,))
        state = _warm(agent)
        for sign, end in ((-1.0, low), (1.0, high)):
            actor = jax.tree.map(jnp.ones_like, state.networks.actor)
            actor["params"]["out"] = jax.tree.map(lambda leaf, sign=sign: leaf * sign, actor["params"]["out"])
            a, _ = agent.act(
                state._replace(networks=state.networks._replace(actor=actor)), jnp.ones((1, 1)), None, explore=False
            )
            assert np.float32(low) <= a[0, 0] <= np.float32(high)
            assert float(a[0, 0]) == pytest.approx(end)


def test_ornstein_uhlenbeck_noise_has_its_stationary_moments() -> None:
    agent = Agent(1, (-1.0,), (1.0,), noise="ou", theta=0.3, sigma=0.05)
    s = jnp.zeros((400, 1))

    def turn(state: AgentState, key: jax.Array) -> tuple[AgentState, jax.Array]:
        a, state = agent.act(state, s, key)
        return state, a[:, 0]

    state, a = jax.lax.scan(turn, _warm(agent, 400), jax.random.split(jax.random.key(0), 300))
    noise = np.asarray(a - agent.act(state, s, jax.random.key(0), explore=False)[0][0])[50:]
    np.testing.assert_allclose(noise.std(), 0.05 / np.sqrt(1 - 0.7**2), rtol=0.03)
    assert abs(noise.mean()) < 0.002
    for lag in (1, 3):
        assert np.corrcoef(noise[:-lag].ravel(), noise[lag:].ravel())[0, 1] == pytest.approx(0.7**lag, abs=0.02)
    assert abs(np.corrcoef(noise[:, 0::2].ravel(), noise[:, 1::2].ravel())[0, 1]) < 0.02  # rows are independent
    with pytest.raises(ValueError, match=r"s must be \(400, 1\)"):
        agent.act(state, s[:3], jax.random.key(0))


# ---------------------------------------------------------------- whole loops


def _loop(agent: Agent, turns: int, steps: int, n: int, begin: Any, move: Any) -> Any:
    """``key -> state`` after turns of n transitions and some learning; ``move(key, t, s, a) -> (r, s2, next s)``."""

    def run(key: jax.Array) -> AgentState:
        def turn(carry: Any, t: jax.Array) -> tuple[Any, None]:
            state, s = carry
            act, world, learn = jax.random.split(jax.random.fold_in(key, t), 3)
            a, state = agent.act(state, s, act)
            r, s2, then = move(world, t, s, a)
            state = agent.store(state, s, a, r, s2, jnp.ones(n, bool))
            state, _ = agent.learn(state, learn, steps)
            return (state, then), None

        (state, _), _ = jax.lax.scan(turn, (agent.init(key, n), begin(key)), jnp.arange(turns))
        return state

    return run


def test_a_bandit_with_quadratic_reward_is_solved() -> None:
    """r = -(a - a*(s))^2: within 5% of the action's range of a* at every held-out state, from each of 3 seeds."""
    agent = Agent(2, discount=0.0, warm_up=256, actor_lr=1e-3, critic_lr=3e-3)
    best = lambda s: 0.5 + s @ jnp.array([[0.15], [-0.1]])  # noqa: E731
    states = lambda key: jax.random.uniform(key, (16, 2), minval=-1, maxval=1)  # noqa: E731

    def move(key: jax.Array, t: jax.Array, s: jax.Array, a: jax.Array) -> Any:
        return -((a - best(s)) ** 2)[:, 0], s, states(key)

    held_out = jnp.asarray(RNG.uniform(-1, 1, (200, 2)))

    def error(key: jax.Array) -> jax.Array:
        state = _loop(agent, 400, 2, 16, states, move)(key)
        return jnp.abs(agent.act(state, held_out, key, explore=False)[0] - best(held_out))

    errors = np.asarray(jax.jit(jax.vmap(error))(jax.random.split(jax.random.key(0), 3)))
    assert errors.max() < 0.05
    assert float(jnp.abs(best(held_out) - 0.5).mean()) > 0.08  # a constant would not do


def test_a_linear_quadratic_system_is_controlled_as_by_its_riccati_gain() -> None:
    """s2 = A s + B a + w, cost q s^2 + r a^2: discounted cost within 5% of the best one from each of 3 seeds.

    The settings leave a margin over seeds: rewards scaled so that Q is of order 1, a critic that learns faster than
    the actor, targets that follow quickly, noise that fades, 16 new transitions for 3 updates.
    """
    A, B, q, r, discount, noise, n = 0.95, 0.5, 1.0, 0.2, 0.8, 0.1, 16
    agent = Agent(
        1, (-3.0,), (3.0,), discount=discount, tau=0.1, actor_lr=1e-3, critic_lr=3e-3, capacity=16384, warm_up=256,
        sigma=0.3, fading=0.998, reward_scale=0.1,
    )  # fmt: skip
    root, one = np.sqrt(discount), np.eye(1)
    P = solve_discrete_are(root * A * one, root * B * one, q * one, r * one)[0, 0]
    gain = discount * B * P * A / (r + discount * B * B * P)
    assert 2 * gain < 3  # admissible from every start

    def move(key: jax.Array, t: jax.Array, s: jax.Array, a: jax.Array) -> Any:
        for_noise, for_start = jax.random.split(key)
        s2 = A * s + B * a + noise * jax.random.normal(for_noise, s.shape)
        start = jax.random.uniform(for_start, s.shape, minval=-2, maxval=2)
        return -(q * s**2 + r * a**2)[:, 0], s2, jnp.where(t % 5 == 4, start, s2)

    shocks = jnp.asarray(noise * RNG.normal(size=(60, 21, 1)))

    def cost(policy: Any) -> jax.Array:
        def step(s: jax.Array, at: Any) -> Any:
            t, shock = at
            a = policy(s)
            return A * s + B * a + shock, discount**t * (q * s**2 + r * a**2).mean()

        return jax.lax.scan(step, jnp.linspace(-2, 2, 21)[:, None], (jnp.arange(60.0), shocks))[1].sum()

    def learned(key: jax.Array) -> jax.Array:
        state = _loop(agent, 1000, 3, n, lambda key: jnp.zeros((n, 1)), move)(key)
        return cost(lambda s: agent.act(state, s, key, explore=False)[0])

    best, idle = float(cost(lambda s: -gain * s)), float(cost(lambda s: 0 * s))
    starts = float((jnp.linspace(-2, 2, 21) ** 2).mean())
    assert best == pytest.approx(P * (starts + noise**2 * discount / (1 - discount)), rel=0.05)  # Riccati's own value
    assert idle > 2 * best
    ratios = np.asarray(jax.jit(jax.vmap(learned))(jax.random.split(jax.random.key(0), 3))) / best
    assert (ratios < 1.05).all(), ratios
    assert (ratios > 0.99).all(), ratios


@pytest.mark.parametrize("double", [False, True])
def test_a_state_saved_as_numpy_goes_on_bit_for_bit_and_is_traced_once(double: bool) -> None:
    with jax.enable_x64(double):
        agent, traces = dataclasses.replace(SMALL, noise="ou", warm_up=4), []

        @jax.jit
        def turn(state: AgentState, key: jax.Array) -> tuple[AgentState, Any]:
            traces.append(None)
            keys = jax.random.split(key, 4)
            s = jax.random.normal(keys[0], (5, 3))
            a, state = agent.act(state, s, keys[1])
            state = agent.store(state, s, a, a.sum(1), s + 1, jax.random.bernoulli(keys[2], 0.7, (5,)))
            return agent.learn(state, keys[3], 2)

        keys = jax.random.split(jax.random.key(7), 12)
        straight = resumed = agent.init(jax.random.key(0), 5)
        kind = np.float64 if double else np.float32
        assert {leaf.dtype for leaf in jax.tree.leaves(straight)} == {np.dtype(kind), np.dtype(np.int32)}
        assert all(leaf.size for leaf in jax.tree.leaves(straight))
        for key in keys:
            straight, report = turn(straight, key)
            leaves, structure = jax.tree.flatten(resumed)
            resumed = jax.tree.unflatten(structure, [np.asarray(leaf).copy() for leaf in leaves])
            resumed, again = turn(resumed, key)
            assert _same((straight, report), (resumed, again))
        assert np.isfinite(report["critic_loss"])
        assert len(traces) == 1


def test_a_float_setting_may_be_traced_and_vmapped() -> None:
    state, key = _filled(SMALL, 20), jax.random.key(3)
    names = ("discount", "tau", "actor_lr", "critic_lr", "reward_scale")

    def learn(values: Any) -> Any:
        agent = dataclasses.replace(SMALL, **{name: values[i] for i, name in enumerate(names)})
        return agent.learn(state, key, 3)[0].networks

    rows = [(0.9, 0.1, 1e-3, 1e-2, 0.5), (0.0, 1.0, 1e-2, 1e-3, 2.0)]
    stacked = jax.jit(jax.vmap(learn))(jnp.array(rows))
    for i, row in enumerate(rows):
        for a, b in zip(jax.tree.leaves(stacked), jax.tree.leaves(learn(row)), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-3, atol=1e-5)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state_size": 0}, "state_size must be an integer of at least 1, found 0"),
        ({"batch": 2.5}, "batch must be an integer"),
        ({"warm_up": 33}, "warm_up must be at most capacity = 32"),
        ({"hidden": (4, 0)}, "hidden must be"),
        ({"high": (1.0,)}, "high must be finite and above low"),
        ({"high": (-1.0, 1.0)}, "high must be finite and above low"),
        ({"high": (float("nan"), 1.0)}, "high must be finite"),
        ({"noise": "pink"}, "noise must be 'gaussian' or 'ou', found 'pink'"),
        ({"discount": 1.1}, r"discount must be in 0 \.\. 1"),
        ({"tau": float("nan")}, "tau must be in"),
        ({"sigma": -0.1}, "sigma must be in"),
        ({"actor_lr": 0.0}, "actor_lr must be positive"),
        ({"reward_scale": float("inf")}, "reward_scale must be positive and finite"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^agent: {message}"):
        dataclasses.replace(SMALL, **change)


def test_shapes_that_do_not_fit_are_refused() -> None:
    state, (s, a, r, s2), valid = SMALL.init(jax.random.key(0)), _transitions(SMALL, 4), np.ones(4, bool)
    cases = {
        r"s must be \(N, 3\), found \(4, 2\)": lambda: SMALL.act(state, s[:, :2], jax.random.key(0)),
        r"s must be \(N, 3\), found \(3,\)": lambda: SMALL.store(state, s[0], a, r, s2, valid),
        r"s2 must be \(4, 3\), found \(3, 3\)": lambda: SMALL.store(state, s, a, r, s2[:3], valid),
        r"a must be \(4, 2\) for 4 transitions, found \(4,\)": lambda: SMALL.store(state, s, r, r, s2, valid),
        r"r must be \(4,\) for 4 transitions, found \(4, 1\)": lambda: SMALL.store(state, s, a, r[:, None], s2, valid),
        r"valid must be \(4,\)": lambda: SMALL.store(state, s, a, r, s2, valid[:1]),
        r"done must be \(4,\)": lambda: SMALL.store(state, s, a, r, s2, valid, valid[:1]),
        "rows must be at least 1, found 0": lambda: SMALL.init(jax.random.key(0), 0),
        "steps must be at least 1, found 0": lambda: SMALL.learn(state, jax.random.key(0), 0),
    }
    for message, call in cases.items():
        with pytest.raises(ValueError, match=message):
            call()
