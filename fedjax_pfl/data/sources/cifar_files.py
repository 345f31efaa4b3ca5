"""Where CIFAR's batches lie: in a folder or an archive, binary, pickled or packed, and how one batch is read."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.data.archives import Files, named_files, open_files
from fedjax_pfl.data.files import fill, npy_header, open_xz
from fedjax_pfl.data.pickles import read_pickle

SIDE, PIXELS = 32, 3072
RECORDS = 1000  # records of a binary batch that are read at once


class Form(NamedTuple):
    """One published form: file names in order (the last is the test set), and whether they are binary."""

    names: tuple[str, ...]
    binary: bool


FORMS = {
    10: (
        Form((*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"), True),
        Form((*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"), False),
    ),
    100: (Form(("train.bin", "test.bin"), True), Form(("train", "test"), False)),
}
ARCHIVES = {classes: tuple(f"cifar-{classes}-{kind}.tar.gz" for kind in ("binary", "python")) for classes in (10, 100)}


@contextlib.contextmanager
def open_batches(path: Path, form: Form) -> Iterator[tuple[Files, list[str]]]:
    """The files of a folder or of a ``.tar.gz``, and the batches of a form among them in the order of its names.

    Raises:
        FileNotFoundError: batches are missing, with their names.
        ValueError: see ``open_files``; two batches of one name.
    """
    with contextlib.ExitStack() as stack:
        files = named_files(path, form.names) if path.is_dir() else stack.enter_context(open_files(path))
        found = {name: files.find(name) for name in form.names}
        missing = [name for name, member in found.items() if member is None]
        if missing:
            raise FileNotFoundError(f"{path}: {', '.join(missing)} missing beside the other batches: fetch all of them")
        yield files, [member for member in found.values() if member is not None]


def records(files: Files, name: str, labels: int) -> int:
    """The number of records of a binary batch with ``labels`` bytes before the pixels.

    Raises:
        ValueError: no whole number of records.
    """
    size = files.member(name).size
    count, rest = divmod(size, labels + PIXELS)
    if rest or not count:
        raise ValueError(
            f"{files.place(name)}: {size} bytes are no whole number of records of {labels + PIXELS}: truncated?"
        )
    return count


def read_binary(files: Files, name: str, images: np.ndarray, labels: int) -> np.ndarray:
    """Fill ``images`` (n, 32, 32, 3) and return the label bytes ``(n, labels)`` uint8.

    Raises:
        ValueError: fewer bytes than promised.
    """
    found = np.empty((len(images), labels), np.uint8)
    buffer = np.empty((min(RECORDS, len(images)), labels + PIXELS), np.uint8)
    with files.stream(name) as stream:
        for start in range(0, len(images), RECORDS):
            part = buffer[: len(images) - start]
            fill(stream, part.data.cast("B"), files.place(name))
            found[start : start + len(part)] = part[:, :labels]
            images[start : start + len(part)] = _upright(part[:, labels:])
    return found


def _upright(flat: np.ndarray) -> np.ndarray:
    """Rows of red, green and blue planes as ``(n, 32, 32, 3)``."""
    return flat.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)


def read_pickled(files: Files, name: str, images: np.ndarray, keys: tuple[str, ...]) -> np.ndarray:
    """Fill the head of ``images`` and return the labels under ``keys``: ``(n, len(keys))`` int64.

    Raises:
        ValueError: a pickle that holds more than plain data, no such arrays, numbers of images and labels that differ,
            more images than ``images`` has room for.
    """
    place = files.place(name)
    with files.stream(name) as stream:
        found: Any = read_pickle(stream, name=place)
    if not isinstance(found, dict):
        raise ValueError(f"{place}: holds no dictionary of data and labels: not a batch of CIFAR")
    plain = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in found.items()}
    lost = [key for key in ("data", *keys) if key not in plain]
    if lost:
        raise ValueError(f"{place}: {', '.join(lost)} missing, found {', '.join(map(str, plain))}")
    data = plain["data"]
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != PIXELS:
        raise ValueError(f"{place}: data must be uint8 of shape (images, {PIXELS})")
    columns = [np.asarray(plain[key]) for key in keys]
    if any(column.shape != (len(data),) or column.dtype.kind not in "iu" for column in columns):
        raise ValueError(f"{place}: {len(data)} images need as many whole labels under {', '.join(keys)}")
    if len(data) > len(images):
        size = files.member(name).size
        raise ValueError(f"{place}: {len(data)} images are more than its {size} bytes can be, or this set has")
    images[: len(data)] = _upright(data)
    return np.stack(columns, 1).astype(np.int64)


def read_packed(folder: Path, stem: str, room: np.ndarray) -> int:
    """Fill the head of ``room`` (n, 32, 32, 3) uint8 from ``STEM_images*.npy.xz``, by number; how many there were.

    Raises:
        ValueError: damaged files, images of another size, more of them than there is room for.
    """
    done = 0
    for path in sorted(folder.glob(f"{stem}_images*.npy.xz"), key=_number):
        left = room[done:]
        with open_xz(path) as stream:
            shape, fortran, dtype = npy_header(stream, str(path))
            if fortran or dtype != np.uint8 or shape[1:] != left.shape[1:] or shape[0] > len(left):
                raise ValueError(f"{path}: holds {dtype} {shape}, at most {left.shape} of uint8 have labels")
            fill(stream, left[: shape[0]].data.cast("B") if shape[0] else memoryview(b""), path)
            if stream.read(1):
                raise ValueError(f"{path}: holds more than the {shape} of its header: fetch it again")
        done += shape[0]
    return done


def _number(path: Path) -> tuple[int, str]:
    return int((re.findall(r"\d+", path.name) or ["0"])[-1]), path.name
