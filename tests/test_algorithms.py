"""The common test: what every method must pass. A new method is one more line in ``common.CASES``."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import CASES, SIZES, Case, assert_close, assert_equal, build, federation, tiny_data

import fedjax_pfl as fp
from fedjax_pfl.data.clients import shard
from fedjax_pfl.engine.rounds import one_round, rollout
from fedjax_pfl.engine.sharding import client_mesh, place_data
from fedjax_pfl.engine.simulate import run
from fedjax_pfl.engine.simulation import Simulation
from fedjax_pfl.evaluation import scores_of

every_method = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
HALF = fp.Participation(0.5, 0.2)


def finite(tree) -> bool:
    return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))


@every_method
def test_runs_traces_once_is_deterministic_and_resumes_bit_for_bit(case: Case) -> None:
    fed = case.federation(participation=HALF)
    simulation = Simulation(fed, build(case, fed), rounds=7, eval_every=3)
    whole = run(simulation)
    assert simulation.traces == 1, "a remainder of rounds must not compile again"
    assert finite(whole.state)
    assert [record.round for record in whole.records] == [0, 3, 6, 7]
    for scores in whole.records[-1].scores["test"].values():
        assert scores.accuracy.shape == (1, len(SIZES)), "all clients are evaluated, sampled or not"
        assert finite(scores)
    assert whole.info["loss"].shape == (1, 7)
    assert_equal(whole.state, run(simulation).state)

    halfway = run(simulation, callbacks=[keep := Keep(3)])
    assert_equal(halfway.state, whole.state)
    resumed = run(simulation, state=jax.tree.map(jnp.asarray, keep.state), first=3)
    assert_equal(resumed.state, whole.state)
    assert_equal(resumed.records[-1].scores, whole.records[-1].scores)
    assert simulation.traces == 1


class Keep:
    """A callback that copies the state after some round to the host."""

    def __init__(self, round_: int) -> None:
        self.round = round_

    def __call__(self, progress: fp.Progress) -> None:
        if progress.round == self.round:
            self.state = jax.tree.map(np.array, progress.state)


ELEVEN = (7, 3, 12, 5, 10, 4, 9, 6, 2, 8, 5)  # clients, on eight devices


@functools.cache
def alone(number: int) -> fp.Result:
    """A case with one seed, on one device, in chunks of five clients and evaluated every third round. (With a seed in
    which DDPG sees states of all zeros, its ReLUs at 0 would turn rounding into another direction of descent.)"""
    fed = CASES[number].federation(tiny_data(ELEVEN), participation=HALF, client_chunk=5)
    return fp.simulate(fed, build(CASES[number], fed), rounds=7, eval_every=3, seed=3)


@every_method
def test_seeds_chunks_and_evaluation_interval_change_nothing(case: Case, float64: None) -> None:
    fed = case.federation(tiny_data(ELEVEN), participation=HALF)
    both = fp.simulate(fed, build(case, fed), rounds=7, eval_every=7, seed=2, seeds=2)
    one = alone(CASES.index(case))
    second = lambda result: jax.tree.map(lambda a: a[1], result)  # noqa: E731
    assert_close(second(both.state), one.state)
    assert_close(second(both.records[-1].scores), jax.tree.map(lambda a: a[0], one.records[-1].scores))
    np.testing.assert_array_equal(both.info["trains"][1], one.info["trains"][0])
    assert not np.array_equal(both.info["trains"][0], both.info["trains"][1])


@every_method
def test_eight_devices_equal_one(case: Case, float64: None) -> None:
    if case.one_device:
        with pytest.raises(ValueError, match="one device"):
            build(case, case.federation(shard(tiny_data(), 8), mesh=client_mesh(8)))
        return
    mesh = client_mesh(8)
    many = case.federation(place_data(shard(tiny_data(ELEVEN), 8), mesh), participation=HALF, mesh=mesh)
    a = alone(CASES.index(case))
    b = fp.simulate(many, build(case, many), rounds=7, eval_every=7, seed=3)
    assert_close(a.records[-1].scores, b.records[-1].scores, 1e-9)
    np.testing.assert_array_equal(a.info["reported"], b.info["reported"])
    np.testing.assert_allclose(a.info["loss"], b.info["loss"], 1e-10)
    for name in (name for name, values in a.info.items() if values.shape == (1, 7)):
        np.testing.assert_allclose(a.info[name], b.info[name], 1e-7, 1e-9, err_msg=name)
    for field in many_rows(b.state, build(case, many)):
        assert len(field.sharding.device_set) == 8, "client rows live on all devices"
        assert field.addressable_shards[0].data.shape[0] * 8 == field.shape[0]


def many_rows(state, algorithm: fp.Algorithm) -> list[jax.Array]:
    return jax.tree.leaves([value for name, value in zip(state._fields, state, strict=True) if name in algorithm.rows])


@every_method
def test_without_learning_received_equals_personal(case: Case) -> None:
    fed = case.federation(lr=0.0, participation=HALF)
    scores = fp.simulate(fed, build(case, fed), rounds=7, eval_every=3).records[-1].scores["test"]
    assert_close(scores["received"], scores["personal"], 1e-5)


@every_method
def test_nobody_reports_leaves_the_state(case: Case) -> None:
    fed = case.federation()
    algorithm = build(case, fed)
    env = fed.env(algorithm.hyper)
    state = algorithm.init(env, jax.random.key(0))
    cohort = fp.everyone(env.data)
    new, info = jax.jit(algorithm.round)(env, state, cohort._replace(reports=~cohort.reports), jax.random.key(1))
    assert_equal(new, state)
    assert not info["reported"].any()
    for name in ("loss", "loss_shared", "update", "mean_update"):
        assert np.isnan(info.get(name, np.nan)), "an absent measurement is NaN, never 0"


@every_method
def test_a_client_whose_update_is_not_finite_keeps_its_row(case: Case) -> None:
    fed = case.federation(lr=1e38, participation=HALF)
    simulation = Simulation(fed, build(case, fed), rounds=7, eval_every=3)
    result = run(simulation, on_nonfinite="continue")
    assert result.failures
    assert finite(result.state)
    with pytest.raises(fp.NonFiniteError, match=r"client \d+ in round 0") as caught:
        run(simulation)
    assert set(caught.value.failures) <= set(result.failures)


@pytest.mark.parametrize(
    ("case", "rounds"),  # three rounds hold one of their own; one alone is for whoever looks for a fault
    [pytest.param(c, 3, id=c.id) for c in CASES if c.differentiable]
    + [pytest.param(c, 1, id=f"{c.id}-once") for c in CASES if c.name == "fedavg"],
)
def test_gradient_through_rounds_agrees_with_central_differences(case: Case, rounds: int, float64: None) -> None:
    fed = case.federation(participation=fp.Participation(0.8), differentiable=True)
    algorithm = build(case, fed)
    env, key = fed.env(algorithm.hyper), jax.random.key(5)
    start = perturbed(algorithm.init(env, key), env)
    deliver = algorithm.personal if case.name in ("ditto", "fedavg_ft") else algorithm.received

    def loss(point):
        hyper, state = point
        changed = env._replace(hyper=env.hyper | hyper)
        state = rollout(fed, algorithm, changed, state, key, rounds)[0]
        return scores_of(fed, algorithm, changed, algorithm.serve(changed, state), deliver, "validation").loss.mean()

    point = ({name: env.hyper[name] for name in case.differentiable}, start)
    loss_and_gradient = jax.jit(jax.value_and_grad(loss, allow_int=True))  # one program for both sides
    gradient = loss_and_gradient(point)[1]
    for seed, part in enumerate([0, 1, 1]):
        step = jax.tree.map(jnp.zeros_like, point)
        step = tuple(direction(leaf, seed) if i == part else step[i] for i, leaf in enumerate(point))
        ahead, behind = (
            jax.tree.map(lambda p, d, h=h: p + (h * d).astype(p.dtype), point, step) for h in (1e-5, -1e-5)
        )
        numeric = (loss_and_gradient(ahead)[0] - loss_and_gradient(behind)[0]) / 2e-5
        both = zip(jax.tree.leaves(gradient), jax.tree.leaves(step), strict=True)
        exact = sum(jnp.vdot(g, d) for g, d in both if is_float(d))
        assert abs(exact) > 1e-6, "a gradient that is nothing proves nothing"
        np.testing.assert_allclose(exact, numeric, rtol=1e-5, atol=1e-8)


def perturbed(state, env):
    """Away from clip ties: clients differ, and weights A lie strictly inside (0, 1)."""
    keys = iter(jax.random.split(jax.random.key(9), 99))
    moved = jax.tree.map(lambda a: a + 0.2 * jax.random.normal(next(keys), a.shape) if is_float(a) else a, state)
    if hasattr(state, "A"):
        A = 0.3 + 0.4 * jax.random.uniform(next(keys), state.A.shape)
        moved = moved._replace(A=A / A.sum(1, keepdims=True))
    return moved


def direction(tree, seed: int):
    keys = iter(jax.random.split(jax.random.key(seed), 99))
    return jax.tree.map(lambda a: jax.random.normal(next(keys), a.shape) if is_float(a) else jnp.zeros_like(a), tree)


def is_float(leaf) -> bool:
    """Whether a leaf of a state can be moved: clusters and counts, whole numbers, stay as they are."""
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def test_the_registry_is_the_files_and_every_method_has_a_case() -> None:
    assert {case.name for case in CASES} == set(fp.registry())
    for entry in fp.registry().values():
        assert entry.options.__doc__
        assert entry.title


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'fedapa'"):
        fp.build("fedappa", federation())
    with pytest.raises(ValueError, match="did you mean 'eta'"):
        fp.build("fedapa", federation(), etaa=1.0)


def test_a_round_is_pure_under_jit(float64: None) -> None:
    fed = federation()
    algorithm = fp.build("fedavg", fed)
    env, key = fed.env(algorithm.hyper), jax.random.key(0)
    state = algorithm.init(env, key)
    eager = one_round(fed, algorithm, env, state, key, 0, 3)[0]
    assert_close(eager, jax.jit(lambda s: one_round(fed, algorithm, env, s, key, 0, 3)[0])(state))


@pytest.mark.parametrize(
    ("name", "option"), [("fedapa", {"eta": np.nan}), ("fedapa", {"eta": -1.0}), ("fedprox", {"mu": np.nan})]
)
def test_a_numeric_option_out_of_range_is_refused(name: str, option: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{min(option)}"):
        fp.build(name, federation(), **option)
