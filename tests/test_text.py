"""Plays: roles, alphabet, windows, options, and faults with their line."""

from __future__ import annotations

import os
import string
from pathlib import Path

import numpy as np
import pytest

from fedjax_pfl.data import PartitionConfig, make_partition, to_client_data
from fedjax_pfl.data.sources import DATA_VARIABLE, Source, load
from fedjax_pfl.data.sources.text import ALPHABET, encode, roles

SPEECHES = {
    "First Citizen": "Before we proceed any further, hear me speak. " * 4,
    "All": "Speak, speak! " * 3,
    "MARCIUS": "He that will give good words to thee will flatter\nBeneath   abhorring.\n What would you have? " * 2,
}
PLAY = (
    "First Citizen:\n" + SPEECHES["First Citizen"][:90] + "\n\nAll:\n" + SPEECHES["All"] + "\n\n\nMARCIUS:\n"
    + SPEECHES["MARCIUS"] + "\n \nFirst Citizen:\n" + SPEECHES["First Citizen"][90:] + "\n"
)  # fmt: skip


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "play.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def said(source: Source, sample: int) -> str:
    """The window of a sample and its label, as text."""
    table = source.tables["text"]
    start = source.x[sample]
    return "".join(ALPHABET[code] for code in [*table[start : start + 80], source.y[sample]])


def test_the_alphabet_is_leafs() -> None:
    assert len(ALPHABET) == len(set(ALPHABET)) == 80
    assert set(string.ascii_letters + string.digits + "\n !\"&'(),-.:;>?[]}") == set(ALPHABET)
    assert list(ALPHABET) == sorted(ALPHABET)
    assert encode(ALPHABET).tolist() == list(range(80))
    assert encode("$é中a").tolist() == [-1, -1, -1, ALPHABET.index("a")]


def test_roles_say_their_speeches_in_order(tmp_path: Path) -> None:
    found = roles(PLAY)
    assert list(found) == ["First Citizen", "All", "MARCIUS"]
    assert found["MARCIUS"].startswith("He that will give good words to thee will flatter Beneath abhorring. What")
    assert "  " not in "".join(found.values())
    assert roles(PLAY.replace("\n", "\r\n").replace("\r\n", "\n")) == found


@pytest.mark.parametrize("stride", [1, 7, 80, 200])
def test_windows_are_cut_from_one_role(stride: int, tmp_path: Path) -> None:
    source = load(f"shakespeare:{write(tmp_path, PLAY)},stride={stride}")
    spoken = [text for text in roles(PLAY).values() if len(text) > 80]
    expected = [
        (role, text[at : at + 81]) for role, text in enumerate(spoken) for at in range(0, len(text) - 80, stride)
    ]
    assert [(int(role), said(source, sample)) for sample, role in enumerate(source.client)] == expected
    assert (source.kind, source.num_classes, source.overlap) == ("tokens", 80, 80 // stride)
    assert (source.x.dtype, source.y.dtype, source.tables["text"].dtype) == (np.int32, np.int32, np.uint8)
    np.testing.assert_array_equal(source.sample()[0], source.tables["text"][:80])
    assert "left out 1 roles that say less than 81" in source.where


def test_samples_that_share_characters_are_within_overlap(tmp_path: Path) -> None:
    source = load(f"shakespeare:{write(tmp_path, PLAY)},stride=9")
    first = np.flatnonzero(source.segment == 0)
    spans = [set(range(source.x[sample], source.x[sample] + 81)) for sample in first]
    shared = [max(later - at for later in range(at, len(spans)) if spans[at] & spans[later]) for at in range(3)]
    assert shared == [source.overlap] * 3 == [8] * 3


def test_min_chars(tmp_path: Path) -> None:
    path = write(tmp_path, PLAY)
    assert len(np.unique(load(f"shakespeare:{path}").client)) == 2
    assert len(np.unique(load(f"shakespeare:{path},min_chars=184,stride=3").client)) == 1
    with pytest.raises(ValueError, match="no role says 9999 characters, found 3 roles"):
        load(f"shakespeare:{path},min_chars=9999")


@pytest.mark.parametrize("text", [PLAY, PLAY.replace("\n", "\r\n"), b"\xef\xbb\xbf" + PLAY.encode()])
def test_line_ends_and_marks_do_not_matter(text: str | bytes, tmp_path: Path) -> None:
    source = load(f"shakespeare:{write(tmp_path, text)}")
    np.testing.assert_array_equal(source.tables["text"], load(f"shakespeare:{write(tmp_path, PLAY)}").tables["text"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("stride=0", "stride needs a whole number of at least 1"),
        ("stride=1.5", "stride needs a whole number"),
        ("min_chars=80", "min_chars needs a whole number of at least 81"),
        ("strides=2", "Did you mean 'stride'"),
    ],
)
def test_bad_options(options: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(f"shakespeare:{write(tmp_path, PLAY)},{options}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Just some prose.\nNo roles at all.\n", r"play\.txt: line 1 opens a block but is no 'ROLE:'.*fetch https"),
        (PLAY + "\nNo role:\nyes\n\nand then prose\n", "line 21 opens a block but is no 'ROLE:', it is 'and then"),
        ("", "found 0 roles"),
        (PLAY.replace("speak. ", "spe\u00e4k. "), "characters are outside of LEAF's alphabet .line 2 has 'ä'"),
        (PLAY.encode() + b"\xff", r"byte \d+ \(line 1\d\) is no UTF-8"),
    ],
)
def test_faults_name_the_line(text: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(f"shakespeare:{write(tmp_path, text)}")


def test_rare_characters_become_blanks_and_are_reported(tmp_path: Path) -> None:
    long = PLAY + "\nAll:\n" + "So say we all. " * 100 + "sha$l\n"
    source = load(f"shakespeare:{write(tmp_path, long)}")
    assert "read as blanks: 1 characters outside of LEAF's alphabet (line " in source.where
    assert "has '$')" in source.where
    assert said(source, int(np.flatnonzero(source.client == 1)[-1])).endswith("all. sha l")


def test_missing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"'shakespeare/input\.txt'.*fetch https"):
        load("shakespeare")
    with pytest.raises(ValueError, match="is a folder"):
        load(f"shakespeare:{tmp_path}")


def test_the_published_text() -> None:
    if not (Path(os.environ.get(DATA_VARIABLE, "absent")) / "shakespeare" / "input.txt").is_file():
        pytest.skip(f"{DATA_VARIABLE} names no folder with shakespeare/input.txt")
    source = load("shakespeare")
    assert len(source) == len(source.tables["text"]) - 80 * len(np.unique(source.client))
    spoken = roles((Path(os.environ[DATA_VARIABLE]) / "shakespeare" / "input.txt").read_text()).values()
    assert sum(bool(text) for text in spoken) == 299
    assert len(np.unique(source.client)) == sum(len(text) > 80 for text in spoken)
    assert said(source, 0) == "Before we proceed any further, hear me speak. You are all resolved rather to die "
    assert len(load("shakespeare:stride=40")) < len(source) / 35
    few = load("shakespeare:shakespeare/input.txt,stride=40,min_chars=4000")
    partition = make_partition(few, PartitionConfig(method="natural", min_samples=2))
    data = to_client_data(few, partition)
    assert data.num_clients == len(np.unique(few.client))
    assert np.shares_memory(data.examples["x"], few.x)
    assert np.shares_memory(data.tables["text"], few.tables["text"])
    for train, test in zip(partition.train, partition.test, strict=True):
        gaps = np.abs(few.x[train].astype(int)[:, None] - few.x[test])
        assert gaps.min() > 80  # no character of a test sample was trained on, labels included
