"""Folders, zip and tar archives: one interface, and what is refused before or while it is read."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import tracemalloc
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedjax_pfl.data import archives, tars
from fedjax_pfl.data.archives import open_files
from fedjax_pfl.data.files import read_npy_xz

CONTENTS = {"set/a.txt": b"1, 2\n" * 5000, "set/inner/b.bin": bytes(range(256)), "set/empty": b""}
KINDS = ("folder", "stored", "deflate", "lzma", "bytes", "tar", "tar.gz")


def write_zip(path: Path, contents: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of two members with one name
        for name, data in contents.items():
            archive.writestr(name, data)
    return path


def tar_bytes(members: list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        for info, data in members:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return held.getvalue()


def make(kind: str, folder: Path) -> Path | bytes:
    """``CONTENTS`` as one of ``KINDS``."""
    methods = {"stored": zipfile.ZIP_STORED, "deflate": zipfile.ZIP_DEFLATED, "lzma": zipfile.ZIP_LZMA}
    if kind == "folder":
        for name, data in CONTENTS.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return folder
    if kind.startswith("tar"):
        data = tar_bytes([(tarfile.TarInfo("./" + name), data) for name, data in CONTENTS.items()])
        (folder / "a.tar").write_bytes(gzip.compress(data) if kind == "tar.gz" else data)
        return folder / "a.tar"
    path = write_zip(folder / "a.zip", CONTENTS, methods.get(kind, zipfile.ZIP_DEFLATED))
    return path.read_bytes() if kind == "bytes" else path


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_read_alike(kind: str, tmp_path: Path) -> None:
    with open_files(make(kind, tmp_path)) as files:
        assert files.names() == sorted(CONTENTS)
        for name, data in reversed(CONTENTS.items()):
            assert files.read(name) == files.open(name).read() == data
        assert files.find("b.bin") == files.find("inner/b.bin") == files.find("set/inner/b.bin") == "set/inner/b.bin"
        assert files.find("nner/b.bin") is None
        with pytest.raises(FileNotFoundError, match=r"has no set/c\.txt"):
            files.read("set/c.txt")
        with pytest.raises(ValueError, match=r"set/inner/b\.bin: promises 256 bytes, more than the 255"):
            files.read("set/inner/b.bin", limit=255)


def test_two_files_of_one_ending_are_told_apart(tmp_path: Path) -> None:
    with (
        open_files(write_zip(tmp_path / "a.zip", {"x/a": b"", "y/a": b""})) as files,
        pytest.raises(ValueError, match="'x/a' and 'y/a' are both there"),
    ):
        files.find("a")


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a/../../up", "C:/x", "a\\..\\up", "C:x"])
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_names_that_lead_out_are_refused(name: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    if kind == "zip":
        write_zip(path, {"good": b"", name: b"x"})
    else:
        path.write_bytes(tar_bytes([(tarfile.TarInfo("good"), b""), (tarfile.TarInfo(name), b"x")]))
    with pytest.raises(ValueError, match="leads out of the archive"), open_files(path):
        pass


def test_links_are_refused(tmp_path: Path) -> None:
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
        info = tarfile.TarInfo("bad")
        info.type, info.linkname = kind, "/etc/passwd"
        (tmp_path / "a.tar").write_bytes(tar_bytes([(info, b"")]))
        with pytest.raises(ValueError, match="'bad' is a link or no plain file"), open_files(tmp_path / "a.tar"):
            pass
    link = zipfile.ZipInfo("bad")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(ValueError, match="'bad' is a link"), open_files(tmp_path / "a.zip"):
        pass


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_duplicates_are_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            archive.writestr("a", "1")
            archive.writestr("a", "2")
    else:
        path.write_bytes(tar_bytes([(tarfile.TarInfo("a"), b"1"), (tarfile.TarInfo("./a"), b"2")]))
    with pytest.raises(ValueError, match="two members are called 'a'"), open_files(path):
        pass


def test_encrypted_members_are_refused(tmp_path: Path) -> None:
    data = bytearray(write_zip(tmp_path / "a.zip", {"a": b"x"}).read_bytes())
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "a.zip").write_bytes(data)
    with pytest.raises(ValueError, match="'a' is encrypted"), open_files(tmp_path / "a.zip"):
        pass


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_damaged_members_are_noticed(method: int, tmp_path: Path) -> None:
    content = np.random.default_rng(0).integers(0, 50, 5000).astype(np.uint8).tobytes()
    data = bytearray(write_zip(tmp_path / "a.zip", {"a": content}, method).read_bytes())
    data[1500] ^= 0xFF
    (tmp_path / "a.zip").write_bytes(data)
    with open_files(tmp_path / "a.zip") as files, pytest.raises(ValueError, match=r"a\.zip, a: .*fetch it again"):
        files.read("a")


@pytest.mark.parametrize("promised", [10, 4999, 5001, 2_000_000])
def test_members_of_another_size_than_promised_are_refused(promised: int, tmp_path: Path) -> None:
    data = bytearray(write_zip(tmp_path / "a.zip", {"a": b"x" * 5000}, zipfile.ZIP_LZMA).read_bytes())
    struct.pack_into("<I", data, data.index(b"PK\x01\x02") + 24, promised)
    (tmp_path / "a.zip").write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.zip"), open_files(tmp_path / "a.zip") as files:
        files.read("a")


def test_bombs_are_refused_before_they_expand(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "a.zip", {"a": bytes(40 << 20)}, zipfile.ZIP_LZMA)
    assert path.stat().st_size < 20_000
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="'a' promises to expand to 41943040 bytes"), open_files(path):
            pass
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_numbers_of_members_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MEMBERS", 2)
    monkeypatch.setattr(tars, "MEMBERS", 2)
    for kind in ("deflate", "tar"):
        with pytest.raises(ValueError, match="more than 2 members"), open_files(make(kind, tmp_path)):
            pass


def test_a_header_of_gigabytes_is_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("long")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1 << 32
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 20)))
    with pytest.raises(ValueError, match="no readable zip or tar"), open_files(tmp_path / "a.tar.gz"):
        pass


def long_name(size: int, number: int) -> bytes:
    """A member of a tar file whose name has so many characters."""
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, size
    name = (b"%08d" % number).ljust(size, b"a")
    return info.tobuf(tarfile.GNU_FORMAT) + name + bytes(-size % 512) + tarfile.TarInfo("x").tobuf()


def test_headers_and_names_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.tar.gz"

    def refused(data: bytes, message: str) -> None:
        path.write_bytes(gzip.compress(data + bytes(1024), 1))
        tracemalloc.start()
        try:
            with pytest.raises(ValueError, match=message), open_files(path):
                pass
            assert tracemalloc.get_traced_memory()[1] < 6 << 20
        finally:
            tracemalloc.stop()

    refused(long_name(15 << 20, 0), r"a\.tar\.gz: .*a header of \d+ bytes, at most 16384")
    refused(long_name(5000, 0), "a name of 5000 characters: refused, at most 4096")
    monkeypatch.setattr(tars, "HEADERS", 1 << 20)
    refused(b"".join(long_name(4000, number) for number in range(400)), "headers of more than 1048576 bytes")
    write_zip(path, {"n" * 5000: b""})
    with pytest.raises(ValueError, match="a name of 5000 characters"), open_files(path):
        pass


def test_global_headers_are_not_copied_to_all_members(tmp_path: Path) -> None:
    """A header of 10 kB for all members and 1000 members with headers of their own would be 10 MB of text otherwise."""
    held, common = io.BytesIO(), {f"key{number}": "v" * 8 for number in range(500)}
    with tarfile.open(fileobj=held, mode="w", format=tarfile.PAX_FORMAT, pax_headers=common) as archive:
        for number in range(1000):
            info = tarfile.TarInfo(f"{number}")
            info.pax_headers = {"comment": "own"}
            archive.addfile(info)
    (tmp_path / "a.tar").write_bytes(held.getvalue())
    tracemalloc.start()
    try:
        with open_files(tmp_path / "a.tar") as files:
            assert len(files.names()) == 1000
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_files_are_bounded_by_their_archive(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    for size in (1 << 20, 6 << 20):
        if kind == "zip":
            write_zip(path, {"a": bytes(size)})
        else:
            path.write_bytes(gzip.compress(tar_bytes([(tarfile.TarInfo("a"), bytes(size))])))
        assert size / path.stat().st_size > 600
        if size == 1 << 20:
            with open_files(path) as files:
                assert len(files.read("a")) == size
            continue
        message = r"'a' promises to expand to 6291456 bytes, more than \d+ \(128 times the archive\)"
        with pytest.raises(ValueError, match=message), open_files(path):
            pass


def test_streams_name_what_is_damaged(tmp_path: Path) -> None:
    content = np.random.default_rng(0).integers(0, 50, 5000).astype(np.uint8).tobytes()
    data = bytearray(write_zip(tmp_path / "a.zip", {"a": content}).read_bytes())
    data[1500] ^= 0xFF
    (tmp_path / "a.zip").write_bytes(data)
    with (
        open_files(tmp_path / "a.zip") as files,
        pytest.raises(ValueError, match=r"a\.zip, a: .*fetch it again"),
        files.stream("a") as stream,
    ):
        stream.read()


def test_damaged_tars_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    whole = tar_bytes([(tarfile.TarInfo("a"), b"1" * 700), (tarfile.TarInfo("b"), b"2" * 700)])
    second = bytearray(whole)
    second[1536 + 20] ^= 1  # in the header of b, which tarfile then takes for the end
    packed = bytearray(gzip.compress(whole))
    packed[-6] ^= 1  # the checksum
    for data in (second, packed, gzip.compress(whole)[:-20], whole[:1000], whole[:2000], b"x" * 2000, b"\x1f\x8b"):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"a\.tar"), open_files(path) as files:
            [files.read(name) for name in ("a", "b")]


def test_missing_and_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder or file"), open_files(tmp_path / "none"):
        pass
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ValueError, match="text: no readable zip or tar archive"), open_files(tmp_path / "text"):
        pass
    with pytest.raises(ValueError, match="called so: no readable zip"), open_files(b"PK", "called so"):
        pass


def test_errors_of_the_caller_pass_unchanged(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "a.zip", CONTENTS)
    with pytest.raises(RuntimeError, match=r"^mine$"), open_files(path):
        raise RuntimeError("mine")


def test_npy_xz(tmp_path: Path) -> None:
    import lzma

    held, array = io.BytesIO(), np.arange(12, dtype=np.int16).reshape(3, 4)
    np.save(held, array)
    path = tmp_path / "a.npy.xz"
    path.write_bytes(lzma.compress(held.getvalue()))
    found = read_npy_xz(path)
    np.testing.assert_array_equal(found, array)
    assert found.dtype == np.int16
    with pytest.raises(ValueError, match="unpacks to more than 50 bytes"):
        read_npy_xz(path, limit=50)
    path.write_bytes(lzma.compress(held.getvalue()[:-1]))
    with pytest.raises(ValueError, match="the file holds another size"):
        read_npy_xz(path)
    path.write_bytes(lzma.compress(held.getvalue())[:-8])
    with pytest.raises(ValueError, match="truncated or no xz"):
        read_npy_xz(path)
    held = io.BytesIO()
    np.save(held, np.array([{}]), allow_pickle=True)
    path.write_bytes(lzma.compress(held.getvalue()))
    with pytest.raises(ValueError, match="object arrays are pickles"):
        read_npy_xz(path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_npy_xz(tmp_path / "none")
