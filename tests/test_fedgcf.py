"""FedGCF: rounds against plain loops, NumPy and networkx; the ratio's limits, degenerate input, rewards, errors."""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import networkx
import numpy as np
import pytest
from common import CLASSES, SIZES, assert_close, family_federation, federation, graph_federation, tiny_data, trained

import fedjax_pfl as fp
from fedjax_pfl.algorithms import _fusion
from fedjax_pfl.data.clients import client_data
from fedjax_pfl.engine import random
from fedjax_pfl.models.graph_family import is_core

KEY = jax.random.key(3)
M = len(SIZES)
EVERYBODY = np.ones(M, bool)
Stack = dict[str, np.ndarray]


class Started(NamedTuple):
    """A method after some rounds; ``advance(state, t, reports) -> (state, info)`` is one more."""

    fed: fp.Federation
    algorithm: fp.Algorithm
    env: fp.Env
    advance: Any
    state: Any


def started(fed: fp.Federation, rounds: int = 0, **options: Any) -> Started:
    algorithm = fp.build("fedgcf", fed, **options)
    env = fed.env(algorithm.hyper)

    @jax.jit
    def advance(state: Any, t: Any, reports: Any) -> Any:
        cohort = fed.participation.draw(fed.data, KEY, t, 10)._replace(reports=reports)
        return algorithm.round(env, state, cohort, random.stream(KEY, random.ROUND, t))

    state = algorithm.init(env, KEY)
    everybody = np.ones(fed.data.slots, bool)
    for t in range(rounds):
        state, _ = advance(state, t, everybody)
    return Started(fed, algorithm, env, advance, state)


@functools.cache
def family(rounds: int, **options: Any) -> Started:
    """After some rounds of the tiny federation; in double precision only, as it is compiled once."""
    return started(family_federation(), rounds, **options)


def row(stack: Any, i: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[i], stack)


def core_of(variables: dict[str, Any]) -> dict[str, Any]:
    return {name: leaf for name, leaf in variables.items() if is_core(name)}


def flat(variables: dict[str, Any]) -> np.ndarray:
    return np.concatenate([np.ravel(variables[name]) for name in sorted(variables)])


def best_clusters(points: np.ndarray, K: int) -> np.ndarray:
    """k-means by trying every assignment; clusters are numbered by their first members."""
    best, least, K = None, np.inf, min(K, len(points))
    for labels in itertools.product(range(K), repeat=len(points)):
        label = np.array(labels)
        if any(label[i] > label[:i].max(initial=-1) + 1 for i in range(len(points))) or label.max() + 1 < K:
            continue
        inertia = sum(((points[label == k] - points[label == k].mean(0)) ** 2).sum() for k in range(K))
        best, least = (label, inertia) if inertia < least else (best, least)
    assert best is not None
    return best


def distance_matrix(vectors: np.ndarray, kind: str, epsilon: float) -> np.ndarray:
    pairs = list(itertools.permutations(range(len(vectors)), 2))
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    s = {(i, j): unit[i] @ unit[j] for i, j in pairs}
    low, high = min(s.values()), max(s.values())
    d = np.zeros((len(vectors), len(vectors)))
    for i, j in pairs:
        if kind == "euclidean":
            d[i, j] = np.linalg.norm(vectors[i] - vectors[j])
        else:
            d[i, j] = 1 - s[i, j] if kind == "one_minus_cosine" else 1 - (s[i, j] - low) / (high - low) + epsilon
    return d


def on_paths(d: np.ndarray, P: int) -> tuple[set[int], list[tuple[int, int]]]:
    graph = networkx.from_numpy_array(d)
    lengths = dict(networkx.all_pairs_dijkstra_path_length(graph))
    pairs = sorted(itertools.combinations(range(len(d)), 2), key=lambda pair: -lengths[pair[0]][pair[1]])[:P]
    return {node for i, j in pairs for node in networkx.dijkstra_path(graph, i, j)}, pairs


def mean_of(stack: list[Any], who: Any) -> Any:
    total = sum(SIZES[i] for i in who)
    return {name: sum(SIZES[i] * np.asarray(stack[i][name]) for i in who) / total for name in stack[0]}


def check_round(
    start: Started, round_: int, *, ratio: float, K: int, P: int, kind: str = "minmax", similarity: str = "update",
    epsilon: float = 0.01, measured: bool = False,
) -> set[int]:  # fmt: skip
    """Compare one round with loops over clients: the clients on the paths."""
    fed, algorithm, env, advance, state = start
    new, info = advance(state, round_, EVERYBODY)
    twin = fed.with_related("structure", "test")
    omega_t = trained(fed, [row(state.node, i) | row(state.core, i) for i in range(M)], KEY, round_)
    omega_s = trained(twin, [row(state.structure, i) | row(state.core, i) for i in range(M)], KEY, round_)

    def compared(omega: list[Any]) -> np.ndarray:
        base = [flat(row(state.core, i)) if similarity == "update" else 0 for i in range(M)]
        return np.stack([flat(core_of(one)) - b for one, b in zip(omega, base, strict=True)])

    cluster = best_clusters(compared(omega_s), K)
    d = distance_matrix(compared(omega_t), kind, epsilon)
    on, pairs = on_paths(d, P)
    S = [mean_of([core_of(one) for one in omega_s], np.flatnonzero(cluster == k)) for k in range(cluster.max() + 1)]
    N = mean_of([core_of(one) for one in omega_t], sorted(on))
    for i in range(M):
        expected = {name: ratio * S[cluster[i]][name] + (1 - ratio) * N[name] for name in N}
        assert_close(row(new.core, i), expected, 1e-9)
        assert_close(algorithm.received(env, new, i), omega_t[i] | expected, 1e-9)
        assert_close(algorithm.personal(env, new, i), omega_t[i], 1e-9)
        assert_close(row(new.structure, i), {n: v for n, v in omega_s[i].items() if not is_core(n)}, 1e-9)
    np.testing.assert_array_equal(new.cluster, cluster)
    np.testing.assert_array_equal(new.paths, pairs)
    edges = algorithm.artifacts(env, new)["topology"]
    np.testing.assert_allclose(edges, np.where(np.eye(M, dtype=bool), np.inf, d), 1e-6, 1e-9)
    assert info["on_paths"] == len(on)
    assert [int(info[f"cluster{k + 1}"]) for k in range(K)] == np.bincount(cluster, minlength=K).tolist()
    found = np.mean([accuracy(start, new, i) for i in range(M)]) if measured else -1
    assert float(new.accuracy) == pytest.approx(found)
    assert ("reward" in info) == measured
    assert set(algorithm.artifacts(env, new)) == {"topology", "cluster", "path_ends"}
    return on


def accuracy(start: Started, state: Any, client: int) -> float:
    """Of what a client receives, on its validation samples."""
    split = start.fed.data.validation
    batch = start.fed.data.gather(split.rows[split.start[client] : split.start[client] + split.count[client]])
    mask = jnp.ones(len(batch["y"]), bool)
    x = start.fed.prepare(batch)
    scores = start.fed.model.apply(start.algorithm.received(start.env, state, client), x, mask=mask)[0]
    return float((scores.argmax(1) == batch["y"]).mean())


def test_a_round_on_graphs(float64: None) -> None:
    start = started(graph_federation(), rounds=1, policy="ucb", clusters=2, paths=2)
    check_round(start, 1, ratio=_fusion.RATIOS[1], K=2, P=2, measured=True)  # in its second round the second arm


@pytest.mark.parametrize(
    ("similarity", "kind", "K", "P", "ratio"),
    [
        ("update", "minmax", 2, 1, 0.6),
        ("parameters", "one_minus_cosine", 2 * M, 2, 0.8),
        ("update", "euclidean", 2, 1, 0),
    ],
)
def test_a_round(similarity: str, kind: str, K: int, P: int, ratio: float, float64: None) -> None:
    options = {"policy": f"fixed:{ratio}", "clusters": K, "paths": P, "similarity": similarity, "distance": kind}
    options |= {"epsilon": 0.2}
    on = check_round(family(2, **options), 2, ratio=ratio, K=K, P=P, kind=kind, similarity=similarity, epsilon=0.2)
    if kind == "euclidean":
        assert len(on) == 2, "by a metric distance the longest shortest path is one edge"


ALL_ALIKE = {"clusters": 1, "paths": M * M}  # one cluster, and every client on a path


def test_ratio_1_gives_the_mean_structural_core_and_ratio_0_the_mean_node_core(float64: None) -> None:
    S, N = (family(0, policy=f"fixed:{ratio}", **ALL_ALIKE) for ratio in (1, 0))
    state = S.advance(S.state, 0, EVERYBODY)[0]
    starts = [row(S.state.structure, i) | row(S.state.core, i) for i in range(M)]
    omega_s = trained(S.fed.with_related("structure", "test"), starts, KEY, 0)
    mean = mean_of([core_of(omega) for omega in omega_s], range(M))
    assert_close(state.core, {name: np.stack([leaf] * M) for name, leaf in mean.items()}, 1e-12)
    state = N.advance(N.state, 0, EVERYBODY)[0]
    mean = mean_of([core_of(row(state.node, i)) for i in range(M)], range(M))
    assert_close(state.core, {name: np.stack([leaf] * M) for name, leaf in mean.items()}, 1e-12)
    assert (state.paths[: M * (M - 1) // 2] >= 0).all()
    assert (state.paths[M * (M - 1) // 2 :] == -1).all(), "there are no more pairs"


def test_the_oracle_takes_the_most_accurate_weighted_sum(float64: None) -> None:
    """S and N come from ratios 1 and 0 and the same start; what is sent is their weighted sum, exactly."""
    S, N, oracle = (family(0, policy=policy, **ALL_ALIKE) for policy in ("fixed:1", "fixed:0", "oracle"))
    state, differ = oracle.state, 0
    for t in range(5):
        new, info = oracle.advance(state, t, EVERYBODY)
        other = state._replace(bandit=S.state.bandit)
        structure, node = (one.advance(other, t, EVERYBODY)[0].core for one in (S, N))
        mixed = [{n: a * structure[n] + (1 - a) * node[n] for n in node} for a in _fusion.RATIOS]
        tried = [np.mean([accuracy(oracle, new._replace(core=core), i) for i in range(M)]) for core in mixed]
        best = int(np.argmax(tried))
        assert float(info["ratio"]) == pytest.approx(_fusion.RATIOS[best])
        assert float(new.accuracy) == pytest.approx(tried[best])
        assert_close(new.core, mixed[best], 1e-15)
        state, differ = new, differ + (len(set(tried)) > 1)
    assert differ, "where all ratios are equal the choice proves nothing"


def finite(tree: Any) -> bool:
    return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))


def test_distances_of_vectors_that_are_equal_or_zero() -> None:
    for products in (jnp.ones((3, 3)), jnp.zeros((3, 3))):
        for kind in _fusion.DISTANCES:
            d = _fusion.distances(products, kind, jnp.ones(3, bool), 0.01)[~np.eye(3, dtype=bool)]
            assert np.isfinite(d).all()
            assert (d >= 0).all()
            assert len(set(d.tolist())) == 1, "no pair is preferred"


def test_clients_that_are_all_alike_with_more_clusters_and_paths_than_there_are(float64: None) -> None:
    one = tiny_data((6,))
    x, y = (np.concatenate([one.examples[name]] * 3) for name in ("x", "y"))
    parts = [
        [split.rows + k * len(one.examples["y"]) for k in range(3)] for split in (one.train, one.validation, one.test)
    ]
    fed = family_federation(client_data({"x": x, "y": y}, CLASSES, *parts), batch_size=6)
    start = started(fed, rounds=2, clusters=4, paths=9, policy="fixed:0.5")
    assert finite(start.state)
    assert start.state.cluster.tolist() == [0, 0, 0]
    spread = jax.tree.map(lambda leaf: jnp.abs(leaf - leaf[:1]).max(), start.state.core)
    assert max(jax.tree.leaves(spread)) < 1e-12


def test_one_client_alone(float64: None) -> None:
    """Its longest path is itself: it receives its own two cores, mixed."""
    start = started(family_federation(tiny_data((6,))), rounds=1, policy="fixed:0.25")
    state = start.state
    twin = start.fed.with_related("structure", "test")
    omega_s = trained(twin, [row(state.structure, 0) | row(state.core, 0)], KEY, 1)[0]
    state, info = start.advance(state, 1, np.ones(1, bool))
    assert finite(state)
    assert (state.cluster.tolist(), state.paths.tolist(), int(info["on_paths"])) == ([0], [[-1, -1]], 1)
    node = core_of(row(state.node, 0))
    assert_close(row(state.core, 0), {n: 0.25 * omega_s[n] + 0.75 * node[n] for n in node}, 1e-12)


def test_who_is_absent_keeps_its_models_and_has_no_cluster(float64: None) -> None:
    start = family(2, policy="fixed:0.3", clusters=3, paths=1, similarity="update", distance="minmax")
    state, there = start.state, np.array([True, False, True, True, False])
    new, info = start.advance(state, 2, there)
    np.testing.assert_array_equal(info["reported"], there)
    for field in ("core", "node", "structure"):
        for i in (1, 4):
            assert_close(row(getattr(new, field), i), row(getattr(state, field), i), 0)
    assert (np.asarray(new.cluster) >= 0).tolist() == there.tolist(), "numbers of another round would mean nothing here"
    edges = start.algorithm.artifacts(start.env, new)["topology"]
    assert np.array_equal(np.isfinite(edges), (there[:, None] & there) & ~np.eye(M, dtype=bool))
    assert finite(new)
    assert np.isin(new.paths, np.flatnonzero(there)).all()
    assert sum(int(info[f"cluster{k}"]) for k in (1, 2, 3)) == 3
    pairs = {tuple(sorted(map(int, pair))) for pair in itertools.permutations(np.flatnonzero(there), 2)}
    assert max(float(new.distance[i, j]) for i, j in pairs) == pytest.approx(1.01), "scaled over those who report"
    assert min(float(new.distance[i, j]) for i, j in pairs) == pytest.approx(0.01)


def test_a_round_without_reports_tells_nothing(float64: None) -> None:
    start = family(2, policy="fixed:0.3", clusters=3, paths=1, similarity="update", distance="minmax")
    new, info = start.advance(start.state, 2, np.zeros(M, bool))
    assert_close(new, start.state, 0)
    assert all(np.isnan(value).all() for name, value in info.items() if name != "reported")


def test_an_absent_client_with_a_huge_model_spoils_nobodys_clusters() -> None:
    products = jnp.array([[4.0, 2, jnp.inf], [2, 5, jnp.inf], [jnp.inf, jnp.inf, jnp.inf]])
    inside = _fusion.centred(products, jnp.array([True, True, False]))
    vectors = np.array([[2.0, 0], [1, 2]])
    vectors -= vectors.mean(0)
    np.testing.assert_allclose(inside[:2, :2], vectors @ vectors.T, atol=1e-6)
    assert np.isfinite(inside).all()


def test_what_rounding_left_of_equal_cosines_is_no_distance() -> None:
    products = np.array([[1.0, 0.3, 0.3], [np.nextafter(np.float32(0.3), 1), 1, 0.3], [0.3, 0.3, 1]], np.float32)
    for real in (np.ones(3, bool), np.array([True, True, False])):
        d = np.asarray(_fusion.distances(jnp.asarray(products), "minmax", jnp.asarray(real), 0.01))
        pair = real[:, None] & real & ~np.eye(3, dtype=bool)
        np.testing.assert_allclose(d, np.where(pair, 1.01, np.inf), atol=1e-6)


@pytest.mark.parametrize(
    ("before", "after", "reward"),
    [(-1, 0.9, 0.5), (0.5, 0.5, 0.5), (0.5, 0.52, 0.7), (0.5, 0.47, 0.2), (0.5, 0.6, 1), (0.5, 0.1, 0), (0, 0, 0.5)],
)
def test_the_reward_is_the_gain_in_accuracy(before: float, after: float, reward: float) -> None:
    assert float(_fusion.reward(jnp.asarray(after), jnp.asarray(before))) == pytest.approx(reward, abs=1e-5)


@pytest.mark.parametrize(("policy", "discount"), [("ucb", 1.0), ("discounted", 0.6)])
def test_the_bandit_takes_each_arm_once_and_then_the_best(policy: str, discount: float, float64: None) -> None:
    """Its plays, sums and arms follow from the accuracies by hand."""
    start, c = started(family_federation(), policy=policy, exploration=0.2, fading=0.6), 0.2
    state, sums, counts, plays, before = start.state, np.zeros(5), np.zeros(5), np.zeros(5), None
    assert float(state.accuracy) == -1
    for t in range(8):
        width = [c * np.sqrt(np.log(max(counts.sum(), 1)) / n) if n else np.inf for n in counts]
        bound = [s / n + w if n else np.inf for s, n, w in zip(sums, counts, width, strict=True)]
        arm = int(np.argmax(bound))
        state, info = start.advance(state, t, EVERYBODY)
        found = np.mean([accuracy(start, state, i) for i in range(M)])
        reward = 0.5 if before is None else np.clip(0.5 + (found - before) / 0.1, 0, 1)
        assert float(info["ratio"]) == pytest.approx(_fusion.RATIOS[arm])
        assert float(info["reward"]) == pytest.approx(reward)
        sums, counts, before = discount * sums, discount * counts, found
        plays[arm], sums[arm], counts[arm] = plays[arm] + 1, sums[arm] + reward, counts[arm] + 1
        np.testing.assert_array_equal(state.bandit.plays, plays)
        np.testing.assert_allclose(state.bandit.sums, sums)
        assert [int(info[f"arm{ratio:g}"]) for ratio in _fusion.RATIOS] == plays.tolist()


def test_what_is_sent_are_two_cores_and_one() -> None:
    fed = graph_federation()
    core = 2 * 4 * (4 + 1) * 2  # two layers of two dense layers of width 4
    assert fp.build("fedgcf", fed).floats == (2 * core + 1, core)
    assert fp.build("fedgcf", fed, policy="fixed:0.7").floats == (2 * core, core)
    assert fp.build("fedgcf", fed, policy="oracle").floats == (2 * core + 5, 5 * core)


def test_a_newcomer_gets_the_mean_core(float64: None) -> None:
    start = family(2, policy="fixed:0.3", clusters=3, paths=1, similarity="update", distance="minmax")
    fresh = start.fed.model.init(jax.random.key(9))
    given = start.algorithm.newcomer(start.env, start.state, fresh)
    assert_close(given, fresh | mean_of([row(start.state.core, i) for i in range(M)], range(M)), 1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "greedy"}, "policy must be ucb, discounted, fixed:RATIO, random or oracle, found 'greedy'"),
        ({"policy": "ucb:3"}, "policy must be .*, found 'ucb:3'"),
        ({"policy": "random:"}, "policy must be .*, found 'random:'"),
        ({"policy": "fixed:1.2"}, r"policy: the ratio must lie in 0\.\.1, found 1.2"),
        ({"policy": "fixed:-0.1"}, r"policy: the ratio must lie in 0\.\.1, found -0.1"),
        ({"policy": "fixed:nan"}, r"policy: the ratio must lie in 0\.\.1, found nan"),
        ({"policy": "fixed"}, "policy: fixed needs a number, such as fixed:0.5 .the ratio., found ''"),
        ({"clusters": 0}, "clusters must be at least 1, found 0"),
        ({"paths": 0}, "paths must be at least 1, found 0"),
        ({"similarity": "model"}, "similarity must be one of update, parameters, found 'model'"),
        ({"distance": "cosine"}, "distance must be one of minmax, .*, found 'cosine'"),
        ({"epsilon": -1.0}, "epsilon must be finite and not negative"),
        ({"epsilon": float("nan")}, "epsilon must be finite and not negative"),
        ({"exploration": -1.0}, "exploration must be finite and not negative, found -1"),
        ({"policy": "discounted", "fading": 0.0}, r"fading must lie in \(0, 1\], found 0"),
    ],
)
def test_bad_options_are_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^fedgcf: {message}"):
        fp.build("fedgcf", family_federation(), **options)


def test_what_it_cannot_work_on_is_told() -> None:
    with pytest.raises(ValueError, match=r"fedgcf needs a graph model \(gin, gcn, graphsage, gat\), 'Net' is none"):
        fp.build("fedgcf", federation())
    with pytest.raises(ValueError, match="fedgcf with policy ucb needs validation data: set a validation fraction"):
        fp.build("fedgcf", without_validation())


def without_validation() -> fp.Federation:
    data = tiny_data()
    train = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])
    return family_federation(client_data(data.examples, CLASSES, train))


def test_random_ratios_and_fixed_ones_need_no_validation_data(float64: None) -> None:
    assert fp.build("fedgcf", without_validation(), policy="fixed:0.7").hyper["ratio"] == 0.7
    start = started(without_validation(), rounds=0, policy="random")
    state, ratios = start.state, []
    for t in range(6):
        state, info = start.advance(state, t, EVERYBODY)
        ratios.append(round(float(info["ratio"]), 6))
    assert set(ratios) <= set(_fusion.RATIOS)
    assert len(set(ratios)) > 1
    assert [ratios.count(ratio) for ratio in _fusion.RATIOS] == state.bandit.plays.tolist()
    assert float(state.accuracy) == -1
