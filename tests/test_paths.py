"""Shortest paths and the longest of them against networkx; ties, zero weights, rounding, padding."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_pfl.numerics import hops, longest_paths, members, on_longest_paths, shortest_paths

INF = np.inf
find = jax.jit(shortest_paths)
walk_all = jax.jit(
    lambda s: jax.vmap(lambda i: jax.vmap(lambda j: (members(s, i, j), hops(s, i, j)))(jnp.arange(len(s))))(
        jnp.arange(len(s))
    )
)
longest = jax.jit(on_longest_paths, static_argnums=1)


def graph(seed: int, M: int = 9, kind: str = "real", share: float = 0.4, directed: bool = False) -> np.ndarray:
    """Edges, infinite where there is none."""
    rng = np.random.default_rng(seed)
    values = {
        "real": rng.random((M, M)),
        "whole": rng.integers(0, 3, (M, M)),
        "tiny": 10.0 ** rng.integers(-12, 1, (M, M)),
    }
    d = np.where(rng.random((M, M)) < share, values[kind], INF).astype(np.float32)
    if not directed:
        d = np.triu(d, 1) + np.triu(d, 1).T
    np.fill_diagonal(d, rng.random())  # must not be read
    return d


def by_networkx(d: np.ndarray) -> np.ndarray:
    g = nx.DiGraph()
    g.add_nodes_from(range(len(d)))
    g.add_weighted_edges_from(
        (i, j, float(d[i, j])) for i, j in np.ndindex(*d.shape) if i != j and np.isfinite(d[i, j])
    )
    out = np.full(d.shape, INF)
    for i, lengths in nx.all_pairs_dijkstra_path_length(g):
        for j, value in lengths.items():
            out[i, j] = value
    return out


def check_paths(d: np.ndarray, length: np.ndarray, successor: np.ndarray) -> None:
    """Every path is simple, made of edges, and as long as told; members and hops are its nodes and edges."""
    mask, count = (np.asarray(x) for x in walk_all(successor))
    for i, j in np.ndindex(*d.shape):
        if not np.isfinite(length[i, j]):
            assert successor[i, j] == -1
            assert not mask[i, j].any()
            assert count[i, j] == 0
            continue
        nodes = [i]
        while nodes[-1] != j:
            nodes.append(int(successor[nodes[-1], j]))
            assert len(nodes) <= len(d)
        edges = np.array([d[a, b] for a, b in itertools.pairwise(nodes)], np.float64)
        assert np.isfinite(edges).all()
        np.testing.assert_allclose(edges.sum(), length[i, j], rtol=1e-6)
        np.testing.assert_array_equal(np.flatnonzero(mask[i, j]), sorted(nodes))
        assert len(set(nodes)) == len(nodes) == count[i, j] + 1


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("kind", ["real", "whole", "tiny"])
@pytest.mark.parametrize("share", [0.15, 0.4, 1.0])
def test_lengths_are_those_of_networkx_and_paths_have_them(share: float, kind: str, directed: bool) -> None:
    for seed in range(4):
        d = graph(seed, 9, kind, share, directed)
        length, successor = (np.asarray(x) for x in find(d))
        np.testing.assert_allclose(length, by_networkx(d), rtol=1e-6)
        check_paths(d, length, successor)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.0, 1e-9, 0.1, 0.3, 1.0, INF]), min_size=36, max_size=36))
def test_zeros_ties_and_weights_lost_in_rounding_make_no_cycle(weights: list[float]) -> None:
    d = np.array(weights, np.float32).reshape(6, 6)
    length, successor = (np.asarray(x) for x in find(d))
    np.testing.assert_allclose(length, by_networkx(d), rtol=1e-6)
    check_paths(d, length, successor)


def test_of_equal_paths_the_one_with_fewest_edges() -> None:
    d = np.abs(np.subtract.outer(np.arange(6), np.arange(6))).astype(
        np.float32
    )  # points on a line: every detour between is equal
    length, successor = find(d)
    np.testing.assert_array_equal(length, d)
    np.testing.assert_array_equal(successor, np.tile(np.arange(6), (6, 1)))
    _, successor = find(np.zeros((6, 6), np.float32))
    np.testing.assert_array_equal(successor, np.tile(np.arange(6), (6, 1)))


def test_a_ring_by_hand() -> None:
    d = np.full((5, 5), INF)
    for i in range(5):
        d[i, (i + 1) % 5] = d[(i + 1) % 5, i] = i + 1  # 0-1: 1, 1-2: 2, 2-3: 3, 3-4: 4, 4-0: 5
    length, successor = find(d)
    np.testing.assert_array_equal(length[0], [0, 1, 3, 6, 5])
    np.testing.assert_array_equal(successor[0], [0, 1, 1, 1, 4])
    out = longest(d, 3)
    np.testing.assert_array_equal(out.pairs, [[2, 4], [0, 3], [1, 4]])  # 2-3-4, 0-1-2-3, 1-0-4
    np.testing.assert_array_equal(out.lengths, [7, 6, 6])
    np.testing.assert_array_equal(out.hops, [2, 3, 2])
    np.testing.assert_array_equal(longest(d, 1).mask, [False, False, True, True, True])


@pytest.mark.parametrize("seed", range(4))
def test_the_longest_are_those_of_a_sort(seed: int) -> None:
    d = graph(seed, 8, "whole", 0.35)
    real = np.arange(8) != 3
    length = np.asarray(find(np.where(real[:, None] & real, d, INF))[0])
    every = [(-length[i, j], i, j) for i in range(8) for j in range(i + 1, 8) if real[i] and real[j]]
    ranked = [(i, j) for value, i, j in sorted(every) if value > -INF]
    for P in (1, 28, 40):
        pairs, valid = longest_paths(jnp.asarray(length), P, real)
        assert pairs.shape == (P, 2)
        assert pairs.dtype == jnp.int32
        some = min(P, len(ranked))
        np.testing.assert_array_equal(valid, np.arange(P) < some)
        np.testing.assert_array_equal(pairs[:some], ranked[:some])
        np.testing.assert_array_equal(pairs[some:], -1)


@pytest.mark.parametrize("P", [1, 5])
def test_nodes_on_the_longest_paths_are_those_of_their_walks(P: int) -> None:
    d = graph(5, 10, share=0.3)
    out = longest(d, P)
    length, successor = find(d)
    nodes: set[int] = set()
    for (i, j), told, count in zip(np.asarray(out.pairs), out.lengths, out.hops, strict=True):
        path = [int(i)]
        while path[-1] != j:
            path.append(int(successor[path[-1], j]))
        nodes |= set(path)
        assert told == length[i, j]
        assert count == len(path) - 1
    np.testing.assert_array_equal(np.flatnonzero(out.mask), sorted(nodes))
    assert int(out.hops.max()) > 1
    assert (np.diff(out.lengths) <= 0).all()


def test_a_metric_gives_the_farthest_pair_alone() -> None:
    points = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)
    d = np.linalg.norm(points[:, None] - points, axis=-1)
    out = longest(d, 1)
    np.testing.assert_array_equal(out.pairs[0], np.unravel_index(d.argmax(), d.shape))
    np.testing.assert_array_equal(np.flatnonzero(out.mask), np.sort(out.pairs[0]))


def test_degenerate_graphs() -> None:
    same = longest(np.zeros((4, 4)), 2)
    np.testing.assert_array_equal(same.mask, [True, True, True, False])
    np.testing.assert_array_equal(same.pairs, [[0, 1], [0, 2]])
    np.testing.assert_array_equal(same.lengths, 0)
    for out in (longest(np.full((4, 4), INF), 2, np.arange(4) == 2), longest(np.zeros((4, 4)), 2, np.arange(4) == 2)):
        np.testing.assert_array_equal(out.mask, [False, False, True, False])
        np.testing.assert_array_equal(out.pairs, -1)
        np.testing.assert_array_equal(out.lengths, 0)
        np.testing.assert_array_equal(out.hops, 0)
    np.testing.assert_array_equal(longest(np.zeros((1, 1)), 3).mask, [True])
    np.testing.assert_array_equal(longest(np.full((4, 4), INF), 2).mask, True)
    assert not longest(np.zeros((4, 4)), 2, np.zeros(4, bool)).mask.any()


@pytest.mark.parametrize("junk", [0.0, np.nan, INF, -1.0])
def test_padding_has_no_influence(junk: float) -> None:
    d, place = graph(2, 10, "real", 0.3), np.array([0, 1, 3, 4, 6, 7, 9, 10, 11, 13])
    padded, real = np.full((14, 14), junk, np.float32), np.zeros(14, bool)
    padded[np.ix_(place, place)], real[place] = d, True
    plain, out = longest(d, 5), longest(padded, 5, real)
    np.testing.assert_array_equal(out.mask[place], plain.mask)
    assert not np.asarray(out.mask)[~real].any()
    np.testing.assert_array_equal(out.lengths, plain.lengths)
    np.testing.assert_array_equal(out.hops, plain.hops)
    np.testing.assert_array_equal(out.pairs, place[np.asarray(plain.pairs)])


def test_vmap_over_seeds_and_double_precision(float64: Any) -> None:
    d = np.stack([graph(seed, 7).astype(np.float64) for seed in range(3)])
    together = jax.jit(jax.vmap(lambda one: on_longest_paths(one, 3)))(d)
    assert together.lengths.dtype == jnp.float64
    for i in range(3):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x: x[i], together), longest(d[i], 3))  # noqa: B023
        np.testing.assert_allclose(find(d[i])[0], by_networkx(d[i]), rtol=1e-14)


@pytest.mark.usefixtures("float64")
def test_single_precision_stays_where_double_is_the_default() -> None:
    out = longest(graph(0, 7), 3)
    assert [x.dtype for x in out] == [jnp.bool_, jnp.float32, jnp.int32, jnp.int32]


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"shortest paths: the distances must have shape \(M, M\)"):
        shortest_paths(jnp.ones((2, 3)))
    with pytest.raises(ValueError, match="P must be at least 1, found 0"):
        on_longest_paths(jnp.ones((2, 2)), 0)
    with pytest.raises(ValueError, match="real must be bool"):
        on_longest_paths(jnp.ones((2, 2)), 1, jnp.ones(3, bool))
