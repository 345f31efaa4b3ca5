"""Partitions: which samples each client trains, validates and tests on, hashed, saved and read back."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.data.assign import PARTITIONS, check_config
from fedjax_pfl.data.checks import check_lists, unknown_name
from fedjax_pfl.data.clients import SPLITS
from fedjax_pfl.data.config import PartitionConfig
from fedjax_pfl.data.files import read_npz

MAKE = "with: fedjax-pfl partition ... --out DIR"


@dataclasses.dataclass(frozen=True, eq=False)
class Partition:
    """Row indices per client and split, ascending and disjoint, into the ``samples`` samples of a source.

    groups: ``(M,)`` the group of each client where the method makes groups, or where the source has groups that no
        client mixes; else None.
    unseen: the clients that are held out, as a partition of their own, or None.
    labels_sha256: of the labels that were dealt (``sha256_of``), or empty where it is not known.
    """

    config: PartitionConfig
    samples: int
    train: tuple[np.ndarray, ...]
    validation: tuple[np.ndarray, ...]
    test: tuple[np.ndarray, ...]
    notes: tuple[str, ...] = ()
    groups: np.ndarray | None = None
    unseen: Partition | None = None
    labels_sha256: str = ""

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

    def samples_of_clients(self) -> list[np.ndarray]:
        """The rows of each client, all its splits together."""
        return [np.concatenate(rows) for rows in zip(*(self.rows(split) for split in SPLITS), strict=True)]

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of the index sets, the same on every platform: little-endian int64 of all sizes and rows.

        Groups, clients that are held out, and what changes features (the options and seed of a shift) enter it.
        """
        digest = hashlib.sha256(np.array([self.samples, len(self)], "<i8").tobytes())
        for split in SPLITS:
            digest.update(self.sizes(split).astype("<i8").tobytes())
            digest.update(np.concatenate(self.rows(split)).astype("<i8").tobytes())
        if self.groups is not None:
            digest.update(self.groups.astype("<i8").tobytes())
        if PARTITIONS[self.config.method].shift:
            options = (self.config.shift, self.config.groups, float(self.config.shift_noise), self.config.seed)
            digest.update(repr(options).encode())
        if self.unseen is not None:
            digest.update(self.unseen.sha256.encode())
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
        arrays = self._arrays()
        arrays |= {f"unseen_{name}": array for name, array in (self.unseen._arrays() if self.unseen else {}).items()}
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        with open(partial, "wb") as stream:
            np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]
        os.replace(partial, path)

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays: dict[str, np.ndarray] = {"samples": np.array(self.samples), "sha256": np.array(self.sha256)}
        arrays["config"] = np.array(json.dumps(dataclasses.asdict(self.config)))
        arrays["notes"] = np.array(json.dumps(self.notes))
        arrays["labels_sha256"] = np.array(self.labels_sha256)
        for split in SPLITS:
            arrays[f"{split}_rows"] = np.concatenate(self.rows(split)).astype("<i8")
            arrays[f"{split}_sizes"] = self.sizes(split).astype("<i8")
        return arrays if self.groups is None else arrays | {"groups": self.groups}

    @classmethod
    def load(cls, path: str | Path, labels: np.ndarray | None = None) -> Partition:
        """Read what ``save`` wrote, for a source with these labels ``(n,)`` where given.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not such a file, damaged (rows out of range or shared, another hash), of other data.
        """
        try:
            found = read_npz(Path(path))
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{path}: no such file: make it, {MAKE}") from error
        except ValueError as error:
            raise ValueError(f"{str(error).rpartition(':')[0]}: make it again, {MAKE}") from error
        seen = {name: array for name, array in found.items() if not name.startswith("unseen_")}
        held = {name.removeprefix("unseen_"): array for name, array in found.items() if name not in seen}
        unseen = cls._read(held, path, labels) if held else None
        partition = cls._read(seen, path, labels, unseen)
        if unseen is not None:
            check_lists(partition.samples, [[*partition.rows(split), *unseen.rows(split)] for split in SPLITS])
        return partition

    @classmethod
    def _read(
        cls, found: dict[str, np.ndarray], path: str | Path, labels: np.ndarray | None, unseen: Partition | None = None
    ) -> Partition:
        try:
            stored, digest, groups = int(found["samples"]), str(found["sha256"]), found.get("groups")
            if any(len(found[f"{split}_sizes"]) > max(stored, 1) for split in SPLITS):
                raise ValueError("more clients than samples")
            train, validation, test = (_unflatten(found[f"{split}_rows"], found[f"{split}_sizes"]) for split in SPLITS)
            config = PartitionConfig(**json.loads(str(found["config"])))
            check_config(config)
            notes = tuple(str(note) for note in json.loads(str(found["notes"])))
            if groups is not None and (
                groups.shape != (len(train),) or groups.dtype.kind not in "iu" or groups.min() < 0
            ):
                raise ValueError("groups and clients disagree")
            of = str(found.get("labels_sha256", ""))
        except (KeyError, TypeError, ValueError) as error:
            lost = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path}: not a partition file or damaged ({lost}): make it again, {MAKE}") from error
        if labels is not None and len(labels) != stored:
            raise ValueError(f"{path}: is of {stored} samples, the data has {len(labels)}: it belongs to other data")
        if labels is not None and of and of != sha256_of(labels):
            raise ValueError(f"{path}: was made for data with other labels: it belongs to other data")
        check_lists(stored, (train, validation, test))
        partition = cls(config, stored, train, validation, test, notes, groups, unseen, of)
        if partition.sha256 != digest:
            raise ValueError(f"{path}: its rows do not match its sha256 {digest}: damaged or edited")
        return partition


def _unflatten(rows: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, ...]:
    if rows.ndim != 1 or sizes.ndim != 1 or not len(sizes) or sizes.min() < 0 or sizes.sum() != len(rows):
        raise ValueError("sizes and rows disagree")
    return tuple(np.split(rows.astype(np.int64), np.cumsum(sizes)[:-1]))


def sha256_of(labels: np.ndarray) -> str:
    """Hash of labels ``(n,)``, as little-endian int64: it tells data sets of equal size apart."""
    return hashlib.sha256(np.asarray(labels).astype("<i8").tobytes()).hexdigest()
