"""Checks shared by the data loaders, the partitioners and ``ClientData``: each error names the place and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

MAPPING = "map the sorted distinct labels to 0, 1, ... with np.unique(y, return_inverse=True)[1]"


def unknown_name(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for an unknown name: it names the nearest known one and lists all."""
    choices = list(known)
    near = difflib.get_close_matches(name, choices, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {kind} {name!r}.{hint} Known: {', '.join(choices)}")


def check_values(examples: Mapping[str, np.ndarray], num_classes: int, where: str = "examples") -> None:
    """Refuse values that no model can train on.

    Raises:
        ValueError: labels that are not integers in ``0..num_classes-1``, leaves that are not numbers, NaN or infinity.
    """
    labels = np.asarray(examples["y"])
    if not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"{where}: labels must be integers 0..{num_classes - 1}, found dtype {labels.dtype}: {MAPPING}"
        )
    if labels.size and (labels.min() < 0 or labels.max() >= num_classes):
        place = np.argwhere((labels < 0) | (labels >= num_classes))[0]
        raise ValueError(
            f"{where}: label {labels[tuple(place)]} of sample {place[0]} is outside 0..{num_classes - 1}: {MAPPING}"
        )
    for name, leaf in examples.items():
        array = np.asarray(leaf)
        if array.dtype.kind not in "biuf":
            raise ValueError(
                f"{where}: {name!r} has dtype {array.dtype}, which is no number: convert it to float32 or uint8"
            )
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            bad = int(np.argwhere(~np.isfinite(array))[0][0])
            raise ValueError(f"{where}: sample {bad} of {name!r} is NaN or infinite: clean or drop it")


def check_lists(total: int, lists: Sequence[Sequence[np.ndarray]]) -> None:
    """Refuse index lists (split, client) that are not a set of disjoint splits of ``total`` samples.

    Raises:
        ValueError: splits of different numbers of clients, rows that are not integers, out of range or in two places.
    """
    if len({len(one) for one in lists}) > 1:
        raise ValueError(
            f"train, validation and test name {[len(one) for one in lists]} clients: give one list a client"
        )
    parts = [np.asarray(part) for one in lists for part in one]
    odd = [part.dtype for part in parts if part.size and (part.ndim != 1 or part.dtype.kind not in "iu")]
    if odd:
        raise ValueError(f"rows must be 1-d integer indices, found dtype {odd[0]}")
    rows = np.concatenate([np.zeros(0, np.int64), *(part.astype(np.int64) for part in parts)])
    if rows.size and (rows.min() < 0 or rows.max() >= total):
        raise ValueError(f"row {rows.min() if rows.min() < 0 else rows.max()} is outside the {total} samples")
    if rows.size and np.bincount(rows).max() > 1:
        raise ValueError(
            f"sample {np.bincount(rows).argmax()} belongs to two clients or two splits: splits must be disjoint"
        )
