"""Partitions: which samples each client trains, validates and tests on; a pure function of (labels, seed), hashed."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.data.assign import PARTITIONS, Pool
from fedjax_pfl.data.checks import check_lists, unknown_name
from fedjax_pfl.data.clients import SPLITS, ClientData, client_data
from fedjax_pfl.data.files import read_npz
from fedjax_pfl.data.sources import Source
from fedjax_pfl.data.splits import official_parts, split_parts

ASSIGN, SPLIT, OFFICIAL = 1, 2, 3  # purposes: each has its own stream of random numbers


@dataclasses.dataclass(frozen=True)
class PartitionConfig:
    """How samples are dealt to clients."""

    method: str = "dirichlet"
    """Name of the method: iid, dirichlet, pathological or natural."""
    clients: int | None = 20
    """Number of clients; None takes all of a natural partition."""
    alpha: float = 0.1
    """Dirichlet parameter: small is skewed, large is IID."""
    classes_per_client: int = 2
    """Classes of each client in the pathological partition."""
    balance: bool = False
    """Equal client sizes, within one (dirichlet, pathological)."""
    min_samples: int = 2
    """Smallest number of samples of a client, all its splits together."""
    test_fraction: float = 0.25
    """Share of each client's samples that is its test set (test="local")."""
    validation_fraction: float = 0.1
    """Share of each client's samples that is its validation set; 0 for none."""
    test: str = "local"
    """Where test samples come from: local (re-split of all samples) or official (shares of the published test set)."""
    seed: int = 0
    """Seed of the partition, independent of the model's."""

    def check(self) -> None:
        """Refuse values that no data set can satisfy.

        Raises:
            ValueError: naming the field, its value and the allowed range.
        """
        if self.method not in PARTITIONS:
            raise unknown_name("partition", self.method, PARTITIONS)
        if self.test not in ("local", "official"):
            raise unknown_name("kind of test set", self.test, ("local", "official"))
        for name in sorted({option for entry in PARTITIONS.values() for option in entry.options}):
            changed = getattr(self, name) != type(self).__dataclass_fields__[name].default
            if changed and name not in PARTITIONS[self.method].options:
                readers = ", ".join(entry.name for entry in PARTITIONS.values() if name in entry.options)
                raise ValueError(
                    f"{name} belongs to {readers}; partition {self.method!r} does not read it: leave it out"
                )
        least = {"clients": 1, "classes_per_client": 1, "min_samples": 1, "seed": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"{name} must be at least {low}, found {value}")
        if not 0 < self.alpha < np.inf:
            raise ValueError(f"alpha must be positive and finite, found {self.alpha}")
        for name in ("test_fraction", "validation_fraction"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in 0 <= value < 1, found {getattr(self, name)}")
        if self.test == "local" and self.test_fraction + self.validation_fraction >= 1:
            raise ValueError(
                f"test_fraction {self.test_fraction} and validation_fraction {self.validation_fraction} leave nothing "
                "to train on: their sum must be below 1"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Partition:
    """Row indices per client and split, ascending and disjoint, into the ``samples`` samples of a source.

    groups: ``(M,)`` the group of each client where the method makes groups, or where the source has groups that no
        client mixes; else None.
    """

    config: PartitionConfig
    samples: int
    train: tuple[np.ndarray, ...]
    validation: tuple[np.ndarray, ...]
    test: tuple[np.ndarray, ...]
    notes: tuple[str, ...] = ()
    groups: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.train)

    def sizes(self, split: str) -> np.ndarray:
        """Samples per client of a split: ``(M,)``."""
        return np.array([len(part) for part in self.rows(split)], np.int64)

    def rows(self, split: str) -> tuple[np.ndarray, ...]:
        """The index arrays of ``train``, ``validation`` or ``test``."""
        if split not in SPLITS:
            raise unknown_name("split", split, SPLITS)
        return getattr(self, split)

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of the index sets, the same on every platform: little-endian int64 of all sizes and rows."""
        digest = hashlib.sha256(np.array([self.samples, len(self)], "<i8").tobytes())
        for split in SPLITS:
            digest.update(self.sizes(split).astype("<i8").tobytes())
            digest.update(np.concatenate(self.rows(split)).astype("<i8").tobytes())
        return digest.hexdigest()

    @property
    def achieved_minimum(self) -> int:
        """The smallest number of samples that a client was dealt (shares of an official test set not counted)."""
        counted = ("train", "validation") if self.config.test == "official" else SPLITS
        return int(np.sum([self.sizes(split) for split in counted], axis=0).min())

    def counts(self, labels: np.ndarray, split: str = "train", num_classes: int | None = None) -> np.ndarray:
        """Samples per client and class of a split: ``(M, C)`` integers; C is the largest label + 1 by default."""
        labels = np.asarray(labels)
        if len(labels) != self.samples:
            raise ValueError(f"this partition is of {self.samples} samples, found {len(labels)} labels")
        classes = int(labels.max()) + 1 if num_classes is None else num_classes
        owner = np.repeat(np.arange(len(self)), self.sizes(split))
        cells = owner * classes + labels[np.concatenate(self.rows(split))]
        return np.bincount(cells, minlength=len(self) * classes).reshape(len(self), classes)

    def table(self, labels: np.ndarray) -> list[dict[str, Any]]:
        """One row per client: ``client``, ``train``, ``validation``, ``test`` (sizes), ``classes`` (all its labels)."""
        present = np.sum([self.counts(labels, split) for split in SPLITS], axis=0) > 0
        sizes = {split: self.sizes(split) for split in SPLITS}
        return [
            {"client": client, **{split: int(sizes[split][client]) for split in SPLITS},
             "classes": np.flatnonzero(present[client]).tolist()}
            for client in range(len(self))
        ]  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Write an npz file without pickles; the file appears whole or not at all."""
        arrays: dict[str, np.ndarray] = {"samples": np.array(self.samples), "sha256": np.array(self.sha256)}
        arrays["config"] = np.array(json.dumps(dataclasses.asdict(self.config)))
        arrays["notes"] = np.array(json.dumps(self.notes))
        for split in SPLITS:
            arrays[f"{split}_rows"] = np.concatenate(self.rows(split)).astype("<i8")
            arrays[f"{split}_sizes"] = self.sizes(split).astype("<i8")
        if self.groups is not None:
            arrays["groups"] = self.groups
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        with open(partial, "wb") as stream:
            np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]
        os.replace(partial, path)

    @classmethod
    def load(cls, path: str | Path, samples: int | None = None) -> Partition:
        """Read what ``save`` wrote, for a source of ``samples`` samples where given.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not such a file, damaged (rows out of range or shared, another hash), of other data.
        """
        found = read_npz(Path(path))
        try:
            train, validation, test = (_unflatten(found[f"{split}_rows"], found[f"{split}_sizes"]) for split in SPLITS)
            config = PartitionConfig(**json.loads(str(found["config"])))
            notes = tuple(str(note) for note in json.loads(str(found["notes"])))
            stored, digest = int(found["samples"]), str(found["sha256"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a partition file or damaged ({error!r})") from error
        if samples is not None and samples != stored:
            raise ValueError(f"{path}: is of {stored} samples, the data has {samples}: it belongs to other data")
        check_lists(stored, (train, validation, test))
        partition = cls(config, stored, train, validation, test, notes, found.get("groups"))
        if partition.sha256 != digest:
            raise ValueError(f"{path}: its rows do not match its sha256 {digest}: damaged or edited")
        return partition


def _unflatten(rows: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, ...]:
    if rows.ndim != 1 or sizes.ndim != 1 or not len(sizes) or sizes.min() < 0 or sizes.sum() != len(rows):
        raise ValueError("sizes and rows disagree")
    return tuple(np.split(rows.astype(np.int64), np.cumsum(sizes)[:-1]))


def make_partition(source: Source | np.ndarray, config: PartitionConfig) -> Partition:
    """The partition of a source, or of bare labels ``(n,)``, by a configuration: the same in every process.

    Raises:
        ValueError: values out of range, more clients than samples, a minimum or a number of classes that cannot be met,
            natural without client ids, an official test without an official test set, an unknown method.
    """
    config.check()
    labels, classes, client, official, group = _parts_of(source)
    if config.test == "official" and (official is None or official.all() or not official.any()):
        raise ValueError(
            "test='official' needs a source with an official test set and training samples: use test='local'"
        )
    where = np.flatnonzero(~official) if config.test == "official" and official is not None else np.arange(len(labels))
    pool = Pool(labels[where], classes, None if client is None else client[where])
    dealt = PARTITIONS[config.method].assign(pool, config, _generator(config.seed, ASSIGN))
    parts, notes = [where[part] for part in dealt.parts], list(dealt.notes)
    fraction = config.test_fraction if config.test == "local" else 0.0
    rng = _generator(config.seed, SPLIT)
    train, validation, test = split_parts(parts, labels, fraction, config.validation_fraction, rng)
    if config.test == "official" and official is not None:
        counts = np.stack([np.bincount(labels[part], minlength=classes) for part in parts])
        test, more = official_parts(counts, np.flatnonzero(official), labels, _generator(config.seed, OFFICIAL))
        notes += more
    groups = dealt.groups if dealt.groups is not None or group is None else _groups(parts, group)
    return Partition(config, len(labels), tuple(train), tuple(validation), tuple(test), tuple(notes), groups)


def _generator(seed: int, purpose: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(purpose,))))


def _parts_of(source: Source | np.ndarray) -> tuple[Any, ...]:
    """Labels, number of classes, client ids, official test mask and groups."""
    if isinstance(source, Source):
        return source.y, source.num_classes, source.client, source.official_test, source.group
    labels = np.asarray(source)
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or not labels.size or labels.min() < 0:
        raise ValueError(
            f"labels must be a non-empty 1-d array of integers 0..C-1, found {labels.dtype} {labels.shape}"
        )
    return labels, int(labels.max()) + 1, None, None, None


def _groups(parts: Sequence[np.ndarray], group: np.ndarray) -> np.ndarray | None:
    """The group of each client, or None where a client mixes groups."""
    if any((group[part] != group[part[0]]).any() for part in parts):
        return None
    return np.array([group[part[0]] for part in parts])


def to_client_data(source: Source, partition: Partition) -> ClientData:
    """``ClientData`` of a source under a partition; the features are the source's own array, not a copy.

    Raises:
        ValueError: a partition of other data, a client without training samples (see ``clients.check``).
    """
    if len(source) != partition.samples:
        raise ValueError(f"the partition is of {partition.samples} samples, {source.name} has {len(source)}")
    lists = (partition.rows(split) for split in SPLITS)
    return client_data(source.examples(), source.num_classes, *lists, tables=source.tables, reader=source.reader)
