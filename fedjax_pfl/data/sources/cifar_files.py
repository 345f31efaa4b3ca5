"""Where CIFAR's batches lie: in a folder or an archive, binary or pickled, and how one batch is read."""

from __future__ import annotations

import contextlib
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

import numpy as np

from fedjax_pfl.data.files import EXPANSION
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


class Batch(NamedTuple):
    """One batch that can be read: ``size`` in bytes bounds what it holds; ``place`` is its name in errors."""

    place: str
    size: int
    path: Path
    member: tarfile.TarInfo | None = None
    archive: tarfile.TarFile | None = None

    @property
    def offset(self) -> int:
        """Where it begins in its archive: read in this order, an archive is unpacked once."""
        return 0 if self.member is None else self.member.offset_data

    @contextlib.contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """The batch's bytes.

        Raises:
            ValueError: damaged archive.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(readable(self.place))
            if self.archive is None or self.member is None:
                yield stack.enter_context(open(self.path, "rb"))
                return
            stream = self.archive.extractfile(self.member)
            assert stream is not None  # open_batches takes plain files only
            yield stack.enter_context(stream)


@contextlib.contextmanager
def readable(place: str) -> Iterator[None]:
    """Say which file it was that gzip, tar or lzma could not read.

    Raises:
        ValueError: instead of their errors.
    """
    try:
        yield
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{place}: cannot be read ({error}): truncated or damaged, fetch it again") from error


@contextlib.contextmanager
def open_batches(path: Path, form: Form) -> Iterator[list[Batch]]:
    """The batches of a form in a folder or in a ``.tar.gz``, in the order of its names.

    Raises:
        FileNotFoundError: batches are missing, with their names.
        ValueError: no readable archive, names that leave its folder, links, names that occur twice.
    """
    if path.is_dir():
        found = {name: Batch(str(path / name), (path / name).stat().st_size, path / name)
                 for name in form.names if (path / name).is_file()}  # fmt: skip
        yield _complete(found, form, path)
        return
    with contextlib.ExitStack() as stack:
        with readable(str(path)):
            archive = stack.enter_context(tarfile.open(path, "r:gz"))
            members = archive.getmembers()
        found = {}
        for member in members:
            name = PurePosixPath(member.name)
            if name.is_absolute() or ".." in name.parts:
                raise ValueError(
                    f"{path}: the member {member.name!r} leaves the archive's folder: do not use this file"
                )
            if name.name not in form.names:
                continue
            if not member.isreg() or name.name in found:
                raise ValueError(f"{path}: the member {member.name!r} is no plain file or occurs twice")
            if member.size > path.stat().st_size * EXPANSION:
                raise ValueError(f"{path}: the member {member.name!r} promises {member.size} bytes: damaged")
            found[name.name] = Batch(f"{path}, member {member.name}", member.size, path, member, archive)
        yield _complete(found, form, path)


def _complete(found: dict[str, Batch], form: Form, path: Path) -> list[Batch]:
    missing = [name for name in form.names if name not in found]
    if missing:
        raise FileNotFoundError(f"{path}: {', '.join(missing)} missing beside the other batches: fetch all of them")
    return [found[name] for name in form.names]


def records(batch: Batch, labels: int) -> int:
    """The number of records of a binary batch with ``labels`` bytes before the pixels.

    Raises:
        ValueError: no whole number of records.
    """
    count, rest = divmod(batch.size, labels + PIXELS)
    if rest or not count:
        raise ValueError(
            f"{batch.place}: {batch.size} bytes are no whole number of records of {labels + PIXELS}: truncated?"
        )
    return count


def read_binary(batch: Batch, images: np.ndarray, labels: int) -> np.ndarray:
    """Fill ``images`` (n, 32, 32, 3) and return the label bytes ``(n, labels)`` uint8.

    Raises:
        ValueError: fewer bytes than promised.
    """
    found = np.empty((len(images), labels), np.uint8)
    buffer = np.empty((min(RECORDS, len(images)), labels + PIXELS), np.uint8)
    with batch.open() as stream:
        for start in range(0, len(images), RECORDS):
            part = buffer[: len(images) - start]
            if stream.readinto(part.data.cast("B")) != part.size:  # type: ignore[attr-defined]
                raise ValueError(f"{batch.place}: ends within record {start} to {start + len(part)}: truncated")
            found[start : start + len(part)] = part[:, :labels]
            images[start : start + len(part)] = _upright(part[:, labels:])
    return found


def _upright(flat: np.ndarray) -> np.ndarray:
    """Rows of red, green and blue planes as ``(n, 32, 32, 3)``."""
    return flat.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)


def read_pickled(batch: Batch, images: np.ndarray, keys: tuple[str, ...]) -> np.ndarray:
    """Fill the head of ``images`` and return the labels under ``keys``: ``(n, len(keys))`` int64.

    Raises:
        ValueError: a pickle that holds more than plain data, no such arrays, numbers of images and labels that differ,
            more images than ``images`` has room for.
    """
    with batch.open() as stream:
        found: Any = read_pickle(stream, name=batch.place)
    if not isinstance(found, dict):
        raise ValueError(f"{batch.place}: holds no dictionary of data and labels: not a batch of CIFAR")
    plain = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in found.items()}
    lost = [key for key in ("data", *keys) if key not in plain]
    if lost:
        raise ValueError(f"{batch.place}: {', '.join(lost)} missing, found {', '.join(map(str, plain))}")
    data = plain["data"]
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != PIXELS:
        raise ValueError(f"{batch.place}: data must be uint8 of shape (images, {PIXELS})")
    columns = [np.asarray(plain[key]) for key in keys]
    if any(column.shape != (len(data),) or column.dtype.kind not in "iu" for column in columns):
        raise ValueError(f"{batch.place}: {len(data)} images need as many whole labels under {', '.join(keys)}")
    if len(data) > len(images):
        raise ValueError(
            f"{batch.place}: {len(data)} images are more than its {batch.size} bytes can be, or this set has"
        )
    images[: len(data)] = _upright(data)
    return np.stack(columns, 1).astype(np.int64)
