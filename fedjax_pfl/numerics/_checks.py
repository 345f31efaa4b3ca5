"""What can be told of arguments while a function is traced: shapes and plain numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def square(name: str, x: jax.Array) -> int:
    """M of an array ``(M, M)``.

    Raises:
        ValueError: the array is not square, or empty.
    """
    if x.ndim != 2 or x.shape[0] != x.shape[1] or not x.size:
        raise ValueError(f"{name} must have shape (M, M) with M >= 1, found {x.shape}")
    return x.shape[0]


def mask(name: str, flags: jax.Array | None, rows: int) -> jax.Array:
    """A mask ``(rows,)`` bool; all True for None.

    Raises:
        ValueError: another shape, or not bool: 0 and 1 would be taken for indices.
    """
    if flags is None:
        return jnp.ones(rows, bool)
    flags = jnp.asarray(flags)
    if flags.shape != (rows,) or flags.dtype != bool:
        raise ValueError(f"{name} must be bool of shape ({rows},), found {flags.dtype} of shape {flags.shape}")
    return flags


def at_least(least: int, **counts: int) -> None:
    """Whole numbers are not below ``least``.

    Raises:
        ValueError: one is; it is named.
    """
    for name, count in counts.items():
        if count < least:
            raise ValueError(f"{name} must be at least {least}, found {count}")


def floating(x: jax.Array) -> jax.Array:
    """The array as it is, or in the default float type where it holds whole numbers."""
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.result_type(float))
