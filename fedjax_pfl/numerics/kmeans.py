"""k-means from inner products alone: the dimension of the points costs one matrix product.

    Lloyd, Least squares quantization in PCM, IEEE Transactions on Information Theory, 1982
    Arthur, Vassilvitskii, k-means++: the advantages of careful seeding, SODA 2007

A centre is a vector of weights over points, so with D_ij = ||x_i - x_j||^2

    ||x_i - sum_j w_j x_j||^2 = sum_j w_j D_ij - 1/2 sum_jl w_j w_l D_jl

Points whose D_ij is lost in the rounding of the Gram matrix are one point: they always share a cluster.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.aggregation import EXACT
from fedjax_pfl.numerics import _checks

ROUNDING = 64  # units in the last place of the largest squared norm: below, a squared distance counts as 0


def gram_of(points: jax.Array, real: jax.Array | None = None) -> jax.Array:
    """Inner products of points ``(M, D)`` around the mean of the real ones: ``(M, M)``, 0 with padding.

    Distances are those of the points; taken from the mean, they lose less to rounding.

    Raises:
        ValueError: wrong shapes.
    """
    real = _checks.mask("real", real, len(points))
    inside = jnp.where(real[:, None], _checks.floating(points), 0)
    centred = jnp.where(real[:, None], inside - inside.sum(0) / jnp.maximum(real.sum(), 1), 0)
    return jnp.matmul(centred, centred.T, precision=EXACT)


def kmeans(
    points: jax.Array, K: int, key: jax.Array, *, real: jax.Array | None = None, iterations: int = 20, restarts: int = 4
) -> tuple[jax.Array, jax.Array]:
    """Clusters of points ``(M, D)``: as `kmeans_gram`, with centres ``(K, D)``, 0 for an empty cluster.

    Raises:
        ValueError: wrong shapes, or K, iterations or restarts below 1.
    """
    real = _checks.mask("real", real, len(points))
    gram = gram_of(points, real)
    assignment, weights = kmeans_gram(gram, K, key, real=real, iterations=iterations, restarts=restarts)
    return assignment, jnp.matmul(weights, jnp.where(real[:, None], points, 0), precision=EXACT)


def kmeans_gram(
    gram: jax.Array, K: int, key: jax.Array, *, real: jax.Array | None = None, iterations: int = 20, restarts: int = 4
) -> tuple[jax.Array, jax.Array]:
    """Clusters of points of which the inner products ``(M, M)`` are known; `gram_of` gives the most exact ones.

    Returns the assignment, ``(M,)`` int32, -1 for padding; and the centres as weights over points, ``(K, M)``, 0 for an
    empty cluster. Clusters are numbered by their first members; ``min(K, distinct points)`` of them have any. The best
    of ``restarts`` by the sum of squared distances, each of ``iterations`` at most; further restarts leave the
    first ones as they are. The outcome is a function of the key and the order of the real rows.

    Raises:
        ValueError: wrong shapes, or K, iterations or restarts below 1.
    """
    size = _checks.square("k-means: the Gram matrix", gram)
    _checks.at_least(1, K=K, iterations=iterations, restarts=restarts)
    real = _checks.mask("real", real, size)
    squares, twin = _distances(_checks.floating(gram), real)

    def run(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        def step(carry: Any) -> Any:
            labels, _, count = carry
            new = _assign(_to_centres(squares, _centres(labels, K)), real, twin)
            return new, (new != labels).any(), count + 1

        start = _assign(_seeds(squares, real, K, key), real, twin), jnp.array(True), jnp.array(0)
        labels, *_ = jax.lax.while_loop(lambda carry: carry[1] & (carry[2] < iterations), step, start)
        own = _centres(labels, K)
        return labels, jnp.where(own > 0, _to_centres(squares, own), 0).sum()

    labels, inertia = jax.vmap(lambda i: run(jax.random.fold_in(key, i)))(jnp.arange(restarts))
    best = labels[inertia.argmin()]
    first = jnp.where(best == jnp.arange(K)[:, None], jnp.arange(size), size).min(1)
    number = jnp.argsort(jnp.argsort(first))
    best = jnp.where(real, number[best], -1).astype(jnp.int32)
    return best, _centres(best, K).astype(squares.dtype)


def _distances(gram: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Squared distances ``(M, M)``, 0 for padding; and the first row of which each row is a copy, ``(M,)``."""
    pair = real[:, None] & real
    gram = jnp.where(pair, gram, 0)
    norms = jnp.diagonal(gram)
    squares = norms[:, None] + norms - 2 * gram
    seen = pair & (squares > ROUNDING * jnp.finfo(gram.dtype).eps * norms.max())
    return jnp.where(seen, squares, 0), (pair & ~seen).argmax(1)


def _seeds(squares: jax.Array, real: jax.Array, K: int, key: jax.Array) -> jax.Array:
    """k-means++: squared distances ``(K, M)`` to K seeds; infinite where there are fewer distinct points."""

    def draw(nearest: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
        weights = jnp.where(real, jnp.where(jnp.isinf(nearest), 1, nearest), 0)  # infinite before the first seed
        total = jnp.cumsum(weights)
        place = (total > u * total[-1]) | (total == total[-1])  # u * total may round up to total
        to_seed = jnp.where(total[-1] > 0, squares[place.argmax()], jnp.inf)
        return jnp.minimum(nearest, to_seed), to_seed

    return jax.lax.scan(draw, jnp.full_like(squares[0], jnp.inf), jax.random.uniform(key, (K,), squares.dtype))[1]


def _centres(labels: jax.Array, K: int) -> jax.Array:
    """Weights ``(K, M)`` of the clusters' means; 0 for an empty cluster."""
    inside = labels == jnp.arange(K)[:, None]
    return inside / jnp.maximum(inside.sum(1, keepdims=True), 1)


def _to_centres(squares: jax.Array, weights: jax.Array) -> jax.Array:
    """Squared distances ``(K, M)`` of points to centres; infinite to that of an empty cluster."""
    weights = weights.astype(squares.dtype)
    cross = jnp.matmul(weights, squares, precision=EXACT)
    within = (cross * weights).sum(1, keepdims=True) / 2
    return jnp.where(weights.any(1, keepdims=True), jnp.maximum(cross - within, 0), jnp.inf)


def _assign(to: jax.Array, real: jax.Array, twin: jax.Array) -> jax.Array:
    """The nearest centre, given distances ``(K, M)``: ``(M,)``, -1 for padding.

    A cluster that stays empty takes the farthest point, with its copies, of those whose cluster keeps another one.
    """
    labels, gap = jnp.where(real, to.argmin(0)[twin], -1), to.min(0)[twin]
    stranger = real[:, None] & real & (twin[:, None] != twin)

    def fill(k: jax.Array, labels: jax.Array) -> jax.Array:
        can = ((labels[:, None] == labels) & stranger).any(1)
        far = jnp.where(can, gap, -1).argmax()
        moved = ~(labels == k).any() & can[far] & real & (twin == twin[far])
        return jnp.where(moved, k, labels)

    return jax.lax.fori_loop(0, len(to), fill, labels)
