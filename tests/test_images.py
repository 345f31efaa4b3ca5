"""CIFAR in all its forms, folders of images, and the sets that are asked for by name; real files where they exist."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import pickle
import struct
import tarfile
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedjax_pfl.data.sources import DATA_VARIABLE, SOURCES, load
from fedjax_pfl.data.sources.cifar import shift_and_scale
from fedjax_pfl.data.sources.named import NAMED

RNG = np.random.default_rng(3)
SIZES = (3, 3, 3, 3, 3, 2)  # five training batches and the test batch
IMAGES = RNG.integers(256, size=(17, 32, 32, 3), dtype=np.uint8)
LABELS = RNG.integers(10, size=17)
FINE, COARSE = RNG.integers(100, size=17), RNG.integers(20, size=17)
NAMES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


@pytest.fixture(autouse=True)
def _nowhere_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test looks into the machine's own data or cache, or works in the repository."""
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    monkeypatch.setenv("FEDJAX_PFL_CACHE", str(tmp_path / "cache"))


def planes(images: np.ndarray) -> np.ndarray:
    """Pixels as CIFAR stores them: the red plane of an image, then green, then blue."""
    return np.stack([np.concatenate([image[:, :, c].ravel() for c in range(3)]) for image in images])


def python2(batch: dict[str, Any]) -> bytes:
    """A batch as Python 2 pickled it, like the published ones: the pixels are a byte string, not bytes."""
    data, size = pickle.dumps(batch, 3), struct.pack("<I", batch["data"].nbytes)
    assert data.count(b"B" + size) == 1
    return b"\x80\x02" + data[2:].replace(b"B" + size, b"T" + size)


def batches10(binary: bool) -> dict[str, bytes]:
    """The six files of CIFAR-10."""
    files, start = {}, 0
    for name, size in zip(NAMES, SIZES, strict=True):
        pixels, labels = planes(IMAGES[start : start + size]), LABELS[start : start + size]
        if binary:
            files[name + ".bin"] = b"".join(bytes([y]) + row.tobytes() for y, row in zip(labels, pixels, strict=True))
        else:
            files[name] = python2({"data": pixels, "labels": labels.tolist(), "batch_label": "one"})
        start += size
    return files


def batches100(binary: bool) -> dict[str, bytes]:
    """The two files of CIFAR-100."""
    files = {}
    for name, part in (("train", slice(0, 12)), ("test", slice(12, 17))):
        pixels, fine, coarse = planes(IMAGES[part]), FINE[part], COARSE[part]
        if binary:
            rows = zip(coarse, fine, pixels, strict=True)
            files[name + ".bin"] = b"".join(bytes([c, y]) + row.tobytes() for c, y, row in rows)
        else:
            batch = {"data": pixels, "fine_labels": fine.tolist(), "coarse_labels": coarse.tolist()}
            files[name] = pickle.dumps({key.encode(): value for key, value in batch.items()})
    return files


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def archive(path: Path, files: dict[str, bytes], inner: str) -> None:
    """A ``.tar.gz`` with the files in another order than their names'."""
    with tarfile.open(path, "w:gz") as tar:
        for name in sorted(files, key=lambda name: name[::-1]):
            member = tarfile.TarInfo(f"{inner}/{name}")
            member.size = len(files[name])
            tar.addfile(member, io.BytesIO(files[name]))


def npy_xz(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return lzma.compress(buffer.getvalue())


def packed(folder: Path, **arrays: np.ndarray) -> Path:
    write(folder, {"train_images_0.npy.xz": npy_xz(IMAGES[:9]), "train_images_1.npy.xz": npy_xz(IMAGES[9:15]),
                   "test_images.npy.xz": npy_xz(IMAGES[15:])})  # fmt: skip
    np.savez(folder / "labels.npz", **{"train_labels": LABELS[:15], "test_labels": LABELS[15:], **arrays})
    return folder


@pytest.mark.parametrize("form", ["binary", "python", "binary.tar", "python.tar", "packed"])
@pytest.mark.parametrize("below", ["", "cifar10", "cifar-10-batches-py"])
def test_cifar10_in_every_form(tmp_path: Path, form: str, below: str) -> None:
    folder = tmp_path / "data" / below
    folder.mkdir(parents=True)
    files = batches10(form.startswith("binary"))
    if form == "packed":
        packed(folder)
    elif form.endswith("tar"):
        archive(folder / f"cifar-10-{form.removesuffix('.tar')}.tar.gz", files, "cifar-10-batches")
    else:
        write(folder, files)
    source = load("cifar10", tmp_path / "data")
    np.testing.assert_array_equal(source.x, IMAGES)
    assert source.x.dtype == np.uint8
    assert source.y.tolist() == LABELS.tolist()
    assert source.y.dtype == np.int32
    assert source.num_classes == 10
    assert source.official_test.tolist() == [False] * 15 + [True] * 2
    assert source.shift.shape == source.scale.shape == (3,)  # the values: see the test on real pixels
    assert "a part: 15 of 50,000 training and 2 of 10,000 test images" in source.where
    np.testing.assert_array_equal(load(f"cifar10:{folder}").x, source.x)


@pytest.mark.parametrize("form", ["binary", "python", "binary.tar", "python.tar"])
def test_cifar100_fine_and_coarse(tmp_path: Path, form: str) -> None:
    files = batches100(form.startswith("binary"))
    if form.endswith("tar"):
        archive(tmp_path / f"cifar-100-{form.removesuffix('.tar')}.tar.gz", files, "cifar-100")
    else:
        write(tmp_path, files)
    fine, coarse = load("cifar100", tmp_path), load("cifar100:coarse", tmp_path)
    for source, labels, classes in ((fine, FINE, 100), (coarse, COARSE, 20)):
        np.testing.assert_array_equal(source.x, IMAGES)
        assert source.y.tolist() == labels.tolist()
        assert source.num_classes == classes
        assert source.official_test.sum() == 5
        assert source.client is None
    assert coarse.name == "cifar100:coarse"
    assert load(f"cifar100:{tmp_path},coarse").y.tolist() == COARSE.tolist()


def test_packed_superclasses(tmp_path: Path) -> None:
    table = RNG.integers(20, size=100)
    packed(tmp_path, train_labels=FINE[:15], test_labels=FINE[15:], coarse_of_class=table)
    assert load("cifar100:coarse", tmp_path).y.tolist() == table[FINE].tolist()
    packed(tmp_path, train_labels=FINE[:15], test_labels=FINE[15:])
    with pytest.raises(ValueError, match=r"labels\.npz: needs coarse_of_class"):
        load("cifar100:coarse", tmp_path)


def test_archives_by_their_own_name(tmp_path: Path) -> None:
    archive(tmp_path / "cifar-10-binary.tar.gz", batches10(True), "x")
    np.testing.assert_array_equal(load("cifar10:cifar-10-binary.tar.gz", tmp_path).x, IMAGES)


def changed(name: str, content: bytes | None, binary: bool = True) -> Callable[[Path], None]:
    """CIFAR-10's batches with one of them changed or left out."""

    def make(folder: Path) -> None:
        files = {**batches10(binary), **({} if content is None else {name: content})}
        write(folder, {key: data for key, data in files.items() if content is not None or key != name})

    return make


def tar_with(member: tarfile.TarInfo, data: bytes = b"") -> Callable[[Path], None]:
    """The binary archive with one member more."""

    def make(folder: Path) -> None:
        with tarfile.open(folder / "cifar-10-binary.tar.gz", "w:gz") as tar:
            for name, content in batches10(True).items():
                plain = tarfile.TarInfo(f"c/{name}")
                plain.size = len(content)
                tar.addfile(plain, io.BytesIO(content))
            tar.addfile(member, io.BytesIO(data))

    return make


def member(name: str, **fields: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for key, value in fields.items():
        setattr(info, key, value)
    return info


def cut_tar(folder: Path) -> None:
    archive(folder / "cifar-10-binary.tar.gz", batches10(True), "c")
    path = folder / "cifar-10-binary.tar.gz"
    path.write_bytes(path.read_bytes()[:-4000])


class Evil:
    """A pickle of this runs a command where pickles are loaded freely."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo executed > executed",)


ROW = bytes([3]) + bytes(3072)
GOOD = {"data": planes(IMAGES[:3]), "labels": [1, 2, 3]}
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (changed("data_batch_2.bin", (3 * ROW)[:-1]), r"data_batch_2\.bin: 9218 bytes are no whole number"),
    "empty": (changed("data_batch_2.bin", b""), r"data_batch_2\.bin: 0 bytes"),
    "label": (changed("data_batch_3.bin", 2 * ROW + b"\x0a" + ROW[1:]), "label 10 of image 2 is outside 0..9"),
    "missing": (changed("data_batch_4.bin", None), r"data_batch_4\.bin missing"),
    "unequal": (changed("data_batch_4.bin", 2 * ROW), r"\[3, 3, 3, 2, 3\] images"),
    "too many": (changed("test_batch.bin", 10_001 * ROW), "15 training and 10001 test images are more than"),
    "no pickle": (changed("data_batch_1", b"\x00" * 99, False), "data_batch_1: byte 0"),
    "evil": (changed("data_batch_1", pickle.dumps(Evil()), False), r"data_batch_1: .*system"),
    "list": (changed("data_batch_1", pickle.dumps([1]), False), "holds no dictionary"),
    "no data": (changed("data_batch_1", pickle.dumps({"x": 1}), False), "data, labels missing, found x"),
    "float": (changed("data_batch_1", pickle.dumps({**GOOD, "data": np.zeros((3, 3072))}), False), "must be uint8"),
    "shape": (changed("data_batch_1", pickle.dumps({**GOOD, "data": np.zeros((3, 9), "u1")}), False), "must be uint8"),
    "few labels": (changed("data_batch_1", pickle.dumps({**GOOD, "labels": [1]}), False), "3 images need as many"),
    "wild label": (changed("data_batch_1", pickle.dumps({**GOOD, "labels": [0, -1, 2]}), False), "label -1 of image 1"),
    "pickled size": (changed("data_batch_5", pickle.dumps({"data": GOOD["data"][:2], "labels": [1, 2]}), False),
                     r"\[3, 3, 3, 3, 2\] images"),
    "outside": (tar_with(member("../evil")), r"'\.\./evil' leads out of the archive"),
    "absolute": (tar_with(member("/etc/evil")), "'/etc/evil' leads out"),
    "twice": (tar_with(member("d/test_batch.bin")), "are both there"),
    "link": (tar_with(member("c/test_batch.bin", type=tarfile.SYMTYPE, linkname="/etc/passwd")), "is a link or no"),
    "cut archive": (cut_tar, r"tar\.gz: no readable zip or tar archive"),
    "no archive": (lambda f: write(f, {"cifar-10-binary.tar.gz": b"PK" * 99}), "no readable zip or tar"),
    "packed labels": (lambda f: packed(f, test_labels=LABELS[14:]), "2 test images but 3 labels"),
    "packed range": (lambda f: packed(f, test_labels=np.array([3, 10])), "label 10 of image 16"),
    "packed kind": (lambda f: packed(f, test_labels=np.array([0.5, 1])), r"labels\.npz: needs test_labels"),
    "packed object": (lambda f: np.savez(packed(f) / "labels.npz", allow_pickle=True, train_labels=np.array([None])),
                      "object arrays are pickles"),
    "packed images": (lambda f: write(packed(f), {"test_images.npy.xz": npy_xz(IMAGES[:2, :5])}), r"uint8 \(2, 5"),
    "packed surplus": (lambda f: write(packed(f), {"test_images.npy.xz": npy_xz(IMAGES)}), r"holds uint8 \(17, 32"),
    "packed cut": (lambda f: write(packed(f), {"test_images.npy.xz": npy_xz(IMAGES[:2])[:900]}), "test_images.npy.xz"),
    "packed tail": (lambda f: write(packed(f), {"test_images.npy.xz": lzma.compress(
        lzma.decompress(npy_xz(IMAGES[15:])) + b"x")}), "holds more than"),
    "no xz": (lambda f: write(packed(f), {"test_images.npy.xz": b"\x00" * 99}), "test_images.npy.xz"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_cifar(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make, message = BROKEN[case]
    folder = tmp_path / "data"
    folder.mkdir()
    make(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        load("cifar10", folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("executed"))


def test_a_long_name_does_not_fill_the_memory(tmp_path: Path) -> None:
    header = tarfile.TarInfo("././@LongLink")
    header.size, header.type = 40 << 20, tarfile.GNUTYPE_LONGNAME
    data = header.tobuf(tarfile.USTAR_FORMAT) + b"a" * header.size + tarfile.TarInfo("x").tobuf() + bytes(1024)
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(gzip.compress(data, 1))
    del data
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"python\.tar\.gz: .*a header of 41943040 bytes, at most"):
            load("cifar10", tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_missing_batches_are_all_named(tmp_path: Path) -> None:
    write(tmp_path, {"data_batch_1.bin": 2 * ROW})
    with pytest.raises(FileNotFoundError, match=r"data_batch_2\.bin, .*data_batch_5\.bin, test_batch\.bin missing"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize(("binary", "batches"), [(True, 1), (False, 4)])
def test_cifar_pixels_are_held_once(tmp_path: Path, binary: bool, batches: int) -> None:
    """Besides the pixels there is room for one batch; a pickle's bytes are copied until they are an array."""
    many = 400
    pixels = np.zeros((many, 3072), np.uint8)
    rows = np.zeros((many, 3073), np.uint8).tobytes() if binary else python2({"data": pixels, "labels": [0] * many})
    write(tmp_path, {name + ".bin" * binary: rows for name in NAMES})
    tracemalloc.start()
    try:
        source = load("cifar10", tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert source.x.nbytes == 6 * many * 3072
    assert peak < 1.2 * source.x.nbytes + batches * many * 3073


def idx(array: np.ndarray) -> bytes:
    return gzip.compress(bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes())


def idx_files(labels: np.ndarray, stems: tuple[str, str] = ("train", "t10k")) -> dict[str, bytes]:
    pixels = np.arange(len(labels) * 12, dtype=np.uint8).reshape(-1, 3, 4)
    parts = (slice(0, -3), slice(-3, None))
    return {f"{stem}-{kind}-ubyte.gz": idx(array[part]) for stem, part in zip(stems, parts, strict=True)
            for kind, array in (("images-idx3", pixels), ("labels-idx1", labels.astype(np.uint8)))}  # fmt: skip


def test_emnist_by_split(tmp_path: Path) -> None:
    labels = np.arange(29) % 26
    write(tmp_path / "emnist", idx_files(labels + 1, ("emnist-letters-train", "emnist-letters-test")))
    write(tmp_path / "emnist", idx_files(labels, ("emnist-balanced-train", "emnist-balanced-test")))
    letters, balanced = load("emnist/letters", tmp_path), load("emnist/balanced", tmp_path / "emnist")
    assert letters.y.tolist() == balanced.y.tolist() == labels.tolist()
    assert (letters.num_classes, balanced.num_classes) == (26, 47)
    assert letters.official_test.sum() == 3
    with pytest.raises(FileNotFoundError, match=r"no emnist-digits-train-images.*get it from https://www\.nist\.gov"):
        load("emnist/digits", tmp_path)
    write(tmp_path / "emnist", idx_files(labels, ("emnist-letters-train", "emnist-letters-test")))
    with pytest.raises(ValueError, match="labels start at 0 instead of 1"):
        load("emnist/letters", tmp_path)


def test_where_named_sets_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, here = tmp_path / "data", tmp_path / "here"
    write(data / "mnist", idx_files(np.arange(12) % 10))
    np.savez(data / "mnist" / "writers.npz", train_writer=np.arange(9), test_writer=np.arange(3))
    here.mkdir()
    monkeypatch.chdir(here)
    assert len(load("mnist", data)) == len(load("mnist", data / "mnist")) == len(load(f"mnist:{data / 'mnist'}")) == 12
    monkeypatch.setenv(DATA_VARIABLE, str(data))
    found = load("mnist")
    assert found.name == "mnist"
    assert found.client.tolist() == [*range(9), *range(3)]
    assert found.num_classes == 10
    with pytest.raises(FileNotFoundError, match=r"no the four .* in \S*here, \S*here/mnist: .*leave --data-dir"):
        load("mnist", here)  # what the variable names is not searched when a folder is given
    with pytest.raises(FileNotFoundError, match="does not exist: correct --data-dir"):
        load("mnist", tmp_path / "nowhere")
    write(here / "mnist", idx_files(np.arange(13) % 10))
    assert len(load("mnist")) == 13
    with pytest.raises(FileNotFoundError, match=r"cifar100: no binary.*give its folder with"):
        load("cifar100:coarse")


def test_other_files_than_named(tmp_path: Path) -> None:
    write(tmp_path, idx_files(np.full(12, 11)) | idx_files(np.arange(12)))
    with pytest.raises(ValueError, match=r"labels 0\.\.11 do not fit mnist's 10 classes"):
        load("mnist", tmp_path)


def test_every_named_set_is_described() -> None:
    for name, one in NAMED.items():
        entry = SOURCES[name]
        assert f"{one.train:,} + {one.test:,} images, {one.classes} classes" in entry.description
        assert one.get.startswith("http")
        assert one.counts is None or (sum(one.counts) == one.train and len(one.counts) == one.classes)
    with pytest.raises(ValueError, match="Did you mean 'emnist/balanced'"):
        load("emnist/balance")


real = pytest.mark.skipif(
    not (Path(os.environ.get(DATA_VARIABLE, "/nonexistent")) / "cifar100").is_dir(),
    reason=f"set {DATA_VARIABLE} to a folder with mnist/, fashion_mnist/ and cifar100/ to read the real files",
)
REAL = Path(os.environ.get(DATA_VARIABLE, ""))


@real
def test_real_cifar100() -> None:
    fine, coarse = load("cifar100", REAL), load("cifar100:coarse", REAL)
    assert np.bincount(fine.y[~fine.official_test]).tolist() == [50] * 100
    assert np.bincount(coarse.y[coarse.official_test]).tolist() == [50] * 20
    assert "5,000 of 50,000" in fine.where
    seen = (fine.x[~fine.official_test] - fine.shift) / fine.scale  # a tenth of the images: near 0 and 1, not equal
    np.testing.assert_allclose(seen.mean((0, 1, 2)), 0, atol=0.02)
    np.testing.assert_allclose(seen.std((0, 1, 2)), 1, atol=0.02)


@real
@pytest.mark.parametrize("classes", [10, 100])
def test_shift_and_scale_are_those_of_the_pixels(classes: int) -> None:
    """Mean and deviation of each channel of the real training images, here of 4,000 of them."""
    files = sorted((REAL / f"cifar{classes}").glob("train_images*.npy.xz"))
    if not files:
        pytest.skip(f"{DATA_VARIABLE} names no folder with cifar{classes}")
    with lzma.open(files[0]) as stream:
        pixels = np.frombuffer(stream.read(128 + 4000 * 3072), np.uint8, offset=128).reshape(-1, 3) / 255
    shift, scale = shift_and_scale(classes)
    np.testing.assert_allclose(shift / 255, pixels.mean(0), atol=0.006)  # a channel's means differ by 0.02
    np.testing.assert_allclose(scale / 255, pixels.std(0), atol=0.003)


@real
def test_real_cifar100_as_official_batches(tmp_path: Path) -> None:
    source = load("cifar100", REAL)
    coarse = load("cifar100:coarse", REAL).y
    for name, part in (("train", ~source.official_test), ("test", source.official_test)):
        rows = np.concatenate([coarse[part, None], source.y[part, None], planes(source.x[part])], 1).astype(np.uint8)
        (tmp_path / f"{name}.bin").write_bytes(rows.tobytes())
    again = load("cifar100", tmp_path)
    np.testing.assert_array_equal(again.x, source.x)
    np.testing.assert_array_equal(again.y, source.y)


@real
def test_real_idx_sets_by_name(tmp_path: Path) -> None:
    mnist = load("mnist", REAL)
    assert mnist.official_test.sum() == 10_000
    assert len(np.unique(mnist.client)) == 836
    assert load("fashion_mnist", REAL).licence == "MIT"
    with pytest.raises(ValueError, match="the classes have other sizes than in fashion_mnist"):
        load("fashion_mnist", REAL / "mnist")


def picture(path: Path, array: np.ndarray, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, **options)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Two classes, three images each, in colour."""
    for place, name in enumerate(("cat/1.png", "cat/2.png", "cat/3.PNG", "ant/1.png", "ant/2.png", "ant/9.png")):
        picture(tmp_path / "p" / name, IMAGES[place, :6, :5])
    return tmp_path / "p"


def test_folder(pictures: Path) -> None:
    source = load(f"folder:{pictures}")
    np.testing.assert_array_equal(source.x, IMAGES[[3, 4, 5, 0, 1, 2], :6, :5])
    assert source.y.tolist() == [0, 0, 0, 1, 1, 1]
    assert source.scale == 255
    assert source.official_test is None
    assert "classes ant, cat" in source.where
    gray = load("folder:p,gray,size=8", pictures.parent)
    assert gray.x.shape == (6, 8, 8, 1)
    assert "resized to 8x8, gray" in gray.where
    assert load(f"folder:{pictures},gray").x.shape == (6, 6, 5, 1)


def test_folder_with_official_test(tmp_path: Path) -> None:
    for name in ("train/b/1.png", "train/a/1.png", "test/b/1.png"):
        picture(tmp_path / name, IMAGES[0, :4, :4, 0])
    source = load(f"folder:{tmp_path}")
    assert source.y.tolist() == [0, 1, 1]
    assert source.official_test.tolist() == [False, False, True]
    assert source.x.shape == (3, 4, 4, 1)
    picture(tmp_path / "test/c/1.png", IMAGES[0])
    with pytest.raises(ValueError, match=r"test/c: the class 'c' is not in .*train"):
        load(f"folder:{tmp_path}")


def test_folder_of_jpeg(tmp_path: Path) -> None:
    smooth = np.add.outer(np.arange(16), np.arange(16)).astype(np.uint8) * 8
    picture(tmp_path / "a" / "1.jpg", smooth, quality=95)
    picture(tmp_path / "b" / "1.jpeg", smooth, quality=95)
    source = load(f"folder:{tmp_path}")
    assert np.abs(source.x[0, ..., 0].astype(int) - smooth).max() < 6


def header_png(width: int, height: int) -> bytes:
    """A small file whose header promises a huge image."""
    buffer = io.BytesIO()
    Image.fromarray(IMAGES[0]).save(buffer, "PNG")
    data = bytearray(buffer.getvalue())
    data[16:24] = struct.pack(">2I", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(bytes(data[12:29])))
    return bytes(data)


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "size": (lambda p: picture(p / "cat/2.png", IMAGES[0, :7, :5]),
             r"cat/2\.png is 5x7 with 3 channels, .*ant/1\.png is 5x6 with 3.*size=32"),
    "channels": (lambda p: picture(p / "cat/2.png", IMAGES[0, :6, :5, 0]), "is 5x6 with 1 channel,.*gray"),
    "broken": (lambda p: (p / "cat/2.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(50)), r"2\.png: cannot be read"),
    "cut": (lambda p: (p / "cat/2.png").write_bytes((p / "cat/2.png").read_bytes()[:70]), r"2\.png: cannot be read"),
    "no image": (lambda p: (p / "cat/2.png").write_text("hello"), r"cat/2\.png: cannot be read"),
    "gif": (lambda p: Image.fromarray(IMAGES[0]).save(p / "cat/2.png", "GIF"), r"cat/2\.png: cannot be read"),
    "text": (lambda p: (p / "cat/notes.txt").write_text("x"), r"cat/notes\.txt: is no PNG or JPEG"),
    "nested": (lambda p: (p / "cat/more.png").mkdir(), r"cat/more\.png: is no PNG"),
    "empty class": (lambda p: (p / "bee").mkdir(), "bee: an empty class"),
    "bomb": (lambda p: (p / "cat/2.png").write_bytes(header_png(60_000, 60_000)), r"cat/2\.png: cannot be read"),
    "large": (lambda p: (p / "cat/2.png").write_bytes(header_png(5_000, 5_000)), "5000x5000 pixels, more than"),
    "deep": (lambda p: picture(p / "cat/2.png", IMAGES[0, :6, :5, 0].astype(np.uint16) * 257), "8 bits a channel"),
    "link": (lambda p: (p / "cat/0.png").symlink_to("/etc/passwd"), r"cat/0\.png: a link that leaves"),
    "linked class": (lambda p: (p / "bee").symlink_to("/etc"), "bee: a link that leaves"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_faulty_folders(pictures: Path, case: str) -> None:
    make, message = FAULTS[case]
    make(pictures)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=message) as caught:
            load(f"folder:{pictures}")
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)


def test_links_within_the_folder(pictures: Path) -> None:
    (pictures / "cat/4.png").symlink_to(pictures / "ant/1.png")
    assert len(load(f"folder:{pictures}")) == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "folder needs a folder"),
        ("p,sise=3", "unknown option of folder 'sise'. Did you mean 'size'"),
        ("p,size=big", "size needs a whole number"),
        ("p,size=0", "size needs a whole number"),
        ("p,size=99999", "size needs a whole number"),
        ("p,gray=maybe", "gray stands alone"),
        ("p/cat", "has no sub-folders"),
        ("p/cat/1.png", "is no folder"),
    ],
)
def test_bad_folder_options(pictures: Path, options: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(f"folder:{options}", pictures.parent)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="was not found"):
        load("folder:nowhere", tmp_path)
