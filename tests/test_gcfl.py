"""GCFL and GCFL+: several rounds against NumPy and networkx, splits, series, the choice of a model, errors."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import networkx
import numpy as np
import pytest
import reference
from common import CLASSES, FEATURES, assert_close, federation, graph_federation, tiny_data
from reference import Draw, Params
from test_reference import batches_of

import fedjax_pfl as fp
from fedjax_pfl.algorithms.gcfl import cut_all
from fedjax_pfl.algorithms.gcfl_plus import closeness
from fedjax_pfl.data.clients import ClientData, client_data
from fedjax_pfl.engine.rounds import one_round

SIZES = (7, 3, 12, 5, 10, 4, 9, 6, 2, 8, 5)
M, LR, ROUNDS, KEY = len(SIZES), 0.3, 7, jax.random.key(3)
EVERYONE, SOME = fp.Participation(), fp.Participation(0.8, 0.2)
Cached = tuple[float, Params]


def opposed_data() -> ClientData:
    """Two groups of clients by turns, with opposite labels: the first cut is between them, and then both are cut."""
    rng = np.random.default_rng(1)
    data = tiny_data(SIZES)
    splits = (data.train, data.validation, data.test)
    owner = np.concatenate([np.repeat(np.arange(M), split.count) for split in splits])
    group = np.empty(len(owner), int)
    group[np.concatenate([split.rows for split in splits])] = owner % 2
    kind = np.arange(len(owner)) % 2
    noise = np.where(np.arange(len(owner)) < sum(SIZES), 0.5, 3.0)  # so that the last model is not the best for all
    x = 2 * np.eye(2, FEATURES)[kind] + noise[:, None] * rng.normal(size=(len(owner), FEATURES))
    return dataclasses.replace(data, examples={"x": x, "y": ((kind + group) % 2).astype(np.int32)})


def flat(params: Params) -> np.ndarray:
    return np.concatenate([params[name].ravel() for name in sorted(params)])


def warping(a: list[float], b: list[float]) -> float:
    """Dynamic time warping by the table."""
    table = np.full((len(a) + 1, len(b) + 1), np.inf)
    table[0, 0] = 0
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1, j + 1] = abs(x - y) + min(table[i, j + 1], table[i + 1, j], table[i, j])
    return table[-1, -1]


@dataclasses.dataclass
class Clustered:
    """GCFL, or GCFL+ where ``L`` is given. W: what is shared, as each client has it; best: its cached models."""

    clients: reference.Clients
    validation: list[tuple[np.ndarray, np.ndarray]]
    W: list[Params]
    private: list[Params]
    epsilon1: float
    epsilon2: float
    first_split: int
    L: int | None = None
    of_gradients: bool = True

    def __post_init__(self) -> None:
        self.clusters = [list(range(M))]
        self.best: list[list[Cached]] = [[] for _ in range(M)]
        self.series: list[list[float]] = [[] for _ in range(M)]
        self.splits: list[int] = []

    def round(self, draw: Draw) -> None:
        lr = self.clients.lr
        before = {i: self.clients.train(self.last(i), draw.batches[i][:-1], lr)[0] for i in draw.reports}
        gradient = {i: self.gradient(before[i], draw.batches[i][-1]) for i in draw.reports}
        back = {i: {name: before[i][name] - lr * gradient[i][name] for name in before[i]} for i in draw.reports}
        delta = {i: {name: back[i][name] - self.W[i][name] for name in self.W[i]} for i in draw.reports}
        vectors = {i: flat(delta[i]) for i in draw.reports}
        lengths = {i: float(np.linalg.norm(vectors[i])) for i in draw.reports}
        for i in draw.reports:
            self.private[i] = {name: back[i][name] for name in self.private[i]}
            of_last = float(np.linalg.norm(flat({name: gradient[i][name] for name in self.W[i]})))
            number = of_last if self.of_gradients else lengths[i]
            self.series[i] = [*self.series[i], number][-self.L if self.L else None :]
        ready = self.L is None or all(len(self.series[i]) == self.L for i in draw.reports)
        found, split = [], 0
        for members in self.clusters:
            there = [i for i in members if i in delta]
            total = sum(SIZES[i] for i in there)
            mean = {name: sum(SIZES[i] * delta[i][name] for i in there) / max(total, 1) for name in self.W[0]}
            for i in members:
                self.W[i] = {name: self.W[i][name] + mean[name] for name in mean}
            norm = np.linalg.norm(flat(mean)) if there else 0.0
            rest = norm < self.epsilon1 and max((lengths[i] for i in there), default=0) > self.epsilon2
            if rest and len(there) > 2 and draw.round >= self.first_split and ready:
                found += self.cut(members, there, vectors)
                split += 1
            else:
                found.append(members)
        self.clusters = found
        self.splits.append(split)
        if split:
            self.series = [[] for _ in range(M)]

    def cut(self, members: list[int], there: list[int], vectors: dict[int, np.ndarray]) -> list[list[int]]:
        for i in members:
            self.best[i].append((self.accuracy(self.last(i), i), self.last(i)))
        graph = networkx.Graph()
        apart = {(i, j): warping(self.series[i], self.series[j]) for i in there for j in there} if self.L else {}
        for i in there:
            for j in (j for j in there if j > i):
                cosine = vectors[i] @ vectors[j] / np.linalg.norm(vectors[i]) / np.linalg.norm(vectors[j])
                graph.add_edge(i, j, weight=max(apart.values()) - apart[i, j] if self.L else cosine + 1)
        _, (one, other) = networkx.stoer_wagner(graph)
        side = set(other if there[0] in one else one)  # the absent stay with the first who is there
        return [[i for i in members if i not in side], sorted(side)]

    def last(self, i: int) -> Params:
        return self.W[i] | self.private[i]

    def gradient(self, params: Params, rows: list[int]) -> Params:
        return reference.loss_and_gradient(params, self.clients.x[rows], self.clients.y[rows])[1]

    def accuracy(self, params: Params, i: int) -> float:
        x, y = self.validation[i]
        hidden = np.tanh(x @ params[reference.KERNEL_1] + params[reference.BIAS_1])
        return float(((hidden @ params[reference.KERNEL_2] + params[reference.BIAS_2]).argmax(1) == y).mean())

    def personal(self, i: int) -> Params:
        """The earliest of the best cached ones, where it beats the last."""
        best = max(self.best[i], key=lambda one: one[0], default=(-1.0, {}))
        return best[1] if best[0] > self.accuracy(self.last(i), i) else self.last(i)

    def prefers_a_cached_model(self, i: int) -> bool:
        return any(self.personal(i) is one for _, one in self.best[i])


@functools.cache
def program(method: str, participation: fp.Participation, private: bool, **options: Any) -> Any:
    fed = federation(opposed_data(), participation=participation, lr=LR)
    if private:
        fed = fed.replace(model=dataclasses.replace(fed.model, private=fed.model.head))
    algorithm = fp.build(method, fed, epsilon1=1e9, epsilon2=0.0, **options)

    def advance(env: fp.Env, state: Any, round_: jax.Array) -> Any:
        state, info = one_round(fed, algorithm, env, state, KEY, round_, ROUNDS)
        served = algorithm.serve(env, state)
        personal = jax.vmap(lambda i: algorithm.personal(env, served, i))(jnp.arange(M))
        return state, info, jax.vmap(lambda i: algorithm.received(env, state, i))(jnp.arange(M)), personal

    return fed, algorithm, jax.jit(advance)


def followed(
    method: str, participation: fp.Participation, hyper: dict[str, float], private: bool = False, **options: Any
) -> Clustered:
    """Package and reference side by side, compared after every round: the reference at the end."""
    fed, algorithm, advance = program(method, participation, private, **options)
    env = fed.env(dict(algorithm.hyper) | hyper)
    state = jax.jit(algorithm.init)(env, KEY)
    x, y = (np.asarray(fed.data.examples[name]) for name in ("x", "y"))
    held = np.asarray(fed.data.validation.rows).reshape(M, -1)
    start = {name: np.asarray(value) for name, value in fed.model.init(KEY).items()}
    own = {name for name in start if fed.stays(name)}
    expected = Clustered(
        reference.Clients(x, y, list(SIZES), LR), [(x[rows], y[rows]) for rows in held],
        [{name: start[name] for name in start if name not in own}] * M, [{name: start[name] for name in own}] * M,
        float(env.hyper["epsilon1"]), float(env.hyper["epsilon2"]), options["first_split"],
        options.get("series_length"), options.get("series") != "update",
    )  # fmt: skip
    for t in range(ROUNDS):
        cohort = fed.participation.draw(fed.data, KEY, jnp.int32(t), ROUNDS)
        reports = np.flatnonzero(cohort.trains & cohort.reports).tolist()
        key = fp.engine.random.stream(KEY, fp.engine.random.ROUND, t)
        state, info, received, personal = advance(env, state, jnp.int32(t))
        expected.round(Draw(t, reports, batches_of(fed, key, fed.local_epochs)))
        groups = {tuple(np.flatnonzero(state.cluster == number).tolist()) for number in set(state.cluster.tolist())}
        assert groups == {tuple(members) for members in expected.clusters}, f"round {t}"
        assert float(info["clusters"]) == pytest.approx(len(groups))
        for i in range(M):
            assert_close({name: leaf[i] for name, leaf in received.items()}, expected.last(i), 1e-8)
            assert_close({name: leaf[i] for name, leaf in personal.items()}, expected.personal(i), 1e-8)
        if method == "gcfl_plus":
            assert state.series.length.tolist() == [len(one) for one in expected.series]
            for i, one in enumerate(expected.series):
                np.testing.assert_allclose(state.series.norms[i, : len(one)], one, 1e-8)
    return expected


@pytest.mark.parametrize("participation", [EVERYONE, SOME], ids=["everyone", "some"])
def test_gcfl_splits_as_the_reference(participation: fp.Participation, float64: None) -> None:
    expected = followed("gcfl", participation, {}, first_split=1)
    assert expected.splits[0] == 0, "no split in the first round"
    if participation is EVERYONE:
        assert max(expected.splits) == 2, "clusters that qualify in one round are all cut"
    assert any(map(expected.prefers_a_cached_model, range(M)))


def test_gcfl_keeps_private_parts_with_the_models_of_splits(float64: None) -> None:
    expected = followed("gcfl", EVERYONE, {}, private=True, first_split=1)
    assert any(map(expected.prefers_a_cached_model, range(M)))


def test_gcfl_waits_until_clusters_are_at_rest(float64: None) -> None:
    """Thresholds between the norms that occur: rounds differ in whether they split."""
    expected = followed("gcfl", EVERYONE, {"epsilon1": 0.35, "epsilon2": 0.95}, first_split=1)
    assert 0 < np.count_nonzero(expected.splits[1:]) < ROUNDS - 1


@pytest.mark.parametrize(
    ("participation", "L", "series", "private"),
    [(EVERYONE, 1, "update", False), (SOME, 2, "gradient", False), (EVERYONE, 1, "gradient", True)],
    ids=["updates", "gradients", "private"],
)
def test_gcfl_plus_compares_series(
    participation: fp.Participation, L: int, series: str, private: bool, float64: None
) -> None:
    expected = followed("gcfl_plus", participation, {}, private, first_split=0, series_length=L, series=series)
    assert sum(expected.splits) > 1
    if L > 1:
        assert expected.splits[0] == 0, "the series are not full"
        after = [expected.splits[t + 1] for t in range(ROUNDS - 1) if expected.splits[t]]
        assert not any(after), "after a split the series start anew"


def test_distances_are_weighed_by_the_largest_of_their_own_cluster() -> None:
    d = np.full((6, 6), 9.0)
    d[:3, :3] = [[0, 4, 2], [4, 0, 3], [2, 3, 0]]
    d[3:, 3:] = [[0, 0.5, 0.2], [0.5, 0, 0.4], [0.2, 0.4, 0]]
    same = np.kron(np.eye(2), np.ones((3, 3))).astype(bool)
    w = np.where(same, closeness(jnp.asarray(d), jnp.asarray(same)), 0)
    np.testing.assert_allclose(w[:3, :3], [[4, 0, 2], [0, 4, 1], [2, 1, 4]])
    np.testing.assert_allclose(w[3:, 3:], [[0.5, 0, 0.3], [0, 0.5, 0.1], [0.3, 0.1, 0.5]], atol=1e-6)
    same[5] = same[:, 5] = False  # who is absent does not count
    assert closeness(jnp.asarray(d), jnp.asarray(same))[3, 4] == 0


def test_both_of_two_clusters_are_cut_and_the_rest_stay() -> None:
    cluster = jnp.array([4, 4, 4, 1, 1, 1, 0, 0])
    close = np.full((8, 8), 0.1)
    for i, j in ((0, 2), (4, 5), (6, 7)):
        close[i, j] = close[j, i] = 5
    splits, reported = jnp.array([1, 1, 1, 1, 1, 1, 0, 0], bool), jnp.ones(8, bool)
    found = cut_all(cluster, splits, jnp.asarray(close), reported)
    assert len({int(found[i]) for i in (0, 1, 3, 4, 6)}) == 5, "each part has its number"
    for i, j in ((0, 2), (4, 5), (6, 7)):
        assert found[i] == found[j]
    absent = reported.at[0].set(False)  # of cluster 4: stays with the first who is there
    found = cut_all(cluster, splits, jnp.asarray(close), absent)
    assert found[0] == found[1] != found[2]


def test_no_part_is_empty_even_where_all_weights_are_equal_or_zero() -> None:
    for weights in (jnp.ones((6, 6)), jnp.zeros((6, 6))):
        found = cut_all(jnp.zeros(6, int), jnp.ones(6, bool), weights, jnp.ones(6, bool))
        assert len(set(found.tolist())) == 2


def test_clusters_of_two_are_not_cut(float64: None) -> None:
    fed = federation(tiny_data((4, 5)))
    algorithm = fp.build("gcfl", fed, epsilon1=1e9, epsilon2=0.0, first_split=0)
    env = fed.env(algorithm.hyper)
    state, info = jax.jit(lambda s: one_round(fed, algorithm, env, s, KEY, 0, 2))(algorithm.init(env, KEY))
    assert state.cluster.tolist() == [0, 0]
    assert info["clusters"] == 1


def test_clusters_are_judged_in_full_precision() -> None:
    fed = federation()
    algorithm = fp.build("gcfl", fed)
    env = fed.env(algorithm.hyper)
    text = str(jax.make_jaxpr(algorithm.round)(env, algorithm.init(env, KEY), fp.everyone(fed.data), KEY))
    found = re.findall(r":f32\[5,5\] = dot_general\[(.*?)\n\s*\]", text, re.DOTALL)
    assert len(found) > 1, "of all pairs of clients: updates, and means of clusters"
    assert all("precision=(Precision.HIGHEST, Precision.HIGHEST)" in one for one in found)


def test_what_is_sent_is_what_is_shared() -> None:
    fed = federation()
    for method in ("gcfl", "gcfl_plus"):
        assert fp.build(method, fed).floats == (fed.model.count(), fed.model.count())
        assert fp.build(method, graph_federation()).floats == (80, 80), "two GIN layers of width 4"


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("gcfl", {"epsilon1": -1.0}, "gcfl: epsilon1 must be finite and not negative, found -1"),
        ("gcfl", {"epsilon2": float("nan")}, "gcfl: epsilon2 must be finite and not negative, found nan"),
        ("gcfl", {"first_split": -1}, "gcfl: first_split must be finite and not negative, found -1"),
        ("gcfl_plus", {"epsilon1": float("inf")}, "gcfl_plus: epsilon1 must be finite and not negative, found inf"),
        ("gcfl_plus", {"series_length": 0}, "gcfl_plus: series_length must be at least 1, found 0"),
        ("gcfl_plus", {"series": "norms"}, "gcfl_plus: series must be gradient or update, found 'norms'"),
    ],
)
def test_bad_options_are_told(method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        fp.build(method, federation(), **options)


@pytest.mark.parametrize("method", ["gcfl", "gcfl_plus"])
def test_validation_data_is_needed(method: str) -> None:
    data = tiny_data((4, 5))
    fed = federation(client_data(data.examples, CLASSES, [np.arange(4), np.arange(4, 9)]))
    with pytest.raises(ValueError, match=f"{method} needs validation data: set a validation fraction above 0"):
        fp.build(method, fed)
