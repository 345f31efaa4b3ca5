"""The members of tar archives, whose headers are bounded: Python's reader takes their sizes on trust."""

from __future__ import annotations

import contextlib
import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

from fedjax_pfl.data.files import CHUNK

MEMBERS = 100_000
HEADER, HEADERS = 16 << 10, 64 << 20  # bytes of one header, and of all


class Member(NamedTuple):
    """A file: its name with ``/`` between folders, its promised size in bytes, how it is opened, and where it begins.

    A tar.gz archive whose files are read in the order of their ``offset`` is unpacked once.
    """

    name: str
    size: int
    open: Callable[[], IO[bytes]]
    offset: int = 0


class _Stream(io.BufferedIOBase):
    """A tar file's bytes, and the last that were read; while headers are read, one of megabytes is refused."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.last = b""
        self.headers: int | None = 0  # bytes of them so far

    def read(self, size: int | None = -1) -> bytes:
        most = HEADER if self.headers is not None else 16 * CHUNK
        if size is None or not 0 <= size <= most:
            raise tarfile.ReadError(f"a header of {size} bytes, at most {most} are read")
        if self.headers is not None:
            self.headers += size
            if self.headers > HEADERS:
                raise tarfile.ReadError(f"headers of more than {HEADERS} bytes")
        self.last = self.stream.read(size)
        return self.last

    def seek(self, offset: int, whence: int = 0) -> int:
        return self.stream.seek(offset, whence)

    def tell(self) -> int:
        return self.stream.tell()


def tar_members(path: Path, stack: contextlib.ExitStack, where: str) -> list[Member]:
    """All files of a tar(.gz) archive, which is open as long as ``stack``; ``where`` is what errors call it.

    A gzip file is read through, so its checksum is compared before anything is used.

    Raises:
        ValueError: links, too many members.
        tarfile.ReadError, zlib.error, EOFError, OSError: damaged or truncated, headers of unusual size.
    """
    plain = stack.enter_context(path.open("rb"))
    packed = plain.read(2) == b"\x1f\x8b"
    plain.seek(0)
    stream: Any = stack.enter_context(gzip.GzipFile(fileobj=plain)) if packed else plain
    careful = _Stream(stream)
    archive = stack.enter_context(tarfile.TarFile(fileobj=careful))
    members: list[Member] = []
    while (info := _next(archive)) is not None:
        if len(members) >= MEMBERS:
            raise ValueError(f"{where}: holds more than {MEMBERS} members: refused")
        if info.isdir():
            continue
        if not info.isreg() or info.issparse():
            raise ValueError(f"{where}: member {info.name!r} is a link or no plain file: refused")
        members.append(Member(info.name.removeprefix("./"), info.size, _opener(archive, info), info.offset_data))
    if careful.last != bytes(tarfile.BLOCKSIZE):  # tarfile takes a damaged or truncated header for the end
        raise tarfile.ReadError("a damaged header, or no end")
    careful.headers = None
    while stream.read(CHUNK):
        pass
    return members


def _next(archive: tarfile.TarFile) -> tarfile.TarInfo | None:
    """The next member, without what the archive would hold of it: each has a copy of all global headers."""
    try:
        info = archive.next()
    except ValueError as error:
        raise tarfile.ReadError(f"a damaged header ({error})") from error
    archive.members = []  # type: ignore[attr-defined]
    if info is not None:
        info.pax_headers = {}
    return info


def _opener(archive: tarfile.TarFile, info: tarfile.TarInfo) -> Callable[[], IO[bytes]]:
    return lambda: archive.extractfile(info) or io.BytesIO()
