"""UCI-HAR in its published layout and packed, and the reader of numbers in text files."""

from __future__ import annotations

import io
import lzma
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedjax_pfl.data import PartitionConfig, make_partition, to_client_data
from fedjax_pfl.data.columns import read_columns
from fedjax_pfl.data.sources import DATA_VARIABLE, load
from fedjax_pfl.data.sources.har import CHANNELS

RNG = np.random.default_rng(0)
COUNTS = {"train": 12, "test": 5}
SUBJECT = {"train": np.repeat([1, 3], 6), "test": np.full(5, 2)}
LABEL = {"train": np.array([5, 5, 5, 1, 1, 1, 6, 6, 6, 6, 2, 2]), "test": np.array([4, 4, 3, 3, 3])}
SIGNALS = {part: RNG.normal(size=(n, 128, 9)).astype(np.float32) for part, n in COUNTS.items()}
FEATURES = {part: RNG.uniform(-1, 1, (n, 561)) for part, n in COUNTS.items()}


def write(root: Path) -> Path:
    """The published layout, with few windows."""
    folder = root / "UCI HAR Dataset"
    for part in COUNTS:
        (folder / part / "Inertial Signals").mkdir(parents=True)
        np.savetxt(folder / part / f"y_{part}.txt", LABEL[part], "%d")
        np.savetxt(folder / part / f"subject_{part}.txt", SUBJECT[part], "%d")
        np.savetxt(folder / part / f"X_{part}.txt", FEATURES[part], "%16.8e", delimiter="")
        for place, channel in enumerate(CHANNELS):
            name = folder / part / "Inertial Signals" / f"{channel}_{part}.txt"
            np.savetxt(name, SIGNALS[part][..., place], " %15.8e", delimiter="")
    return folder


def zipped(folder: Path, target: Path) -> Path:
    with zipfile.ZipFile(target, "w") as archive:
        for path in sorted(folder.rglob("*.txt")):
            archive.write(path, path.relative_to(folder.parent))
            archive.writestr(f"__MACOSX/{path.relative_to(folder.parent).parent}/._{path.name}", b"\0\1")
    return target


@pytest.mark.parametrize("form", ["folder", "zip", "zip in a zip", "data folder"])
def test_raw_windows(form: str, tmp_path: Path) -> None:
    folder = write(tmp_path)
    name, data_dir = f"uci_har:{folder}", None
    if form.startswith("zip"):
        path = zipped(folder, tmp_path / "UCI HAR Dataset.zip")
        if form == "zip in a zip":
            with zipfile.ZipFile(tmp_path / "outer.zip", "w") as outer:
                outer.write(path, path.name)
            path = tmp_path / "outer.zip"
        name = f"uci_har:{path}"
    elif form == "data folder":
        name, data_dir = "uci_har", tmp_path
    source = load(name, data_dir)
    assert source.x.shape == (17, 128, 9)
    assert source.x.dtype == np.float32
    np.testing.assert_allclose(source.x, np.concatenate([SIGNALS["train"], SIGNALS["test"]]), rtol=1e-6)
    np.testing.assert_array_equal(source.y, np.concatenate([LABEL["train"], LABEL["test"]]) - 1)
    np.testing.assert_array_equal(source.client, [*SUBJECT["train"], *SUBJECT["test"]])
    assert source.official_test.tolist() == [False] * 12 + [True] * 5
    assert source.segment.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4, 5, 5, 5]
    assert (source.overlap, source.num_classes, source.kind) == (1, 6, "array")


def test_features(tmp_path: Path) -> None:
    source = load(f"uci_har_features:{write(tmp_path)}")
    np.testing.assert_allclose(source.x, np.concatenate([FEATURES["train"], FEATURES["test"]]), rtol=1e-6)
    assert source.x.shape == (17, 561)
    assert source.segment.max() == 5


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("train/y_train.txt", b"\n6\n2", b"\n7\n2", r"y_train\.txt: line 10: label 7 is outside 1\.\.6"),
        ("train/y_train.txt", b"5\n", b"5.5\n", r"y_train\.txt: line 1: '5\.5' is no whole number"),
        ("train/y_train.txt", b"2\n2\n", b"2\n", r"y_train\.txt has 11 lines but .*subject_train\.txt has 12"),
        ("test/subject_test.txt", b"2\n", b"x\n", r"subject_test\.txt: line 1: 'x' is no whole number"),
        ("test/X_test.txt", b"e-01", b"e-0l", r"X_test\.txt: line 1: .* is no finite number"),
        ("test/Inertial Signals/body_gyro_y_test.txt", None, b"", r"body_gyro_y_test\.txt: is empty"),
    ],
)
def test_faults_name_file_and_line(file: str, old: bytes | None, new: bytes, message: str, tmp_path: Path) -> None:
    folder = write(tmp_path)
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(new if old is None else data.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        load(f"uci_har_features:{folder}" if "X_" in file else f"uci_har:{folder}")


@pytest.mark.parametrize("fault", ["nan", "short line", "missing line"])
def test_faults_in_signals(fault: str, tmp_path: Path) -> None:
    folder = write(tmp_path)
    path = folder / "train" / "Inertial Signals" / "total_acc_z_train.txt"
    lines = path.read_text().splitlines()
    if fault == "nan":
        lines[3] = lines[3][:-15] + "            nan"
        message = r"total_acc_z_train\.txt: line 4: 'nan' is no finite number"
    elif fault == "short line":
        lines[4] = lines[4][:-16]
        message = r"total_acc_z_train\.txt: line 5 has 127 numbers instead of 128"
    else:
        del lines[7]
        message = r"y_train\.txt has 12 lines but .*total_acc_z_train\.txt has 11"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=message):
        load(f"uci_har:{folder}")


def test_missing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path)
    shutil.rmtree(folder / "test")
    with pytest.raises(FileNotFoundError, match=r"has no test/y_test\.txt: fetch https"):
        load(f"uci_har:{folder}")
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path / "UCI HAR Dataset" / "train")
    with pytest.raises(FileNotFoundError, match="fetch https"):
        load("uci_har")


def packed(folder: Path, **changes: np.ndarray) -> Path:
    folder.mkdir()
    arrays = {
        "start": np.array([0, 64, 128, 300], np.int32), "label": np.array([0, 0, 0, 5], np.uint8),
        "subject": np.array([1, 1, 1, 2], np.uint8), "is_test": np.array([False, False, False, True]),
        "step": np.array(0.5),
    } | changes  # fmt: skip
    signals = arrays.pop("signals", np.arange(9 * 428, dtype=np.int16).reshape(9, 428))
    np.savez(folder / "windows.npz", **arrays)
    held = io.BytesIO()
    np.save(held, signals)
    (folder / "signals.npy.xz").write_bytes(lzma.compress(held.getvalue()))
    return folder


def test_packed_windows(tmp_path: Path) -> None:
    source = load(f"uci_har:{packed(tmp_path / 'p')}")
    assert source.x.shape == (4, 128, 9)
    assert source.x.dtype == np.float32
    for window, start in enumerate([0, 64, 128, 300]):
        for channel in (0, 4, 8):
            np.testing.assert_array_equal(source.x[window, :, channel], (channel * 428 + start + np.arange(128)) / 2)
    assert source.y.tolist() == [0, 0, 0, 5]
    assert source.segment.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": np.array([0, 64, 128, 301], np.int32)}, "window 3 has a start beyond"),
        ({"start": np.array([0, -1, 128, 300], np.int32)}, "window 1 has a start beyond"),
        ({"label": np.array([0, 0, 6, 5], np.uint8)}, "window 2 has .* a label outside"),
        ({"label": np.zeros(3, np.uint8)}, "one entry a window"),
        ({"step": np.zeros(2)}, "one entry a window"),
        ({"signals": np.zeros((8, 428), np.int16)}, r"needs whole numbers \(9, times\)"),
        ({"signals": np.zeros((9, 428), np.float32)}, r"needs whole numbers \(9, times\)"),
    ],
)
def test_packed_faults(changes: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(f"uci_har:{packed(tmp_path / 'p', **changes)}")


def test_published_windows() -> None:
    folder = Path(os.environ.get(DATA_VARIABLE, "absent")) / "uci_har"
    if not (folder / "windows.npz").is_file():
        pytest.skip(f"{DATA_VARIABLE} names no folder with uci_har/windows.npz")
    source = load("uci_har")
    assert source.x.shape == (10299, 128, 9)
    assert np.bincount(source.y).tolist() == [1722, 1544, 1406, 1777, 1906, 1944]
    assert source.official_test.sum() == 2947
    assert len(np.unique(source.client)) == 30
    assert set(source.client[source.official_test]) == {2, 4, 9, 10, 12, 13, 18, 20, 24}
    np.testing.assert_allclose(source.x[0, :3, 0], [1.808515e-4, 1.013856e-2, 9.275574e-3], atol=3e-4)
    np.testing.assert_allclose(source.x[0, 0, 6], 1.012817, atol=3e-4)
    halves = (source.x[:-1, 64:] == source.x[1:, :64]).all((1, 2))
    same = source.segment[:-1] == source.segment[1:]
    assert not (halves & ~same).any()  # a window shares samples with no other than its segment's next
    assert halves[same].mean() > 0.9
    partition = make_partition(source, PartitionConfig(method="natural", min_samples=2))
    data = to_client_data(source, partition)
    assert data.num_clients == 30
    assert np.shares_memory(data.examples["x"], source.x)
    for train, test in zip(partition.train, partition.test, strict=True):
        both = np.intersect1d(train + 1, test)
        assert not halves[both - 1].any()


NUMBERS = st.lists(
    st.lists(st.floats(-1e30, 1e30), min_size=3, max_size=3), min_size=1, max_size=20
)  # fmt: skip


@given(NUMBERS, st.sampled_from([" ", "   ", "\t"]), st.sampled_from(["\n", "\r\n", " \n"]), st.booleans())
def test_columns_are_what_was_written(rows: list[list[float]], gap: str, end: str, commas: bool) -> None:
    joint = gap + "," + gap if commas else gap
    data = "".join(joint.join(repr(number) for number in row) + end for row in rows).encode()
    np.testing.assert_array_equal(read_columns(data, "file", commas=commas), rows)


@given(st.text(alphabet="12,, \t\n", min_size=1, max_size=30))
def test_commas_are_read_as_a_plain_reader_would(text: str) -> None:
    lines = [line.split(",") for line in text.rstrip().split("\n")]
    good = all(len(line) == len(lines[0]) and all(len(field.split()) == 1 for field in line) for line in lines)
    if good:
        wanted = [[float(field) for field in line] for line in lines]
        np.testing.assert_array_equal(read_columns(text.encode(), "file", commas=True), wanted)
    else:
        with pytest.raises(ValueError, match=r"^file: (is empty|line )"):
            read_columns(text.encode(), "file", commas=True)


def test_small_archives_of_long_columns_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "har.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("train/y_train.txt", "1\n" * 4_000_000)
        archive.writestr("train/subject_train.txt", "1\n")
    message = r"y_train\.txt' promises to expand to 8000000 bytes, more than \d+ \(128 times the archive\)"
    with pytest.raises(ValueError, match=message):
        load(f"uci_har:{tmp_path / 'har.zip'}")


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000])
def test_pieces_do_not_matter(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedjax_pfl.data.columns.PIECE", piece)
    found = read_columns(b"  1 22\n-3  4 \n5 66", "file", 2, whole=True)
    assert found.dtype == np.int64
    assert found.tolist() == [[1, 22], [-3, 4], [5, 66]]
    with pytest.raises(ValueError, match="file: line 2 has 3 numbers instead of 2"):
        read_columns(b"1 22\n-3  4 5\n6", "file")


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (b" \n", {}, "is empty"),
        (b"1\n\n2", {}, "line 2 has 0 numbers"),
        (b"1\n1e999\n", {}, "line 2: '1e999' is no finite"),
        (b"1 2\n3 0x10\n", {}, "line 2: '0x10' is no finite"),
        (b"1_0\n", {}, "line 1: '1_0'"),
        (b"1\n2-3\n", {}, "line 2: '2-3'"),
        (b"1-2 x\n", {}, "line 1: '1-2'"),
        (b"1\n2\0\n", {}, r"line 2: .* is no finite"),
        (b"1\n2.0\n", {"whole": True}, "line 2: '2.0' is no whole"),
        (b"1\n99999999999999999999\n", {"whole": True}, "line 2: '9999"),
        (b"1, 2\n3 4\n", {"commas": True}, "line 2 needs 2 numbers with commas"),
        (b"1, 2\n3,, 4\n", {"commas": True}, "line 2 needs 2 numbers with commas"),
        (b"4,5,6\n1,,2 3\n", {"commas": True}, "line 2 needs 3 numbers with commas"),
        (b"4,5,6\n,1,2 3\n", {"commas": True}, "line 2 needs 3 numbers with commas"),
        (b"1 2,3,\n4,5,6\n", {"commas": True}, "line 1 needs 3 numbers with commas"),
        (b"1 2,3 , \t\n4,5,6\n", {"commas": True}, "line 1 needs 3 numbers with commas"),
        (b"1,2 3\n4,5,6,\n", {"commas": True}, "line 1 needs 3 numbers with commas"),
        (b"1,2,3\n4 5,6,", {"commas": True}, "line 2 needs 3 numbers with commas"),
        (b"1,\n2\n", {"commas": True}, "line 1 needs 1 numbers with commas"),
    ],
)
def test_other_text_is_refused(data: bytes, options: dict[str, bool], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_columns(data, "file", **options)
