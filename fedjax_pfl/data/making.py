"""From a source to a partition, a pure function of (labels, options, seed), and on to client data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_pfl.data.assign import PARTITIONS, Pool, check_config
from fedjax_pfl.data.clients import SPLITS, ClientData, client_data
from fedjax_pfl.data.config import PartitionConfig
from fedjax_pfl.data.partition import Partition, sha256_of
from fedjax_pfl.data.shifts import check_shift, shifted
from fedjax_pfl.data.sources import Source
from fedjax_pfl.data.splits import official_parts, ordered_parts, split_parts
from fedjax_pfl.data.subgraphs import edge_note, edges_of_samples

ASSIGN, SPLIT, OFFICIAL, UNSEEN = 1, 2, 3, 5  # purposes: each has its own stream of random numbers (4: shifts.py)


def make_partition(source: Source | np.ndarray, config: PartitionConfig) -> Partition:
    """The partition of a source, or of bare labels ``(n,)``, by a configuration: the same in every process.

    Raises:
        ValueError: values out of range, more clients than samples, a minimum or a number of classes that cannot be met,
            natural without client ids, an official test without an official test set, an unknown method, several data
            sets in a method that would mix them, ordered splits of data without an order, all clients held out.
    """
    check_config(config)
    entry, several = PARTITIONS[config.method], isinstance(source, Source) and len(source.datasets) > 1
    if entry.shift and isinstance(source, Source):
        check_shift(source, config)
    source = source if isinstance(source, Source) else _bare(source)
    labels, official = source.y, source.official_test
    if config.test == "official" and (official is None or official.all() or not official.any()):
        raise ValueError(
            "test='official' needs a source with an official test set and training samples: use test='local'"
        )
    if several and config.test == "official":
        raise ValueError(f"{source.name} holds several data sets: use test='local'")
    if several and not entry.apart:
        fit = ", ".join(other.name for other in PARTITIONS.values() if other.apart)
        raise ValueError(f"{config.method} would mix the {len(source.datasets)} data sets of {source.name}: use {fit}")
    published = official if config.test == "official" else None
    where = np.arange(len(labels)) if published is None or entry.linked else np.flatnonzero(~published)
    cut, notes = _cut(source, where, config)
    where = where if cut is None else where[cut[where] >= 0]
    client, dataset = (None if leaf is None else leaf[where] for leaf in (source.client, source.dataset))
    edges = edges_of_samples(source) if entry.linked else None
    pool = Pool(labels[where], source.num_classes, client, dataset, source.datasets, edges)
    dealt = entry.assign(pool, config, _generator(config.seed, ASSIGN))
    parts = [where[part] for part in dealt.parts]
    splits, more = _split(source, parts, cut, config)
    groups = dealt.groups
    if groups is None and source.group is not None:
        groups = _groups(parts, source.group)
    train, validation, test = (tuple(split) for split in splits)
    if source.kind == "nodes":
        more = [*more, edge_note(source, [np.concatenate(rows) for rows in zip(*splits, strict=True)])]
    told, digest = (*notes, *dealt.notes, *more), sha256_of(labels)
    whole = Partition(config, len(labels), train, validation, test, told, groups, labels_sha256=digest)
    return _hold_out(whole) if config.held_out else whole


def _cut(source: Source, where: np.ndarray, config: PartitionConfig) -> tuple[np.ndarray | None, list[str]]:
    """For samples in order the split of each, ``(n,)``: 0, 1, 2, or -1 where it is left out; None for random splits.

    Recordings are cut before they are dealt, so that nobody trains on what anybody is tested on.
    """
    if config.split == "random" or (config.split == "auto" and source.segment is None):
        return None, []
    if source.segment is None:
        raise ValueError(f"split='order' needs samples with an order, {source.name} has none: use split='random'")
    owner = np.zeros(len(where), np.int64) if source.client is None else source.client[where]
    order = np.argsort(owner, kind="stable")
    owners = np.split(where[order], np.flatnonzero(np.diff(np.unique(owner, return_inverse=True)[1][order])) + 1)
    fraction = config.test_fraction if config.test == "local" else 0.0
    *splits, lost = ordered_parts(owners, source.segment, source.overlap, fraction, config.validation_fraction)
    cut = np.full(len(source), -1, np.int8)
    for kind, split in enumerate(splits):
        cut[np.concatenate([np.zeros(0, np.int64), *split])] = kind
    return cut, [f"left out {lost} samples that share content with a later split"] if lost else []


def _split(
    source: Source, parts: list[np.ndarray], cut: np.ndarray | None, config: PartitionConfig
) -> tuple[list[list[np.ndarray]], list[str]]:
    """Train, validation and test rows of the clients, and notes.

    Raises:
        ValueError: a client whose samples are all held back by the order.
    """
    labels, fraction = source.y, config.test_fraction if config.test == "local" else 0.0
    if config.test == "official" and PARTITIONS[config.method].linked:
        return _split_linked(source, parts, config), []
    if cut is None:
        rng = _generator(config.seed, SPLIT)
        splits = list(split_parts(parts, labels, fraction, config.validation_fraction, rng))
    else:
        splits = [[part[cut[part] == kind] for part in parts] for kind in range(3)]
        idle = [client for client, part in enumerate(splits[0]) if not len(part)]
        if idle:
            raise ValueError(
                f"client {idle[0]} has no training samples ({len(idle)} such clients): all of its samples stand in the "
                "later parts of their recordings: raise min_samples, or use split='random'"
            )
    if config.test == "official" and source.official_test is not None:
        splits[2], notes = _official(source, np.flatnonzero(source.official_test), parts, config)
        return splits, notes
    return splits, []


def _split_linked(source: Source, parts: list[np.ndarray], config: PartitionConfig) -> list[list[np.ndarray]]:
    """Splits of clients that have samples of the published test set already.

    Raises:
        ValueError: a client of which no other samples are left, or fewer than its minimum.
    """
    assert source.official_test is not None
    trained = [part[~source.official_test[part]] for part in parts]
    least = min(map(len, trained))
    if least < config.min_samples:
        raise ValueError(
            f"{config.method}: the smallest client has {least} samples besides the published test set, the minimum is "
            f"{config.min_samples}: lower min_samples or clients, or use test='local'"
        )
    rng = _generator(config.seed, SPLIT)
    train, validation, _ = split_parts(trained, source.y, 0.0, config.validation_fraction, rng)
    return [train, validation, [part[source.official_test[part]] for part in parts]]


def _official(
    source: Source, official: np.ndarray, parts: list[np.ndarray], config: PartitionConfig
) -> tuple[list[np.ndarray], list[str]]:
    """Each natural client's own samples of the published test set, where it has any there; else shares by label."""
    if config.method == "natural" and source.client is not None:
        theirs = np.argsort(source.client[official], kind="stable")
        names, own = source.client[official][theirs], source.client[[part[0] for part in parts]]
        first, last = (np.searchsorted(names, own, side) for side in ("left", "right"))
        test = [official[theirs[a:b]] for a, b in zip(first, last, strict=True)]
        lost = len(official) - sum(map(len, test))
        if lost < len(official):
            note = f"left out {lost} official test samples of clients that do not train"
            return test, [note] if lost else []
    counts = np.stack([np.bincount(source.y[part], minlength=source.num_classes) for part in parts])
    test, notes = official_parts(counts, official, source.y, _generator(config.seed, OFFICIAL))
    if config.method == "natural":
        notes = ["no client has test samples of its own in the published test set: shares by label", *notes]
    return test, notes


def _hold_out(whole: Partition) -> Partition:
    """The same partition without ``held_out`` clients drawn by the seed, which become ``unseen``."""
    count, clients = whole.config.held_out, len(whole)
    if count >= clients:
        raise ValueError(f"held_out must leave a client that trains: {count} of {clients} are held out")
    held = np.sort(_generator(whole.config.seed, UNSEEN).permutation(clients)[:count])
    kept = np.setdiff1d(np.arange(clients), held)

    def chosen(clients: np.ndarray, **changes: Any) -> Partition:
        rows: dict[str, Any] = {split: tuple(whole.rows(split)[client] for client in clients) for split in SPLITS}
        groups = None if whole.groups is None else whole.groups[clients]
        return dataclasses.replace(whole, **rows, groups=groups, **changes)

    return chosen(kept, unseen=chosen(held))


def _generator(seed: int, purpose: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(purpose,))))


def _bare(labels: np.ndarray) -> Source:
    """A source of labels alone."""
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or not labels.size or labels.min() < 0:
        raise ValueError(
            f"labels must be a non-empty 1-d array of integers 0..C-1, found {labels.dtype} {labels.shape}"
        )
    return Source("labels", np.zeros((len(labels), 1), np.uint8), labels, int(labels.max()) + 1)


def _groups(parts: Sequence[np.ndarray], group: np.ndarray) -> np.ndarray | None:
    """The group of each client, or None where a client mixes groups."""
    if any((group[part] != group[part[0]]).any() for part in parts):
        return None
    return np.array([group[part[0]] for part in parts])


def to_client_data(source: Source, partition: Partition, examples: dict[str, Any] | None = None) -> ClientData:
    """``ClientData`` of a source under a partition; the features are the source's own array, not a copy.

    Only a partition that shifts features copies them, for all clients at once, those held out too: give the
    ``examples`` of the one to the other.

    Raises:
        ValueError: a partition of other data, a client without training samples (see ``clients.check``), features that
            cannot be shifted, a client with samples of several data sets.
    """
    if len(source) != partition.samples:
        raise ValueError(f"the partition is of {partition.samples} samples, {source.name} has {len(source)}")
    if source.dataset is not None:
        _refuse_mixed(source, source.dataset, partition)
    lists = [partition.rows(split) for split in SPLITS]
    if examples is None and PARTITIONS[partition.config.method].shift and partition.groups is not None:
        check_shift(source, partition.config)
        every = [partition, *([] if partition.unseen is None else [partition.unseen])]
        own = [row for one in every for row in one.samples_of_clients()]
        groups = np.concatenate([np.asarray(one.groups) for one in every])
        examples = source.examples() | {"x": shifted(source.x, own, groups, partition.config)}
    examples = examples or source.examples()
    return client_data(examples, source.num_classes, *lists, tables=source.tables, reader=source.reader)


def _refuse_mixed(source: Source, dataset: np.ndarray, partition: Partition) -> None:
    """Labels and classes mean something else in every data set."""
    for client, rows in enumerate(partition.samples_of_clients()):
        found = np.unique(dataset[rows])
        if len(found) > 1:
            names = ", ".join(source.datasets[number] for number in found)
            raise ValueError(
                f"client {client} of the partition has samples of several data sets ({names}), whose labels and "
                "classes are not the same: deal every data set to clients of its own"
            )
