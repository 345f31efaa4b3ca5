"""What a reinforcement-learning agent remembers, as arrays of fixed shapes: a ring buffer and moments of states."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

LARGEST = 1e9  # of a stored number: its square, summed over a run, is still far from what float32 ends at


class Moments(NamedTuple):
    """Running moments of states: how many were seen, int32; mean and sum of squared deviations, ``(S,)``."""

    seen: jax.Array
    mean: jax.Array
    squares: jax.Array


class Replay(NamedTuple):
    """A ring buffer: s and s2 ``(capacity, S)``, a ``(capacity, A)``, r and done ``(capacity,)``; scalars int32.

    head: the place of the next transition. fill: how many are stored. refused: how many valid ones were not, because
    they held a number that is not finite or beyond 1e9.
    """

    s: jax.Array
    a: jax.Array
    r: jax.Array
    s2: jax.Array
    done: jax.Array
    head: jax.Array
    fill: jax.Array
    refused: jax.Array


def places(head: jax.Array, valid: jax.Array, capacity: int) -> jax.Array:
    """Where a ring buffer puts each transition that ``valid (N,)`` marks: ``(N,)`` int32, ``capacity`` for nowhere.

    No place comes twice, since it is open which write to a place is the last one.
    """
    rank = jnp.cumsum(valid, dtype=jnp.int32) - 1
    kept = valid & (rank >= valid.sum(dtype=jnp.int32) - capacity)
    return jnp.where(kept, (head + rank) % capacity, capacity)


def observed(moments: Moments, s: jax.Array, valid: jax.Array) -> Moments:
    """The moments with the states ``s (N, S)`` that ``valid (N,)`` marks (Chan, Golub, LeVeque, 1983)."""
    mask, new = valid[:, None], valid.sum(dtype=jnp.int32)
    before, n = moments.seen.astype(s.dtype), new.astype(s.dtype)
    total = jnp.maximum(before + n, 1)
    mean = jnp.where(mask, s, 0).sum(0) / jnp.maximum(n, 1)
    squares = (jnp.where(mask, s - mean, 0) ** 2).sum(0)
    gap = jnp.where(new > 0, mean - moments.mean, 0)
    return Moments(
        moments.seen + new, moments.mean + gap * n / total, moments.squares + squares + gap**2 * before * n / total
    )
