"""Random draws that depend on (root key, purpose, round, global client id, epoch, index) and on nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_pfl.data.clients import Split

# Purposes: one stream each, so that no draw of one kind shifts those of another.
INITIAL_MODEL, COHORT, DROPOUT, ROUND, EVALUATION, SHUFFLE, STEP, CLIENT, EXPLORE, LEARN = range(10)


def stream(key: jax.Array, purpose: int, number: jax.Array | int = 0) -> jax.Array:
    """The key of one purpose and a number in it, of the round or the epoch, say."""
    return jax.random.fold_in(jax.random.fold_in(key, purpose), number)


def per_client(key: jax.Array, ids: jax.Array) -> jax.Array:
    """One key for each global client id: ``(M,)`` keys."""
    return jax.vmap(lambda client: jax.random.fold_in(key, client))(ids)


def bits(keys: jax.Array) -> jax.Array:
    """One 32-bit word of each key: uint32, the shape of ``keys``."""
    return jax.random.key_data(keys)[..., 0]


def shuffled_rows(split: Split, ids: jax.Array, key: jax.Array, epochs: int) -> jax.Array:
    """The rows of all clients, each client's range in random order, once for every epoch: ``(epochs, R)`` int32.

    One sort an epoch shuffles all clients, and every range stays where it is. The bits of a row come from its client
    and its place in the client's range, so the order does not depend on which other clients exist or where they live.
    """
    owner = split.owner()
    slot = jnp.minimum(owner, ids.shape[0] - 1)
    at = jnp.arange(owner.shape[0], dtype=jnp.int32)
    place = at - split.start[slot]
    first = jnp.where(owner < ids.shape[0], split.start[slot], at)  # padding keeps its place

    def one(epoch: jax.Array) -> jax.Array:
        clients = per_client(stream(key, SHUFFLE, epoch), ids)
        words = bits(jax.vmap(jax.random.fold_in)(clients[slot], place))
        return jax.lax.sort((first, words, split.rows), num_keys=2)[2]

    return jax.lax.map(one, jnp.arange(epochs, dtype=jnp.int32))
