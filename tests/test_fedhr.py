"""FedHR: its identity at alpha 0, one round and the agent's transitions against plain loops, the controls, errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import CLASSES, FEATURES, SIZES, assert_close, federation, tiny_data

import fedjax_pfl as fp
from fedjax_pfl.algorithms import _strength
from fedjax_pfl.algorithms.fedhr import Options
from fedjax_pfl.data.clients import client_data
from fedjax_pfl.engine import random
from fedjax_pfl.models.hypernetwork import Modulator, modulate, modulation_gradient
from fedjax_pfl.models.registry import build_model

KEY = jax.random.key(3)
M = len(SIZES)
EVERYBODY = np.ones(M, bool)


class Started(NamedTuple):
    """FedHR after some rounds; ``advance(state, t, there) -> (state, info)`` is one more, of the clients there."""

    fed: fp.Federation
    algorithm: fp.Algorithm
    env: fp.Env
    state: Any
    advance: Callable[..., Any]


@functools.cache
def started(policy: str, rounds: int = 0, **options: object) -> Started:
    """In double precision only, as it is compiled once."""
    fed = federation()
    algorithm = fp.build("fedhr", fed, policy=policy, **options)
    env = fed.env(algorithm.hyper)

    @jax.jit
    def advance(state: Any, t: Any, there: Any) -> Any:
        cohort = fed.participation.draw(fed.data, KEY, t, 10)._replace(trains=there, reports=there)
        return algorithm.round(env, state, cohort, random.stream(KEY, random.ROUND, t))

    state = jax.jit(algorithm.init)(env, KEY)
    for t in range(rounds):
        state, _ = advance(state, t, EVERYBODY)
    return Started(fed, algorithm, env, state, advance)


def validation(fed: fp.Federation, client: int) -> dict[str, jax.Array]:
    split = fed.data.validation
    rows = split.rows[split.start[client] : split.start[client] + split.count[client]]
    return fed.data.gather(rows)


def accuracy(fed: fp.Federation, variables: dict[str, jax.Array], client: int) -> float:
    batch = validation(fed, client)
    return float((fed.model.apply(variables, batch["x"])[0].argmax(1) == batch["y"]).mean())


def rows_of(stack: dict[str, jax.Array], client: int) -> dict[str, jax.Array]:
    return {name: leaf[client] for name, leaf in stack.items()}


def test_without_modulation_the_global_model_is_that_of_fedavg(float64: None) -> None:
    fed = federation(participation=fp.Participation(0.6, 0.2))
    results = [
        fp.simulate(fed, fp.build(name, fed, **options), rounds=6, seeds=2)
        for name, options in (("fedhr", {"policy": "fixed:0"}), ("fedavg", {}))
    ]
    assert_close(results[0].state.shared, results[1].state.shared, 1e-13)
    last = [result.records[-1].scores["test"] for result in results]
    assert_close(last[0]["shared"], last[1]["shared"], 1e-12)
    assert_close(last[0]["received"], last[1]["received"], 1e-12)


def test_a_round_modulates_trains_averages_and_descends(float64: None) -> None:
    fed, algorithm, env, state, advance = started("fixed:0.7", rounds=2)
    phi, v = state.phi[0], state.v[0]
    modulator = Modulator(4, CLASSES)
    head = {name: leaf for name, leaf in state.shared.items() if fed.model.head(name)}
    new, info = advance(state, 2, EVERYBODY)
    weights, by_phi, moved = np.array(SIZES) / sum(SIZES), [], []
    for client in range(M):
        sent = state.shared | modulate(head, modulator.apply(phi, v[client]), 0.7)
        assert_close(algorithm.received(env, state._replace(alpha=jnp.full(M, 0.7)), client), sent)
        moved.append(np.sqrt(sum(float(((sent[name] - leaf) ** 2).sum()) for name, leaf in head.items())))
        returned = rows_of(new.theta, client)
        change = {name: sent[name] - returned[name] for name in head}
        assert max(float(jnp.abs(leaf).max()) for leaf in change.values()) > 1e-3
        one, by_v = modulation_gradient(modulator, phi, v[client], head, 0.7, change)
        by_phi.append(one)
        trace = jax.tree.leaves(state.v[1])[0][client]
        assert_close(new.v[0][client], v[client] - 0.01 * (by_v + 0.9 * trace), 1e-9)  # momentum; norms are below 50
    norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in head.values()))
    assert info["modulation"] == pytest.approx(np.mean(moved) / norm)
    assert (float(info["alpha"]), float(info["alpha_std"])) == pytest.approx((0.7, 0))
    for name, leaf in new.shared.items():
        mean = np.tensordot(weights, np.asarray(new.theta[name]), 1)
        np.testing.assert_allclose(leaf, mean, rtol=1e-10)
    mean = jax.tree.map(lambda *leaves: sum(leaves) / M, *by_phi)
    trace = jax.tree.unflatten(jax.tree.structure(phi), jax.tree.leaves(state.phi[1]))
    expected = jax.tree.map(lambda p, g, t: p - 0.01 * (g + 0.9 * t), phi, mean, trace)
    assert_close(new.phi[0], expected, 1e-9)


def quality(fed: fp.Federation, variables: dict[str, jax.Array], client: int, metric: str) -> float:
    if metric == "accuracy":
        return accuracy(fed, variables, client)
    batch = validation(fed, client)
    return -float(fed.loss(fed.model.apply(variables, batch["x"])[0], batch["y"]).mean())


@pytest.mark.parametrize("gain", _strength.GAINS)
@pytest.mark.parametrize("metric", _strength.METRICS)
def test_the_reward_is_the_gain_minus_the_deviation(gain: str, metric: str, float64: None) -> None:
    fed, algorithm, env, state, _ = started("fixed:0.7", rounds=3, penalty=0.2, bound=5.0, hyper_lr=0.5)
    options = Options(gain=gain, gain_metric=metric)
    everyone = jnp.ones(M, bool)
    found = _strength.rewards(fed, options, env, state, algorithm.received, state.theta, everyone)
    whole = np.concatenate([np.ravel(leaf) for leaf in state.shared.values()])
    for client in range(M):
        local, sent = rows_of(state.theta, client), algorithm.received(env, state, client)
        pair = {"start": (sent, state.shared), "received": (local, sent), "shared": (local, state.shared)}
        after, before = pair.get(gain, (local, None))
        gained = quality(fed, after, client, metric) - (quality(fed, before, client, metric) if before else 0)
        difference = np.concatenate([np.ravel(local[n] - state.shared[n]) for n in local])
        assert found[client] == pytest.approx(gained - 0.2 * np.linalg.norm(difference) / np.linalg.norm(whole))
    if metric == "loss":
        assert np.std(found) > 1e-3


def test_the_agent_is_told_what_clients_saw_and_gained(float64: None) -> None:
    fed, algorithm, env, first, advance = started("ddpg", rounds=1, warm_up=64, penalty=0.2, gain="received")
    state, _ = advance(first, 1, EVERYBODY)
    replay = state.agent.replay
    assert int(replay.fill) == M
    start = algorithm.init(env, KEY)
    for client in range(M):
        sent = algorithm.received(env, start._replace(alpha=first.alpha), client)
        local = rows_of(first.theta, client)
        difference = np.concatenate([np.ravel(local[n] - start.shared[n]) for n in local])
        whole = np.concatenate([np.ravel(leaf) for leaf in start.shared.values()])
        gain = accuracy(fed, local, client) - accuracy(fed, sent, client)
        reward = gain - 0.2 * np.linalg.norm(difference) / np.linalg.norm(whole)
        assert replay.r[client] == pytest.approx(reward)
        assert replay.a[client, 0] == pytest.approx(float(first.alpha[client]))
        batch = validation(fed, client)
        p, q = (jax.nn.softmax(fed.model.apply(w, batch["x"])[0]) for w in (local, first.shared))
        mine, other = (np.concatenate([np.ravel(w[n]) for n in local]) for w in (local, first.shared))
        seen = [
            float((p * (jnp.log(p) - jnp.log(q))).sum(1).mean()),
            np.linalg.norm(mine - other),
            1 - mine @ other / np.linalg.norm(mine) / np.linalg.norm(other),
            accuracy(fed, local, client),
            1 / 10,
        ]
        np.testing.assert_allclose(replay.s2[client], seen, rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(replay.s[client], [0, 0, 0, accuracy(fed, start.shared, client), 0], atol=1e-9)


def test_clients_that_are_absent_keep_their_transition_waiting(float64: None) -> None:
    one = started("ddpg", rounds=1, warm_up=64, penalty=0.2, gain="received")
    state, _ = one.advance(one.state, 1, np.arange(M) < 2)
    assert int(state.agent.replay.fill) == 2
    state, _ = one.advance(state, 2, EVERYBODY)
    assert int(state.agent.replay.fill) == 2 + M


def test_greedy_takes_the_strength_with_the_least_validation_loss(float64: None) -> None:
    fed, algorithm, env, state, _ = started("greedy-validation", rounds=3)
    served = algorithm.serve(env, state)
    for client in range(M):
        batch, losses = validation(fed, client), []
        for alpha in _strength.GRID:
            variables = algorithm.received(env, state._replace(alpha=jnp.full(M, alpha)), client)
            losses.append(float(fed.loss(fed.model.apply(variables, batch["x"])[0], batch["y"]).mean()))
        assert float(served.alpha[client]) == pytest.approx(_strength.GRID[int(np.argmin(losses))])


def test_what_is_sent_is_the_model_and_the_modulation() -> None:
    x = np.zeros((30, 32, 32, 3), np.uint8)
    y = np.arange(30) % 10
    data = client_data({"x": x, "y": y}, 10, [np.arange(10), np.arange(10, 20)], [np.arange(20, 25), np.arange(25, 30)])
    fed = fp.Federation(build_model("lenet5", 10, x[:1]), jax.tree.map(jnp.asarray, data))
    assert fp.build("fedhr", fed, policy="fixed:0.5").floats == (62_006, 62_006 + 2 * 850)
    assert fp.build("fedhr", fed).floats == (62_006 + 6, 62_006 + 2 * 850 + 1)  # state and reward up, alpha down


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "dpg"}, "policy must be ddpg, fixed:ALPHA, random or greedy-validation, found 'dpg'"),
        ({"policy": "fixed:1.5"}, "alpha must lie in 0..1, found 1.5"),
        ({"bound": -1.0}, "bound must be finite"),
        ({"penalty": float("nan")}, "penalty must be finite"),
        ({"embedding_size": 0}, "embedding_size must be finite and at least 1"),
        ({"policy": "fixed:"}, "fixed needs a number"),
        ({"policy": "random:3"}, "found 'random:3'"),
        ({"gain": "global"}, "gain must be one of received, shared, nothing"),
        ({"sigma": -1.0}, "sigma"),
    ],
)
def test_bad_options_are_told(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fp.build("fedhr", federation(), **options)


def test_what_it_cannot_work_on_is_told() -> None:
    data = tiny_data()
    without = client_data(data.examples, CLASSES, np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1]))
    fed = federation(without)
    with pytest.raises(ValueError, match="fedhr with policy ddpg needs validation data"):
        fp.build("fedhr", fed)
    fp.build("fedhr", fed, policy="random")
    linear = fp.function_model(lambda key: {"w": jnp.zeros((FEATURES, CLASSES))}, lambda p, x: x @ p["w"])
    with pytest.raises(ValueError, match=r"one dense layer with a bias, the head of 'function' is: none"):
        fp.build("fedhr", fed.replace(model=linear), policy="random")
