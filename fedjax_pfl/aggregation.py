"""Aggregation: weighted means and mixing matrices over stacked clients, differentiable and safe at zero weight."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedjax_pfl.engine.sharding import AXIS, ROWS, constrain

Tree = Any
EXACT = jax.lax.Precision.HIGHEST  # accelerators round the factors of a float32 product to 8 or 11 bits by default


def safe_divide(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """``numerator / denominator``, 0 where the denominator is 0; value and gradient are finite there."""
    zero = denominator == 0
    return jnp.where(zero, 0, numerator / jnp.where(zero, 1, denominator))


def safe_norm(x: jax.Array, axis: int | None = None, epsilon: float = 1e-24) -> jax.Array:
    """Euclidean norm with epsilon inside the root: its gradient is finite at zero."""
    return jnp.sqrt(jnp.sum(x * x, axis=axis) + epsilon)


def mean_of_sums(sums: Tree, total: jax.Array, otherwise: Tree) -> Tree:
    """Weighted mean ``sums / total`` of what clients contributed; ``otherwise`` where nobody did (total 0)."""
    empty = total == 0
    safe = jnp.where(empty, 1, total)
    return jax.tree.map(lambda s, o: jnp.where(empty, o, s / safe).astype(o.dtype), sums, otherwise)


def weighted_mean(stack: Tree, weights: jax.Array) -> Tree:
    """``sum_i w_i x_i / sum_i w_i`` over the leading axis of every leaf; 0 where all weights are 0.

    stack: leaves ``(M, ...)``; weights: ``(M,)``, not negative.
    """
    sums = jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf, 1, precision=EXACT), stack)
    return jax.tree.map(lambda leaf: safe_divide(leaf, weights.sum()), sums)


def mix(weights: jax.Array, stack: Tree, mesh: Mesh | None = None) -> Tree:
    """``out_i = sum_j weights[i, j] * stack_j`` for every leaf.

    weights: ``(K, M)``; stack: leaves ``(M, ...)``; returns leaves ``(K, ...)``. In full precision on every backend: a
    client that takes only its own model gets that model. Over several devices every device
    mixes its share of the parameters of all clients, so that none holds the whole stack.
    """

    def leaf(x: jax.Array) -> jax.Array:
        flat = x.reshape(x.shape[0], -1)
        if mesh is None:
            return jnp.matmul(weights, flat, precision=EXACT).reshape(weights.shape[0], *x.shape[1:])
        flat = constrain(jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % mesh.size))), mesh, P(None, AXIS))
        out = constrain(jnp.matmul(weights, flat, precision=EXACT), mesh, P(None, AXIS))
        out = constrain(out, mesh, ROWS)[:, : x[0].size]
        return constrain(out.reshape(weights.shape[0], *x.shape[1:]), mesh, ROWS)

    return jax.tree.map(leaf, stack)


def cosine_matrix(rows: jax.Array) -> jax.Array:
    """Cosine between all pairs of rows: ``(M, d) -> (M, M)``; 0 with a zero row, gradients finite."""
    unit = rows / safe_norm(rows, axis=-1)[:, None]
    return jnp.matmul(unit, unit.T, precision=EXACT)


def gram(a: Tree, b: Tree, mesh: Mesh | None = None) -> jax.Array:
    """Inner products of all pairs of clients over all leaves: ``(M, M)``, entry ``(i, j)`` is ``<a_i, b_j>``."""

    def flat(x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        return x if mesh is None else constrain(jnp.pad(x, ((0, 0), (0, -x.shape[1] % mesh.size))), mesh, P(None, AXIS))

    products = jax.tree.map(lambda x, y: jnp.matmul(flat(x), flat(y).T, precision=EXACT), a, b)
    return sum(jax.tree.leaves(products), start=jnp.zeros((), jnp.result_type(float)))
