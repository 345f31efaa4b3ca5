"""k-means from inner products against scikit-learn and exhaustive search; copies, empty clusters, padding."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score

from fedjax_pfl.numerics import gram_of, kmeans, kmeans_gram
from fedjax_pfl.numerics.kmeans import _assign, _distances, _seeds

KEY = jax.random.key(0)
fit = jax.jit(kmeans, static_argnums=1, static_argnames=("iterations", "restarts"))


def blobs(seed: int, clusters: int = 4, each: int = 6, dim: int = 5, spread: float = 0.1) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    centres = 3 * np.eye(dim)[:clusters] + 50  # far from the origin, one sqrt(18) from another
    labels = rng.permutation(np.repeat(np.arange(clusters), each))
    return (centres[labels] + spread * rng.normal(size=(len(labels), dim))).astype(np.float32), labels


def inertia(points: Any, labels: Any) -> float:
    points, labels = np.asarray(points, np.float64), np.asarray(labels)
    parts = (points[labels == k] for k in np.unique(labels))
    return sum(((part - part.mean(0)) ** 2).sum() for part in parts)


@pytest.mark.parametrize("seed", range(4))
def test_separated_clusters_are_those_of_scikit_learn(seed: int) -> None:
    points, labels = blobs(seed)
    found, centres = fit(points, 4, jax.random.key(seed))
    theirs = KMeans(4, n_init=10, random_state=0).fit(points)
    assert adjusted_rand_score(labels, found) == 1
    assert adjusted_rand_score(theirs.labels_, found) == 1
    assert inertia(points, found) == pytest.approx(theirs.inertia_, rel=1e-3)
    for k in range(4):
        np.testing.assert_allclose(centres[k], points[np.asarray(found) == k].mean(0), rtol=1e-5)
    assert found.dtype == jnp.int32
    assert (np.diff(np.unique(found, return_index=True)[1]) > 0).all()  # numbered by first members


@pytest.mark.parametrize("K", [2, 3])
def test_many_restarts_find_the_best_of_all_partitions(K: int) -> None:
    points = np.random.default_rng(7).normal(size=(7, 2)).astype(np.float32)
    best = min(inertia(points, labels) for labels in itertools.product(range(K), repeat=7))
    found, _ = fit(points, K, KEY, restarts=64)
    assert inertia(points, found) == pytest.approx(best, rel=1e-5)


def test_the_end_is_a_fixed_point_and_restarts_only_help() -> None:
    points = np.random.default_rng(1).normal(size=(40, 3)).astype(np.float32)
    values = []
    for restarts in (1, 8):
        found, centres = fit(points, 5, KEY, iterations=100, restarts=restarts)
        distances = ((points[:, None] - centres) ** 2).sum(-1)
        np.testing.assert_array_equal(found, distances.argmin(1))
        values.append(inertia(points, found))
    assert values == sorted(values, reverse=True)
    assert values[0] > values[-1]


def test_deterministic_in_the_key_and_different_under_another() -> None:
    points = np.random.default_rng(2).normal(size=(40, 3)).astype(np.float32)
    once = functools.partial(fit, points, 5, iterations=100, restarts=1)
    np.testing.assert_array_equal(once(KEY)[0], once(KEY)[0])
    assert len({tuple(np.asarray(once(jax.random.key(seed))[0])) for seed in range(5)}) > 1


def test_the_first_seed_is_uniform_over_real_points_and_the_second_goes_by_squared_distance() -> None:
    points, real = jnp.array([[0.0], [99.0], [1.0], [10.0]]), jnp.array([True, False, True, True])
    squares, _ = _distances(gram_of(points, real), real)
    seeds = jax.vmap(lambda key: _seeds(squares, real, 2, key))(jax.random.split(KEY, 3000))
    first, second = np.asarray(seeds)[..., [0, 2, 3]].argmin(-1).T  # a seed is at distance 0 of itself alone
    np.testing.assert_allclose(np.bincount(first) / 3000, 1 / 3, atol=0.04)
    share = np.bincount(second[first == 0]) / (first == 0).sum()
    np.testing.assert_allclose(share, [0, 1 / 101, 100 / 101], atol=0.02)


@pytest.mark.parametrize("K", [3, 12])
def test_identical_points_share_a_cluster(K: int) -> None:
    points = np.full((9, 999), 0.1, np.float32)
    found, centres = fit(points, K, KEY)
    np.testing.assert_array_equal(found, 0)
    np.testing.assert_allclose(centres[0], 0.1, rtol=1e-6)
    np.testing.assert_array_equal(centres[1:], 0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("K", [3, 4, 12])
def test_as_many_clusters_as_distinct_points_allow_and_copies_agree(seed: int, K: int) -> None:
    rng = np.random.default_rng(seed)
    distinct = (rng.normal(size=(4, 999)) + 3).astype(np.float32)
    which = rng.permutation([0, 0, 0, 0, 1, 1, 2, 3, 3])
    found, centres = fit(distinct[which], K, jax.random.key(seed))
    assert len(np.unique(found)) == min(K, 4)
    for copies in range(4):
        assert len(np.unique(np.asarray(found)[which == copies])) == 1
    if K >= 4:
        np.testing.assert_allclose(np.asarray(centres)[np.asarray(found)], distinct[which], rtol=1e-5, atol=1e-5)
    assert np.isfinite(centres).all()


@pytest.mark.parametrize("K", [1, 4])
def test_an_empty_cluster_takes_the_farthest_point_that_is_not_alone(K: int) -> None:
    far = jnp.inf
    to = jnp.array([[1.0, 4.0, 4.0, 2.0, far], [far, far, far, far, 9.0], [far] * 5, [far] * 5][:K])
    twin, real = jnp.array([0, 1, 1, 3, 4]), jnp.ones(5, bool)
    found = _assign(to, real, twin)
    np.testing.assert_array_equal(found, [0] * 5 if K == 1 else [0, 2, 2, 3, 1])


def test_padding_has_no_influence() -> None:
    points = np.random.default_rng(3).normal(size=(9, 999)).astype(np.float32)
    plain, centres = fit(points, 3, KEY)
    place = np.array([0, 2, 3, 4, 6, 7, 8, 11, 12])
    for junk in (np.nan, 1e30, 0.0):
        padded = np.full((14, 999), junk, np.float32)
        padded[place] = points
        real = np.zeros(14, bool)
        real[place] = True
        found, c = fit(padded, 3, KEY, real=real)
        np.testing.assert_array_equal(found[place], plain)
        np.testing.assert_array_equal(np.delete(found, place), -1)
        np.testing.assert_allclose(c, centres, rtol=1e-5, atol=1e-6)
    found, c = fit(padded, 3, KEY, real=np.zeros(14, bool))
    np.testing.assert_array_equal(found, -1)
    np.testing.assert_array_equal(c, 0)
    one, c = fit(padded, 3, KEY, real=np.arange(14) == 4)
    np.testing.assert_array_equal(one, np.where(np.arange(14) == 4, 0, -1))
    np.testing.assert_allclose(c[0], padded[4], rtol=1e-6)


def test_vmap_over_seeds_equals_each_alone() -> None:
    points = np.stack([blobs(seed, spread=1.0)[0] for seed in range(3)])
    keys = jax.random.split(KEY, 3)
    found, centres = jax.jit(jax.vmap(lambda x, key: kmeans(x, 4, key)))(points, keys)
    for i in range(3):
        alone, c = fit(points[i], 4, keys[i])
        np.testing.assert_array_equal(found[i], alone)
        np.testing.assert_allclose(centres[i], c, rtol=1e-5)


@pytest.mark.usefixtures("float64")
def test_single_precision_stays_where_double_is_the_default() -> None:
    points = np.random.default_rng(4).normal(size=(3, 1)).astype(np.float32)
    found, centres = fit(points, 3, KEY)
    assert (found.dtype, centres.dtype) == (jnp.int32, jnp.float32)
    assert len(np.unique(found)) == 3


@pytest.mark.usefixtures("float64")
def test_double_precision_tells_closer_points_apart() -> None:
    points = np.array([[1.0], [1.0 + 1e-5], [2.0]])
    found, centres = fit(points, 3, KEY)
    assert len(np.unique(found)) == 3
    assert centres.dtype == jnp.float64
    np.testing.assert_allclose(np.asarray(centres)[np.asarray(found)], points, rtol=1e-14)
    assert len(np.unique(fit(points.astype(np.float32), 3, KEY)[0])) == 2


def test_distances_far_from_the_origin() -> None:
    points = (np.random.default_rng(5).normal(size=(6, 30)) + 1000).astype(np.float32)
    squares, twin = _distances(gram_of(points), jnp.ones(6, bool))
    exact = ((points.astype(np.float64)[:, None] - points) ** 2).sum(-1)
    np.testing.assert_allclose(squares, exact, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(twin, range(6))


def test_copies_are_known_despite_rounding() -> None:
    rng = np.random.default_rng(6)
    points = rng.normal(size=(4, 30))[[0, 1, 0, 2, 1, 3]]
    gram = (points @ points.T * (1 + 3e-7 * rng.uniform(-1, 1, (6, 6)))).astype(np.float32)
    squares, twin = _distances(jnp.asarray(gram), jnp.ones(6, bool))
    np.testing.assert_array_equal(twin, [0, 1, 0, 3, 1, 5])
    assert squares[0, 2] == squares[4, 1] == 0
    assert len(np.unique(kmeans_gram(gram, 6, KEY)[0])) == 4


def test_the_gram_matrix_suffices_and_keeps_full_precision() -> None:
    points, _ = blobs(0, spread=1.0)
    rows = points - 50
    found, weights = jax.jit(kmeans_gram, static_argnums=1)(rows @ rows.T, 4, KEY)
    by_points, centres = fit(rows, 4, KEY)
    np.testing.assert_array_equal(found, by_points)
    np.testing.assert_allclose(weights @ rows, centres, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
    text = str(jax.make_jaxpr(lambda x: kmeans(x, 4, KEY))(points))
    assert text.count("dot_general") == text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") > 2


def test_wrong_arguments_are_named() -> None:
    square, rows = jnp.eye(3), jnp.ones((3, 2))
    for message, call in {
        r"k-means: the Gram matrix must have shape \(M, M\) with M >= 1, found \(3, 2\)": (rows, 2),
        "K must be at least 1, found 0": (square, 0),
    }.items():
        with pytest.raises(ValueError, match=message):
            kmeans_gram(*call, KEY)
    for message, options in {
        "iterations must be at least 1": {"iterations": 0},
        "restarts must be at least 1": {"restarts": 0},
        r"real must be bool of shape \(3,\), found int": {"real": jnp.ones(3, int)},
        r"real must be bool of shape \(3,\), found bool of shape \(2,\)": {"real": jnp.ones(2, bool)},
    }.items():
        with pytest.raises(ValueError, match=message):
            kmeans(rows, 2, KEY, **options)
