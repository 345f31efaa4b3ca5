"""Dynamic time warping against the plain recursion; valid prefixes, empty series, padding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.numerics import warping_distance, warping_distances

one, every = jax.jit(warping_distance), jax.jit(warping_distances)


def plain(a: Any, b: Any) -> float:
    a, b = (list(x) or [0.0] for x in (a, b))
    table = np.full((len(a) + 1, len(b) + 1), np.inf)
    table[0, 0] = 0
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1, j + 1] = abs(x - y) + min(table[i, j + 1], table[i + 1, j], table[i, j])
    return float(table[-1, -1])


@pytest.mark.usefixtures("float64")
def test_every_pair_of_lengths_equals_the_recursion() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 6))
    for la in range(7):
        for lb in range(7):
            assert one(a, b, la, lb) == pytest.approx(plain(a[:la], b[:lb]), rel=1e-14)


def test_by_hand() -> None:
    a, b = jnp.array([1.0, 2.0, 3.0, 0.0]), jnp.array([1.0, 1.0, 2.0, 3.0])
    assert one(a, b, 3, 4) == 0  # a waits at 1
    assert one(a, b, 4, 4) == 3
    assert one(a, b, 0, 0) == 0
    assert one(a, b, 0, 4) == 7  # all against a single 0
    assert one(a, b, 3, 0) == 6
    assert one(jnp.array([2.0]), jnp.array([5.0]), 1, 1) == 3


def test_all_pairs_and_the_rest_of_a_row_does_not_count() -> None:
    rng = np.random.default_rng(1)
    series, lengths = rng.normal(size=(8, 10)).astype(np.float32), np.array([10, 3, 0, 7, 1, 10, 0, 5])
    prefixes = [row[:n] for row, n in zip(series, lengths, strict=True)]
    expected = [[plain(a, b) for b in prefixes] for a in prefixes]
    found = np.asarray(every(series, lengths))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_array_equal(found, found.T)
    np.testing.assert_array_equal(np.diagonal(found), 0)
    for junk in (np.nan, np.inf, 7.0):
        spoiled = np.where(np.arange(10) < lengths[:, None], series, junk)
        np.testing.assert_array_equal(every(spoiled.astype(np.float32), lengths), found)


def test_padding_has_no_influence() -> None:
    series = np.random.default_rng(2).normal(size=(6, 5)).astype(np.float32)
    real = np.array([True, False, True, True, False, True])
    junk = np.where(real[:, None], series, np.nan)
    found = np.asarray(every(junk, np.full(6, 5), real))
    np.testing.assert_array_equal(found[np.ix_(real, real)], every(series[real], np.full(4, 5)))
    np.testing.assert_array_equal(found[~real], 0)
    np.testing.assert_array_equal(found[:, ~real], 0)


def test_vmap_and_double_precision(float64: Any) -> None:
    series, lengths = np.random.default_rng(3).normal(size=(2, 4, 6)), np.array([[6, 5, 4, 3], [1, 6, 6, 2]])
    together = jax.vmap(every)(series, lengths)
    assert together.dtype == jnp.float64
    assert every(series[0].astype(np.float32), lengths[0]).dtype == jnp.float32
    for i in range(2):
        np.testing.assert_array_equal(together[i], every(series[i], lengths[i]))


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"two series of shape \(L,\).* found \(3,\) and \(4,\)"):
        warping_distance(jnp.ones(3), jnp.ones(4), 3, 4)
    with pytest.raises(ValueError, match=r"series \(M, L\) need lengths \(M,\), found \(3, 4\) and \(2,\)"):
        warping_distances(jnp.ones((3, 4)), jnp.ones(2, int))
