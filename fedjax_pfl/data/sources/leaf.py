"""LEAF's Shakespeare and FEMNIST with their users as clients.

Caldas et al.: "LEAF: A Benchmark for Federated Settings", 2018, https://arxiv.org/abs/1812.01097
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedjax_pfl.data.sources.base import Source, SourceEntry
from fedjax_pfl.data.sources.finding import find_any
from fedjax_pfl.data.sources.leaf_files import REMEDY, User, read_users
from fedjax_pfl.data.sources.text import ALPHABET, BLANK, LENGTH, encode, outside
from fedjax_pfl.data.windows import Windows

PIXELS, SIDE, CLASSES = 784, 28, 62
ROUNDING = 0.02  # of a grey level: what four decimals of k/255 leave


class _Gathered:
    """Samples of all users; clients are numbered in the order in which users appear."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.x: list[np.ndarray] = []
        self.y: list[np.ndarray] = []
        self.client: list[np.ndarray] = []
        self.test: list[np.ndarray] = []

    def add(self, user: User, x: np.ndarray, y: np.ndarray) -> None:
        number = self.numbers.setdefault(user.name, len(self.numbers))
        self.x.append(x)
        self.y.append(y)
        self.client.append(np.full(len(y), number, np.int32))
        self.test.append(np.full(len(y), user.test))

    def joined(self, path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """``x``, ``y``, the client, and the official test set where there is one."""
        if not self.numbers or not sum(map(len, self.y)):
            raise ValueError(f"{path}: has no samples: {REMEDY}")
        x, y, client, test = (np.concatenate(one) for one in (self.x, self.y, self.client, self.test))
        return x, y, client, test if test.any() else None


def _femnist(argument: str, data_dir: Path | None) -> Source:
    """``x (n, 28, 28, 1)`` uint8 where all values are k/255 (to four decimals), else float32; 62 classes."""
    path = find_any(argument, ("femnist", "leaf/femnist", "leaf/femnist.zip", "leaf/data/femnist"), data_dir, REMEDY)
    gathered = _Gathered()
    for user in read_users(path):
        gathered.add(user, _grey(_images(user)), _labels(user))
    grey = all(x.dtype == np.uint8 for x in gathered.x)
    if not grey:
        gathered.x = [x / np.float32(255) if x.dtype == np.uint8 else x for x in gathered.x]
    x, y, client, test = gathered.joined(path)
    x = x.reshape(-1, SIDE, SIDE, 1)
    return Source(
        f"femnist:{path}", x, y, CLASSES, client, official_test=test, scale=255.0 if grey else 1.0,
        licence=FEMNIST.licence, where=str(path),
    )  # fmt: skip


def _images(user: User) -> np.ndarray:
    wrong = [place for place, one in enumerate(user.x) if not isinstance(one, list) or len(one) != PIXELS]
    if wrong:
        raise ValueError(f"{user.place}: sample {wrong[0]} of x has no {PIXELS} numbers: damaged, make it again")
    try:
        x = np.array(user.x).reshape(-1, PIXELS)
    except ValueError:
        x = np.empty((0, PIXELS), object)
    if user.x and x.dtype.kind not in "iuf":
        raise ValueError(f"{user.place}: x holds something else than numbers: damaged, make it again")
    x = x.astype(np.float32)
    if not np.isfinite(x).all():
        raise ValueError(f"{user.place}: sample {np.argwhere(~np.isfinite(x))[0][0]} of x is not finite: make it again")
    return x


def _grey(x: np.ndarray) -> np.ndarray:
    """Grey levels as uint8 where all values are such, else the values."""
    levels = np.rint(x * 255)
    exact = (np.abs(x * 255 - levels) < ROUNDING).all() and (levels >= 0).all() and (levels <= 255).all()
    return levels.astype(np.uint8) if exact else x


def _labels(user: User) -> np.ndarray:
    for place, label in enumerate(user.y):
        if type(label) is not int or not 0 <= label < CLASSES:
            label = label if isinstance(label, int | float | str) else type(label).__name__
            raise ValueError(f"{user.place}: label {label!r} of sample {place} is no whole number in 0..{CLASSES - 1}")
    return np.array(user.y, np.int32)


def _leaf_shakespeare(argument: str, data_dir: Path | None) -> Source:
    """``x (n,)`` int32 the first place of a window of 80 in ``tables["text"]`` (uint8), ``y`` the character behind it.

    A window that goes on from the one before by one character adds this character to the table, others add all 80.
    Neighbours are taken to overlap as LEAF's do, so splits leave a gap of 80 samples.
    """
    usual = ("leaf/shakespeare", "leaf/shakespeare.zip", "leaf/data/shakespeare", "leaf_shakespeare")
    path = find_any(argument, usual, data_dir, REMEDY)
    gathered, tables, length, lost, first = _Gathered(), [], 0, 0, ""
    for user in read_users(path):
        codes = _characters(user)
        odd = np.argwhere(codes < 0)
        if odd.size:
            row, place = odd[0]
            first = first or f"{user.place}: {(user.x[row] + user.y[row])[place]!r} in sample {row}"
            lost += len(odd)
            codes[codes < 0] = BLANK
        table, starts = _shared(codes[:, :-1])
        gathered.add(user, (starts + length).astype(np.int32), codes[:, -1].astype(np.int32))
        tables.append(table)
        length += len(table)
    x, y, client, test = gathered.joined(path)
    note = outside(lost, len(x) * (LENGTH + 1), first, str(path))
    segment = client if test is None else client * 2 + test
    return Source(
        f"leaf_shakespeare:{path}", x, y, len(ALPHABET), client, official_test=test, kind="tokens",
        tables={"text": np.concatenate(tables)}, reader=Windows(LENGTH), segment=segment, overlap=LENGTH,
        licence=LEAF_SHAKESPEARE.licence, where=f"{path}{note}",
    )  # fmt: skip


def _characters(user: User) -> np.ndarray:
    """The codes of each sample's 80 characters and of the next one: ``(n, 81)`` int16, -1 outside of the alphabet."""
    for name, column, length in (("x", user.x, LENGTH), ("y", user.y, 1)):
        for place, one in enumerate(column):
            if not isinstance(one, str) or len(one) != length:
                raise ValueError(
                    f"{user.place}: sample {place} of {name} is no text of {length} characters: make it again"
                )
    return encode("".join(x + y for x, y in zip(user.x, user.y, strict=True))).reshape(-1, LENGTH + 1)


def _shared(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A text that holds all windows ``(n, 80)``, and the start of each in it."""
    new = np.ones(windows.shape, bool)
    new[1:, :-1] = ~(windows[1:, :-1] == windows[:-1, 1:]).all(1, keepdims=True)
    return windows[new].astype(np.uint8), np.cumsum(new.sum(1)) - LENGTH


LEAF_SHAKESPEARE = SourceEntry(
    "leaf_shakespeare",
    "leaf_shakespeare[:PATH]",
    "LEAF's JSON of next characters, speaking roles as clients",
    "public domain (the plays); LEAF: BSD-2-Clause",
    _leaf_shakespeare,
)
FEMNIST = SourceEntry(
    "femnist",
    "femnist[:PATH]",
    "LEAF's JSON of 62 handwritten characters, writers as clients",
    "NIST Special Database 19: public domain; LEAF: BSD-2-Clause",
    _femnist,
)
