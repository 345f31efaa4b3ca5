"""CSV and Parquet tables: the roles of columns, and that nothing in them is guessed or dropped in silence."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from fedjax_pfl.data.sources import SOURCES, load

COLUMNS: dict[str, Any] = {
    "height": [1.5, 2.25, -3.0, 4.0],
    "kind": ["pear", "apple", "pear", "plum"],
    "age": [3, 1, 2, 9],
    "user": ["u1", "u2", "u1", "u3"],
    "held": [0, 0, 1, 0],
    "wild": [True, False, False, True],
}


def write(folder: Path, kind: str, columns: dict[str, Any]) -> str:
    """A table in a file; returns the source's name without options."""
    path = folder / f"data.{kind}"
    if kind == "parquet":
        parquet.write_table(pa.table(columns), path)
    else:
        rows = [
            ",".join(columns),
            *(",".join("" if v is None else str(v) for v in row) for row in zip(*columns.values(), strict=True)),
        ]
        path.write_text("\n".join(rows) + "\n")
    return f"{kind}:{path}"


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_roles_of_columns(tmp_path: Path, kind: str) -> None:
    source = load(write(tmp_path, kind, COLUMNS) + ",label=kind,client=user,test=held")
    assert source.x.dtype == np.float32
    assert source.x.tolist() == [[1.5, 3, 1], [2.25, 1, 0], [-3, 2, 0], [4, 9, 1]]
    assert source.y.tolist() == [1, 0, 1, 2]  # apple, pear, plum
    assert source.y.dtype == np.int32
    assert source.num_classes == 3
    assert source.client.tolist() == COLUMNS["user"]
    assert source.official_test.tolist() == [False, False, True, False]
    assert source.scale == 1
    assert "not standardised" in source.where
    assert "classes apple, pear, plum" in source.where


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_whole_numbers_as_labels(tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind, {"x": [0.5, 1.5, 2.5], "y": [30, -7, 30]})
    source = load(f"{kind}:data.{kind}, label = y", data_dir=tmp_path)
    assert source.y.tolist() == [1, 0, 1]
    assert source.x.shape == (3, 1)
    assert source.client is None
    assert source.official_test is None
    assert SOURCES[kind].usage.startswith(f"{kind}:FILE,label=")


def test_encoded_text_and_booleans(tmp_path: Path) -> None:
    columns = {"x": [1.0, 2.0, 3.0], "y": pa.array(["b", "a", "b"]).dictionary_encode(), "test": [True, False, False]}
    source = load(write(tmp_path, "parquet", columns) + ",label=y,test=test")
    assert source.y.tolist() == [1, 0, 1]
    assert source.official_test.tolist() == [True, False, False]


def test_words_for_missing_are_words_in_text(tmp_path: Path) -> None:
    source = load(write(tmp_path, "csv", {"x": [1, 2], "country": ["NA", "DE"]}) + ",label=country")
    assert source.y.tolist() == [1, 0]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, "label=kinds", r"unknown column of .*data\.\w+ 'kinds'\. Did you mean 'kind'\? Known: height, kind, age"),
        ({}, "label=kind,client=usr", "unknown column of .* 'usr'. Did you mean 'user'"),
        ({}, "label=kind", "column 'user' holds string, features must be numbers"),
        ({"height": [1.0, None, 2.0, 3.0]}, "label=kind,client=user", "column 'height' has no value in row 2"),
        ({"kind": ["a", "b", None, "c"]}, "label=kind,client=user", "column 'kind' has no value in row 3"),
        ({"user": ["a", None, "b", "c"]}, "label=kind,client=user", "column 'user' has no value in row 2"),
        ({"height": [1.0, 2.0, float("nan"), 0.0]}, "label=kind,client=user", "'height' has (nan|no value) in row 3"),
        ({"height": [1.0, 2.0, float("inf"), 0.0]}, "label=kind,client=user", "column 'height' has inf in row 3"),
        ({"height": [1.0, 2.0, 1e300, 0.0]}, "label=kind,client=user", r"column 'height' has 1e\+300 in row 3"),
        ({"held": [0, 2, 1, 0]}, "label=kind,client=user,test=held", "'held' has 2 in row 2 .*test must be 0 or 1"),
        ({"kind": [0.5, 1.5, 2.5, 0.5]}, "label=kind,client=user", "'kind' holds double: labels and clients are"),
        ({}, "label=kind,client=kind", "must be different columns, found kind, kind"),
        ({}, "label=kind,clients=user", "unknown option of (csv|parquet) 'clients'. Did you mean 'client'"),
        ({}, "client=user", "needs a file and the column of labels"),
    ],
)  # fmt: skip
def test_bad_columns(tmp_path: Path, kind: str, changes: dict[str, Any], options: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load(f"{write(tmp_path, kind, COLUMNS | changes)},{options}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no readable csv file"),
        (b"x,y\n", "has no rows"),
        (b"x,y\n1,a\n2\n", "no readable csv file .*Expected 2 columns, got 1"),
        (b"x,x,y\n1,2,a\n", "the column 'x' occurs twice"),
        (b"y\na\n", "has no column besides y"),
        (b"x,y\n\xff\xfe,a\n", "column 'x' holds binary"),
        (b"x,y\nNA,a\n1,b\n", "column 'x' has no value in row 1"),
    ],
)
def test_bad_csv_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "data.csv").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load("csv:data.csv,label=y", tmp_path)
    assert str(tmp_path / "data.csv") in str(caught.value)
    assert "\n" not in str(caught.value)


def repeated(path: Path, table: pa.Table, times: int) -> int:
    """A file with a table many times over, each time a row group; its size."""
    with parquet.ParquetWriter(path, table.schema, compression="zstd") as writer:
        for _ in range(times):
            writer.write_table(table)
    return path.stat().st_size


def test_small_files_do_not_become_large_tables(tmp_path: Path) -> None:
    path, zeros = tmp_path / "data.parquet", np.zeros(1_000_000)
    columns = {"y": zeros.astype(np.int8), "a": zeros, "b": zeros, "c": zeros}
    assert repeated(path, pa.table(columns), 20) < 400_000
    before = pa.total_allocated_bytes()
    with pytest.raises(ValueError, match=r"data\.parquet: 20000000 rows of 4 columns .* more than the \d+ bytes"):
        load(f"parquet:{path},label=y")
    assert pa.total_allocated_bytes() <= before + (1 << 20)


def test_long_texts_are_unpacked_once(tmp_path: Path) -> None:
    """A text of 100 kB in each of 300,000 rows, which a dictionary stores once."""
    path, text = tmp_path / "data.parquet", pa.DictionaryArray.from_arrays(np.zeros(300_000, np.int32), ["x" * 100_000])
    assert repeated(path, pa.table({"y": text, "a": np.arange(300_000) % 7}), 1) < 2_000_000
    with pytest.raises(ValueError, match="column 'y': 300000 texts of up to 100000 characters"):
        load(f"parquet:{path},label=y")


def test_text_in_several_row_groups(tmp_path: Path) -> None:
    columns = {"a": np.arange(9.0), "y": list("cabbaccab"), "user": ["zoe", "al", "zoe"] * 3}
    parquet.write_table(pa.table(columns), tmp_path / "data.parquet", row_group_size=2)
    source = load("parquet:data.parquet,label=y,client=user", tmp_path)
    assert source.y.tolist() == [2, 0, 1, 1, 0, 2, 2, 0, 1]
    assert source.client.tolist() == columns["user"]
    assert source.x[:, 0].tolist() == list(range(9))


def test_wide_and_packed_csv_files(tmp_path: Path) -> None:
    (tmp_path / "wide.csv").write_text("," * 70_000 + "\n")
    with pytest.raises(ValueError, match=r"wide\.csv: 1 rows of 70001 columns .*more than 65536 columns"):
        load("csv:wide.csv,label=y", tmp_path)
    (tmp_path / "data.csv.gz").write_bytes(gzip.compress(b"x,y\n" + b"1,a\n" * 9))
    with pytest.raises(ValueError, match=r"data\.csv\.gz"):
        load("csv:data.csv.gz,label=y", tmp_path)


def test_bad_parquet_files(tmp_path: Path) -> None:
    name = write(tmp_path, "parquet", COLUMNS) + ",label=kind,client=user"
    path = tmp_path / "data.parquet"
    whole = path.read_bytes()
    for content in (b"", b"hello", whole[:-20], whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"data\.parquet: no readable parquet file"):
            load(name)
    parquet.write_table(pa.table({"x": [[1.0], [2.0]], "y": [0, 1]}), path)
    with pytest.raises(ValueError, match=r"column 'x' holds list.*features must be numbers"):
        load(f"parquet:{path},label=y")
    with pytest.raises(FileNotFoundError, match="was not found"):
        load("parquet:nothing.parquet,label=y", tmp_path)
