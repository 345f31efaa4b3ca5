"""Small pytree arithmetic shared by the engine and the algorithms."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def where(flag: jax.Array, new: Tree, old: Tree) -> Tree:
    """``new`` where ``flag`` (a scalar bool) holds, else ``old``, leaf by leaf."""
    return jax.tree.map(lambda a, b: jnp.where(flag, a, b), new, old)


def add(a: Tree, b: Tree) -> Tree:
    """Sum of two pytrees."""
    return jax.tree.map(jnp.add, a, b)


def subtract(a: Tree, b: Tree) -> Tree:
    """Difference of two pytrees."""
    return jax.tree.map(jnp.subtract, a, b)


def scale(factor: jax.Array | float, tree: Tree) -> Tree:
    """Every leaf times a scalar, in the leaf's own dtype."""
    return jax.tree.map(lambda a: (a * factor).astype(a.dtype), tree)


def zeros_like(tree: Tree) -> Tree:
    """Zeros of the same shapes."""
    return jax.tree.map(jnp.zeros_like, tree)


def take(tree: Tree, i: jax.Array | int) -> Tree:
    """Entry ``i`` of the leading axis of every leaf."""
    return jax.tree.map(lambda a: a[i], tree)


def broadcast(tree: Tree, count: int) -> Tree:
    """``count`` copies along a new leading axis."""
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (count, *jnp.shape(a))), tree)


def dot(a: Tree, b: Tree) -> jax.Array:
    """Inner product over all leaves."""
    return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, a, b)), start=jnp.zeros(()))


def all_finite(tree: Tree) -> jax.Array:
    """Whether every floating leaf is finite: a scalar bool."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
    peaks = [jnp.isfinite(jnp.abs(leaf).max(initial=0)) for leaf in floats]  # one pass; a maximum keeps NaN
    return jnp.stack(peaks).all() if peaks else jnp.array(True)


def size(tree: Tree) -> int:
    """Number of scalars."""
    return sum(int(jnp.size(leaf)) for leaf in jax.tree.leaves(tree))


def nbytes(tree: Tree) -> int:
    """Number of bytes of all leaves (arrays or shape structs)."""
    return sum(int(leaf.size) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
