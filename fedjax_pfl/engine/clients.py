"""The local-work primitive: the one place that loops over clients and over their minibatches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fedjax_pfl.data.clients import ClientData
from fedjax_pfl.engine import random, tree
from fedjax_pfl.engine.sharding import COMMON, ROWS, data_spec, per_shard

Tree = Any


class Client(NamedTuple):
    """What ``begin`` and ``end`` know of their client, all scalars.

    slot: its row in stacked arrays (of this device); id: its global number; samples: samples in the split, float;
    batches: minibatches of one epoch; key: its own random key in this call.
    """

    slot: jax.Array
    id: jax.Array
    samples: jax.Array
    batches: jax.Array
    key: jax.Array


Begin = Callable[[Client, Tree, Tree], Tree]
Step = Callable[[Tree, dict[str, jax.Array], jax.Array, jax.Array], Tree]
End = Callable[[Client, Tree, Tree], tuple[Tree, Tree]]


@dataclasses.dataclass(frozen=True)
class Work:
    """How local work is run; everything here is static.

    batch_size, epochs: minibatches of at most so many samples, passes over the split (none: no step).
    steps: at most so many minibatches of a client, all epochs together (None: no limit).
    split: which samples. shuffle: a new order each epoch, or the order of the data.
    chunk: clients trained at once (memory grows with it). most: at most so many clients take part (None: all).
    differentiable: static scans, through which reverse mode works, instead of loops of dynamic length.
    check: a client whose row or contribution is not finite keeps its row and contributes nothing.
    """

    batch_size: int
    epochs: int = 1
    split: str = "train"
    shuffle: bool = True
    chunk: int = 1
    most: int | None = None
    steps: int | None = None
    differentiable: bool = False
    check: bool = True
    mesh: Mesh | None = None


def run_clients(
    begin: Begin,
    step: Step,
    end: End,
    *,
    rows: Tree,
    common: Tree,
    data: ClientData,
    work: Work,
    key: jax.Array,
    who: jax.Array | None = None,
    common_spec: Any = COMMON,
) -> tuple[Tree, Tree, jax.Array]:
    """Let the clients in ``who`` work, each written as if it were alone.

    begin: ``(client, row, common) -> carry``, the received model and a fresh optimiser, say.
    step: ``(carry, batch, t, key) -> carry``; the batch has ``"mask"`` ``(B,)``, true for real samples; ``t`` counts
        this client's steps from 0; the key is the client's and the step's own.
    end: ``(client, carry, row) -> (row, contribution)``.
    rows: pytree with leading axis ``slots``, or None; common: what every client sees.
    who: ``(slots,)`` bool, default every client. Clients outside it keep their row and contribute nothing.
    common_spec: how ``common`` is split over devices (default: not at all).

    Returns:
        ``(rows, sums, reported)``: the new rows, the contributions summed over clients, and who ended with a finite
        row and contribution, ``(slots,)`` bool.
    """
    who = data.real if who is None else who & data.real

    def shard(rows: Tree, common: Tree, data: ClientData, who: jax.Array) -> tuple[Tree, Tree, jax.Array]:
        rows, sums, reported = _run_shard(begin, step, end, rows, common, data.local(), who, work, key)
        return rows, tree.broadcast(sums, 1), reported

    run = per_shard(shard, work.mesh, (ROWS, common_spec, data_spec(data), ROWS), (ROWS, ROWS, ROWS))
    rows, sums, reported = run(rows, common, data, who)
    return rows, jax.tree.map(lambda a: a.sum(0), sums), reported


def measure(
    stat: Callable[[Tree, dict[str, jax.Array]], Tree],
    deliver: Callable[[Tree, jax.Array], Tree],
    *,
    common: Tree,
    data: ClientData,
    work: Work,
    who: jax.Array | None = None,
    common_spec: Any = COMMON,
) -> Tree:
    """Per-client sums of a statistic, without training.

    stat: ``(delivered, batch) -> sums over the batch`` (the batch has ``"mask"``).
    deliver: ``(common, slot) -> delivered``, the model of one client, say.

    Returns:
        The sums with leading axis ``slots``; zero for clients outside ``who`` and without samples.
    """
    work = dataclasses.replace(work, shuffle=False, epochs=1, check=False)
    example = jax.eval_shape(lambda data: data.gather(jnp.zeros(work.batch_size, jnp.int32)), data)
    example["mask"] = jax.ShapeDtypeStruct((work.batch_size,), bool)
    delivered = jax.eval_shape(deliver, common, jax.ShapeDtypeStruct((), jnp.int32))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(stat, delivered, example))

    def begin(client: Client, row: Tree, common: Tree) -> Tree:
        return deliver(common, client.slot), row

    def step(carry: Tree, batch: dict[str, jax.Array], t: jax.Array, key: jax.Array) -> Tree:
        return carry[0], tree.add(carry[1], stat(carry[0], batch))

    return run_clients(
        begin, step, lambda client, carry, row: (carry[1], None),
        rows=tree.broadcast(zeros, data.slots), common=common, data=data, work=work, key=jax.random.key(0),
        who=who, common_spec=common_spec,
    )[0]  # fmt: skip


def run_client(
    begin: Begin,
    step: Step,
    end: End,
    *,
    slot: jax.Array,
    row: Tree,
    common: Tree,
    data: ClientData,
    work: Work,
    key: jax.Array,
    order: jax.Array | None = None,
    active: jax.Array | bool = True,
) -> tuple[Tree, Tree]:
    """``run_clients`` for the one client in ``slot`` of this device: ``(row, contribution)``.

    order: the result of ``sample_order``, where it is at hand; active: scalar bool, no step is made without it.
    """
    split = data.split(work.split)
    order = sample_order(data, work, key) if order is None else order
    count, start = split.count[slot], split.start[slot]
    batches = -(-count // work.batch_size)
    steps_key, client_key = (
        jax.random.fold_in(random.stream(key, purpose), data.ids[slot]) for purpose in (random.STEP, random.CLIENT)
    )
    client = Client(slot, data.ids[slot], count.astype(jnp.result_type(float)), batches, client_key)

    def advance(t: jax.Array, carry: Tree) -> Tree:
        epoch, number = t // jnp.maximum(batches, 1), t % jnp.maximum(batches, 1)
        place = number * work.batch_size + jnp.arange(work.batch_size, dtype=jnp.int32)
        rows = order[jnp.minimum(epoch, order.shape[0] - 1), start + jnp.clip(place, 0, jnp.maximum(count - 1, 0))]
        batch = data.gather(rows) | {"mask": place < count}
        return step(carry, batch, t, jax.random.fold_in(steps_key, t))

    steps = jnp.where(active, jnp.minimum(batches * work.epochs, most_steps(data, work)), 0)
    carry = begin(client, row, common)
    carry = _repeat(advance, steps, most_steps(data, work), carry, work.differentiable)
    return end(client, carry, row)


def sample_order(data: ClientData, work: Work, key: jax.Array) -> jax.Array:
    """The rows of a split in the order in which they are visited, ``(epochs, R)`` int32."""
    split = data.split(work.split)
    if not work.shuffle or work.epochs == 0:
        return split.rows[None]
    return random.shuffled_rows(split, data.ids, key, work.epochs)


def most_steps(data: ClientData, work: Work) -> int:
    """The largest number of steps of one client (static)."""
    steps = -(-data.limit(work.split) // work.batch_size) * work.epochs
    return steps if work.steps is None else min(steps, work.steps)


def _repeat(advance: Callable[[Any, Tree], Tree], steps: jax.Array, most: int, carry: Tree, static: bool) -> Tree:
    """``advance`` for t = 0 .. steps - 1: a loop of dynamic length, or a scan of ``most`` masked steps."""
    if not static:
        return jax.lax.fori_loop(0, steps, advance, carry)

    def masked(carry: Tree, t: jax.Array) -> tuple[Tree, None]:
        return tree.where(t < steps, advance(t, carry), carry), None

    return jax.lax.scan(masked, carry, jnp.arange(most, dtype=jnp.int32))[0]


def _run_shard(
    begin: Begin, step: Step, end: End, rows: Tree, common: Tree, data: ClientData, who: jax.Array, work: Work,
    key: jax.Array,
) -> tuple[Tree, Tree, jax.Array]:  # fmt: skip
    """One device's clients, in chunks, those with most work first, so that a chunk's clients end together."""
    slots = data.slots
    most = slots if work.most is None else min(work.most, slots)
    chunk = min(work.chunk, most)
    chunks = -(-most // chunk)
    order = sample_order(data, work, key)
    size = data.split(work.split).count
    queue = jnp.argsort(jnp.where(who, -size, 1), stable=True).astype(jnp.int32)
    queue = jnp.concatenate([queue, jnp.full(chunks * chunk, slots, jnp.int32)])

    def one(slot: jax.Array, row: Tree, live: jax.Array) -> tuple[Tree, Tree]:
        return run_client(
            begin, step, end, slot=slot, row=row, common=common, data=data, work=work, key=key, order=order, active=live
        )

    def run_chunk(number: jax.Array, state: tuple[Tree, Tree, jax.Array]) -> tuple[Tree, Tree, jax.Array]:
        rows, sums, reported = state
        own = jax.lax.dynamic_slice(queue, (number * chunk,), (chunk,))
        slot = jnp.minimum(own, slots - 1)
        live = (own < slots) & who[slot]
        new, contribution = jax.vmap(one)(slot, tree.take(rows, slot), live)
        good = live & jax.vmap(tree.all_finite)((new, contribution)) if work.check else live
        target = jnp.where(good, slot, slots)
        rows = jax.tree.map(lambda a, b: a.at[target].set(b, mode="drop"), rows, new)
        kept = jax.vmap(tree.where, (0, 0, None))(good, contribution, tree.zeros_like(tree.take(contribution, 0)))
        sums = tree.add(sums, jax.tree.map(_sum_over_chunk, kept))
        return rows, sums, reported.at[target].set(True, mode="drop")

    sums = _zero_contribution(one, rows)
    state = (rows, sums, jnp.zeros(slots, bool))
    if work.differentiable:
        return jax.lax.scan(lambda s, n: (run_chunk(n, s), None), state, jnp.arange(chunks))[0]
    return jax.lax.fori_loop(0, chunks, run_chunk, state)


def _sum_over_chunk(leaf: jax.Array) -> jax.Array:
    """Sum over the leading axis; written out for a few clients, where a CPU's reduction is slow."""
    return sum(leaf[1:], start=leaf[0]) if len(leaf) <= 8 else leaf.sum(0)


def _zero_contribution(one: Callable[..., tuple[Tree, Tree]], rows: Tree) -> Tree:
    row = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), rows)
    shape = jax.eval_shape(one, jax.ShapeDtypeStruct((), jnp.int32), row, jax.ShapeDtypeStruct((), bool))[1]
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape)
