"""What ``fedjax-pfl partition`` shows: who has which samples, without a model and without training."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
from rich.table import Table

from fedjax_pfl.data import Partition, Source
from fedjax_pfl.data.clients import SPLITS
from fedjax_pfl.experiment import folder as files

BARS = " ▁▂▃▄▅▆▇█"
MAX_ROWS, MAX_BARS = 40, 64


def table(source: Source, partition: Partition) -> Table:
    """A row a client: sizes, its group where there are groups, and its labels as bars (training samples a class)."""
    counts = class_counts(source, partition)
    made = Table(title=f"{source.name}: {partition.config.method}, {len(partition)} clients", title_justify="left")
    heads = ["client", *SPLITS, *(["group"] if partition.groups is not None else [])]
    for head in heads:
        made.add_column(head, justify="right")
    made.add_column(f"samples of each of {source.num_classes} classes", no_wrap=True)
    for prefix, which in (("", partition), ("held out ", partition.unseen)):
        rows = class_counts(source, which)
        for client, row in enumerate(rows[:MAX_ROWS]):
            assert which is not None
            sizes = [str(len(which.rows(split)[client])) for split in SPLITS]
            group = [] if which.groups is None else [str(which.groups[client])]
            made.add_row(f"{prefix}{client}", *sizes, *group, bars(row, counts.max()))
    return made


def class_counts(source: Source, partition: Partition | None) -> np.ndarray:
    """Training samples of each client and class: ``(M, C)``."""
    if partition is None:
        return np.zeros((0, source.num_classes), np.int64)
    return partition.counts(source.y, num_classes=source.num_classes)


def bars(counts: np.ndarray, most: int) -> str:
    """Counts ``(C,)`` as a bar each, of neighbours together where there are many; whatever is above 0 is visible."""
    parts = [part.max() for part in np.array_split(counts, min(len(counts), MAX_BARS))]
    return "".join(BARS[int(np.ceil(8 * part / max(most, 1)))] for part in parts)


def summary(source: Source, partition: Partition) -> list[str]:
    """What holds of all clients, in a few lines."""
    sizes, tests = partition.sizes("train"), partition.sizes("test")
    lines = [f"{len(partition) - MAX_ROWS} more clients are not shown"] if len(partition) > MAX_ROWS else []
    lines += [
        f"data from {source.where}",
        f"training samples a client: {sizes.min()} to {sizes.max()}, median {np.median(sizes):g}, {sizes.sum():,} in "
        f"all; test samples: {tests.min()} to {tests.max()}, {tests.sum():,} in all",
    ]
    return [*lines, *partition.notes, f"sha256 {partition.sha256}"]


def save(folder: Path, source: Source, partition: Partition) -> list[Path]:
    """Write the partition, its picture and its table into a folder; existing files are replaced."""
    from fedjax_pfl.experiment.plots import plot_partition

    folder.mkdir(parents=True, exist_ok=True)
    names = [folder / name for name in (files.PARTITION, "partition.png", "partition.csv")]
    partition.save(names[0])
    plot_partition(class_counts(source, partition)).savefig(names[1], dpi=200)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["client", "held_out", *SPLITS, "classes"])
    for held, which in ((0, partition), (1, partition.unseen)):
        for row in which.table(source.y) if which is not None else ():
            writer.writerow([row["client"], held, *(row[s] for s in SPLITS), " ".join(map(str, row["classes"]))])
    files.write_text(names[2], out.getvalue())
    return names
