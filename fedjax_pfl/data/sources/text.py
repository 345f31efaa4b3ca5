"""Plays as next-character prediction, a client for each speaking role.

The task is LEAF's (Caldas et al. 2018, https://arxiv.org/abs/1812.01097): 80 characters in, the next one out, over an
alphabet of 80. A role's text is its speeches one after the other, line ends and runs of blanks becoming one blank.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_pfl.data.sources.base import Source, SourceEntry, parse_options
from fedjax_pfl.data.sources.finding import find_any
from fedjax_pfl.data.windows import Windows

ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
LENGTH = 80
BLANK = ALPHABET.index(" ")
TOLERATED = 1000  # one character in so many may lie outside of the alphabet
USUAL = ("shakespeare/input.txt", "input.txt", "shakespeare.txt")
REMEDY = (
    "fetch https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt, or arrange a "
    "play of Project Gutenberg alike: speeches with an empty line between, 'ROLE:' on a line before each"
)

_CODES = np.full(128, -1, np.int16)
_CODES[np.frombuffer(ALPHABET.encode(), np.uint8)] = np.arange(len(ALPHABET))


class TextConfig(NamedTuple):
    """Options of ``shakespeare:FILE,KEY=VALUE,...``.

    stride: characters from one sample of a role to the next; LEAF takes every place. min_chars: roles that say less are
    left out; one sample needs 81.
    """

    stride: int = 1
    min_chars: int = LENGTH + 1


def encode(text: str) -> np.ndarray:
    """The places of characters in LEAF's alphabet: ``(len(text),)`` int16, -1 for others."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    return np.where(points < len(_CODES), _CODES[np.minimum(points, len(_CODES) - 1)], -1).astype(np.int16)


def roles(text: str, place: str = "text") -> dict[str, str]:
    """What each role says, in order of appearance, from blocks with an empty line between, the first line ``ROLE:``.

    Raises:
        ValueError: a block without a role, with its line.
    """
    spoken: dict[str, list[str]] = {}
    for block in re.finditer(r"\S[^\n]*(?:\n[^\n]*\S[^\n]*)*", text):
        head, _, body = block[0].partition("\n")
        if not head.rstrip().endswith(":") or len(head.rstrip()) < 2:
            line = text.count("\n", 0, block.start()) + 1
            raise ValueError(f"{place}: line {line} opens a block but is no 'ROLE:', it is {head[:30]!r}: {REMEDY}")
        spoken.setdefault(head.rstrip()[:-1], []).append(body)
    return {role: re.sub(r"\s+", " ", " ".join(body for body in bodies if body)) for role, bodies in spoken.items()}


def _parse(argument: str) -> tuple[str, TextConfig]:
    """The path and the options of an argument."""
    parts = argument.split(",")
    given: dict[str, int] = {}
    options: list[str] = []
    while parts and "=" in parts[-1]:
        options.append(parts.pop())
    for key, value in parse_options(options, TextConfig._fields, "shakespeare").items():
        least = 1 if key == "stride" else LENGTH + 1
        if not value.isdecimal() or int(value) < least:
            raise ValueError(f"shakespeare: {key} needs a whole number of at least {least}, found {value!r}")
        given[key] = int(value)
    return ",".join(parts), TextConfig(**given)


def _read(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}: byte {error.start} (line {line}) is no UTF-8: save the text as UTF-8") from error


def outside(count: int, total: int, first: str, place: str) -> str:
    """A note on ``count`` of ``total`` characters that are outside of the alphabet and become blanks; "" for none.

    first: what the first of them is and where.

    Raises:
        ValueError: more than one in ``TOLERATED``.
    """
    if count * TOLERATED > total:
        raise ValueError(
            f"{place}: {count} of {total} characters are outside of LEAF's alphabet ({first}): replace them by some of "
            f"{ALPHABET!r}"
        )
    return f"; read as blanks: {count} characters outside of LEAF's alphabet ({first})" if count else ""


def _shakespeare(argument: str, data_dir: Path | None) -> Source:
    """``x (n,)`` int32 the first place of a window of 80 in ``tables["text"]`` (uint8), ``y`` the character behind it.

    Clients are roles, numbered in order of appearance among those that say enough.
    """
    name, config = _parse(argument)
    path = find_any(name, USUAL, data_dir, REMEDY)
    if path.is_dir():
        raise ValueError(f"{path}: is a folder: give the text file in it")
    text = _read(path)
    spoken = roles(text, str(path))
    kept = [body for body in spoken.values() if len(body) >= config.min_chars]
    if not kept:
        raise ValueError(f"{path}: no role says {config.min_chars} characters, found {len(spoken)} roles: {REMEDY}")
    joined = "".join(kept)
    codes = encode(joined)
    lost = np.flatnonzero(codes < 0)
    odd = joined[lost[0]] if lost.size else ""
    line = text.count("\n", 0, text.find(odd)) + 1
    note = outside(lost.size, codes.size, f"line {line} has {odd!r}", str(path))
    left = len(spoken) - len(kept)
    note += f"; left out {left} roles that say less than {config.min_chars} characters" if left else ""
    table = np.where(codes < 0, BLANK, codes).astype(np.uint8)
    x, client = windows([len(body) for body in kept], config.stride)
    return Source(
        f"shakespeare:{argument or path}", x, table[x + LENGTH].astype(np.int32), len(ALPHABET), client, kind="tokens",
        tables={"text": table}, reader=Windows(LENGTH), segment=client, overlap=LENGTH // config.stride,
        licence=SHAKESPEARE.licence, where=f"{path}{note}",
    )  # fmt: skip


def windows(lengths: list[int], stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts of all windows that have a next character, in texts that stand one after the other, and their texts."""
    offsets = np.cumsum([0, *lengths])
    starts = [np.arange(begin, end - LENGTH, stride) for begin, end in itertools.pairwise(offsets)]
    owner = np.repeat(np.arange(len(lengths), dtype=np.int32), [len(one) for one in starts])
    return np.concatenate(starts).astype(np.int32), owner


SHAKESPEARE = SourceEntry(
    "shakespeare",
    "shakespeare[:FILE,stride=N,min_chars=N]",
    "next character of a play in 'ROLE:' blocks, speaking roles as clients, LEAF's alphabet of 80",
    "public domain (the plays)",
    _shakespeare,
)
