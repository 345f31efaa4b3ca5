"""Global minimum cut against networkx and exhaustive search; zero weights, members, padding."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest

from fedjax_pfl.numerics import min_cut

cut = jax.jit(min_cut)


def graph(seed: int, M: int, kind: str = "real", share: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = rng.random((M, M)) if kind == "real" else rng.integers(0, 4, (M, M))
    upper = np.triu(np.where(rng.random((M, M)) < share, values, 0), 1)
    return (upper + upper.T + np.diag(rng.random(M))).astype(np.float32)  # the diagonal must not be read


def crossing(weights: np.ndarray, side: np.ndarray, members: np.ndarray) -> float:
    return float(weights[np.ix_(side, members & ~side)].astype(np.float64).sum())


def by_networkx(weights: np.ndarray, members: np.ndarray) -> float:
    g = nx.Graph()
    nodes = np.flatnonzero(members)
    g.add_nodes_from(nodes)
    g.add_weighted_edges_from((i, j, float(weights[i, j])) for i, j in itertools.combinations(nodes, 2))
    return nx.stoer_wagner(g)[0]


def check(weights: np.ndarray, members: np.ndarray, expected: float) -> None:
    side, value = cut(weights, members)
    side = np.asarray(side)
    assert not (side & ~members).any()
    assert side.any()
    assert (members & ~side).any()
    assert not side[np.argmax(members)]
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(value, crossing(weights, side, members), rtol=1e-6)


@pytest.mark.parametrize("kind", ["real", "whole"])
@pytest.mark.parametrize("share", [0.15, 0.5, 1.0])
def test_value_is_that_of_networkx_and_the_side_has_it(share: float, kind: str) -> None:
    for seed in range(8):
        weights = graph(seed, 12, kind, share)
        members = np.random.default_rng(seed).permutation(12) < (12, 9, 2)[seed % 3]
        check(weights, members, by_networkx(weights, members))


@pytest.mark.parametrize("seed", range(4))
def test_value_is_the_least_of_all_cuts(seed: int) -> None:
    weights, members = graph(seed, 7, "real", 0.6), np.ones(7, bool)
    sides = (np.array(bits, bool) for bits in itertools.product([0, 1], repeat=7) if 0 < sum(bits) < 7)
    check(weights, members, min(crossing(weights, side, members) for side in sides))


def test_two_cliques_part_at_their_bridge() -> None:
    weights = np.zeros((9, 9), np.float32)
    left = np.isin(np.arange(9), [1, 3, 4, 8])
    weights[left[:, None] & left], weights[~left[:, None] & ~left] = 1, 1
    weights[3, 5] = weights[5, 3] = 0.5
    side, value = cut(weights)
    np.testing.assert_array_equal(side, left)
    assert value == 0.5


def test_no_weights_and_few_members() -> None:
    check(np.zeros((6, 6), np.float32), np.arange(6) % 2 == 1, 0.0)
    for members in (np.zeros(4, bool), np.arange(4) == 2):
        side, value = cut(graph(0, 4), members)
        assert not side.any()
        assert value == 0
    side, value = cut(np.ones((1, 1), np.float32))
    assert not side.any()
    assert value == 0
    side, value = cut(graph(0, 4), np.array([False, True, False, True]))
    np.testing.assert_array_equal(side, [False, False, False, True])
    assert value == graph(0, 4)[1, 3]


def test_rounding_below_zero_counts_as_zero() -> None:
    side, value = cut(np.full((5, 5), -1e-7, np.float32))
    assert value == 0
    assert 0 < side.sum() < 5


@pytest.mark.parametrize("junk", [np.nan, np.inf, -3.0])
def test_padding_has_no_influence(junk: float) -> None:
    weights, place = graph(3, 6), np.array([1, 2, 4, 5, 8, 9])
    padded, members = np.full((11, 11), junk, np.float32), np.zeros(11, bool)
    padded[np.ix_(place, place)], members[place] = weights, True
    plain, value = cut(weights)
    side, other = cut(padded, members)
    np.testing.assert_array_equal(side[place], plain)
    assert other == pytest.approx(float(value), rel=1e-6)
    assert not np.asarray(side)[~members].any()


def test_vmap_and_double_precision(float64: Any) -> None:
    weights = np.stack([graph(seed, 8).astype(np.float64) for seed in range(3)])
    members = np.arange(8) < np.array([[8], [5], [1]])
    side, value = jax.jit(jax.vmap(min_cut))(weights, members)
    assert value.dtype == jnp.float64
    for i in range(3):
        alone = cut(weights[i], members[i])
        np.testing.assert_array_equal(side[i], alone[0])
        np.testing.assert_allclose(value[i], alone[1], rtol=1e-14)
    assert cut(graph(0, 8), members[0])[1].dtype == jnp.float32
    assert value[0] == pytest.approx(by_networkx(weights[0], members[0]), rel=1e-14)


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"minimum cut: the weights must have shape \(M, M\)"):
        min_cut(jnp.ones((2, 3)))
    with pytest.raises(ValueError, match=r"members must be bool of shape \(2,\)"):
        min_cut(jnp.ones((2, 2)), jnp.ones(2))
