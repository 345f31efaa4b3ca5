"""The engine: local work against plain Python loops, draws, local training, evaluation sums, the rounds loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from common import CLASSES, FEATURES, SIZES, Case, Net, assert_close, build, federation, tiny_data

import fedjax_pfl as fp
from fedjax_pfl.data.clients import ClientData, Split, client_data, shard
from fedjax_pfl.engine import random
from fedjax_pfl.engine.clients import Work, measure, run_clients, sample_order
from fedjax_pfl.engine.federation import Federation
from fedjax_pfl.engine.rounds import one_round, rollout
from fedjax_pfl.engine.sharding import client_mesh
from fedjax_pfl.engine.simulate import run
from fedjax_pfl.engine.simulation import Simulation
from fedjax_pfl.experiment.config import configure
from fedjax_pfl.experiment.setup import build_federation

M, BATCH, EPOCHS = len(SIZES), 4, 3
KEY = jax.random.key(11)


def numbered_data(sizes: tuple[int, ...] = SIZES) -> ClientData:
    """The tiny clients, whose samples also carry their number."""
    data = tiny_data(sizes)
    number = np.arange(len(data.examples["y"]), dtype=np.int32)
    return jax.tree.map(jnp.asarray, dataclasses.replace(data, examples=data.examples | {"number": number}))


def rows_of(data: ClientData, i: int, split: str = "train") -> np.ndarray:
    part = data.split(split)
    return np.asarray(part.rows)[int(part.start[i]) : int(part.start[i] + part.count[i])]


# run_clients against a loop.


def begin(client: Any, row: Any, common: Any) -> Any:
    first = jnp.zeros(()) if row is None else row["w"]
    return first + common[0], (client.samples + client.id, {"batches": client.batches.astype(float)})


def step(carry: Any, batch: Any, t: jax.Array, key: jax.Array) -> Any:
    value, (total, seen) = carry
    total = total + jnp.where(batch["mask"], batch["x"][:, 0] * (t + 1), 0).sum()
    seen = 2 * seen["batches"] + batch["mask"].sum()
    return 0.9 * value + total + jax.random.uniform(key), (total, {"batches": seen})


def end_of(keep_row: bool, contribute: bool) -> Callable[..., Any]:
    def end(client: Any, carry: Any, row: Any) -> Any:
        value, (_, seen) = carry
        new = {"w": value + client.slot, "n": (row["n"] + 1).astype(jnp.int32)} if keep_row else None
        return new, ((value, seen["batches"] * jax.random.uniform(client.key)) if contribute else None)

    return end


def by_loop(data: ClientData, rows: Any, common: Any, who: np.ndarray, order: np.ndarray) -> tuple[list[Any], Any]:
    """The same work, one client after another, one batch after another, in NumPy."""
    x, new, sums = np.asarray(data.examples["x"])[:, 0], [], np.zeros(2)
    for i in range(M):
        row = None if rows is None else {name: np.asarray(leaf)[i] for name, leaf in rows.items()}
        if not who[i]:
            new.append(row)
            continue
        start, count = int(data.train.start[i]), int(data.train.count[i])
        own = jax.random.fold_in(random.stream(KEY, random.STEP), i)
        value, total, seen = (0.0 if row is None else row["w"]) + common, float(count + i), -(-count // BATCH)
        t = 0
        for epoch in range(EPOCHS):
            mine = order[epoch][start : start + count]
            for place in range(0, count, BATCH):
                batch = mine[place : place + BATCH]
                total += (x[batch] * (t + 1)).sum()
                value = 0.9 * value + total + float(jax.random.uniform(jax.random.fold_in(own, t)))
                seen = 2 * seen + len(batch)
                t += 1
        new.append(None if row is None else {"w": value + i, "n": row["n"] + 1})
        mine = jax.random.fold_in(random.stream(KEY, random.CLIENT), i)
        sums += value, seen * float(jax.random.uniform(mine))
    return new, sums


WHO = [None, (True, False, True, True, False), (False,) * M]


@pytest.mark.parametrize(("keep_row", "contribute"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize(("chunk", "most", "static"), [(1, None, False), (2, 3, False), (5, None, True)])
def test_run_clients_equals_a_loop(
    keep_row: bool, contribute: bool, chunk: int, most: int | None, static: bool, float64: None
) -> None:
    data = numbered_data()
    work = Work(BATCH, EPOCHS, chunk=chunk, most=most, differentiable=static)
    rows = {"w": jnp.linspace(0, 1, M), "n": jnp.arange(M, dtype=jnp.int32)} if keep_row else None
    end = end_of(keep_row, contribute)

    @jax.jit
    def run(who: Any) -> Any:
        common = (jnp.asarray(0.5),)
        return run_clients(begin, step, end, rows=rows, common=common, data=data, work=work, key=KEY, who=who)

    order = np.asarray(sample_order(data, work, KEY))
    for who in WHO[1:] if most else WHO:
        mask = np.ones(M, bool) if who is None else np.array(who)
        new, sums, reported = run(None if who is None else jnp.asarray(who))
        expected, total = by_loop(data, rows, 0.5, mask, order)
        np.testing.assert_array_equal(reported, mask)
        if keep_row:
            assert_close(new, {n: np.array([row[n] for row in expected]) for n in ("w", "n")}, 1e-12)
        else:
            assert new is None
        if contribute:
            np.testing.assert_allclose(sums, total, 1e-12)
        else:
            assert sums is None


def test_a_client_that_is_not_finite_keeps_its_row_and_contributes_nothing() -> None:
    data = numbered_data()

    def spoil(client: Any, carry: Any, row: Any) -> Any:
        bad = jnp.where(client.id == 1, jnp.nan, 1.0), jnp.where(client.id == 3, jnp.inf, client.samples)
        return bad

    rows, sums, reported = run_clients(
        lambda client, row, common: row, lambda carry, *_: carry, spoil, rows=jnp.zeros(M), common=None, data=data,
        work=Work(BATCH, chunk=2), key=KEY,
    )  # fmt: skip
    np.testing.assert_array_equal(reported, [True, False, True, False, True])
    np.testing.assert_array_equal(rows, [1, 0, 1, 0, 1])
    assert sums == SIZES[0] + SIZES[2] + SIZES[4]


# Minibatches and their order.


def test_every_sample_is_seen_once_an_epoch_and_no_other() -> None:
    data = numbered_data()
    total = len(data.examples["y"])
    batches = -(-jnp.asarray(SIZES) // BATCH)

    def count(carry: Any, batch: Any, t: jax.Array, key: jax.Array) -> Any:
        slot, seen = carry
        return slot, seen.at[t // batches[slot], batch["number"]].add(batch["mask"].astype(jnp.int32))

    seen = run_clients(
        lambda client, row, common: (client.slot, row), count, lambda client, carry, row: (carry[1], None),
        rows=jnp.zeros((M, EPOCHS, total), jnp.int32), common=None, data=data, key=KEY,
        work=Work(BATCH, EPOCHS, chunk=2),
    )[0]  # fmt: skip
    expected = np.zeros((M, EPOCHS, total), int)
    for i in range(M):
        expected[i][:, rows_of(data, i)] = 1
    np.testing.assert_array_equal(seen, expected)


def orders(data: ClientData, key: jax.Array, epochs: int = EPOCHS) -> list[np.ndarray]:
    """Of each client: its samples, epoch after epoch, in the order in which they are visited."""
    order = np.asarray(random.shuffled_rows(data.train, data.ids, key, epochs))
    return [order[:, int(s) : int(s + c)] for s, c in zip(data.train.start, data.train.count, strict=True)]


def test_a_clients_order_does_not_depend_on_the_other_clients() -> None:
    data = numbered_data()
    kept = [0, 1, 3, 4]
    fewer = client_data(data.examples, CLASSES, [rows_of(data, i) for i in kept])
    fewer = dataclasses.replace(fewer, ids=np.array(kept, np.int32), num_clients=M)
    for mine, i in zip(orders(fewer, KEY), kept, strict=True):
        np.testing.assert_array_equal(mine, orders(data, KEY)[i])


def test_orders_differ_between_epochs_rounds_and_clients() -> None:
    sizes = (12, 12, 12)
    data = numbered_data(sizes)
    places = []
    for round_ in range(3):
        for i, mine in enumerate(orders(data, random.stream(KEY, random.ROUND, round_))):
            places += [tuple(one - rows_of(data, i).min()) for one in mine]
    assert all(sorted(one) == list(range(12)) for one in places)
    assert len(set(places)) == len(places) == 3 * 3 * EPOCHS
    first = np.bincount([one[0] for one in places], minlength=12)
    assert first.max() < 10, "and the first sample is not always the same"


def test_without_shuffling_the_order_is_that_of_the_data() -> None:
    data = numbered_data()
    order = sample_order(data, Work(BATCH, 2, shuffle=False), KEY)
    np.testing.assert_array_equal(order, data.train.rows[None])


def local_model(case: str = "local", **options: Any) -> Any:
    fed = federation(**options)
    algorithm = fp.build(case, fed)
    state, info = jax.jit(lambda s: one_round(fed, algorithm, fed.env(algorithm.hyper), s, KEY, 0, 1))(
        algorithm.init(fed.env(algorithm.hyper), KEY)
    )
    return state.private, info


def test_a_client_with_fewer_samples_than_the_batch_steps_on_what_it_has(float64: None) -> None:
    large, _ = local_model(batch_size=10)
    for i in (1, 3):  # 3 and 5 samples
        small, _ = local_model(batch_size=SIZES[i])
        assert_close({n: v[i] for n, v in large.items()}, {n: v[i] for n, v in small.items()}, 1e-12)
        assert not np.allclose(large["params/head/bias"][2], small["params/head/bias"][2]), "twelve samples differ"


# Cohorts.


def cohorts(participation: fp.Participation, data: ClientData, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    draw = jax.jit(jax.vmap(lambda r: participation.draw(data, KEY, r, rounds)))
    cohort = draw(jnp.arange(rounds, dtype=jnp.int32))
    np.testing.assert_allclose(cohort.progress, np.arange(rounds) / rounds, 1e-6)
    return np.asarray(cohort.trains), np.asarray(cohort.reports)


@pytest.mark.parametrize(("ratio", "size"), [(1.0, 20), (0.5, 10), (0.26, 5), (0.01, 1)])
def test_cohorts_have_exactly_their_size(ratio: float, size: int) -> None:
    data = tiny_data((2,) * 20)
    trains, reports = cohorts(fp.Participation(ratio), data, 100)
    assert (trains.sum(1) == size).all()
    np.testing.assert_array_equal(trains, reports)
    share = trains.mean(0)
    assert abs(share - size / 20).max() < 5 * np.sqrt(0.25 / 100), "every client as often as the others"
    assert len({tuple(row) for row in trains}) > 10 or ratio in (1.0,)


def test_the_size_of_a_cohort_ranges_between_the_ratios() -> None:
    trains, _ = cohorts(fp.Participation(0.5, join_ratio_low=0.2), tiny_data((2,) * 20), 300)
    sizes = np.bincount(trains.sum(1), minlength=21)
    assert np.flatnonzero(sizes).tolist() == list(range(4, 11))
    assert sizes[4:11].min() > 300 / 7 / 2, "uniform"


def test_drop_outs_are_participants_and_as_frequent_as_asked() -> None:
    trains, reports = cohorts(fp.Participation(0.5, dropout=0.3), tiny_data((2,) * 20), 300)
    assert not (reports & ~trains).any()
    assert abs(reports.sum() / trains.sum() - 0.7) < 0.04
    np.testing.assert_array_equal(trains, cohorts(fp.Participation(0.5), tiny_data((2,) * 20), 300)[0])


def test_padding_never_takes_part_and_devices_do_not_change_the_cohort() -> None:
    one, many = tiny_data((2,) * 11), shard(tiny_data((2,) * 11), 8)
    for participation in (fp.Participation(0.5, 0.2, 0.3), fp.Participation()):
        a, b = (cohorts(participation, data, 20) for data in (one, many))
        real = np.asarray(many.ids) < 11
        for x, y in zip(a, b, strict=True):
            assert not y[:, ~real].any()
            np.testing.assert_array_equal(x, y[:, np.argsort(many.ids)[:11]])


# measure.


def test_measure_equals_loops_with_a_client_without_samples(float64: None) -> None:
    data = numbered_data()
    test = [rows_of(data, i, "test")[:n] for i, n in enumerate((4, 0, 1, 3, 4))]
    data = client_data(data.examples, CLASSES, [rows_of(data, i) for i in range(M)], None, test)
    data = jax.tree.map(jnp.asarray, data)

    def stat(delivered: jax.Array, batch: Any) -> Any:
        mask = batch["mask"]
        return {"n": mask.sum(), "x": jnp.where(mask[:, None], delivered * batch["x"], 0).sum(0)}

    who = np.array([True, True, False, True, True])
    for mask in (None, who):
        sums = measure(
            stat, lambda common, slot: common[slot], common=jnp.arange(1.0, M + 1), data=data,
            work=Work(3, 7, split="test", chunk=2), who=mask,
        )  # fmt: skip
        for i in range(M):
            rows = [] if mask is not None and not mask[i] else test[i]
            expected = sum(((i + 1) * np.asarray(data.examples["x"])[row] for row in rows), start=np.zeros(FEATURES))
            assert sums["n"][i] == len(rows)
            np.testing.assert_allclose(sums["x"][i], expected, 1e-12, 1e-12)


# Static scans, schedules, local optimisers.


STATIC = [Case("fedper"), Case("fedapa", {"eta": 0.2, "centring": "cosine"})]


@pytest.mark.parametrize("case", STATIC, ids=lambda case: case.id)
def test_differentiable_rounds_equal_dynamic_ones(case: Case, float64: None) -> None:
    states = []
    for static in (False, True):
        fed = federation(participation=fp.Participation(0.8, 0.2), differentiable=static)
        algorithm = build(case, fed)
        env = fed.env(algorithm.hyper)
        roll = jax.jit(lambda s, f=fed, a=algorithm, e=env: rollout(f, a, e, s, KEY, 3))
        states.append(roll(algorithm.init(env, KEY)))
    assert_close(*states, tolerance=1e-12)


def test_the_learning_rate_is_one_of_the_round_for_absent_clients_too(float64: None) -> None:
    model = fp.function_model(lambda key: jnp.zeros(1), lambda w, x: jnp.broadcast_to(w, (len(x), 1)))
    schedule = lambda round_: 0.5**round_  # noqa: E731
    fed = federation(lr_schedule=schedule, participation=fp.Participation(0.6), local_epochs=1)
    fed = fed.replace(model=model, loss=lambda scores, y: scores[:, 0])  # its gradient is 1 wherever it is taken
    result = fp.simulate(fed, fp.build("local", fed), rounds=5, eval_every=5)
    trained = np.asarray(result.info["trains"])[0]
    assert (trained.any(0) & ~trained.all(0)).any()
    steps = -(-np.array(SIZES) // fed.batch_size)
    expected = -fed.lr * (trained * (0.5 ** np.arange(5))[:, None]).sum(0) * steps
    (w,) = result.state.private.values()
    np.testing.assert_allclose(w[:, 0], expected, 1e-12)


@pytest.mark.parametrize("keep", [False, True])
def test_adam_as_local_optimiser_starts_anew_every_round_or_is_kept(keep: bool, float64: None) -> None:
    fed = federation(optimizer=optax.adam, keep_optimizer=keep, lr=0.1)
    algorithm = fp.build("local", fed)
    env = fed.env(algorithm.hyper)
    state = algorithm.init(env, KEY)
    clients = reference.Clients(*(np.asarray(fed.data.examples[n]) for n in ("x", "y")), list(SIZES), 0.1)
    expected = [{name: np.asarray(value[i]) for name, value in state.private.items()} for i in range(M)]
    advance = jax.jit(lambda s, r: one_round(fed, algorithm, env, s, KEY, r, 2)[0])
    optimizers = [reference.Adam(0.1) for _ in SIZES]
    for round_ in range(2):
        state = advance(state, jnp.int32(round_))
        mine = orders(fed.data, random.stream(KEY, random.ROUND, round_), fed.local_epochs)
        batches = [[one[k : k + 4] for one in order for k in range(0, len(one), 4)] for order in mine]
        optimizers = optimizers if keep else [reference.Adam(0.1) for _ in SIZES]
        expected = [one.train(clients, *its) for one, *its in zip(optimizers, expected, batches, strict=True)]
    assert_close(state.private, {name: np.stack([row[name] for row in expected]) for name in expected[0]}, 1e-9)


# Running statistics.


class Normed(nn.Module):
    """BatchNorm on the input, then a linear head: the statistics do not depend on the parameters."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5, name="bn")(x)
        return nn.Dense(CLASSES, name="head")(x)


BN_SIZES, MEAN = (4, 8, 12), "batch_stats/bn/mean"


def normed(statistics: str) -> tuple[Federation, np.ndarray]:
    """A federation whose batches are all full, and the features."""
    data = tiny_data(BN_SIZES)
    fed = federation(data, statistics=statistics, participation=fp.Participation(0.7), local_epochs=1)
    return fed.replace(model=fp.flax_model(Normed(), np.zeros((1, FEATURES)))), data.examples["x"]


def statistics_by_hand(fed: Federation, x: np.ndarray, policy: str, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Running means that each client would be evaluated with, and who ever trained."""
    mean = np.zeros((3, FEATURES))
    ever = np.zeros(3, bool)
    for round_ in range(rounds):
        cohort = fed.participation.draw(fed.data, jax.random.key(0), jnp.int32(round_), rounds)
        mine = orders(fed.data, random.stream(jax.random.key(0), random.ROUND, round_), 1)
        new = mean.copy()
        for i in np.flatnonzero(cohort.trains):
            new[i] = 0 if policy == "reset" else mean[i]
            for place in range(0, BN_SIZES[i], 4):
                new[i] = 0.5 * new[i] + 0.5 * x[mine[i][0][place : place + 4]].mean(0)
        if policy == "average":
            weight = np.array(BN_SIZES) * np.asarray(cohort.trains)
            new[:] = weight @ new / weight.sum()
        mean, ever = new, ever | np.asarray(cohort.trains)
    return mean, ever


@pytest.mark.parametrize("policy", ["average", "local", "reset"])
def test_policies_on_running_statistics(policy: str, float64: None) -> None:
    fed, x = normed(policy)
    algorithm = fp.build("fedavg", fed)
    result = fp.simulate(fed, algorithm, rounds=2, eval_every=2)
    mean, ever = statistics_by_hand(fed, x, policy, 2)
    assert not np.asarray(result.info["trains"]).all()
    assert ever.sum() >= 2
    env, state = fed.env(algorithm.hyper), result.state
    for deliver in (algorithm.received, algorithm.personal):
        found = np.stack([deliver(env, state, i)[MEAN] for i in range(3)])
        np.testing.assert_allclose(found, mean, 1e-10, 1e-12)
    shared = policy == "average"
    assert (MEAN in state.shared) == shared
    assert (algorithm.shared is not None) == shared, "with private statistics there is no global model"
    parameters = 2 * FEATURES + FEATURES * CLASSES + CLASSES
    assert algorithm.floats == ((parameters + 2 * FEATURES,) * 2 if shared else (parameters,) * 2)


def test_bodies_mix_statistics_but_weights_learn_from_parameters_only(float64: None) -> None:
    fed, _ = normed("average")
    fed = fed.replace(participation=fp.Participation())
    A = jnp.array([[0.5, 0.2, 0.3], [0.3, 0.4, 0.3], [0.2, 0.2, 0.6]])
    for variant in ("descent", "released"):
        algorithm = fp.build("fedapa", fed, eta=0.02, variant=variant)
        env = fed.env(algorithm.hyper)
        state = algorithm.init(env, KEY)
        theta = {n: v + 0.3 * jax.random.normal(jax.random.fold_in(KEY, k), v.shape) ** 2 + 1.0
                 for k, (n, v) in enumerate(state.theta.items())}  # fmt: skip
        new, _ = one_round(fed, algorithm, env, state._replace(theta=theta, A=A), KEY, 0, 1)
        g = np.zeros((3, 3))
        for name in ("params/bn/scale", "params/bn/bias"):
            old, back = np.asarray(theta[name]), np.asarray(new.theta[name])
            g += (back - A @ old) @ old.T
        if variant == "released":  # the first client sees what it sees when all go at once
            np.testing.assert_allclose(new.velocity[0], -(0.9**2) * g[0], 1e-10)
            continue
        expected = np.clip(A + 0.02 * g, 0, 1)
        np.fill_diagonal(expected, 0.5)
        np.testing.assert_allclose(new.A, expected / expected.sum(1, keepdims=True), 1e-10)
        served = algorithm.serve(env, new)
        received = np.stack([algorithm.received(env, served, i)[MEAN] for i in range(3)])
        np.testing.assert_allclose(received, np.asarray(new.A) @ np.asarray(new.theta[MEAN]), 1e-10)


# The rounds loop.


def test_a_sweep_of_hyper_parameters_equals_separate_runs(float64: None) -> None:
    fed = federation(participation=fp.Participation(0.8))
    algorithm = fp.build("fedprox", fed, mu=0.2)
    rates = [0.05, 0.3, 0.8]
    sweep = fp.simulate(fed, algorithm, rounds=3, eval_every=3, seed=4, seeds=3, hyper={"lr": np.array(rates)})
    single = Simulation(fed, algorithm, rounds=3, eval_every=3, seed=4)
    for number, rate in enumerate(rates):
        single.env, single.key = fed.env(dict(algorithm.hyper) | {"lr": rate}), jax.random.key(4 + number)
        alone = run(single)
        assert_close(jax.tree.map(lambda a, n=number: a[n], sweep.state), alone.state)
        assert_close(jax.tree.map(lambda a, n=number: a[n], sweep.records[-1].scores),
                     jax.tree.map(lambda a: a[0], alone.records[-1].scores))  # fmt: skip
    assert single.traces == 1, "other values of hyper-parameters and seeds compile nothing"
    with pytest.raises(ValueError, match="no hyper-parameter 'eta'"):
        Simulation(fed, algorithm, rounds=1, hyper={"eta": 0.1})


def test_traces_do_not_grow_with_clients_rounds_or_samples() -> None:
    def traces(sizes: tuple[int, ...], rounds: int) -> int:
        fed, calls = federation(tiny_data(sizes)), []
        apply = fed.model.apply
        counting = lambda *args, **options: calls.append(1) or apply(*args, **options)  # noqa: E731
        fed = fed.replace(model=dataclasses.replace(fed.model, apply=counting))
        algorithm = fp.build("fedavg", fed)
        jax.make_jaxpr(lambda s: rollout(fed, algorithm, fed.env(algorithm.hyper), s, KEY, rounds))(
            algorithm.init(fed.env(algorithm.hyper), KEY)
        )
        return len(calls)

    assert traces((3, 5), 1) == traces((3, 50, 7, 9, 11, 20), 6) <= 4


def test_the_state_is_given_up_and_memory_does_not_grow_with_rounds() -> None:
    fed = federation(participation=fp.Participation(0.8))
    simulation = Simulation(fed, fp.build("fedper", fed), rounds=12, eval_every=2)
    state = simulation.init()
    new, _ = simulation.advance(state, 0, 2)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new))
    live: list[int] = []
    run(simulation, callbacks=[lambda progress: live.append(sum(a.nbytes for a in jax.live_arrays()))])
    assert len(live) == 7
    assert live[1:] == live[1:2] * 6
    longer = Simulation(fed, fp.build("fedper", fed), rounds=1200, eval_every=2)
    longer.advance(longer.init(), 0, 2)
    assert longer.memory() == simulation.memory()


def test_ranges_in_any_order_and_with_gaps_are_shuffled_in_place() -> None:
    start, count = np.array([9, 2, 0], np.int32), np.array([3, 5, 0], np.int32)
    split = Split(np.arange(13, dtype=np.int32), start, count)
    order = np.asarray(random.shuffled_rows(split, np.arange(3, dtype=np.int32), KEY, EPOCHS))
    for s, c in zip(start, count, strict=True):
        np.testing.assert_array_equal(np.sort(order[:, s : s + c]), np.tile(np.arange(s, s + c), (EPOCHS, 1)))
    assert len({tuple(one) for one in order}) == EPOCHS


def test_data_that_is_not_dealt_to_the_devices_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dealt to 2 device\(s\) and the mesh has 1"):
        federation(shard(tiny_data(), 2))
    with pytest.raises(ValueError, match=r"dealt to 1 device\(s\) and the mesh has 8"):
        federation(tiny_data(), mesh=client_mesh(8))
    with pytest.raises(ValueError, match="scale must not be 0"):
        federation(scale=np.array([1.0, 0.0]))


def test_a_hyper_parameter_has_one_value_or_one_a_seed() -> None:
    fed = federation()
    algorithm = build(Case("fedavg"), fed)
    with pytest.raises(ValueError, match=r"lr needs one value or 1 .* found shape \(4,\)"):
        Simulation(fed, algorithm, rounds=1, hyper={"lr": np.full(4, 0.1)})
    with pytest.raises(ValueError, match=r"lr needs one value or 2 .* found shape \(3,\)"):
        Simulation(fed, algorithm, rounds=1, seeds=2, hyper={"lr": np.full(3, 0.1)})
    assert Simulation(fed, algorithm, rounds=1, hyper={"lr": [0.1]}).env.hyper["lr"].shape == ()


def test_a_model_of_other_classes_is_refused() -> None:
    wrong = fp.flax_model(Net(classes=CLASSES + 1), np.zeros((1, FEATURES)))
    fed = federation().replace(model=wrong)
    algorithm = fp.build("fedavg", fed)
    with pytest.raises(ValueError, match=rf"scores of shape \(1, {CLASSES + 1}\).*{CLASSES} classes"):
        fp.simulate(fed, algorithm, rounds=1)


def test_going_on_needs_the_state() -> None:
    fed = federation()
    with pytest.raises(ValueError, match="cannot go on from round 2 of 4"):
        fp.simulate(fed, fp.build("fedavg", fed), rounds=4, first=2)


# Clients at a time.


def test_seeds_share_the_models_that_train_at_a_time() -> None:
    """Four small models on a CPU, whichever they are, and one at least."""
    chunks = [federation(client_chunk=None, seeds_at_once=seeds).chunk for seeds in (1, 2, 3, 5)]
    assert chunks == [4, 2, 1, 1]
    assert federation(client_chunk=3, seeds_at_once=5).chunk == 3
    with pytest.raises(ValueError, match="seeds at once must be at least 1, found 0"):
        federation(seeds_at_once=0)
    assert build_federation(configure("local", clients=2, seeds=3))[0].seeds_at_once == 3
