"""TensorFlow Datasets: the real builders against a server on this machine, prepared folders, the cache, every error."""

from __future__ import annotations

import functools
import gzip
import http.server
import importlib.util
import inspect
import io
import json
import os
import shutil
import socket
import struct
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import scipy.io

from fedjax_pfl.data.sources import DATA_VARIABLE, Source, cache, load
from fedjax_pfl.data.sources.no_tensorflow import tensorflow_or_stand_in

tfds = pytest.importorskip("tensorflow_datasets", reason="tensorflow-datasets is not installed")
pytest.importorskip("array_record", reason="array_record is not installed (it has no wheel for this system)")

from tensorflow_datasets.core.download import checksums  # noqa: E402
from tensorflow_datasets.image_classification import cifar, mnist  # noqa: E402

TRAIN, TEST = 60, 20
RNG = np.random.default_rng(5)
SIZES = {"train": TRAIN, "t10k": TEST}
COLOUR = RNG.integers(256, size=(TRAIN + TEST, 32, 32, 3), dtype=np.uint8)
DIGITS = RNG.integers(10, size=TRAIN + TEST).astype(np.uint8)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def idx(array: np.ndarray) -> bytes:
    head = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    return gzip.compress(head + array.tobytes())


def mnist_files() -> dict[str, bytes]:
    """The first images of MNIST's four files where they are at hand, else random ones of their form."""
    folder = Path(os.environ.get(DATA_VARIABLE, "")) / "mnist"
    files = {}
    for stem, size in SIZES.items():
        if os.environ.get(DATA_VARIABLE) and folder.is_dir():
            with gzip.open(folder / f"{stem}-images-idx3-ubyte.gz") as images:
                x = np.frombuffer(images.read(16 + 784 * size), np.uint8, offset=16).reshape(-1, 28, 28)
            with gzip.open(folder / f"{stem}-labels-idx1-ubyte.gz") as labels:
                y = np.frombuffer(labels.read(8 + size), np.uint8, offset=8)
        else:
            x = RNG.integers(256, size=(size, 28, 28), dtype=np.uint8)
            y = RNG.integers(10, size=size).astype(np.uint8)
        files |= {f"{stem}-images-idx3-ubyte.gz": idx(x), f"{stem}-labels-idx1-ubyte.gz": idx(y)}
    return files


def emnist_zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for kind, size in (("train", TRAIN), ("test", TEST)):
            stem = f"gzip/emnist-letters-{kind}"
            x = RNG.integers(256, size=(size, 28, 28), dtype=np.uint8)
            archive.writestr(f"{stem}-images-idx3-ubyte.gz", idx(x))
            archive.writestr(f"{stem}-labels-idx1-ubyte.gz", idx((np.arange(size) % 26 + 1).astype(np.uint8)))
    return buffer.getvalue()


def cifar_batches() -> dict[str, bytes]:
    flat = COLOUR.transpose(0, 3, 1, 2).reshape(len(COLOUR), -1)
    rows = np.concatenate([DIGITS[:, None], flat], 1)
    each = TRAIN // 5
    files = {f"data_batch_{i + 1}.bin": rows[i * each : (i + 1) * each].tobytes() for i in range(5)}
    names = b"\n".join(b"class %d" % number for number in range(10))
    return files | {"test_batch.bin": rows[TRAIN:].tobytes(), "batches.meta.txt": names}


def cifar_tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, data in cifar_batches().items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def svhn_mat(part: slice) -> bytes:
    buffer = io.BytesIO()
    labels = np.where(DIGITS[part] == 0, 10, DIGITS[part])[:, None]  # SVHN stores the digit 0 as 10
    scipy.io.savemat(buffer, {"X": COLOUR[part].transpose(1, 2, 3, 0), "y": labels})
    return buffer.getvalue()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A folder with the published files in small, and the address of a server that hands them out."""
    folder = tmp_path_factory.mktemp("served")
    parts = {"train": slice(0, TRAIN), "test": slice(TRAIN, None), "extra": slice(0, 5)}
    files = {**mnist_files(), "gzip.zip": emnist_zip(), "cifar-10-binary.tar.gz": cifar_tar()}
    files |= {f"{name}_32x32.mat": svhn_mat(part) for name, part in parts.items()}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield SimpleNamespace(folder=folder, url=f"http://127.0.0.1:{server.server_port}/")
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def web(served: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The builders look at that server instead of the places that they name, for as many images as it has."""
    monkeypatch.setattr(mnist.MNIST, "URL", served.url)
    monkeypatch.setattr(mnist.EMNIST, "URL", served.url + "gzip.zip")
    monkeypatch.setattr(mnist, "_TRAIN_EXAMPLES", TRAIN)
    monkeypatch.setattr(mnist, "_TEST_EXAMPLES", TEST)
    letters = mnist.EMNIST.builder_configs["letters"]
    monkeypatch.setattr(letters, "train_examples", TRAIN)
    monkeypatch.setattr(letters, "test_examples", TEST)
    info = tfds.builder_cls("cifar10")._cifar_info.fget(SimpleNamespace(name="cifar10"))
    own = info._replace(url=served.url + "cifar-10-binary.tar.gz")
    monkeypatch.setattr(cifar.Cifar10, "_cifar_info", property(lambda self: own))
    return served


@pytest.fixture(scope="module")
def prepared(served: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder in which the library itself has prepared MNIST."""
    folder = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch, tensorflow_or_stand_in():
        patch.setattr(mnist.MNIST, "URL", served.url)
        patch.setattr(mnist, "_TRAIN_EXAMPLES", TRAIN)
        patch.setattr(mnist, "_TEST_EXAMPLES", TEST)
        builder = tfds.builder("mnist", data_dir=folder, file_format="array_record")
        builder.download_and_prepare()
    shutil.rmtree(folder / "downloads")
    return folder


def rows(source: Source) -> np.ndarray:
    """Each sample as one row of bytes (pixels, label, whether of the test set), sorted: the library shuffles."""
    flat = source.x.reshape(len(source), -1)
    table = np.concatenate([flat, source.y[:, None].astype(np.uint8), source.official_test[:, None]], 1).astype(
        np.uint8
    )
    return table[np.lexsort(table.T)]


def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(tfds, "builder", refuse)
    monkeypatch.setattr(tfds, "builder_from_directory", refuse)


def test_mnist_from_download_to_source(web: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = load("tfds:mnist")
    assert source.name == "tfds:mnist/3.0.1"
    assert source.x.shape == (TRAIN + TEST, 28, 28, 1)
    assert source.x.dtype == np.uint8
    assert source.num_classes == 10
    assert source.scale == 255
    assert source.official_test.sum() == TEST
    np.testing.assert_array_equal(rows(source), rows(load(f"mnist-idx:{web.folder}")))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["tfds"]  # downloads and records are gone
    no_network(monkeypatch)
    again = load("tfds:mnist")
    np.testing.assert_array_equal(again.x, source.x)
    np.testing.assert_array_equal(again.y, source.y)
    named = load("mnist")
    np.testing.assert_array_equal(named.x, source.x)
    assert (named.name, named.licence) == ("mnist", "CC BY-SA 3.0 as commonly given")
    assert f"a part: {TRAIN} of 60,000" in named.where


def test_cifar10_by_name_from_its_archive(web: SimpleNamespace, tmp_path: Path) -> None:
    source = load("cifar10")
    batches = tmp_path / "batches"
    batches.mkdir()
    for name, data in cifar_batches().items():
        (batches / name).write_bytes(data)
    local = load("cifar10", batches)
    np.testing.assert_array_equal(rows(source), rows(local))
    np.testing.assert_array_equal(source.shift, local.shift)
    np.testing.assert_array_equal(source.scale, local.scale)


def test_emnist_letters_by_name(web: SimpleNamespace, tmp_path: Path) -> None:
    source = load("emnist/letters")
    assert np.bincount(source.y[source.official_test], minlength=26).tolist() == [1] * 20 + [0] * 6
    assert source.num_classes == 26
    with zipfile.ZipFile(web.folder / "gzip.zip") as archive:
        archive.extractall(tmp_path)
    np.testing.assert_array_equal(rows(source), rows(load("emnist/letters", tmp_path / "gzip")))


def test_svhn_by_name(web: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = tfds.builder_cls("svhn_cropped")
    monkeypatch.setitem(builder._split_generators.__globals__, "URL", web.url)
    source = load("svhn_cropped")
    wanted = Source("w", COLOUR, DIGITS.astype(np.int32), 10, official_test=np.arange(TRAIN + TEST) >= TRAIN)
    np.testing.assert_array_equal(rows(source), rows(wanted))
    assert source.where.endswith("split extra ignored, feature id ignored; a part: 60 of 73,257 training and 20 of "
                                 "26,032 test images")  # fmt: skip


@pytest.mark.parametrize("below", ["", "mnist", "mnist/3.0.1"])
@pytest.mark.parametrize("name", ["tfds:mnist", "mnist"])
def test_prepared_folder(
    prepared: Path, served: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, below: str, name: str
) -> None:
    source = load(name, prepared / below)
    np.testing.assert_array_equal(rows(source), rows(load(f"mnist-idx:{served.folder}")))
    no_network(monkeypatch)
    monkeypatch.setenv(DATA_VARIABLE, str(prepared / below))
    np.testing.assert_array_equal(load(name).x, source.x)


def checksum(data: bytes) -> int:
    """CRC32C bit by bit, masked."""
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ 0x82F63B78 * (state & 1)
    state ^= 0xFFFFFFFF
    return ((state >> 15 | state << 17) + 0xA282EAD8) & 0xFFFFFFFF


def framed(data: bytes) -> bytes:
    """A record of a TFRecord file."""
    head = struct.pack("<Q", len(data))
    return head + struct.pack("<I", checksum(head)) + data + struct.pack("<I", checksum(data))


def test_crc32c() -> None:
    """The values of RFC 3720, appendix B.4, and all lengths around a block."""
    from fedjax_pfl.data.sources.crc32c import BLOCK, crc32c, masked

    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    for size in (*range(10), *range(BLOCK - 1, BLOCK + 6), 3 * BLOCK + 2):
        data = RNG.bytes(size)
        assert masked(data) == checksum(data)


@pytest.fixture
def tfrecords(prepared: Path, tmp_path: Path) -> Path:
    """The same set in the library's default format."""
    folder = tmp_path / "records" / "mnist" / "3.0.1"
    folder.mkdir(parents=True)
    builder = tfds.builder_from_directory(prepared / "mnist" / "3.0.1")
    for split in ("train", "test"):
        data = builder.as_data_source(split=split).data_source  # the records as they are stored
        name = f"mnist-{split}.tfrecord-00000-of-00001"
        (folder / name).write_bytes(b"".join(framed(bytes(data[i])) for i in range(len(data))))
    shutil.copy(prepared / "mnist" / "3.0.1" / "features.json", folder)
    info = json.loads((prepared / "mnist" / "3.0.1" / "dataset_info.json").read_text())
    info["fileFormat"] = "tfrecord"
    for split in info["splits"]:
        split["filepathTemplate"] = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return tmp_path / "records"


def test_tfrecords_without_tensorflow(prepared: Path, tfrecords: Path) -> None:
    source = load("tfds:mnist", tfrecords)
    np.testing.assert_array_equal(source.x, load("tfds:mnist", prepared).x)
    path = tfrecords / "mnist" / "3.0.1" / "mnist-train.tfrecord-00000-of-00001"
    whole = path.read_bytes()
    for data in (whole[:-9], whole + b"xx", struct.pack("<Q", 1 << 60) + whole[8:]):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"train.*( is truncated|another checksum)"):
            load("tfds:mnist", tfrecords)
    length = struct.unpack("<Q", whole[:8])[0]
    for place in (8, 11, 12, *range(13, length, 97), length + 11, length + 12, length + 15):  # length + 11: the label
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"records of train are damaged .*train.* another checksum"):
            load("tfds:mnist", tfrecords)


def test_cached_arrays_follow_the_prepared_folder(prepared: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(prepared, mine)
    load("tfds:mnist", mine)
    path = next((mine / "mnist" / "3.0.1").glob("*train*"))
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"records of train are damaged"):
        load("tfds:mnist", mine)
    path.unlink()
    with pytest.raises(ValueError, match=r"tfds:mnist: .*3\.0\.1"):
        load("tfds:mnist", mine)


IMAGE = "tensorflow_datasets.core.features.image_feature.Image"
DICT = "tensorflow_datasets.core.features.features_dict.FeaturesDict"
EVIL = "mnist.payload.Image"


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(IMAGE, EVIL),
        lambda text: text.replace(DICT, EVIL),
        lambda text: text.replace(DICT, EVIL.replace("p", "\\u0070")),
        lambda text: text.replace(IMAGE, EVIL).replace("pythonClassName", "python_class_name"),
        lambda text: text.replace(IMAGE, EVIL).replace("pythonClassName", "python\\u0043lassName"),
        lambda text: text.replace(IMAGE, "tensorflow_datasets.core.features.image_feature.Image.mnist.payload.X"),
        lambda text: json.dumps({"type": EVIL, "content": {}}),
        lambda text: json.dumps({"type": EVIL, "content": {}, **json.loads(text)}),
        lambda text: json.dumps({"type": DICT, "content": {"image": {"type": EVIL, "content": {}}}}),
    ],
)
def test_foreign_classes_are_not_imported(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[str], str]
) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(prepared, mine)
    (mine / "mnist" / "payload.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(mine))
    path = mine / "mnist" / "3.0.1" / "features.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=r"mnist") as caught:
        load("tfds:mnist", mine)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "executed").exists()


def test_classes_of_ignored_features_are_not_imported(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(prepared, mine)
    (mine / "mnist" / "payload.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(mine))
    path = mine / "mnist" / "3.0.1" / "features.json"
    features = json.loads(path.read_text())
    features["featuresDict"]["features"]["extra"] = {"pythonClassName": EVIL, "type": EVIL}
    path.write_text(json.dumps(features))
    assert "feature extra ignored" in load("tfds:mnist", mine).where
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda info: [], r"dataset_info\.json: cannot be read"),
        (lambda info: info | {"splits": 3}, r"dataset_info\.json: another structure"),
        (lambda info: info | {"fileFormat": "parquet"}, "format parquet is not read here"),
        (lambda info: info | {"splits": [one | {"name": "other"} for one in info["splits"]]}, "needs the split train"),
        (lambda info: info | {"splits": [one | {"filepathTemplate": "../{SPLIT}"} for one in info["splits"]]},
         r"file name '\.\./train' is refused"),
        (lambda info: info | {"splits": [one | {"filepathTemplate": "{NONE}"} for one in info["splits"]]}, "structure"),
        (lambda info: info | {"splits": [one | {"shardLengths": [str(10**12)]} for one in info["splits"]]},
         "promises 2000000000000 records, more than the files can hold"),
        (lambda info: info | {"splits": [one | {"shardLengths": ["61"]} for one in info["splits"]]},
         r"holds 80 of the 122 images"),
        (lambda info: info | {"splits": [one | {"shardLengths": ["x"]} for one in info["splits"]]}, "'x' is no whole"),
    ],
)  # fmt: skip
def test_other_descriptions(prepared: Path, tmp_path: Path, change: Callable[[Any], Any], message: str) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(prepared, mine)
    path = mine / "mnist" / "3.0.1" / "dataset_info.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ValueError, match=message) as caught:
        load("tfds:mnist", mine)
    assert "mnist" in str(caught.value)


def test_flipped_bits_of_records_are_noticed(prepared: Path, tmp_path: Path) -> None:
    """Every bit of an array_record file is covered by its checksums, but for padding and the library's own notes."""
    mine = tmp_path / "mine"
    shutil.copytree(prepared, mine)
    (path,) = (mine / "mnist" / "3.0.1").glob("*train*")
    whole = path.read_bytes()
    for place in range(1000, 19_000, 2000):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(ValueError, match="records of train are damaged"):
            load("tfds:mnist", mine)


@pytest.mark.parametrize("name", ["images.npy", "labels.npy", "test.npy", "about.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damaged_cache(prepared: Path, tmp_path: Path, name: str, damage: str) -> None:
    load("tfds:mnist", prepared)
    (path,) = (tmp_path / "cache").rglob(name)
    data = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(data[:-1] if damage == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"the cached data is damaged .*delete this folder"):
        load("tfds:mnist", prepared)


def test_two_writers_of_one_cache(tmp_path: Path) -> None:
    samples = [(COLOUR[i], i, i > 3, str(i)) for i in range(5)]
    for _ in range(2):
        cache.store(tmp_path / "c" / "one", 5, iter(samples), {"name": "x"}, "x")
    found = cache.read(tmp_path / "c" / "one")
    np.testing.assert_array_equal(found.images, COLOUR[:5])
    assert found.labels.tolist() == list(range(5))
    assert found.test.tolist() == [False] * 4 + [True]
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["one"]
    assert isinstance(found.images.base, np.memmap)
    for wrong, message in (
        ([*samples[:4]], "holds 4 of the 5 images"),
        ([*samples, samples[0]], "holds more than 5 images"),
        ([(COLOUR[0], -1, False, "image 7")], "image 7 has no label"),
        ([(COLOUR[0, :3], 1, False, "a"), (COLOUR[0], 1, False, "b")], r"a has \(3, 32, 3\), b has \(32, 32, 3\)"),
        ([(COLOUR[0].astype(float), 1, False, "a")], "images .* of uint8 are needed"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.store(tmp_path / "c" / "two", 5, iter(wrong), {}, "x")
        assert [path.name for path in (tmp_path / "c").iterdir()] == ["one"]


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv(cache.CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_folder() == tmp_path / "xdg" / "fedjax_pfl"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.cache_folder() == Path.home() / ".cache" / "fedjax_pfl"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tfds:mnits", "has no data set 'mnits'. Did you mean mnist"),
        ("tfds:emnist/balance", "unknown configuration of emnist 'balance'. Did you mean 'balanced'"),
        ("tfds:mnist/large", "unknown configuration of mnist 'large'"),
        ("tfds:ag_news_subset", r"needs a feature image \(Image\), has .*title \(Text\)"),
        ("tfds", "tfds needs the name of a data set"),
        ("tfds:../mnist", "tfds needs the name of a data set"),
        ("tfds:a/b/c", "tfds needs the name of a data set"),
    ],
)
def test_unknown_or_unfit_sets(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load(name)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").rglob("*.npy"))


def test_nothing_prepared_in_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_network(monkeypatch)
    for name in ("tfds:mnist", "mnist"):
        with pytest.raises(FileNotFoundError, match=r"leave (it|--data-dir) out to download"):
            load(name, tmp_path)


def fails(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load(name)
    assert "--data-dir" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(cache.cache_folder().iterdir())  # nothing half done is left


def test_failed_downloads(web: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{free.getsockname()[1]}/"
    monkeypatch.setattr(mnist.MNIST, "URL", closed)
    fails("mnist", rf"cannot download {closed}\S*-ubyte\.gz \(ConnectionError\): check the network")
    monkeypatch.setattr(mnist.MNIST, "URL", web.url + "missing/")
    fails("mnist", r"Failed to get url http\S*missing/\S* HTTP code: 404")
    monkeypatch.setattr(mnist.MNIST, "URL", web.url)
    url = web.url + "train-labels-idx1-ubyte.gz"
    wrong = checksums.UrlInfo(size=tfds.core.utils.Size(3), checksum="0" * 64, filename="train-labels-idx1-ubyte.gz")
    monkeypatch.setattr(mnist.MNIST, "url_infos", {url: wrong})
    fails("mnist", rf"Artifact {url}, .* has wrong checksum: .*Expected: .*Got: ")


def test_names_that_are_patched_in_the_library() -> None:
    """They are private, so another release may move them: then the code that patches them has to follow."""
    from tensorflow_datasets.core.download import downloader
    from tensorflow_datasets.core.utils import lazy_imports_utils

    moved = "has moved in this release of tensorflow-datasets: adapt"
    assert isinstance(getattr(downloader, "MAX_RETRIES", None), int), f"downloader.MAX_RETRIES {moved} sources/tfds.py"
    source = inspect.getsource(downloader)
    assert source.count("MAX_RETRIES") > 1, f"the use of downloader.MAX_RETRIES {moved} sources/tfds.py"
    lazy = getattr(lazy_imports_utils, "tensorflow", None)
    assert "_module" in dir(type(lazy)) or "_module" in inspect.getsource(type(lazy)), (
        f"lazy_imports_utils.tensorflow._module {moved} sources/no_tensorflow.py"
    )
    with tensorflow_or_stand_in():
        assert lazy_imports_utils.tensorflow.executing_eagerly(), f"the stand-in's place {moved} no_tensorflow.py"


class Odd(tfds.core.GeneratorBasedBuilder):
    """What a set may be that is no plain image set."""

    VERSION = tfds.core.Version("1.0.0")
    KINDS = ("sizes", "jpeg", "manual", "lacking", "unlabelled")
    BUILDER_CONFIGS: ClassVar = [tfds.core.BuilderConfig(name=kind) for kind in KINDS]

    def _info(self) -> Any:
        form = "jpeg" if self.builder_config.name == "jpeg" else "png"
        image = tfds.features.Image(shape=(None, None, 3), encoding_format=form)
        features = tfds.features.FeaturesDict({"image": image, "label": tfds.features.ClassLabel(num_classes=2)})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager: Any) -> Any:
        if self.builder_config.name == "manual":
            return {"train": self._generate_examples(os.listdir(dl_manager.manual_dir))}
        if self.builder_config.name == "lacking":
            raise ModuleNotFoundError("No module named 'rare'", name="rare")
        return {"train": self._generate_examples(range(4))}

    def _generate_examples(self, numbers: Any) -> Any:
        for number in numbers:
            side = 4 + (number == 2 and self.builder_config.name == "sizes")
            yield (
                number,
                {"image": np.zeros((side, 4, 3), np.uint8), "label": -(self.builder_config.name == "unlabelled")},
            )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("sizes", r"images differ in size: image 0 of train has \(.*\), image . of train has \(.*\): resize them"),
        ("manual", r"tfds:odd/manual: cannot be prepared \(.*anual.*give its folder with --data-dir"),
        ("lacking", "preparing this set needs rare, which is not installed: pip install rare"),
        ("unlabelled", "image 0 of train has no label"),
    ],
)
def test_sets_that_cannot_be_used(config: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load(f"tfds:odd/{config}")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").rglob("*.npy"))


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is not None, reason="TensorFlow is installed")
def test_what_needs_tensorflow_says_so() -> None:
    with pytest.raises(ValueError, match=r"needs tensorflow, which is not installed: pip install 'fedjax_pfl\[tf\]'"):
        load("tfds:odd/jpeg")
    with tensorflow_or_stand_in():
        from tensorflow_datasets.core.utils.lazy_imports_utils import tensorflow

        assert tensorflow.executing_eagerly()
        with pytest.raises(ModuleNotFoundError, match=r"tensorflow\.data needs TensorFlow"):
            _ = tensorflow.data
    with pytest.raises(ModuleNotFoundError):
        tensorflow.executing_eagerly()
