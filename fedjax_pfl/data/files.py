"""Readers of idx, npy and npz files that trust nothing in them: no pickles, no allocation that the file cannot fill."""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

EXPANSION = 1032  # the largest ratio that deflate can reach, so a bound on what a compressed file can hold
CHUNK = 1 << 20


def read_idx(path: Path, rank: int) -> np.ndarray:
    """The uint8 array of ``rank`` axes in an idx file, gzipped if the name ends in ``.gz``.

    Raises:
        ValueError: another magic number or rank, a header that promises more or less than the file holds, bad gzip.
    """
    try:
        stream: IO[bytes]
        with cast("IO[bytes]", gzip.open(path)) if path.suffix == ".gz" else open(path, "rb") as stream:
            shape = _idx_shape(stream, rank, path)
            size, stored = math.prod(shape), path.stat().st_size
            most = stored * EXPANSION if path.suffix == ".gz" else stored
            if size > most:
                raise ValueError(
                    f"{path}: the header promises {shape}, {size} bytes, the file cannot hold them: truncated"
                )
            array = _read_exactly(stream, size, path)
            if stream.read(1):
                raise ValueError(f"{path}: holds more than the {shape} bytes of its header: fetch it again")
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path}: cannot be read ({error}): truncated or no gzip file, fetch it again") from error
    return array.reshape(shape)


def _idx_shape(stream: IO[bytes], rank: int, path: Path) -> tuple[int, ...]:
    """Read the header: two zero bytes, the type (8: unsigned byte), the rank, one big-endian uint32 an axis."""
    magic = stream.read(4)
    if magic != bytes((0, 0, 8, rank)):
        raise ValueError(
            f"{path}: starts with {magic.hex(' ') or 'nothing'} instead of 00 00 08 {rank:02x}: "
            f"not an idx file of unsigned bytes with {rank} axes"
        )
    sizes = stream.read(4 * rank)
    if len(sizes) < 4 * rank:
        raise ValueError(f"{path}: ends inside its header: truncated, fetch it again")
    return struct.unpack(f">{rank}I", sizes)


def _read_exactly(stream: Any, size: int, path: Path | str) -> np.ndarray:
    """``size`` bytes as uint8, read in pieces into one buffer."""
    array = np.empty(size, np.uint8)
    fill(stream, memoryview(array.data), path)
    return array


def fill(stream: Any, view: memoryview, place: Path | str) -> None:
    """Fill a buffer of bytes from a stream, in pieces.

    Raises:
        ValueError: the stream ends too early.
    """
    done = 0
    while done < len(view):
        got = stream.readinto(view[done : done + CHUNK])
        if not got:
            raise ValueError(f"{place}: ends after {done} of {len(view)} bytes: truncated, fetch it again")
        done += got


def read_npz(path: Path, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """The arrays of an npz file, those of ``names`` that it has (all by default); never unpickles.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no npz file, damaged, object arrays (pickles), a header that disagrees with the stored bytes.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            chosen = members if names is None else [name for name in names if name in members]
            return {name: _read_member(archive, members[name], path) for name in chosen}
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, NotImplementedError) as error:
        raise ValueError(f"{path}: not a readable npz file ({error}): write it with np.savez") from error


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> np.ndarray:
    place = f"{path}, member {info.filename}"
    plain = info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    if not plain or info.file_size > info.compress_size * EXPANSION:
        raise ValueError(f"{place}: packed in a way that np.savez does not use: write the file with np.savez again")
    with archive.open(info) as stream:
        array = read_npy(stream, place, info.file_size)
        stream.read(1)  # reaches the end, where zipfile compares the checksum
    return array


def read_npy(stream: IO[bytes], place: str, total: int) -> np.ndarray:
    """The array of an npy stream of ``total`` bytes; never unpickles.

    Raises:
        ValueError: no npy data, object arrays (pickles), a header that disagrees with the bytes that follow.
    """
    begin = stream.tell()
    shape, fortran, dtype = npy_header(stream, place)
    size = math.prod(shape) * dtype.itemsize
    if size != total - (stream.tell() - begin):
        raise ValueError(f"{place}: the header promises {shape} of {dtype}, the file holds another size: damaged")
    array = _read_exactly(stream, size, place)
    flat = array.view(dtype) if dtype.itemsize else np.zeros(math.prod(shape), dtype)
    return flat.reshape(shape, order="F" if fortran else "C")


def npy_header(stream: IO[bytes], place: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether in Fortran's order, and dtype of an npy stream, which then stands before the numbers.

    Raises:
        ValueError: no npy data, object arrays (pickles).
    """
    try:
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, fortran, dtype = read[np.lib.format.read_magic(stream)](stream)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{place}: not a plain npy array ({error})") from error
    if dtype.hasobject or dtype.names:
        raise ValueError(f"{place}: dtype {dtype} is refused (object arrays are pickles): store plain numbers")
    return shape, fortran, dtype


def read_bounded(stream: IO[bytes], limit: int) -> bytes:
    """The rest of a stream, or its first ``limit + 1`` bytes where it has more; memory grows with what is there."""
    held = io.BytesIO()
    while held.tell() <= limit and (piece := stream.read(min(CHUNK, limit + 1 - held.tell()))):
        held.write(piece)
    return held.getvalue()


@contextlib.contextmanager
def open_xz(path: Path) -> Iterator[IO[bytes]]:
    """The unpacked bytes of an xz file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: truncated or damaged, found while it is read.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        with lzma.open(path) as stream:
            yield cast("IO[bytes]", stream)
    except (lzma.LZMAError, EOFError, OSError) as error:
        raise ValueError(f"{path}: cannot be read ({error}): truncated or no xz file, fetch it again") from error


def read_npy_xz(path: Path, limit: int = 1 << 30) -> np.ndarray:
    """The array of an ``.npy.xz`` file of at most ``limit`` bytes.

    Raises:
        FileNotFoundError: no such file.
        ValueError: see ``read_npy``; bad xz, more than ``limit`` bytes or than the header promises.
    """
    with open_xz(path) as stream:
        data = read_bounded(stream, limit)
    if len(data) > limit:
        raise ValueError(f"{path}: unpacks to more than {limit} bytes: refused")
    return read_npy(io.BytesIO(data), str(path), len(data))
