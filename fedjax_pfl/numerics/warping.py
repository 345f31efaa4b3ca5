"""Dynamic time warping of short series (GCFL+ compares the gradient norms of clients with it).

    Sakoe, Chiba, Dynamic programming algorithm optimization for spoken word recognition, IEEE Transactions on
    Acoustics, Speech, and Signal Processing, 1978

    D_ij = |a_i - b_j| + min(D_i-1,j , D_i,j-1 , D_i-1,j-1)

without a window or slope constraint. Cells with the same i + j do not need each other and are computed at once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.numerics import _checks


def warping_distance(a: jax.Array, b: jax.Array, length_a: jax.Array, length_b: jax.Array) -> jax.Array:
    """Warping distance of the first ``length_a`` and ``length_b`` numbers of two series ``(L,)``: a scalar.

    An empty series counts as a single 0, so that its distance is finite, and 0 to another empty one.

    Raises:
        ValueError: the series are not vectors of one length >= 1.
    """
    if a.shape != b.shape or a.ndim != 1 or not a.size:
        raise ValueError(f"warping: two series of shape (L,) with L >= 1 are needed, found {a.shape} and {b.shape}")
    place = jnp.arange(len(a))
    a, b = (jnp.where(place < n, _checks.floating(x), 0) for x, n in ((a, length_a), (b, length_b)))
    last_a, last_b = (jnp.clip(n, 1, len(a)) - 1 for n in (length_a, length_b))

    def diagonal(carry: Any, total: jax.Array) -> tuple[Any, None]:
        before, last, answer = carry  # D of the two diagonals before, by i
        j = total - place
        left, up, both = last, _shift(last), _shift(before)
        least = jnp.where(total == 0, 0, jnp.minimum(jnp.minimum(left, up), both))
        now = jnp.where((j >= 0) & (j < len(b)), jnp.abs(a - b[jnp.clip(j, 0, len(b) - 1)]) + least, jnp.inf)
        return (last, now, jnp.where(total == last_a + last_b, now[last_a], answer)), None

    nowhere = jnp.full(a.shape, jnp.inf, a.dtype)
    start = nowhere, nowhere, jnp.zeros((), a.dtype)
    return jax.lax.scan(diagonal, start, jnp.arange(2 * len(a) - 1))[0][2]


def _shift(x: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.full_like(x[:1], jnp.inf), x[:-1]])


def warping_distances(series: jax.Array, lengths: jax.Array, real: jax.Array | None = None) -> jax.Array:
    """Warping distances of all pairs of series ``(M, L)`` with ``lengths (M,)``: ``(M, M)``, symmetric, 0 with padding.

    Raises:
        ValueError: wrong shapes.
    """
    if series.ndim != 2 or lengths.shape != series.shape[:1]:
        raise ValueError(f"warping: series (M, L) need lengths (M,), found {series.shape} and {lengths.shape}")
    real = _checks.mask("real", real, len(series))
    row = jax.vmap(warping_distance, (None, 0, None, 0))
    distances = jax.vmap(row, (0, None, 0, None))(series, series, lengths, lengths)
    return jnp.where(real[:, None] & real, distances, 0)
