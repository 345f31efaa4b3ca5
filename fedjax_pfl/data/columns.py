"""Numbers in text files: whole files at once, with the file and line of whatever is no number."""

from __future__ import annotations

import math
import warnings

import numpy as np

PIECE = 8 << 20  # bytes that are looked at together
SPACE, NEWLINE = 32, 10
MOST = 2**63 - 1


def read_columns(
    data: bytes, place: str, columns: int | None = None, *, commas: bool = False, whole: bool = False
) -> np.ndarray:
    """A text of equally long lines of numbers: ``(lines, columns)`` float64, or int64 of ``whole`` numbers.

    columns: numbers a line, by default as many as the first line has. commas: numbers stand between commas (and blanks)
    instead of blanks alone. Empty lines at the end are none; other empty lines are errors.

    Raises:
        ValueError: no number, a line with another count of numbers, NaN or infinity, an empty file; with the line.
    """
    data = data.replace(b"\r\n", b"\n").rstrip()
    if not data:
        raise ValueError(f"{place}: is empty: fetch it again")
    plain = data.replace(b",", b" ") if commas else data
    counts = _counts(plain)
    width = int(counts[0]) if columns is None else columns
    if (counts != width).any():
        line = int((counts != width).argmax())
        raise ValueError(f"{place}: line {line + 1} has {counts[line]} numbers instead of {width}: damaged or edited")
    if commas and (_counts(data.replace(b",", b"\n")) != 1).any():  # each field is one number
        raise _bad_commas(data, place, width)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)  # which numpy gives where text is no number
            numbers = np.fromstring(plain, np.int64 if whole else np.float64, sep=" ")
    except (DeprecationWarning, ValueError):
        raise _bad_line(plain, place, whole) from None
    limits = (MOST, -MOST - 1) if whole else (np.inf, -np.inf)  # where numbers end that are too large
    if len(numbers) != width * len(counts) or np.isnan(numbers).any() or np.isin(numbers, limits).any():
        raise _bad_line(plain, place, whole)
    return numbers.reshape(-1, width)


def _counts(data: bytes) -> np.ndarray:
    """Numbers, that is runs of other characters than blanks, in each line: ``(lines,)``."""
    found, rest, ended = [], 0, True
    for begin in range(0, len(data), PIECE):
        text = np.frombuffer(data, np.uint8, min(PIECE, len(data) - begin), begin)
        dark = text > SPACE
        starts = dark.copy()
        starts[1:] &= ~dark[:-1]
        starts[0] &= ended
        running = np.cumsum(starts, dtype=np.int64) + rest
        found.append(running[text == NEWLINE])
        rest, ended = int(running[-1]), not dark[-1]
    return np.diff(np.concatenate([*found, [rest]]), prepend=0)


def _bad_commas(data: bytes, place: str, width: int) -> ValueError:
    lines = enumerate(data.split(b"\n"), 1)
    number = next(number for number, line in lines if any(len(part.split()) != 1 for part in line.split(b",")))
    return ValueError(f"{place}: line {number} needs {width} numbers with commas between: damaged or edited")


def _bad_line(data: bytes, place: str, whole: bool) -> ValueError:
    """The error that names the first line which is not of finite (whole) numbers."""
    kind = "whole" if whole else "finite"
    for number, line in enumerate(data.split(b"\n"), 1):
        for word in line.split():
            try:
                good = abs(int(word)) < MOST if whole else math.isfinite(float(word))
            except ValueError:
                good = False
            if not good or b"_" in word:
                shown = word[:20].decode("latin-1")
                return ValueError(f"{place}: line {number}: {shown!r} is no {kind} number: correct or drop the line")
    return ValueError(f"{place}: holds something else than {kind} numbers: fetch it again")
