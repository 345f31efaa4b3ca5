"""Tables for a person: what stands in which cell."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from rich.table import Table

from fedjax_pfl.experiment.console import dataset_table


def cells(table: Table) -> list[list[str]]:
    stream = io.StringIO()
    Console(file=stream, width=200).print(table)
    rows = (line.split("│")[1:-1] for line in stream.getvalue().splitlines() if line.startswith("│"))
    return [[cell.strip() for cell in row] for row in rows]


def of_run(datasets: dict[str, float | None], mean: float, seeds: int) -> dict[str, Any]:
    def told(value: float | None) -> dict[str, Any]:
        return {"personal": {"mean": value, "std_over_seeds": 0.01}}

    return {
        "seeds": list(range(seeds)),
        "datasets": {n: told(v) for n, v in datasets.items()},
        "datasets_mean": told(mean),
    }


def test_accuracy_by_data_set() -> None:
    many = of_run({"MUTAG": 0.75, "[b]": None}, 0.75, 2)
    one = of_run({"MUTAG": 0.5}, 0.5, 1)
    table = dataset_table([("fedgcf", many), ("local", one), ("plain", {"seeds": [0]})])
    assert table is not None
    assert cells(table) == [
        ["MUTAG", "0.7500 ± 0.0100", "0.5000", ""],
        ["[b]", "", "", ""],
        ["mean", "0.7500 ± 0.0100", "0.5000", ""],
    ]


def test_runs_on_a_single_data_set_have_no_such_table() -> None:
    assert dataset_table([("plain", {"seeds": [0]}), ("other", {"seeds": [0], "datasets": {}})]) is None
