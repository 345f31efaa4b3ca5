"""LEAF's JSON files: users, windows that share storage, grey levels, and faults with their user."""

from __future__ import annotations

import json
import os
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedjax_pfl.data import PartitionConfig, make_partition, to_client_data
from fedjax_pfl.data.sources import DATA_VARIABLE, Source, load
from fedjax_pfl.data.sources.text import ALPHABET, roles

LINE = "O, pardon me, thou bleeding piece of earth, that I am meek and gentle with these butchers! " * 2
OTHER = "Friends, Romans, countrymen, lend me your ears; I come to bury Caesar, not to praise him. " * 2


def spoken(text: str, places: Any) -> dict[str, list[str]]:
    return {"x": [text[at : at + 80] for at in places], "y": [text[at + 80] for at in places]}


def content(**users: dict[str, Any]) -> dict[str, Any]:
    return {"users": list(users), "num_samples": [len(own["y"]) for own in users.values()], "user_data": users}


SPOKEN = {
    "train/b.json": content(BRUTUS=spoken(OTHER, [0, 1, 2]), ANTONY=spoken(LINE, range(20))),
    "train/a.json": content(CAESAR=spoken(OTHER, [30, 10, 50])),
    "test/c.json": content(ANTONY=spoken(LINE, range(40, 45)), CAESAR=spoken(LINE, [7])),
}
GREY = np.random.default_rng(0).integers(0, 256, (6, 784))


def written(levels: np.ndarray, labels: list[int], digits: int = 17) -> dict[str, Any]:
    return {"x": [[round(value / 255, digits) for value in row] for row in levels.tolist()], "y": labels}


DRAWN = {
    "train/all.json": content(f0=written(GREY[:2], [3, 61]), f1=written(GREY[2:4], [0, 9])),
    "test/all.json": content(f1=written(GREY[4:5], [1]), f2=written(GREY[5:], [2])),
}


def write(folder: Path, files: dict[str, Any], form: str = "folder") -> Path:
    for name, value in files.items():
        path = folder / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value if isinstance(value, str) else json.dumps(value))
    if form == "folder":
        return folder
    with zipfile.ZipFile(folder / "leaf.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in files:
            archive.write(folder / "data" / name, f"data/{name}")
    return folder / "leaf.zip"


def said(source: Source) -> list[str]:
    table = source.tables["text"]
    return [
        "".join(ALPHABET[code] for code in [*table[start : start + 80], label])
        for start, label in zip(source.x, source.y, strict=True)
    ]


@pytest.mark.parametrize("form", ["folder", "zip"])
def test_windows(form: str, tmp_path: Path) -> None:
    source = load(f"leaf_shakespeare:{write(tmp_path, SPOKEN, form)}")
    order = [(OTHER, [30, 10, 50]), (OTHER, [0, 1, 2]), (LINE, range(20)), (LINE, range(40, 45)), (LINE, [7])]
    assert said(source) == [text[at : at + 81] for text, places in order for at in places]
    assert source.client.tolist() == [0] * 3 + [1] * 3 + [2] * 20 + [2] * 5 + [0]
    assert source.official_test.tolist() == [False] * 26 + [True] * 6
    assert (source.kind, source.num_classes, source.overlap) == ("tokens", 80, 80)
    assert len(source.tables["text"]) == 3 * 80 + 82 + 99 + 84 + 80  # consecutive windows are stored once
    assert len(np.unique(source.segment)) == 5


def test_images_are_grey_levels_at_rest(tmp_path: Path) -> None:
    source = load(f"femnist:{write(tmp_path, DRAWN)}")
    assert source.x.dtype == np.uint8
    np.testing.assert_array_equal(source.x, GREY.reshape(6, 28, 28, 1))
    assert source.y.tolist() == [3, 61, 0, 9, 1, 2]
    assert source.client.tolist() == [0, 0, 1, 1, 1, 2]
    assert source.official_test.tolist() == [False] * 4 + [True] * 2
    assert (source.num_classes, source.scale) == (62, 255.0)
    rounded = DRAWN | {"train/all.json": content(f0=written(GREY[:2], [3, 61], 4), f1=written(GREY[2:4], [0, 9], 4))}
    np.testing.assert_array_equal(load(f"femnist:{write(tmp_path, rounded)}").x, source.x)


def test_other_images_stay_floats(tmp_path: Path) -> None:
    odd = content(f0=written(GREY[:2], [3, 61]), f1={"x": [[0.1234567] * 784], "y": [0]})
    source = load(f"femnist:{write(tmp_path, {'train/all.json': odd})}")
    assert (source.x.dtype, source.scale, source.official_test) == (np.float32, 1.0, None)
    np.testing.assert_allclose(source.x[:2].reshape(2, -1) * 255, GREY[:2], rtol=1e-6)
    assert (source.x[2] == np.float32(0.1234567)).all()


def test_a_single_file_and_other_folders(tmp_path: Path) -> None:
    root = write(tmp_path, DRAWN | {"all_data/x.json": "damaged"})
    assert len(load(f"femnist:{root}")) == 6  # a stage of the same data is not read
    alone = load(f"femnist:{root / 'data' / 'train' / 'all.json'}")
    assert len(alone) == 4
    assert alone.official_test is None
    assert len(load(f"femnist:{root / 'data' / 'train'}")) == 4
    write(tmp_path / "two", {"a/x.json": DRAWN["train/all.json"], "b/x.json": DRAWN["train/all.json"]})
    with pytest.raises(ValueError, match="JSON files in data/a, data/b: name one"):
        load(f"femnist:{tmp_path / 'two'}")
    (tmp_path / "none").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no train/\*\.json: make it with https"):
        load(f"femnist:{tmp_path / 'none'}")


def changed(change: Any) -> dict[str, Any]:
    """The drawn training file after a change."""
    value = json.loads(json.dumps(DRAWN["train/all.json"]))
    change(value)
    return {"train/all.json": value}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.pop("users"), "needs the lists users and num_samples"),
        (lambda v: v.update(user_data=[]), "needs the lists users"),
        (lambda v: v["users"].append("f9"), "one entry of num_samples for each of 3"),
        (lambda v: v.update(users=["f0", "f0"]), "needs distinct users"),
        (lambda v: v["user_data"].update(f7={"x": [], "y": []}), "user 'f7' is in user_data but not in users"),
        (lambda v: v["user_data"].pop("f1"), "user 'f1' has no lists x and y"),
        (lambda v: v["user_data"].update(f1={"x": 3, "y": []}), "user 'f1' has no lists x and y"),
        (lambda v: v["user_data"]["f1"]["y"].pop(), "user 'f1' has 2 x, 1 y and num_samples 2"),
        (lambda v: v.update(num_samples=[2, 3]), "user 'f1' has 2 x, 2 y and num_samples 3"),
        (lambda v: v["user_data"]["f0"]["x"][1].pop(), "user 'f0': sample 1 of x has no 784 numbers"),
        (lambda v: v["user_data"]["f0"].update(x=["a", "b"]), "user 'f0': sample 0 of x has no 784 numbers"),
        (lambda v: v["user_data"]["f0"]["x"][1].__setitem__(5, None), "user 'f0': x holds something else"),
        (lambda v: v["user_data"]["f0"]["x"][1].__setitem__(5, "1"), "user 'f0': x holds something else"),
        (lambda v: v["user_data"]["f0"]["x"][1].__setitem__(5, [1]), "user 'f0': x holds something else"),
        (lambda v: v["user_data"]["f0"]["x"][1].__setitem__(5, 10**400), "user 'f0': x holds something else"),
        (lambda v: v["user_data"]["f0"]["x"][1].__setitem__(5, 1e300), "user 'f0': sample 1 of x is not finite"),
        (lambda v: v["user_data"]["f0"]["x"][1].__setitem__(5, float("nan")), "NaN is no finite number"),
        (lambda v: v["user_data"]["f1"].update(y=[62, 0]), "user 'f1': label 62 of sample 0"),
        (lambda v: v["user_data"]["f1"].update(y=[0, "1"]), "user 'f1': label '1' of sample 1"),
        (lambda v: v["user_data"]["f1"].update(y=[0, True]), "user 'f1': label True of sample 1"),
        (lambda v: (v["users"].clear(), v["num_samples"].clear(), v["user_data"].clear()), "has no samples"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:overflow")
def test_faults_name_file_and_user(change: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load(f"femnist:{write(tmp_path, changed(change))}")
    assert "has no samples" in message or "train/all.json" in str(caught.value)


def test_a_key_that_occurs_twice_is_found_at_once(tmp_path: Path) -> None:
    """A search of all keys for each of them would take minutes here."""
    text = "{" + ",".join(f'"{i}": 0' for i in range(150_000)) + ', "z": 0, "z": 0}'
    with pytest.raises(ValueError, match="the key 'z' occurs twice"):
        load(f"femnist:{write(tmp_path, {'train/all.json': text})}")


def test_small_archives_of_much_json_are_refused(tmp_path: Path) -> None:
    text = '{"users": [], "num_samples": [], "user_data": {}, "z": [' + "[]," * 1_000_000 + "0]}"
    with zipfile.ZipFile(tmp_path / "leaf.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("train/a.json", text)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"train/a\.json' promises to expand to \d+ bytes, .*\(128 times"):
            load(f"femnist:{tmp_path / 'leaf.zip'}")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"users": [', r"train/all\.json: no usable JSON \(.*line 1 column 12"),
        ("[" * 100_000, "no usable JSON"),
        ("[1]", "holds no object"),
        ("\x00", "no usable JSON"),
        ('{"users": ["a"], "num_samples": [0], "user_data": {"a": {"x": [], "y": []}, "a": {}}}', "'a' occurs twice"),
    ],
)
def test_damaged_json(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(f"femnist:{write(tmp_path, {'train/all.json': text})}")


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (LINE[:79], "a", "user 'A': sample 1 of x is no text of 80"),
        (LINE[:80], "ab", "user 'A': sample 1 of y is no text of 1"),
        (7, "a", "user 'A': sample 1 of x is no text of 80"),
        (LINE[:79] + "$", "a", "1 of 162 characters are outside of LEAF's alphabet .*user 'A': '\\$' in sample 1"),
    ],
)
def test_faults_in_windows(x: Any, y: str, message: str, tmp_path: Path) -> None:
    files = {"train/all.json": content(A={"x": [LINE[:80], x], "y": ["b", y]})}
    with pytest.raises(ValueError, match=message):
        load(f"leaf_shakespeare:{write(tmp_path, files)}")


def test_the_sample_files() -> None:
    folder = Path(os.environ.get(DATA_VARIABLE, "absent"))
    if not (folder / "leaf" / "shakespeare.zip").is_file():
        pytest.skip(f"{DATA_VARIABLE} names no folder with leaf/shakespeare.zip")
    source = load("leaf_shakespeare:leaf/shakespeare.zip")
    assert (len(source), source.official_test.sum(), len(np.unique(source.client))) == (13120, 1600, 16)
    spoken = sorted(roles((folder / "shakespeare" / "input.txt").read_text()).values(), key=len, reverse=True)
    assert said(source)[:720] == [spoken[0][at : at + 81] for at in range(720)]
    partition = make_partition(source, PartitionConfig(method="natural", min_samples=2))
    data = to_client_data(source, partition)
    assert data.num_clients == 16
    assert np.shares_memory(data.tables["text"], source.tables["text"])
    drawn = load("femnist:leaf/mnist_writers.zip")
    assert (len(drawn), drawn.official_test.sum(), len(np.unique(drawn.client))) == (1265, 258, 12)
    digits = load("mnist-idx:mnist")
    assert {image.tobytes() for image in drawn.x} <= {image.tobytes() for image in digits.x[:60000]}
