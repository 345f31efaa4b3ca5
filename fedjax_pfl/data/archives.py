"""The files of a folder, a zip or a tar(.gz) archive through one small interface; nothing is unpacked to disk."""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
import os
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from fedjax_pfl.data.files import CHUNK, EXPANSION

LIMIT = 2 << 30  # bytes of one member
MEMBERS = 100_000
LEVELS = 4  # of folders that are looked through
SLACK = 1 << 20
BROKEN = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError,
    NotImplementedError, OverflowError, UnicodeError, struct.error,
)  # fmt: skip


class Member(NamedTuple):
    """A file: its name with ``/`` between folders, its promised size in bytes, and how it is opened."""

    name: str
    size: int
    open: Callable[[], IO[bytes]]


class Files:
    """The files of a folder or an archive, by name; see ``open_files``."""

    def __init__(self, where: str, members: list[Member]) -> None:
        self.where = where
        self._members: dict[str, Member] = {}
        for member in members:
            if _unsafe(member.name):
                raise ValueError(f"{where}: member {member.name!r} leads out of the archive: refused, fetch it anew")
            if member.name in self._members:
                raise ValueError(f"{where}: two members are called {member.name!r}: refused, fetch it anew")
            self._members[member.name] = member

    def names(self) -> list[str]:
        """The names of all files, sorted."""
        return sorted(self._members)

    def find(self, ending: str) -> str | None:
        """The name that is ``ending``, or else the only one that ends in it behind a ``/``; None where there is none.

        Raises:
            ValueError: several such files.
        """
        if ending in self._members:
            return ending
        found = [name for name in self.names() if name.endswith("/" + ending)]
        if len(found) > 1:
            raise ValueError(f"{self.where}: {found[0]!r} and {found[1]!r} are both there: name the folder to be read")
        return found[0] if found else None

    def place(self, name: str) -> str:
        """How errors call a file."""
        return f"{self.where}, {name}"

    def read(self, name: str, limit: int = LIMIT) -> bytes:
        """All bytes of a file.

        Raises:
            FileNotFoundError: no such file.
            ValueError: more than ``limit`` bytes or than promised, encrypted, damaged (checksum).
        """
        if name not in self._members:
            raise FileNotFoundError(f"{self.where}: has no {name}: it is incomplete, fetch it again")
        member = self._members[name]
        if member.size > limit:
            raise ValueError(f"{self.place(name)}: promises {member.size} bytes, more than the {limit} that are read")
        held = io.BytesIO()
        try:
            with member.open() as stream:
                while piece := stream.read(CHUNK):
                    held.write(piece)
                    if held.tell() > member.size:
                        raise ValueError(f"{self.place(name)}: expands beyond its {member.size} bytes: refused")
        except BROKEN as error:
            raise ValueError(f"{self.place(name)}: cannot be read ({error}): damaged, fetch it again") from error
        if held.tell() != member.size:
            raise ValueError(f"{self.place(name)}: ends after {held.tell()} of {member.size} bytes: fetch it again")
        return held.getvalue()

    def open(self, name: str, limit: int = LIMIT) -> IO[bytes]:
        """A file as a stream over its bytes in memory (see ``read``), so that it is checked before it is used."""
        return io.BytesIO(self.read(name, limit))


@contextlib.contextmanager
def open_files(path: str | Path | bytes, name: str = "") -> Iterator[Files]:
    """The files of a folder (``LEVELS`` deep), a zip (stored, deflate, LZMA) or a tar(.gz) file; or of a zip in memory.

    Raises:
        FileNotFoundError: no such folder or file.
        ValueError: no such archive, damaged, encrypted, absolute names or ``..``, links, two members of one name,
            more than ``MEMBERS`` members, members that promise to expand more than any real data does.
    """
    where = name or ("archive" if isinstance(path, bytes) else str(path))
    with contextlib.ExitStack() as stack:
        try:
            if isinstance(path, bytes):
                members = _zip_members(stack.enter_context(zipfile.ZipFile(io.BytesIO(path))), where)
            elif Path(path).is_dir():
                members = _folder_members(Path(path))
            elif not Path(path).is_file():
                raise FileNotFoundError(f"{where}: no such folder or file")
            elif zipfile.is_zipfile(path):
                members = _zip_members(stack.enter_context(zipfile.ZipFile(path)), where)
            else:
                members = _tar_members(Path(path), stack, where)
        except BROKEN as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise ValueError(f"{where}: no readable zip or tar archive ({error}): fetch it again") from error
        yield Files(where, members)


def _unsafe(name: str) -> bool:
    """Whether a name points out of its archive, or could on some system."""
    return bool(re.match(r"/|[A-Za-z]:", name)) or "\\" in name or "\0" in name or ".." in name.split("/")


def _folder_members(folder: Path) -> list[Member]:
    members = []
    for base, inner, names in os.walk(folder):
        at = Path(base)
        if len(at.relative_to(folder).parts) >= LEVELS:
            inner.clear()
        for name in sorted(names):
            if (at / name).is_file():
                path = at / name
                members.append(Member(path.relative_to(folder).as_posix(), path.stat().st_size, _opener(path)))
    return members


def _opener(path: Path) -> Callable[[], IO[bytes]]:
    return lambda: open(path, "rb")


def _zip_members(archive: zipfile.ZipFile, where: str) -> list[Member]:
    members = []
    if len(archive.infolist()) > MEMBERS:
        raise ValueError(f"{where}: holds more than {MEMBERS} members: refused")
    for info in archive.infolist():
        if stat.S_ISLNK(info.external_attr >> 16):
            raise ValueError(f"{where}: member {info.filename!r} is a link: refused, pack the file itself")
        if info.flag_bits & 1:
            raise ValueError(f"{where}: member {info.filename!r} is encrypted: unpack it and give the folder")
        if info.file_size > info.compress_size * EXPANSION + SLACK:
            raise ValueError(f"{where}: member {info.filename!r} promises to expand to {info.file_size} bytes: refused")
        if not info.is_dir():
            members.append(Member(info.filename, info.file_size, _zip_opener(archive, info)))
    return members


def _zip_opener(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Callable[[], IO[bytes]]:
    return lambda: archive.open(info)


class _Stream(io.BufferedIOBase):
    """A tar file's bytes, and the last that were read; a header that asks for a gigabyte at once is refused."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.last = b""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= 16 * CHUNK:
            raise tarfile.ReadError(f"a header of {size} bytes")
        self.last = self.stream.read(size)
        return self.last

    def seek(self, offset: int, whence: int = 0) -> int:
        return self.stream.seek(offset, whence)

    def tell(self) -> int:
        return self.stream.tell()


def _tar_members(path: Path, stack: contextlib.ExitStack, where: str) -> list[Member]:
    """All members; a gzip file is read through, so its checksum is compared before anything is used."""
    plain = stack.enter_context(path.open("rb"))
    packed = plain.read(2) == b"\x1f\x8b"
    plain.seek(0)
    stream: Any = stack.enter_context(gzip.GzipFile(fileobj=plain)) if packed else plain
    careful = _Stream(stream)
    archive = stack.enter_context(tarfile.TarFile(fileobj=careful))
    members: list[Member] = []
    for info in archive:
        if len(members) >= MEMBERS:
            raise ValueError(f"{where}: holds more than {MEMBERS} members: refused")
        if info.isdir():
            continue
        if not info.isreg() or info.issparse():
            raise ValueError(f"{where}: member {info.name!r} is a link or no plain file: refused")
        members.append(Member(info.name.removeprefix("./"), info.size, _tar_opener(archive, info)))
    if careful.last != bytes(tarfile.BLOCKSIZE):  # tarfile takes a damaged or truncated header for the end
        raise tarfile.ReadError("a damaged header, or no end")
    while stream.read(CHUNK):
        pass
    return members


def _tar_opener(archive: tarfile.TarFile, info: tarfile.TarInfo) -> Callable[[], IO[bytes]]:
    return lambda: archive.extractfile(info) or io.BytesIO()
