"""The files of a folder, a zip or a tar(.gz) archive through one small interface; nothing is unpacked to disk."""

from __future__ import annotations

import contextlib
import io
import lzma
import os
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from fedjax_pfl.data.files import CHUNK
from fedjax_pfl.data.tars import MEMBERS, Member, tar_members

LIMIT = 2 << 30  # bytes of one member
LEVELS = 4  # of folders that are looked through
RATIO, SLACK = 128, 1 << 20  # a file may have so many times the bytes of its archive, and so many more (real: up to 31)
NAME = 4096  # characters
BROKEN = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError,
    NotImplementedError, OverflowError, UnicodeError, struct.error,
)  # fmt: skip


class Files:
    """The files of a folder or an archive (of ``packed`` bytes), by name; see ``open_files``."""

    def __init__(self, where: str, members: list[Member], packed: int | None = None) -> None:
        self.where = where
        self._members: dict[str, Member] = {}
        most = RATIO * (packed or 0) + SLACK
        for member in members:
            if len(member.name) > NAME:
                raise ValueError(f"{where}: a name of {len(member.name)} characters: refused, at most {NAME} are read")
            if packed is not None and member.size > most:
                raise ValueError(
                    f"{where}: member {member.name!r} promises to expand to {member.size} bytes, more than {most} "
                    f"({RATIO} times the archive): refused, unpack it and give the folder"
                )
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

    def member(self, name: str) -> Member:
        """A file by its name.

        Raises:
            FileNotFoundError: no such file.
        """
        if name not in self._members:
            raise FileNotFoundError(f"{self.where}: has no {name}: it is incomplete, fetch it again")
        return self._members[name]

    @contextlib.contextmanager
    def stream(self, name: str) -> Iterator[IO[bytes]]:
        """A file's bytes as they come, for files that are too large to be in memory twice; sizes are not compared.

        Raises:
            FileNotFoundError: no such file.
            ValueError: damaged, encrypted.
        """
        member = self.member(name)
        try:
            with member.open() as stream:
                yield stream
        except BROKEN as error:
            raise ValueError(f"{self.place(name)}: cannot be read ({error}): damaged, fetch it again") from error

    def read(self, name: str, limit: int = LIMIT) -> bytes:
        """All bytes of a file.

        Raises:
            FileNotFoundError: no such file.
            ValueError: more than ``limit`` bytes or than promised, encrypted, damaged (checksum).
        """
        member = self.member(name)
        if member.size > limit:
            raise ValueError(f"{self.place(name)}: promises {member.size} bytes, more than the {limit} that are read")
        held = io.BytesIO()
        with self.stream(name) as stream:
            while piece := stream.read(CHUNK):
                held.write(piece)
                if held.tell() > member.size:
                    raise ValueError(f"{self.place(name)}: expands beyond its {member.size} bytes: refused")
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
            more than ``MEMBERS`` members, names or headers of unusual length, members that promise more than ``RATIO``
            times the bytes of the archive.
    """
    where = name or ("archive" if isinstance(path, bytes) else str(path))
    packed = len(path) if isinstance(path, bytes) else Path(path).stat().st_size if Path(path).is_file() else None
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
                members = tar_members(Path(path), stack, where)
        except BROKEN as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise ValueError(f"{where}: no readable zip or tar archive ({error}): fetch it again") from error
        yield Files(where, members, packed)


def named_files(folder: Path, names: Sequence[str]) -> Files:
    """Those of the named files that a folder itself has."""
    paths = [folder / name for name in names if (folder / name).is_file()]
    return Files(str(folder), [Member(path.name, path.stat().st_size, _opener(path)) for path in paths])


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
        if not info.is_dir():
            members.append(Member(info.filename, info.file_size, _zip_opener(archive, info)))
    return members


def _zip_opener(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Callable[[], IO[bytes]]:
    return lambda: archive.open(info)
