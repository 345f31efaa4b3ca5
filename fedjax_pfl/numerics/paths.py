"""Shortest paths between all pairs of a weighted graph, and the longest of them (FedGCF's choice of clients).

    Dijkstra, A note on two problems in connexion with graphs, Numerische Mathematik, 1959

One run of Dijkstra's algorithm for every destination, all in step: as many operations as Floyd and Warshall's. A node
takes as successor one that was settled before it, so paths have no cycle even where weights are 0, equal, or lost in
the rounding of a sum; and the length of a path is exactly the sum along it, from its end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.numerics import _checks


class OnPaths(NamedTuple):
    """The P longest shortest paths: the nodes on them, ``(M,)`` bool; for each path its length, its number of edges
    (int32), ``(P,)``, 0 where there is no further path; and its ends, ``(P, 2)`` int32, -1 where there is none."""

    mask: jax.Array
    lengths: jax.Array
    hops: jax.Array
    pairs: jax.Array


def shortest_paths(d: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Lengths and successors of shortest paths, given edges ``d (M, M)``, not negative, infinite or NaN for no edge.

    Returns ``length (M, M)``, infinite where there is no path, 0 on the diagonal; and ``successor (M, M)`` int32, the
    node after i on the path from i to j, -1 where there is none, i itself for j = i. Of equally long paths it is one
    with the fewest edges. The diagonal of ``d`` is not read.

    Raises:
        ValueError: d is not square.
    """
    size = _checks.square("shortest paths: the distances", d)
    into = _checks.floating(d).T
    length, successor = jax.vmap(lambda end: _to(into, end))(jnp.arange(size))
    return length.T, successor.T


def _to(into: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Shortest paths of all nodes to one; ``into[i]`` holds the edges that end in i."""
    size = len(into)
    length = jnp.full(size, jnp.inf, into.dtype).at[end].set(0)
    edges = jnp.full(size, size, jnp.int32).at[end].set(0)
    successor = jnp.full(size, -1, jnp.int32).at[end].set(end.astype(jnp.int32))

    def settle(_: jax.Array, carry: Any) -> Any:
        length, edges, successor, rest = carry
        nearest = rest & (length == jnp.where(rest, length, jnp.inf).min())
        node = jnp.where(nearest, edges, size + 1).argmin().astype(jnp.int32)
        rest = rest.at[node].set(False)
        reach, count = into[node] + length[node], edges[node] + 1
        better = rest & (reach < jnp.inf) & ((reach < length) | ((reach == length) & (count < edges)))
        new = jnp.where(better, reach, length), jnp.where(better, count, edges), jnp.where(better, node, successor)
        return *new, rest

    length, _, successor, _ = jax.lax.fori_loop(0, size, settle, (length, edges, successor, jnp.ones(size, bool)))
    return length, successor


def _walk(successor: jax.Array, i: jax.Array, j: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The nodes on a path and its number of edges; nothing where there is no path."""
    size = len(successor)
    successor, i, j = jnp.asarray(successor), jnp.asarray(i), jnp.asarray(j)
    there = successor[i, j] >= 0

    def step(carry: Any) -> Any:
        node, mask, count = carry
        node = successor[node, j]
        return node, mask.at[node].set(True), count + 1

    start = jnp.where(there, i, j).astype(jnp.int32), jnp.zeros(size, bool).at[i].set(there), jnp.array(0, jnp.int32)
    _, mask, count = jax.lax.while_loop(lambda carry: (carry[0] != j) & (carry[2] < size), step, start)
    return mask, count


def members(successor: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
    """Nodes on the path from i to j, both ends among them: ``(M,)`` bool; none where there is no path."""
    return _walk(successor, i, j)[0]


def hops(successor: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
    """Number of edges of the path from i to j, int32; 0 where there is no path."""
    return _walk(successor, i, j)[1]


def longest_paths(length: jax.Array, P: int, real: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Ends ``(P, 2)`` int32, i < j, of the P longest finite paths between real nodes, the longest first; and which of
    them exist, ``(P,)`` bool: there may be fewer, then the ends are -1. Of equal ones the first by (i, j) comes first.

    Raises:
        ValueError: wrong shapes, or P below 1.
    """
    size = _checks.square("longest paths: the lengths", length)
    _checks.at_least(1, P=P)
    real = _checks.mask("real", real, size)
    i, j = np.triu_indices(size, 1)
    values = jnp.where(real[i] & real[j] & jnp.isfinite(length[i, j]), length[i, j], -jnp.inf)
    top, place = jax.lax.top_k(values, min(P, len(i)))
    valid = top > -jnp.inf
    pairs = jnp.where(valid[:, None], jnp.stack([jnp.asarray(i)[place], jnp.asarray(j)[place]], -1), -1)
    short = P - len(top)
    return jnp.pad(pairs.astype(jnp.int32), ((0, short), (0, 0)), constant_values=-1), jnp.pad(valid, (0, short))


def on_longest_paths(d: jax.Array, P: int, real: jax.Array | None = None) -> OnPaths:
    """The nodes on the P longest of the shortest paths between real nodes, given edges ``d (M, M)``.

    Where no two real nodes are connected, as with a single one, the mask holds all real nodes.

    Raises:
        ValueError: wrong shapes, or P below 1.
    """
    size = _checks.square("longest paths: the distances", d)
    real = _checks.mask("real", real, size)
    length, successor = shortest_paths(jnp.where(real[:, None] & real, _checks.floating(d), jnp.inf))
    pairs, valid = longest_paths(length, P, real)
    i, j = jnp.where(valid[:, None], pairs, 0).T
    nodes, count = jax.vmap(_walk, (None, 0, 0))(successor, i, j)
    mask = jnp.where(valid.any(), (nodes & valid[:, None]).any(0), real)
    return OnPaths(mask, jnp.where(valid, length[i, j], 0), jnp.where(valid, count, 0), pairs)
