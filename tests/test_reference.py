"""Every method over several rounds equals its NumPy reference; and the limits in which methods coincide."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from common import CLASSES, SIZES, assert_close, federation
from reference import Draw, Params

import fedjax_pfl as fp
from fedjax_pfl.algorithms._mixing import weight_diagnostics
from fedjax_pfl.data.clients import client_data
from fedjax_pfl.engine import random
from fedjax_pfl.engine.federation import Federation
from fedjax_pfl.engine.rounds import one_round
from fedjax_pfl.models.model import partition
from fedjax_pfl.models.registry import build_model

pytestmark = pytest.mark.usefixtures("float64")
M, LR, ROUNDS = len(SIZES), 0.3, 4
ROOT = 3  # in its rounds clients are absent and clients drop out
PARTIAL = fp.Participation(0.8, 0.3)


def schedule(round_: Any) -> Any:
    return 1.0 / (1.0 + 0.5 * round_)


class Program(NamedTuple):
    """A method in a federation with one compiled function: a round, and all that clients then hold."""

    fed: Federation
    algorithm: fp.Algorithm
    start: Callable[[], Any]
    advance: Callable[..., Any]

    def env(self, **hyper: float) -> fp.Env:
        return self.fed.env(dict(self.algorithm.hyper) | hyper)


@functools.cache
def program(
    method: str, optimizer: Callable[..., Any] = optax.sgd, own_heads: bool = False, keep: bool = False, **options: Any
) -> Program:  # fmt: skip
    fed = federation(participation=PARTIAL, optimizer=optimizer, keep_optimizer=keep, lr=LR, lr_schedule=schedule)
    if own_heads:  # as the model's own property, and not the method's
        fed = fed.replace(model=dataclasses.replace(fed.model, private=fed.model.head))
    algorithm = fp.build(method, fed, **options)
    slots = jnp.arange(M)

    def advance(env: fp.Env, state: Any, key: jax.Array, round_: jax.Array) -> Any:
        state, info = one_round(fed, algorithm, env, state, key, round_, ROUNDS)
        served = algorithm.serve(env, state)
        received = jax.vmap(lambda i: algorithm.received(env, served, i))(slots)
        alone = algorithm.received(env, state, 2)  # without ``serve``
        return state, info, received, alone, jax.vmap(lambda i: algorithm.personal(env, state, i))(slots)

    start = functools.partial(jax.jit(algorithm.init), fed.env(algorithm.hyper), jax.random.key(7))
    return Program(fed, algorithm, start, jax.jit(advance))


def batches_of(fed: Federation, key: jax.Array, epochs: int) -> list[list[list[int]]]:
    """The batches of every client in the order in which the package draws them."""
    split, size = fed.data.train, fed.batch_size
    orders = np.asarray(random.shuffled_rows(split, fed.data.ids, key, epochs))
    ranges = [slice(start, start + count) for start, count in zip(split.start, split.count, strict=True)]
    return [[list(o[r][k : k + size]) for o in orders for k in range(0, len(o[r]), size)] for r in ranges]


def draw(fed: Federation, key: jax.Array, round_: int) -> Draw:
    cohort = fed.participation.draw(fed.data, key, jnp.int32(round_), ROUNDS)
    reports = [int(i) for i in np.flatnonzero(cohort.trains & cohort.reports)]
    return Draw(round_, reports, batches_of(fed, random.stream(key, random.ROUND, round_), fed.local_epochs))


def clients_of(fed: Federation, **options: float) -> reference.Clients:
    x, y = (np.asarray(fed.data.examples[name]) for name in ("x", "y"))
    assert x.dtype == np.float64
    return reference.Clients(x, y, list(SIZES), LR, schedule, **options)


def initial(fed: Federation) -> Params:
    return {name: np.asarray(value) for name, value in fed.model.init(jax.random.key(7)).items()}


def stacked(rows: list[Params]) -> Params:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def follow(
    case: Program, expected: Any, state_of: Callable[[Any, Any], None], tolerance: float = 1e-9, start: Any = None
) -> Any:
    """Run package and reference side by side, all compared after every round: the last (state, info)."""
    env, key, state = case.env(), jax.random.key(ROOT), case.start() if start is None else start
    for round_ in range(ROUNDS):
        drawn = draw(case.fed, key, round_)
        state, info, received, alone, personal = case.advance(env, state, key, jnp.int32(round_))
        expected.round(drawn)
        state_of(state, expected)
        total, samples = expected.clients.seen
        np.testing.assert_allclose(info["loss"], total / samples, tolerance)
        close = functools.partial(assert_close, tolerance=tolerance)
        close(received, stacked([expected.received(i) for i in range(M)]))
        close(alone, expected.received(2))
        close(personal, stacked([expected.personal(i) for i in range(M)]))
        assert np.flatnonzero(info["reported"]).tolist() == drawn.reports
    return state, info


def averaged_state(tolerance: float = 1e-9) -> Callable[[Any, Any], None]:
    def compare(state: Any, expected: reference.Averaging) -> None:
        assert_close(state.shared, expected.shared, tolerance)
        assert_close(state.private or {}, stacked(expected.private), tolerance)

    return compare


def mixed_state(tolerance: float = 1e-9) -> Callable[[Any, Any], None]:
    def compare(state: Any, expected: Any) -> None:
        assert_close(state.theta, stacked(expected.theta), tolerance)
        assert_close(state.phi, stacked(expected.phi), tolerance)
        if hasattr(state, "A"):
            np.testing.assert_allclose(state.A, expected.A, 0, tolerance)

    return compare


def test_the_draws_exercise_absence_and_dropout() -> None:
    fed = program("fedavg").fed
    cohorts = [PARTIAL.draw(fed.data, jax.random.key(ROOT), jnp.int32(r), ROUNDS) for r in range(ROUNDS)]
    sizes = [(int(c.trains.sum()), int((c.trains & c.reports).sum())) for c in cohorts]
    assert all(trains == 4 and reports >= 1 for trains, reports in sizes)
    assert len({reports for _, reports in sizes}) > 1, "some rounds have drop-outs, and not the same number"


def momentum_and_decay(lr: Any) -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(0.02), optax.sgd(lr, momentum=0.9))


AVERAGING = [
    ("fedavg", {}, lambda name: False, 0.0),
    ("fedprox", {"mu": 0.7}, lambda name: False, 0.7),
    ("fedprox", {"mu": 0.7, "own_heads": True}, lambda name: "/head/" in name, 0.7),
    ("fedper", {}, lambda name: "/head/" in name, 0.0),
    ("local", {}, lambda name: True, 0.0),
]


@pytest.mark.parametrize(("method", "options", "stays", "mu"), AVERAGING)
def test_averaging(method: str, options: dict, stays: Callable, mu: float) -> None:
    case = program(method, **options)
    private, shared = partition(initial(case.fed), stays)
    follow(case, reference.Averaging(clients_of(case.fed), shared, [private] * M, mu), averaged_state())


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("method", "stays"), [("fedavg", lambda name: False), ("fedper", lambda name: "/head/" in name)]
)
def test_momentum_starts_anew_every_round_or_is_kept(method: str, stays: Callable, keep: bool) -> None:
    case = program(method, momentum_and_decay, keep=keep)
    clients = clients_of(case.fed, momentum=0.9, weight_decay=0.02)
    private, shared = partition(initial(case.fed), stays)
    expected = reference.Averaging(clients, shared, [private] * M, velocities={} if keep else None)
    follow(case, expected, averaged_state())


def test_fine_tuning() -> None:
    case = program("fedavg_ft", epochs=3)
    key = random.stream(jax.random.key(0), random.EVALUATION)
    tuning = Draw(0, [], batches_of(case.fed, key, 3))
    expected = reference.FineTuned(clients_of(case.fed), initial(case.fed), [{}] * M, tuning=tuning)
    follow(case, expected, averaged_state())


def head_of(name: str) -> bool:
    return "/head/" in name


@pytest.mark.parametrize("own_heads", [False, True])
def test_ditto(own_heads: bool) -> None:
    case = program("ditto", lam=0.7, own_heads=own_heads)
    start = initial(case.fed)
    private, shared = partition(start, lambda name: own_heads and "/head/" in name)
    averaged = averaged_state()

    def state_of(state: Any, expected: reference.Ditto) -> None:
        averaged(state, expected)
        assert_close(state.v, stacked(expected.v), 1e-9)

    expected = reference.Ditto(clients_of(case.fed), shared, [private] * M, v=[start] * M, lam=0.7)
    state, info = follow(case, expected, state_of)
    assert np.abs(state.v[reference.KERNEL_1] - state.shared[reference.KERNEL_1]).max() > 0.01
    assert info["loss"] != info["loss_shared"]


def test_fedrep() -> None:
    case = program("fedrep", head_epochs=3)
    private, shared = partition(initial(case.fed), head_of)
    keys = [jax.random.fold_in(random.stream(jax.random.key(ROOT), random.ROUND, r), 1) for r in range(ROUNDS)]
    heads = [batches_of(case.fed, key, 3) for key in keys]
    expected = reference.FedRep(clients_of(case.fed), shared, [private] * M, heads=heads)

    def state_of(state: Any, expected: reference.FedRep) -> None:
        assert_close((state.theta, state.phi), (expected.shared, stacked(expected.private)), 1e-9)

    follow(case, expected, state_of)


@pytest.mark.parametrize("clip", [0.4, 10.0])
def test_fedkd(clip: float) -> None:
    case = program("fedkd", energy_first=0.6, energy_last=0.9, clip=clip)
    start, energy = initial(case.fed), lambda round_: 0.6 + 0.3 * round_ / ROUNDS
    expected = reference.FedKD(clients_of(case.fed), start, [start] * M, [np.eye(4)] * M, energy, clip)

    def state_of(state: Any, expected: reference.FedKD) -> None:
        assert_close(state.shared, expected.shared, 1e-9)
        assert_close((state.teacher, state.W), (stacked(expected.teacher), np.stack(expected.W)), 1e-9)

    _, info = follow(case, expected, state_of)
    np.testing.assert_allclose([info["floats_up"], info["floats_down"]], [expected.up, expected.down])
    assert expected.up < case.algorithm.floats[0]


@pytest.mark.parametrize("clip", [0.3, 50.0])
@pytest.mark.parametrize(("at_once", "private_head"), [(False, False), (False, True), (True, False), (True, True)])
def test_pfedhn(at_once: bool, private_head: bool, clip: float) -> None:
    rates = {"hyper_lr": 0.05, "hyper_momentum": 0.8, "hyper_decay": 0.02, "hyper_clip": clip}
    case = program("pfedhn", at_once=at_once, private_head=private_head, hyper_width=5, **rates)
    private, made = partition(initial(case.fed), lambda name: private_head and head_of(name))
    rng, state = np.random.default_rng(0), case.start()
    flat = {
        "/".join(key.key for key in path[1:]): path for path, _ in jax.tree_util.tree_leaves_with_path(state.phi[0])
    }
    phi = jax.tree.map(lambda leaf: leaf + 0.2 * rng.normal(size=leaf.shape), state.phi[0])  # no kernel is zero

    def named(tree: Any) -> Params:
        leaves = (np.asarray(leaf) for leaf in jax.tree.leaves(tree))
        return {
            name.replace("params.", "params/").replace(".", "/"): leaf for name, leaf in zip(flat, leaves, strict=True)
        }

    expected = reference.PFedHN(
        clients_of(case.fed), named(phi), list(np.asarray(state.v[0])), [private] * M,
        {name: value.shape for name, value in made.items()}, tuple(rates.values()), at_once,
    )  # fmt: skip

    def state_of(state: Any, expected: reference.PFedHN) -> None:
        assert_close((named(state.phi[0]), named(state.phi[1])), (expected.phi, expected.velocity), 1e-9)
        assert_close(state.v, (np.stack(expected.v), np.stack(expected.v_velocity)), 1e-9)
        assert_close(state.private or {}, stacked(expected.private), 1e-9)

    follow(case, expected, state_of, start=state._replace(phi=(phi, state.phi[1])))


def mixing(kind: Callable[..., Any], case: Program, A: np.ndarray, momentum: float = 0.0, **options: Any) -> Any:
    phi, theta = partition(initial(case.fed), lambda name: "/head/" in name)
    return kind(clients_of(case.fed, momentum=momentum), [theta] * M, [phi] * M, A, **options)


def test_fixed_mixing() -> None:
    case = program("fixed_mixing", self_weight=0.4)
    A = np.full((M, M), 0.6 / (M - 1))
    np.fill_diagonal(A, 0.4)
    follow(case, mixing(reference.FixedMixing, case, A), mixed_state())


FEDAPA = {
    "descent": ({"eta": 0.4}, {}),
    "printed": ({"eta": 0.4, "variant": "printed"}, {"sign": -1.0}),
    "self_weight_and_floor": ({"eta": 0.4, "self_weight": 0.8, "floor": 0.05}, {}),
    "row": ({"eta": 0.4, "centring": "row"}, {}),
    "cosine": ({"eta": 0.1, "centring": "cosine"}, {}),
}


def scattered(case: Program, expected: reference.Mixing) -> Any:
    """Both start again with unequal bodies and weights that are neither 0 nor 1."""
    rng = np.random.default_rng(5)
    expected.theta = [{n: v + 0.5 * rng.normal(size=v.shape) for n, v in body.items()} for body in expected.theta]
    A = rng.uniform(0.1, 1.0, (M, M))
    expected.A = A / A.sum(1, keepdims=True)
    theta = {name: jnp.asarray(value) for name, value in stacked(expected.theta).items()}
    return case.start()._replace(theta=theta, A=jnp.asarray(expected.A))


@pytest.mark.parametrize("begin", ["identity", "scattered"])
@pytest.mark.parametrize("name", FEDAPA)
def test_fedapa(name: str, begin: str) -> None:
    options, own = FEDAPA[name]
    case = program("fedapa", **options)
    settings = {key: value for key, value in options.items() if key != "variant"} | own
    expected = mixing(reference.FedAPA, case, np.eye(M), **settings)
    start = scattered(case, expected) if begin == "scattered" else None
    # Distances come from inner products, so those of equal bodies are zero to the root of the rounding only.
    tolerance = 1e-8 if (name, begin) == ("cosine", "identity") else 1e-9
    state, info = follow(case, expected, mixed_state(tolerance), tolerance, start)
    peers = expected.A[~np.eye(M, dtype=bool)]
    if begin == "scattered":
        assert ((peers > 0.01) & (peers < 0.99)).sum() > M
        assert (peers < 1e-12).any() == ("floor" not in options), "the clip was met"
    assert_diagnostics(info, np.asarray(state.A), case.fed)


def assert_diagnostics(info: dict[str, Any], A: np.ndarray, fed: Federation) -> None:
    clients = range(len(A))
    pairs = [(i, j) for i in clients for j in clients if i != j]
    np.testing.assert_allclose(info["self_weight"], sum(A[i, i] for i in clients) / len(A), 1e-6)
    np.testing.assert_allclose(info["share_at_zero"], sum(A[p] < 1e-6 for p in pairs) / len(pairs), 1e-6)
    labels = [np.asarray(fed.data.examples["y"])[rows] for rows in client_rows(fed)]
    histogram = np.array([[(mine == c).sum() for c in range(CLASSES)] for mine in labels])
    unit = [row / np.linalg.norm(row) for row in histogram]
    alike = [A[i, j] for i, j in pairs if unit[i] @ unit[j] > 0.5]
    unlike = [A[i, j] for i, j in pairs if unit[i] @ unit[j] <= 0.05]
    expected = np.mean(alike) / np.mean(unlike) if alike and unlike else np.nan
    np.testing.assert_allclose(info["selectivity"], expected, 1e-6)


def client_rows(fed: Federation) -> list[np.ndarray]:
    train = fed.data.train
    return [np.asarray(train.rows)[s : s + c] for s, c in zip(train.start, train.count, strict=True)]


def test_selectivity_compares_clients_that_share_labels_with_those_that_do_not() -> None:
    y = np.array([0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 0])  # cosines from 0 to 0.9, one of them 0.55
    rows = np.split(np.arange(len(y)), [3, 8, 10, 12])
    fed = federation(client_data({"x": np.zeros((len(y), 6)), "y": y}, CLASSES, rows))
    A = np.random.default_rng(0).uniform(size=(5, 5)) * (np.arange(5) != 1)
    info = weight_diagnostics(fed.env({}), jnp.asarray(A))
    assert_diagnostics(info, A, fed)
    assert np.isfinite(info["selectivity"])


def heavy_ball(lr: Any) -> optax.GradientTransformation:
    return optax.sgd(lr, momentum=0.9)


@pytest.mark.parametrize("begin", ["identity", "scattered"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fedapa_released(momentum: float, begin: str) -> None:
    case = program("fedapa", heavy_ball if momentum else optax.sgd, variant="released", eta=0.1)
    zeros = {name: np.zeros_like(value) for name, value in initial(case.fed).items()}
    own = {"velocity": np.zeros((M, M)), "buffers": [zeros] * M, "eta": 0.1}
    expected = mixing(reference.ReleasedFedAPA, case, np.eye(M), momentum, **own)
    compare = mixed_state()

    def state_of(state: Any, expected: Any) -> None:
        compare(state, expected)
        np.testing.assert_allclose(state.velocity, expected.velocity, 1e-9, 1e-9)
        if momentum:
            assert_close(optax.tree.get(state.optimizer, "trace"), stacked(expected.buffers), 1e-9)

    follow(case, expected, state_of, start=scattered(case, expected) if begin == "scattered" else None)


def test_rows_of_absent_clients_move_on_in_the_released_variant_only() -> None:
    for options, moves in (({"variant": "released", "eta": 0.1}, True), ({"eta": 0.4}, False)):
        case = program("fedapa", **options)
        env, key, state = case.env(), jax.random.key(ROOT), case.start()
        seen, moved = np.zeros(M, bool), []
        for round_ in range(ROUNDS):
            before = np.asarray(state.A)
            state, info, *_ = case.advance(env, state, key, jnp.int32(round_))
            changed = (np.asarray(state.A) != before).any(1)
            moved += list(changed[~info["reported"] & seen])
            seen |= np.asarray(info["reported"])
        assert moved
        assert any(moved) == moves


# Limits.


def run(case: Program, **hyper: float) -> list[Any]:
    """Received and personal after every round."""
    env, key, state, seen = case.env(**hyper), jax.random.key(ROOT), case.start(), []
    for round_ in range(ROUNDS):
        state, _, received, _, personal = case.advance(env, state, key, jnp.int32(round_))
        seen.append((received, personal))
    return seen


def test_fedprox_without_mu_is_fedavg() -> None:
    case = program("fedprox", mu=0.7)
    assert_close(run(case, mu=0.0), run(program("fedavg")), 1e-13)


@pytest.mark.parametrize("keep", [False, True])
def test_ditto_without_lambda_is_local_training_beside_fedavg(keep: bool) -> None:
    made = functools.partial(program, optimizer=momentum_and_decay if keep else optax.sgd, keep=keep)
    ditto, local, fedavg = run(made("ditto", lam=0.7), lam=0.0), run(made("local")), run(made("fedavg"))
    assert_close([personal for _, personal in ditto], [personal for _, personal in local], 1e-13)
    assert_close([received for received, _ in ditto], [received for received, _ in fedavg], 1e-13)


def test_ditto_with_a_large_lambda_stays_near_the_global_model() -> None:
    apart = []
    for lam in (0.0, 2.0):
        received, personal = run(program("ditto", lam=0.7), lam=lam)[-1]
        apart.append(np.mean([np.linalg.norm(received[name] - personal[name]) for name in received]))
    assert apart[1] < 0.7 * apart[0]


MIXING_LIMITS = {
    "descent": ("fedapa", {"eta": 0.4}, {"eta": 0.0}),
    "printed": ("fedapa", {"eta": 0.4, "variant": "printed"}, {"eta": 0.0}),
    "released": ("fedapa", {"eta": 0.1, "variant": "released"}, {"eta": 0.0}),
    "cosine": ("fedapa", {"eta": 0.1, "centring": "cosine"}, {"eta": 0.0}),
    "fixed_mixing": ("fixed_mixing", {"self_weight": 0.4}, {"self_weight": 1.0}),
}


@pytest.mark.parametrize("name", MIXING_LIMITS)
def test_mixing_with_oneself_is_local_training(name: str) -> None:
    method, options, limit = MIXING_LIMITS[name]
    assert_close(run(program(method, **options), **limit), run(program("local")), 1e-13)


def test_floats_of_lenet5_on_cifar10() -> None:
    shape = (len(federation().data.examples["y"]), 32, 32, 3)
    data = federation().data
    data = dataclasses.replace(data, examples=data.examples | {"x": jnp.zeros(shape, jnp.uint8)})
    fed = Federation(build_model("lenet5", 10, np.zeros((1, 32, 32, 3))), data)
    floats = {name: fp.build(name, fed).floats for name in fp.registry() if name not in ("fedgcf", "fedstar")}
    whole, body = (62_006, 62_006), (61_156, 61_156)
    expected = {"fedavg": whole, "fedavg_ft": whole, "fedprox": whole, "fedper": body, "fedapa": body}
    assert {name: floats[name] for name in expected} == expected
    expected |= {"ditto": whole, "fedbn": whole, "fedkd": whole, "pfedhn": whole, "fedrep": body}
    expected |= {"gcfl": whole, "gcfl_plus": whole}
    assert {name: floats[name] for name in expected} == expected
    assert fp.build("pfedhn", fed, private_head=True).floats == body
    assert floats["fixed_mixing"] == body
    assert floats["local"] == (0, 0)


def test_communication_counts_who_downloads_and_who_uploads() -> None:
    case = program("fedper")
    result = fp.simulate(case.fed, case.algorithm, rounds=ROUNDS, eval_every=ROUNDS, seed=ROOT)
    body = 6 * 4 + 4
    assert result.floats_down == body * result.info["trains"].sum()
    assert result.floats_up == body * result.info["reported"].sum()
    assert result.info["trains"].sum() > result.info["reported"].sum() > 0
