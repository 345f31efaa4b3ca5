"""Sources: what each loader returns, and that broken or malicious files are refused by name."""

from __future__ import annotations

import gzip
import io
import os
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedjax_pfl.data.sources import DATA_VARIABLE, SOURCES, Source, load

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(256, size=(40, 4, 5)).astype(np.uint8)
LABELS = (np.arange(40) % 3).astype(np.uint8)


def idx(array: np.ndarray) -> bytes:
    """An array of unsigned bytes as an idx file."""
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_pair(folder: Path, stem: str, x: np.ndarray, y: np.ndarray, packed: bool) -> None:
    folder.mkdir(exist_ok=True)
    for name, array in ((f"{stem}-images-idx3-ubyte", x), (f"{stem}-labels-idx1-ubyte", y)):
        data = idx(array)
        (folder / (name + ".gz" * packed)).write_bytes(gzip.compress(data, mtime=0) if packed else data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_pair(tmp_path / "mnist", "train", IMAGES, LABELS, packed=False)
    return tmp_path / "mnist"


def test_digits() -> None:
    source = load("digits")
    assert source.x.shape == (1797, 8, 8, 1)
    assert source.x.dtype == np.uint8
    assert source.x.max() == source.scale == 16
    assert source.y.dtype == np.int32
    assert np.unique(source.y).tolist() == list(range(10)) == list(range(source.num_classes))
    assert source.client is None
    assert source.official_test is None
    assert source.licence
    with pytest.raises(ValueError, match="no options"):
        load("digits:5")


def test_loading_is_light() -> None:
    heavy = "('sklearn', 'pandas', 'matplotlib', 'tensorflow_datasets', 'scipy.sparse')"
    script = (
        "import sys, jax; before = set(sys.modules); import fedjax_pfl.data;"
        f"print([name for name in {heavy} if name in set(sys.modules) - before])"
    )
    root = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("packed", [False, True])
def test_idx_pairs(tmp_path: Path, packed: bool) -> None:
    write_pair(tmp_path, "train", IMAGES, LABELS, packed)
    alone = load(f"mnist-idx:{tmp_path}")
    assert alone.official_test is None
    assert alone.num_classes == 3
    assert alone.scale == 255
    np.testing.assert_array_equal(alone.x[..., 0], IMAGES)
    write_pair(tmp_path, "t10k", IMAGES[:7], LABELS[:7], not packed)
    both = load(str(tmp_path))  # a plain folder
    assert both.x.shape == (47, 4, 5, 1)
    assert both.x.dtype == np.uint8
    assert both.official_test.tolist() == [False] * 40 + [True] * 7
    np.testing.assert_array_equal(both.y, np.concatenate([LABELS, LABELS[:7]]))


def test_where_folders_are_looked_for(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    assert len(load("mnist-idx:mnist", data_dir=tmp_path)) == len(load("mnist-idx", data_dir=tmp_path)) == 40
    assert len(load("mnist-idx", data_dir=folder)) == 40
    with pytest.raises(FileNotFoundError, match=f"tried .*set {DATA_VARIABLE}"):
        load("mnist-idx:nowhere")
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    assert len(load("mnist-idx")) == len(load("mnist-idx:mnist")) == 40


def test_writers_are_natural_clients(folder: Path) -> None:
    np.savez(folder / "writers.npz", train_writer=np.arange(40) // 10)
    assert np.unique(load(f"mnist-idx:{folder}").client).tolist() == [0, 1, 2, 3]
    np.savez(folder / "writers.npz", train_writer=np.arange(39))
    with pytest.raises(ValueError, match=r"writers\.npz.*one writer an image"):
        load(f"mnist-idx:{folder}")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-images-idx3-ubyte", b"", "starts with nothing"),
        ("train-images-idx3-ubyte", idx(IMAGES)[:-1], "truncated"),
        ("train-images-idx3-ubyte", idx(IMAGES)[:9], "ends inside its header"),
        ("train-images-idx3-ubyte", idx(IMAGES) + b"x", "holds more than"),
        ("train-images-idx3-ubyte", idx(LABELS), "instead of 00 00 08 03"),
        ("train-images-idx3-ubyte", b"\x00\x00\x0d\x03" + idx(IMAGES)[4:], "instead of 00 00 08 03"),
        ("train-images-idx3-ubyte", bytes((0, 0, 8, 3)) + b"\xff" * 12, "cannot hold them"),
        ("train-images-idx3-ubyte", idx(IMAGES[:39]), "39 images but .* 40 labels"),
        ("train-labels-idx1-ubyte", idx(LABELS + 1), "labels start at 1"),
        ("train-labels-idx1-ubyte", None, "train-labels-idx1-ubyte .* missing beside its partner"),
    ],
)
def test_broken_idx_files(folder: Path, name: str, content: bytes | None, message: str) -> None:
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        load(f"mnist-idx:{folder}")
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(idx(IMAGES), mtime=0)[:-20], "truncated"),
        (gzip.compress(idx(IMAGES)[:-5], mtime=0), "ends after"),
        (idx(IMAGES), "no gzip file"),
        (gzip.compress(idx(IMAGES), mtime=0)[:40] + b"\x00" * 200, "cannot be read"),
        (gzip.compress(bytes((0, 0, 8, 3)) + b"\xff" * 12, mtime=0), "cannot hold them"),
        (gzip.compress(bytes((0, 0, 8, 3)) + struct.pack(">3I", 4_000_000_000, 1, 1), mtime=0), "cannot hold them"),
    ],
)
def test_broken_gzip_files(folder: Path, content: bytes, message: str) -> None:
    (folder / "train-images-idx3-ubyte").unlink()
    (folder / "train-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(f"mnist-idx:{folder}")


def test_huge_headers_allocate_nothing(folder: Path) -> None:
    (folder / "train-images-idx3-ubyte").write_bytes(bytes((0, 0, 8, 3)) + b"\x00\x00\xff\xff" * 3 + bytes(1000))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="cannot hold them"):
            load(f"mnist-idx:{folder}")
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


def test_missing_idx_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="put MNIST's four files there"):
        load(f"mnist-idx:{tmp_path}")
    write_pair(tmp_path, "train", IMAGES[:0], LABELS[:0], packed=False)
    with pytest.raises(ValueError, match="the data set is empty"):
        load(f"mnist-idx:{tmp_path}")


ARRAYS = {"x": RNG.normal(size=(12, 3)), "y": np.arange(12) % 4}


def npz(tmp_path: Path, **arrays: np.ndarray | None) -> str:
    """A file with ``ARRAYS`` changed as given, None leaves one out; returns its source name."""
    kept = {name: leaf for name, leaf in {**ARRAYS, **arrays}.items() if leaf is not None}
    np.savez_compressed(tmp_path / "data.npz", allow_pickle=True, **kept)
    return f"npz:{tmp_path / 'data.npz'}"


def test_npz(tmp_path: Path) -> None:
    client, test = np.array(list("aabbccddeeff")), np.arange(12) > 8
    source = load(npz(tmp_path, client=client, test=test.astype(int)))
    assert source.x.dtype == np.float32
    assert source.y.dtype == np.int32
    assert source.num_classes == 4
    assert source.client.tolist() == client.tolist()
    assert source.official_test.tolist() == test.tolist()
    np.testing.assert_allclose(source.x, ARRAYS["x"], rtol=1e-6)
    image = load(npz(tmp_path, x=np.asfortranarray(RNG.integers(256, size=(12, 3, 2), dtype=np.uint8)), client=None))
    assert image.x.dtype == np.uint8
    assert image.x.shape == (12, 3, 2)
    assert image.scale == 255
    assert image.client is None
    assert load(npz(tmp_path, num_classes=np.array(9), scale=np.array([1.0, 2.0, 3.0]))).num_classes == 9
    assert len(load("npz:data.npz", data_dir=tmp_path)) == 12


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"y": None}, "needs the arrays x and y, found .*x"),
        ({"y": np.arange(12) % 4 + 1}, r"labels are 1, 2, 3, 4 instead of 0\.\.C-1: .*return_inverse"),
        ({"y": np.arange(12) % 4 - 1}, "labels are -1, 0"),
        ({"y": (np.arange(12) % 4) * 2}, "labels are 0, 2, 4, 6"),
        ({"y": np.arange(12) % 4 / 2}, "y must be integers"),
        ({"y": np.arange(11) % 4}, "found lengths"),
        ({"y": np.zeros((12, 2), int)}, "y must have the shape"),
        ({"num_classes": np.array(3)}, "do not fit num_classes 3"),
        ({"x": np.full((12, 3), np.nan)}, "sample 0 of 'x' is NaN or infinite"),
        ({"x": np.full((12, 3), 1e300)}, "NaN or infinite"),
        ({"x": np.full((12, 3), "a")}, "x must be numbers"),
        ({"x": np.zeros(12)}, "x must be numbers of shape"),
        ({"x": np.full((12, 3), None)}, "object arrays are pickles"),
        ({"x": np.zeros((0, 3)), "y": np.zeros(0, int)}, "the data set is empty"),
        ({"client": np.arange(3)}, "found lengths"),
        ({"client": np.arange(12) / 2}, "client ids must be integers or text"),
        ({"test": np.arange(12)}, "test must be booleans"),
    ],
)
def test_bad_npz_arrays(tmp_path: Path, arrays: dict[str, np.ndarray | None], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load(npz(tmp_path, **arrays))
    assert "data.npz" in str(caught.value)


def header(shape: str, descr: str = "'<f4'") -> bytes:
    """A version 1.0 npy header."""
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (header("(1000000000000, 3)") + b"\x00" * 144, "holds another size"),
        (header("(12, 3)") + b"\x00" * 100, "holds another size"),
        (header("(-12, -3)") + b"\x00" * 100, "not a plain npy array|holds another size"),
        (header("__import__('os')") + b"\x00" * 144, "not a plain npy array"),
        (header("(12, 3)", "[('a', '<f4')]") + b"\x00" * 144, "is refused"),
        (header("(12, 3)", "'|O'") + b"\x00" * 288, "object arrays are pickles"),
        (b"\x80\x04N.", "not a plain npy array"),
        (b"", "not a plain npy array"),
    ],
)
def test_malicious_npz_members(tmp_path: Path, member: bytes, message: str) -> None:
    path = tmp_path / "bad.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", member)
        buffer = io.BytesIO()
        np.save(buffer, ARRAYS["y"])
        archive.writestr("y.npy", buffer.getvalue())
    with pytest.raises(ValueError, match=message):
        load(f"npz:{path}")


def test_damaged_npz_files(tmp_path: Path) -> None:
    name = npz(tmp_path, x=RNG.normal(size=(12, 300)))
    path = tmp_path / "data.npz"
    whole = path.read_bytes()
    path.write_bytes(whole[:5000] + bytes(99) + whole[5099:])
    with pytest.raises(ValueError, match=r"data\.npz"):
        load(name)
    path.write_bytes(whole[:5000])
    with pytest.raises(ValueError, match="not a readable npz file"):
        load(name)
    path.write_bytes(b"\x80\x04N.")
    with pytest.raises(ValueError, match="not a readable npz file"):
        load(name)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("x.npy", bytes(1000))
        archive.writestr("y.npy", bytes(1000))
    with pytest.raises(ValueError, match=r"np\.savez"):
        load(name)
    with pytest.raises(FileNotFoundError, match="was not found"):
        load("npz:nothing.npz")
    with pytest.raises(ValueError, match="npz needs a file"):
        load("npz")


def test_synthetic_clients_of_a_group_agree() -> None:
    source = load("synthetic:clients=6,groups=3,features=16,classes=4,samples=300,separation=9,seed=2")
    assert source.x.shape == (1800, 16)
    assert source.num_classes == 4
    assert np.unique(source.client).tolist() == list(range(6))
    assert [int(source.group[source.client == i][0]) for i in range(6)] == [0, 0, 1, 1, 2, 2]
    means = np.stack([[source.x[(source.client == i) & (source.y == c)].mean(0) for c in range(4)] for i in range(6)])
    apart = np.linalg.norm(means[:, None] - means[None], axis=-1).max(-1)
    same = np.arange(6)[:, None] // 2 == np.arange(6)[None] // 2
    assert apart[same].max() < 2
    assert apart[~same].min() > 5


def test_synthetic_is_a_function_of_its_name() -> None:
    first, again, other = (
        load("synthetic:seed=1,skew=1"),
        load("synthetic:seed=1, skew=1"),
        load("synthetic:seed=2,skew=1"),
    )
    np.testing.assert_array_equal(first.x, again.x)
    assert len(first.x) != len(other.x) or not np.array_equal(first.x, other.x)
    counts = np.bincount(first.client)
    assert counts.min() >= 1
    assert counts.max() > 3 * counts.min()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("client=3", "unknown option of synthetic 'client'. Did you mean 'clients'"),
        ("seed=1,seed=2", "synthetic: the option seed is given twice"),
        ("clients", "clients needs a value of type int"),
        ("clients=2.5", "clients needs a value of type int"),
        ("clients=0", "clients must be at least 1"),
        ("clients=2", "4 groups need at least as many clients"),
        ("classes=2", "too few mappings for 4 groups"),
        ("skew=-1", "skew lies in"),
        ("separation=nan", "separation in"),
        ("seed=-1", "seed must not be negative"),
    ],
)
def test_bad_synthetic_options(options: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(f"synthetic:{options}")


def test_unknown_source_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown data source 'digit'\. Did you mean 'digits'"):
        load("digit")
    for name, entry in SOURCES.items():
        assert entry.name == name
        assert entry.usage.startswith(name)
        assert entry.description
        assert entry.licence


def test_source_checks_its_arrays() -> None:
    with pytest.raises(ValueError, match=r"mine: label 5 of sample 1 is outside 0\.\.1"):
        Source("mine", np.zeros((2, 1), np.float32), np.array([0, 5], np.int32), 2)
    with pytest.raises(ValueError, match="mine: all arrays need one entry a sample"):
        Source("mine", np.zeros((2, 1), np.float32), np.array([0, 1], np.int32), 2, client=np.zeros(3))


def test_real_mnist() -> None:
    if not os.environ.get(DATA_VARIABLE) or not (Path(os.environ[DATA_VARIABLE]) / "mnist").is_dir():
        pytest.skip(f"set {DATA_VARIABLE} to a folder with mnist/ to read the real files")
    source = load("mnist-idx")
    assert source.x.shape == (70000, 28, 28, 1)
    assert source.official_test.sum() == 10000
    assert np.bincount(source.y[:60000]).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    if source.client is not None:
        assert len(np.unique(source.client)) == 836
