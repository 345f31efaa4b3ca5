"""Tables of one's own: CSV and Parquet files with one row a sample."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.data.checks import unknown_name
from fedjax_pfl.data.memory import empty
from fedjax_pfl.data.sources.base import Source, SourceEntry, locate, parse_options
from fedjax_pfl.data.sources.table_files import Table, open_table

SHOWN = 8  # class names that fit into a line
TEXT = 1 << 30  # bytes of all labels, or clients, as an array of text


class TableConfig(NamedTuple):
    """Columns that are no features: label, and optionally the natural client and whether a row is a test sample."""

    label: str = ""
    client: str = ""
    test: str = ""


def parse(kind: str, argument: str) -> tuple[str, TableConfig]:
    """The file and the columns of ``"FILE,label=y,client=user"``.

    Raises:
        ValueError: no file, no label, unknown option (with the nearest one), one column in two roles.
    """
    path, *options = (part.strip() for part in argument.split(","))
    config = TableConfig(**parse_options(options, TableConfig._fields, kind))
    if not path or not config.label:
        raise ValueError(f"{kind} needs a file and the column of labels: {kind}:FILE,label=COLUMN[,client=,test=]")
    named = [column for column in config if column]
    if len(set(named)) < len(named):
        raise ValueError(f"{kind}: label, client and test must be different columns, found {', '.join(named)}")
    return path, config


def _table(kind: str, argument: str, data_dir: Path | None) -> Source:
    name, config = parse(kind, argument)
    path = locate(name, data_dir)
    with open_table(kind, path, [name for name in (config.label, config.client) if name]) as table:
        return _source(kind, argument, path, table, config)


def _source(kind: str, argument: str, path: Path, table: Table, config: TableConfig) -> Source:
    names = table.names
    repeated = sorted({column for column in names if names.count(column) > 1}) if len(set(names)) < len(names) else []
    if repeated:
        raise ValueError(f"{path}: the column {repeated[0]!r} occurs twice: rename one")
    for column in filter(None, config):
        if column not in names:
            raise unknown_name(f"column of {path}", column, names)
    if not table.rows:
        raise ValueError(f"{path}: has no rows")
    features = [column for column in names if column not in config]
    if not features:
        raise ValueError(f"{path}: has no column besides {', '.join(filter(None, config))}: add features")
    x = empty((table.rows, len(features)), np.float32)
    for place, column in enumerate(features):
        x[:, place] = _numbers(table, column, path)
    labels, y = np.unique(_plain(table, config.label, path), return_inverse=True)
    client = _plain(table, config.client, path) if config.client else None
    test = _test(table, config.test, path) if config.test else None
    classes = ", ".join(str(label) for label in labels[:SHOWN]) + ", ..." * (len(labels) > SHOWN)
    return Source(
        f"{kind}:{argument}", x, y.astype(np.int32), len(labels), client, official_test=test,
        licence="the file's own",
        where=f"{path}, features as they stand (not standardised), classes {classes}",
    )  # fmt: skip


def _whole(table: Table, column: str, path: Path) -> Any:
    """The column, which must have a value in every row."""
    found = table.read(column)
    if len(found) != table.rows:
        raise ValueError(f"{path}: column {column!r} has {len(found)} of the {table.rows} rows promised: damaged")
    if found.null_count:
        row = int(np.argmax(found.is_null().to_numpy()))
        raise ValueError(f"{path}: column {column!r} has no value in {_place(row)}: fill it in or drop the row")
    return found


def _place(row: int) -> str:
    return f"row {row + 1} (counted from 1 below the header)"


def _numbers(table: Table, column: str, path: Path) -> np.ndarray:
    """A feature column as float32 ``(n,)``."""
    import pyarrow as pa

    kind = table.kind(column)
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise ValueError(
            f"{path}: column {column!r} holds {kind}, features must be numbers: encode it, drop it, or name it with "
            "label=, client= or test="
        )
    values = _whole(table, column, path).to_numpy()
    with np.errstate(over="ignore"):
        plain = values.astype(np.float32)
    if not np.isfinite(plain).all():
        row = int(np.argmin(np.isfinite(plain)))
        raise ValueError(f"{path}: column {column!r} has {values[row]} in {_place(row)}: correct it or drop the row")
    return plain


def _plain(table: Table, column: str, path: Path) -> np.ndarray:
    """Labels or client ids: whole numbers or text ``(n,)``."""
    import pyarrow as pa

    kind = table.kind(column)
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if not (text or pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise ValueError(f"{path}: column {column!r} holds {kind}: labels and clients are whole numbers or text")
    values = _whole(table, column, path)
    if text:
        return _text(values, column, path)
    array = (values.cast(kind) if pa.types.is_dictionary(values.type) else values).to_numpy()
    return array.astype(np.int64) if pa.types.is_boolean(kind) else array


def _text(values: Any, column: str, path: Path) -> np.ndarray:
    """A column of text ``(n,)``: each distinct text is unpacked once, for a small file can repeat a long one often."""
    import pyarrow as pa

    coded = (values if pa.types.is_dictionary(values.type) else values.dictionary_encode()).unify_dictionaries()
    words = coded.chunk(0).dictionary.to_pylist()
    longest = max(map(len, words), default=0)
    if len(coded) * longest * 4 > TEXT:
        raise ValueError(
            f"{path}: column {column!r}: {len(coded)} texts of up to {longest} characters: use short names"
        )
    codes = np.concatenate([chunk.indices.to_numpy() for chunk in coded.chunks])
    array = np.array(words, str)[codes]
    if (array == "").any():
        row = int(np.argmax(array == ""))
        raise ValueError(f"{path}: column {column!r} has no value in {_place(row)}: fill it in or drop the row")
    return array


def _test(table: Table, column: str, path: Path) -> np.ndarray:
    values = _numbers(table, column, path)
    wrong = ~np.isin(values, (0, 1))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(f"{path}: column {column!r} has {values[row]:g} in {_place(row)}: test must be 0 or 1")
    return values == 1


_OPTIONS = ",label=COLUMN[,client=COLUMN][,test=COLUMN]"
CSV = SourceEntry(
    "csv", f"csv:FILE{_OPTIONS}", "a table with a header; every other column is a feature, not standardised",
    "the file's own", functools.partial(_table, "csv"),
)  # fmt: skip
PARQUET = SourceEntry(
    "parquet", f"parquet:FILE{_OPTIONS}", "a table; every other column is a feature, not standardised",
    "the file's own", functools.partial(_table, "parquet"),
)  # fmt: skip
