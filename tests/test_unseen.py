"""Clients that were held out: what they are given, what a few local steps make of it, against a plain loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import CASES, Case, assert_close, build, federation, tiny_data

import fedjax_pfl as fp
from fedjax_pfl.data.clients import ClientData, shard
from fedjax_pfl.engine import random
from fedjax_pfl.engine.sharding import client_mesh, place_data
from fedjax_pfl.engine.simulation import Simulation
from fedjax_pfl.engine.unseen import adapt

HELD = tiny_data((9, 4, 6), seed=5)
STEPS = 3
KINDS = ("local", "fedavg", "fedper", "fedapa", "fedhr", "ditto", "pfedhn")  # what a newcomer is given differs
METHODS = [case for name, case in {case.name: case for case in reversed(CASES)}.items() if name in KINDS]


def on_device(data: ClientData) -> ClientData:
    return jax.tree.map(jnp.asarray, data)


def mean_over_clients(stacked: dict[str, jax.Array], weights: np.ndarray) -> dict[str, np.ndarray]:
    return {name: np.tensordot(weights / weights.sum(), np.asarray(leaf), 1) for name, leaf in stacked.items()}


def given_by_hand(case: Case, fed: fp.Federation, state: object, fresh: dict[str, jax.Array]) -> dict | None:
    """What a newcomer gets: what everybody shares, and the rest untrained; None for methods with tests of their own."""
    if case.name == "local":
        return fresh
    if case.name in ("fedavg", "fedavg_ft", "fedprox", "fedhr"):
        return state.shared  # type: ignore[attr-defined]
    if case.name not in ("fedper", "fedapa", "fixed_mixing"):
        return None
    bodies = state.shared if case.name == "fedper" else mean_over_clients(state.theta, np.ones(5))  # type: ignore[attr-defined]
    return fresh | {name: leaf for name, leaf in bodies.items() if not fed.model.head(name)}


@pytest.mark.parametrize("case", METHODS, ids=lambda case: case.name)
def test_newcomers_start_from_what_is_shared_and_take_plain_steps(float64: None, case: Case) -> None:
    fed = federation(batch_size=4)
    simulation = Simulation(fed, build(case, fed), rounds=2)
    state, _ = simulation.advance(simulation.init(), 0, 2)
    found = simulation.unseen(state, on_device(HELD), STEPS)["test"]
    fresh = fed.model.init(random.stream(simulation.key, random.INITIAL_MODEL))
    start = simulation.algorithm.newcomer(simulation.env, state, fresh)
    if (expected := given_by_hand(case, fed, state, fresh)) is not None:
        assert_close(start, jax.tree.map(jnp.asarray, expected))
    data = on_device(HELD)
    order = random.shuffled_rows(data.train, data.ids, random.stream(simulation.key, random.EVALUATION), STEPS)
    for client in range(3):
        first, count = int(HELD.train.start[client]), int(HELD.train.count[client])
        variables, done, epoch = dict(start), 0, 0
        while done < STEPS:
            rows = np.asarray(order[epoch, first : first + count])
            for place in range(0, count, 4):
                if done < STEPS:
                    variables = sgd(fed, variables, HELD, rows[place : place + 4])
                    done += 1
            epoch += 1
        own = HELD.test.rows[HELD.test.start[client] : HELD.test.start[client] + HELD.test.count[client]]
        for when, which in (("before", start), ("after", variables)):
            scores = fed.model.apply(which, HELD.examples["x"][own])[0]
            loss = float(fed.loss(scores, HELD.examples["y"][own]).mean())
            assert found[when].loss[0, client] == pytest.approx(loss, rel=1e-9)
            right = (np.asarray(scores).argmax(1) == HELD.examples["y"][own]).mean()
            assert found[when].accuracy[0, client] == pytest.approx(right)


def sgd(
    fed: fp.Federation, variables: dict[str, jax.Array], data: ClientData, rows: np.ndarray
) -> dict[str, jax.Array]:
    def loss(v: dict[str, jax.Array]) -> jax.Array:
        return fed.loss(fed.model.apply(v, data.examples["x"][rows])[0], jnp.asarray(data.examples["y"][rows])).mean()

    return jax.tree.map(lambda a, g: a - fed.lr * g, variables, jax.grad(loss)(variables))


def test_devices_and_seeds_do_not_change_them(float64: None) -> None:
    one = federation()
    simulation = Simulation(one, fp.build("fedapa", one), rounds=2, seeds=2)
    alone = simulation.unseen(simulation.init(), on_device(HELD), STEPS)
    assert alone["test"]["after"].loss.shape == (2, 3)
    single = Simulation(one, fp.build("fedapa", one), rounds=2, seed=1)
    assert_close(jax.tree.map(lambda a: a[1:], alone), single.unseen(single.init(), on_device(HELD), STEPS))

    mesh = client_mesh(2)
    two = federation(place_data(shard(tiny_data(), 2), mesh), mesh=mesh)
    spread = Simulation(two, fp.build("fedapa", two), rounds=2, seeds=2)
    assert_close(alone, spread.unseen(spread.init(), place_data(shard(HELD, 2), mesh), STEPS))


def test_the_number_of_steps_counts_at_every_call() -> None:
    fed = federation()
    simulation = Simulation(fed, fp.build("fedavg", fed), rounds=2)
    state = simulation.init()
    few, many = (simulation.unseen(state, on_device(HELD), steps)["test"] for steps in (1, 20))
    np.testing.assert_array_equal(few["before"].loss, many["before"].loss)
    assert (many["after"].loss != few["after"].loss).all()


def test_a_method_without_a_model_for_newcomers_says_so() -> None:
    fed = federation()
    algorithm = fp.build("fedavg", fed)._replace(newcomer=None)
    env = fed.env(algorithm.hyper)
    state = algorithm.init(env, jax.random.key(0))
    with pytest.raises(ValueError, match="fedavg has no model for a client that it has never seen"):
        adapt(fed, algorithm, env, state, on_device(HELD), jax.random.key(0), STEPS)
