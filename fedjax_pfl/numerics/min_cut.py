"""Global minimum cut of an undirected graph (GCFL splits a cluster of clients by it).

    Stoer, Wagner, A simple min-cut algorithm, Journal of the ACM, 1997

    while more than one node is left:
        A = {the first node};  repeat: add to A the node most tightly connected to it
        the last node, with all that was merged into it, against the rest: the cut of the phase
        merge the last two nodes
    the least cut of all phases

O(M^3), with O(M^2) steps one after another.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.numerics import _checks


def min_cut(weights: jax.Array, members: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Least cut of the members of a graph ``(M, M)`` into two parts.

    weights: symmetric, finite; below 0, as rounding may leave them, they count as 0; the diagonal is not read.
    members: ``(M,)`` bool, all for None. Returns ``(side, value)``: the part without the first member, ``(M,)`` bool;
    and the weight between the two. With fewer than two members the side is empty and the value 0.

    Raises:
        ValueError: wrong shapes.
    """
    size = _checks.square("minimum cut: the weights", weights)
    members = _checks.mask("members", members, size)
    pair = members[:, None] & members
    weights = jnp.where(pair, jnp.maximum(_checks.floating(weights), 0), 0)

    def phase(i: jax.Array, carry: Any) -> Any:
        merged, groups, left, side, value = carry
        before, last, cut = _phase(merged, left, count - i)
        better = cut < value
        side, value = jnp.where(better, groups[last], side), jnp.where(better, cut, value)
        groups = groups.at[before].set(groups[before] | groups[last])
        row = merged[before] + merged[last]
        merged = merged.at[before].set(row).at[:, before].set(row)
        return merged, groups, left.at[last].set(False), side, value

    count = members.sum()
    start = weights, jnp.eye(size, dtype=bool), members, jnp.zeros(size, bool), jnp.array(jnp.inf, weights.dtype)
    side = jax.lax.fori_loop(0, count - 1, phase, start)[3]
    side = jnp.where(side[members.argmax()], members & ~side, side)
    return side, jnp.where(side[:, None] & ~side & members, weights, 0).sum()


def _phase(weights: jax.Array, left: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The last two nodes of an order by tightness of the ``count`` nodes left, and the last one's tightness."""

    def add(_: jax.Array, carry: Any) -> Any:
        outside, tight, _, last, _ = carry
        node = jnp.where(outside, tight, -1).argmax()
        return outside.at[node].set(False), tight + weights[node], last, node, tight[node]

    nobody = jnp.argmax(left)
    start = left, jnp.zeros_like(weights[0]), nobody, nobody, jnp.zeros((), weights.dtype)
    _, _, before, last, cut = jax.lax.fori_loop(0, count, add, start)
    return before, last, cut
