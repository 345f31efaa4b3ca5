"""CSV and Parquet files, opened so that a small file does not become a large table."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

RATIO, SLACK = 256, 64 << 20  # the bytes that a file may expand to: a multiple of its own, and so many more
MOST = 1 << 16  # columns


class Table(NamedTuple):
    """Columns that are read one by one: their names, the number of rows, the types, and how one is read."""

    names: list[str]
    rows: int
    kind: Callable[[str], Any]
    read: Callable[[str], Any]


@contextlib.contextmanager
def open_table(kind: str, path: Path, text: Sequence[str]) -> Iterator[Table]:
    """A csv or parquet file whose size was checked before anything of it is expanded; ``text`` names columns of words.

    Raises:
        ValueError: an unreadable file, more columns or cells than a file of this size may have.
    """
    import pyarrow as pa
    from pyarrow import csv, parquet

    most = RATIO * path.stat().st_size + SLACK
    with contextlib.ExitStack() as stack:
        try:
            if kind == "parquet":
                about = parquet.read_metadata(path)
                schema = about.schema.to_arrow_schema()
                groups = sum(about.row_group(group).total_byte_size for group in range(about.num_row_groups))
                _check_size(path, about.num_rows, max(about.num_columns, len(schema)), groups, most)
                words = [column for column in text if column in schema.names]
                file = stack.enter_context(parquet.ParquetFile(path, metadata=about, read_dictionary=words))
                yield Table(schema.names, about.num_rows, lambda column: schema.field(column).type,
                             lambda column: file.read(columns=[column])[column])  # fmt: skip
            else:
                stream = stack.enter_context(open(path, "rb"))  # given a name, pyarrow would unpack a .gz file
                _check_size(path, 1, stream.readline(1 << 24).count(b",") + 1, 0, most)
                stream.seek(0)
                # Text such as NA or null is a missing value in numbers, and a word like any other in a column of text.
                table = csv.read_csv(stream, convert_options=csv.ConvertOptions(strings_can_be_null=False))
                yield Table(table.column_names, table.num_rows, lambda column: table.schema.field(column).type,
                             lambda column: table[column])  # fmt: skip
        except (pa.ArrowException, OSError, UnicodeError) as error:
            raise ValueError(f"{path}: no readable {kind} file ({' '.join(str(error).split())})") from error


def _check_size(path: Path, rows: int, columns: int, stored: int, most: int) -> None:
    if columns > MOST or max(rows * columns * 4, stored) > most:
        raise ValueError(
            f"{path}: {rows} rows of {columns} columns ({stored} bytes unpacked) are more than the {most} bytes that a "
            f"file of this size may expand to ({RATIO} times its own and {SLACK}), or more than {MOST} columns: refused"
        )
