"""Truncated singular value decomposition of updates: FedKD's compression, with static shapes and a safe derivative."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.aggregation import EXACT, safe_divide
from fedjax_pfl.models.model import Variables


def compress(update: Mapping[str, jax.Array], energy: jax.Array | float) -> tuple[Variables, jax.Array]:
    """What arrives of an update that is sent as truncated SVDs, and the floats sent, a scalar in the default float.

    update: leaves of any shape; one with two axes or more counts as a matrix whose columns are its last axis (a kernel
        ``(kh, kw, cin, cout)`` is ``(kh kw cin, cout)``), others are sent whole.
    energy: the share T of the squared singular values that has to be kept; 1 keeps everything.
    """
    received, floats = dict(update), jnp.zeros((), jnp.result_type(float))
    for name, leaf in update.items():
        if leaf.ndim < 2:
            floats += leaf.size
        else:
            matrix, sent = truncate(leaf.reshape(-1, leaf.shape[-1]), energy)
            received[name], floats = matrix.reshape(leaf.shape), floats + sent
    return received, floats


def truncate(matrix: jax.Array, energy: jax.Array | float) -> tuple[jax.Array, jax.Array]:
    """The best approximation of the smallest rank k that keeps the share ``energy``: ``(m, n) -> ((m, n), floats)``.

    floats: ``k (m + n + 1)``; where that is not below ``m n``, the matrix is sent as it is and arrives exactly. The
    derivative holds k fixed: it exists wherever k does not jump.
    """
    m, n = matrix.shape
    peak = jax.lax.stop_gradient(jnp.abs(matrix).max())
    peak = jnp.where(peak == 0, 1, peak)  # squares of tiny or huge values leave the range of float32
    tall = (matrix.T if m < n else matrix) / peak
    # The right singular vectors from the smaller Gram matrix: on a CPU many times faster than the SVD, and what is lost
    # of the smallest singular values is far below any energy that is left out.
    fixed = jax.lax.stop_gradient(tall)
    squared, V = jnp.linalg.eigh(jnp.matmul(fixed.T, fixed, precision=EXACT))
    squared, V = jnp.maximum(squared[::-1], 0), V[:, ::-1]
    rank = rank_for(squared, energy)
    kept = (jnp.arange(squared.size) < rank).astype(tall.dtype)
    small = _project(tall, squared, V, kept) * peak
    factors = rank * (m + n + 1)
    sent = jnp.where(factors < m * n, small.T if m < n else small, matrix)
    return sent, jnp.minimum(factors, m * n).astype(jnp.result_type(float))


def rank_for(squared: jax.Array, energy: jax.Array | float) -> jax.Array:
    """The smallest k for which the first k of the squared singular values ``(r,)``, in falling order, keep ``energy``
    of their sum."""
    before = jnp.concatenate([jnp.zeros(1, squared.dtype), jnp.cumsum(squared)[:-1]])
    return (before < energy * squared.sum()).sum()


@jax.custom_jvp
def _project(X: jax.Array, squared: jax.Array, V: jax.Array, kept: jax.Array) -> jax.Array:
    """``X V_k V_k^T``, V the right singular vectors of ``X (m, n)``, kept 1 for the first k and 0 for the others."""
    return _product(X, V * kept, V.T)


@_project.defjvp
def _project_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
    """The derivative of the best rank-k approximation by that of the projector V_k V_k^T, in which only pairs of a kept
    and a dropped value meet. That of V has poles where two values of one kind coincide, as the zeros of an update of
    low rank do."""
    (X, squared, V, kept), dX = primals, tangents[0]
    half = _product(V.T, dX.T, X, V)
    pair = kept[:, None] * (1 - kept[None, :])
    S = safe_divide(pair * (half + half.T), pair * (squared[:, None] - squared[None, :]))
    moved = _product(V, S + S.T, V.T)
    return _project(*primals), _product(dX, V * kept, V.T) + _product(X, moved)


def _product(*factors: jax.Array) -> jax.Array:
    return jnp.linalg.multi_dot(factors, precision=EXACT)
