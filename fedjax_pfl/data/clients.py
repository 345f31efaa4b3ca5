"""Ragged client data: samples stored once, every client a range of row indices, no padding at rest."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.data.checks import check_lists, check_values

Array = Any  # a jax.Array under a trace, a numpy array on the host
Batch = Mapping[str, Array]
Reader = Callable[[Array, Mapping[str, Array]], Any]  # (x of a batch, tables) -> what a model is given

SPLITS = ("train", "validation", "test")


class Split(NamedTuple):
    """One split of all clients: slot ``i`` owns ``rows[start[i] : start[i] + count[i]]``.

    rows: ``(R,)`` int32, indices into the examples; start, count: ``(M,)`` int32.
    """

    rows: Array
    start: Array
    count: Array

    def owner(self) -> Array:
        """The slot that owns each entry of ``rows``: ``(R,)`` int32; ``M`` for entries that nobody owns (padding).

        Holds for any order of the slots, and wherever empty slots start.
        """
        places, slots = self.rows.shape[0], self.start.shape[0]
        count = jnp.asarray(self.count)
        first = jnp.where(count > 0, self.start, places)
        slot_at = jnp.full(places, slots, jnp.int32).at[first].set(jnp.arange(slots, dtype=jnp.int32), mode="drop")
        place = jnp.arange(places)
        begin = jax.lax.cummax(jnp.where(slot_at < slots, place, 0))
        slot = slot_at[begin]
        return jnp.where(place - begin < count.at[slot].get(mode="fill", fill_value=0), slot, slots)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClientData:
    """The data of all clients, as a pytree that enters compiled functions as an argument.

    examples: every leaf has the leading axis ``total``; ``examples["x"]`` are features, ``examples["y"]`` labels.
    ids: ``(slots,)`` int32, the global client id of each slot; an id >= ``num_clients`` marks a padding slot
        (no samples, weight zero), which exist only where clients are spread over devices.
    limits: the largest number of samples of one client in each split (static: it bounds static loops).
    shards: the number of equal blocks that each leading axis consists of; rows and starts count within a block.
    tables: arrays that samples have in common (a text, the edges of all graphs); every device holds them whole.
    reader: ``(x, tables) -> x`` (static, equal readers being the same program): reads a batch of samples, which
        ``examples["x"]`` then only points at.
    """

    examples: dict[str, Array]
    train: Split
    validation: Split
    test: Split
    ids: Array
    num_clients: int = dataclasses.field(metadata={"static": True})
    num_classes: int = dataclasses.field(metadata={"static": True})
    limits: tuple[int, int, int] = dataclasses.field(metadata={"static": True})
    shards: int = dataclasses.field(default=1, metadata={"static": True})
    tables: dict[str, Array] = dataclasses.field(default_factory=dict)
    reader: Reader | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def slots(self) -> int:
        """Number of client slots, padding included."""
        return int(self.ids.shape[0])

    @property
    def real(self) -> Array:
        """Which slots hold a client: ``(slots,)`` bool."""
        return self.ids < self.num_clients

    @property
    def by_client(self) -> Array:
        """The slots in the order of client ids, padding left out, ``(num_clients,)``: what is computed in this order
        does not depend on how clients are dealt to devices."""
        return jnp.argsort(self.ids)[: self.num_clients]

    @property
    def weight(self) -> Array:
        """Number of training samples per slot as float: the ``n_i`` of weighted means, ``(slots,)``."""
        return self.train.count.astype(jnp.result_type(float))

    def split(self, name: str) -> Split:
        """The split called ``train``, ``validation`` or ``test``."""
        if name not in SPLITS:
            raise ValueError(f"unknown split {name!r}: choose one of {', '.join(SPLITS)}")
        return getattr(self, name)

    def limit(self, name: str) -> int:
        """The largest number of samples that one client has in a split."""
        return self.limits[SPLITS.index(name)]

    def gather(self, rows: Array) -> dict[str, Any]:
        """The examples of ``rows``: a batch whose leaves lead with ``rows.shape``."""
        batch = {name: leaf[rows] for name, leaf in self.examples.items()}
        return batch if self.reader is None else batch | {"x": self.reader(batch["x"], self.tables)}

    def local(self) -> ClientData:
        """The same leaves as one block: what a device holds inside ``shard_map``, where one of ``shards`` is left."""
        return dataclasses.replace(self, shards=1)

    def label_histogram(self) -> Array:
        """Training samples per slot and class: ``(slots, num_classes)`` float; padding slots have none."""
        local = jax.tree.map(lambda leaf: leaf.reshape(self.shards, -1), self.train)
        labels = self.examples["y"].reshape(self.shards, -1)
        return jax.vmap(self._histogram)(local, labels).reshape(self.slots, self.num_classes)

    def _histogram(self, split: Split, labels: Array) -> Array:
        cells = jnp.zeros((split.start.shape[0] + 1, self.num_classes), jnp.result_type(float))
        return cells.at[split.owner(), labels[split.rows]].add(1.0)[:-1]


def split_from_lists(lists: Sequence[np.ndarray]) -> Split:
    """A host-side ``Split`` from one index array per client; without any sample it has one row that nobody owns."""
    count = np.array([len(indices) for indices in lists], np.int32)
    start = (np.cumsum(count) - count).astype(np.int32)
    rows = np.concatenate([np.zeros(0, np.int32), *(np.asarray(indices, np.int32) for indices in lists)])
    return Split(rows if rows.size else np.zeros(1, np.int32), start, count)


def client_data(
    examples: Mapping[str, np.ndarray],
    num_classes: int,
    train: Sequence[np.ndarray],
    validation: Sequence[np.ndarray] | None = None,
    test: Sequence[np.ndarray] | None = None,
    *,
    tables: Mapping[str, np.ndarray] | None = None,
    reader: Reader | None = None,
) -> ClientData:
    """Host-side ``ClientData`` from arrays and one index array per client and split (see ``check`` for the errors).

    examples: leaves ``(total, ...)``, kept without a copy; ``"x"`` may be uint8 (normalised inside the step), float, or
    signed integers (tokens, given to the model as they are); ``"y"`` integer labels.
    tables, reader: see ``ClientData``.
    """
    clients = len(train)
    nothing = [np.zeros(0, np.int32)] * clients
    lists = [list(nothing if one is None else one) for one in (train, validation, test)]
    check(examples, num_classes, lists)
    fit, tune, final = (split_from_lists(one) for one in lists)
    examples = {name: np.asarray(leaf) for name, leaf in examples.items()}
    examples["y"] = examples["y"].astype(np.int32, copy=False)
    limits = (int(fit.count.max()), int(tune.count.max()), int(final.count.max()))
    ids = np.arange(clients, dtype=np.int32)
    return ClientData(
        examples, fit, tune, final, ids, num_clients=clients, num_classes=num_classes, limits=limits,
        tables={name: np.asarray(table) for name, table in (tables or {}).items()}, reader=reader,
    )  # fmt: skip


def check(examples: Mapping[str, np.ndarray], num_classes: int, lists: Sequence[Sequence[np.ndarray]]) -> None:
    """Refuse unusable client data.

    Raises:
        ValueError: empty data, leaves of different length, labels outside ``0..C-1``, NaN or infinite features,
            splits of different numbers of clients, rows out of range or in two places, a client that cannot train.
    """
    if "x" not in examples or "y" not in examples:
        raise ValueError(f"examples need the leaves 'x' and 'y', found {sorted(examples)}")
    lengths = {name: len(leaf) for name, leaf in examples.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"all leaves of examples need the same number of samples, found {lengths}")
    if lengths["y"] == 0 or not lists[0]:
        raise ValueError("the data set is empty: no samples or no clients")
    check_values(examples, num_classes)
    check_lists(lengths["y"], lists)
    idle = [client for client, part in enumerate(lists[0]) if len(part) == 0]
    if idle:
        raise ValueError(f"client {idle[0]} has no training samples ({len(idle)} such clients): raise the minimum")


def shard(data: ClientData, shards: int, work: np.ndarray | None = None) -> ClientData:
    """Deal clients to ``shards`` equal blocks, so that ``PartitionSpec("clients")`` splits every leaf evenly (host).

    The largest client goes first, each to the block with the least work that has a free slot of ``ceil(M / shards)``.
    A block owns the examples of its clients (samples of no client are dropped); its rows and starts count within the
    block, so inside ``shard_map`` a device sees valid client data (see ``ClientData.local``). Short blocks repeat their
    first entry; padding slots have distinct ids >= ``num_clients`` and no samples.

    work: ``(M,)`` the work of each slot, by default its training samples.

    Raises:
        ValueError: shards below 1, data that is sharded already, work of another length.
    """
    if shards < 1 or data.shards != 1:
        raise ValueError(f"shards must be at least 1 and the data unsharded, found {shards} and {data.shards}")
    load = np.asarray(data.train.count if work is None else work)
    if load.shape != (data.slots,):
        raise ValueError(f"work needs one number for each of {data.slots} clients, found shape {load.shape}")
    if shards == 1:
        return data
    data = jax.tree.map(np.asarray, data)
    members = _deal_by_work(load, shards)
    blocks = [_Block.of(data, slots) for slots in members]
    length = max(1, *(len(block.rows) for block in blocks))
    index = np.concatenate([_pad(block.rows, length) for block in blocks])
    capacity = -(-data.slots // shards)
    train, validation, test = (_stack([block.splits[s] for block in blocks], capacity) for s in range(len(SPLITS)))
    padding = iter(range(data.num_clients, data.num_clients + shards * capacity))
    ids = [
        int(data.ids[slots[place]]) if place < len(slots) else next(padding)
        for slots in members
        for place in range(capacity)
    ]
    return dataclasses.replace(
        data,
        examples={name: leaf[index] for name, leaf in data.examples.items()},
        train=train,
        validation=validation,
        test=test,
        ids=np.array(ids, np.int32),
        shards=shards,
    )


def _deal_by_work(load: np.ndarray, shards: int) -> list[list[int]]:
    """Slots of each shard, ascending."""
    capacity = -(-len(load) // shards)
    members: list[list[int]] = [[] for _ in range(shards)]
    queue = [(0.0, block) for block in range(shards)]
    for slot in np.argsort(-load, kind="stable"):
        total, block = heapq.heappop(queue)
        members[block].append(int(slot))
        if len(members[block]) < capacity:
            heapq.heappush(queue, (total + float(load[slot]), block))
    return [sorted(slots) for slots in members]


class _Block(NamedTuple):
    """The global rows that a shard owns, and its splits counted within them."""

    rows: np.ndarray
    splits: list[Split]

    @classmethod
    def of(cls, data: ClientData, slots: list[int]) -> _Block:
        lists = [[_rows_of(data.split(name), slot) for slot in slots] for name in SPLITS]
        flat = [np.concatenate([np.zeros(0, np.int32), *one]) for one in lists]
        offsets = np.cumsum([0, *(len(one) for one in flat)])
        splits = []
        for parts, one, offset in zip(lists, flat, offsets, strict=False):
            count = np.array([len(part) for part in parts], np.int32)
            splits.append(Split(np.arange(offset, offset + len(one), dtype=np.int32), np.cumsum(count) - count, count))
        return cls(np.concatenate(flat), splits)


def _rows_of(split: Split, slot: int) -> np.ndarray:
    return split.rows[split.start[slot] : split.start[slot] + split.count[slot]]


def _pad(values: np.ndarray, length: int) -> np.ndarray:
    """Values followed by copies of the first, or zeros where there is none."""
    return np.concatenate([values, np.full(length - len(values), values[0] if len(values) else 0, values.dtype)])


def _stack(splits: list[Split], capacity: int) -> Split:
    """One split, block after block, with equally many rows and slots in each."""
    length = max(1, *(len(split.rows) for split in splits))
    rows = [_pad(split.rows, length) for split in splits]
    start = [np.append(s.start, np.full(capacity - len(s.start), len(s.rows))) for s in splits]
    count = [np.append(s.count, np.zeros(capacity - len(s.count))) for s in splits]
    return Split(*(np.concatenate(leaf).astype(np.int32) for leaf in (rows, start, count)))
