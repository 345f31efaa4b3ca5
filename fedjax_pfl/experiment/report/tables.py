"""The tables of a report as HTML; every text that comes from a run is escaped, every absent number is blank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from fedjax_pfl.evaluation import KINDS
from fedjax_pfl.experiment.plots.style import DASHES, PALETTE, quantity
from fedjax_pfl.experiment.report.data import Run

MAX_ROWS = 300
"""Clients in the per-client table; with more, those with the lowest accuracy."""
STATISTICS = {
    "weighted_mean": "weighted mean",
    "uniform_mean": "uniform mean",
    "worst_decile": "worst decile",
    "min": "lowest client",
    "last_k_mean": "mean of last\N{NO-BREAK SPACE}k",
    "at_best_validation": "at best validation",
}


class Column(NamedTuple):
    """A column of numbers over runs; better is +1 where more is better, -1 where less is, 0 where neither."""

    title: str
    group: str
    value: Callable[[Run], float | None]
    spread: Callable[[Run], float | None]
    show: Callable[[float], str]
    better: int


def accuracy_column(kind: str, statistic: str, title: str, group: str) -> Column:
    """Test accuracy of one kind of model in per cent, with its standard deviation over seeds."""
    return Column(
        title, group, lambda run: run.test(kind, statistic), lambda run: run.spread(kind, statistic), percent, 1
    )


def _none(run: Run) -> None:
    return None


def percent(value: float) -> str:
    """A share in per cent, one decimal."""
    return f"{100 * value:.1f}"


def _cost(title: str, group: str, name: str, better: int) -> Column:
    return Column(title, "cost", lambda run: run.figure(group, name), _none, quantity, better)


def result_table(runs: Sequence[Run]) -> str:
    """One row a run: the three models' accuracy, the personal model's spread over clients, and what it cost."""
    personal = [
        accuracy_column("personal", name, title, "personal model over clients and rounds")._replace(spread=_none)
        for name, title in STATISTICS.items()
        if name != "weighted_mean"
    ]
    columns = [
        *(accuracy_column(k, "weighted_mean", k, "weighted mean") for k in ("personal", "received", "shared")),
        *personal,
        _cost("floats up", "communication", "floats_up", -1),
        _cost("floats down", "communication", "floats_down", -1),
        _cost("rounds/s", "timing", "rounds_per_s", 1),
    ]
    return run_table(runs, columns, "Test accuracy in per cent and cost of every run")


def unseen_table(runs: Sequence[Run]) -> str:
    """Clients that were held out: accuracy before and after they adapt; nothing where no run held any out."""
    if not any(run.summary.get("unseen") for run in runs):
        return ""

    def column(when: str) -> Column:
        def part(name: str) -> Callable[[Run], float | None]:
            return lambda run: ((run.summary.get("unseen") or {}).get(when) or {}).get(name)

        return Column(when, "clients that were held out", part("weighted_mean"), part("std_over_seeds"), percent, 1)

    return run_table(runs, [column("before"), column("after")], "Test accuracy in per cent of clients held out")


def kind_table(runs: Sequence[Run], kind: str) -> str:
    """All summaries of one kind of model."""
    columns = [accuracy_column(kind, name, title, f"{kind} model") for name, title in STATISTICS.items()]
    columns.append(accuracy_column(kind, "std", "std over clients", f"{kind} model")._replace(better=0))
    return run_table(runs, columns, f"Test accuracy of the {kind} model in per cent")


def dataset_table(runs: Sequence[Run], kind: str) -> str:
    """Accuracy of one kind of model on every data set, and the mean over them; nothing for runs on a single one."""
    names = list(dict.fromkeys(name for run in runs for name in run.summary.get("datasets") or ()))
    if not names:
        return ""

    def column(name: str | None) -> Column:
        def part(statistic: str) -> Callable[[Run], float | None]:
            return lambda run: run.of_data_set(name, kind, statistic)

        group = "over data sets" if name is None else f"{kind} model on each data set"
        return Column(name or "mean", group, part("mean"), part("std_over_seeds"), percent, 1)

    columns = [*map(column, names), column(None)]
    return run_table(runs, columns, f"Test accuracy of the {kind} model in per cent by data set")


def run_table(runs: Sequence[Run], columns: Sequence[Column], caption: str) -> str:
    """A sortable table of runs in which the best of each column is marked; empty columns are kept, blank."""
    groups = _group_row(columns)
    heads = "".join(f'<th scope="col">{escape(column.title)}</th>' for column in columns)
    best = [_best(runs, column) for column in columns]
    rows = "".join(
        f"<tr>{run_head(run, i)}" + "".join(_cell(run, c, i in b) for c, b in zip(columns, best, strict=True)) + "</tr>"
        for i, run in enumerate(runs)
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table class="names" '
        f'data-sortable><caption class="sr">{escape(caption)}</caption><thead><tr><th></th>{groups}</tr>'
        f'<tr><th scope="col">algorithm</th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _group_row(columns: Sequence[Column]) -> str:
    widths: dict[str, int] = {}
    for column in columns:
        widths[column.group] = widths.get(column.group, 0) + 1
    return "".join(
        f'<th class="group" scope="colgroup" colspan="{width}"><span>{escape(name)}</span></th>'
        for name, width in widths.items()
    )


def swatch(index: int) -> str:
    """The dash that stands for a run in the figures."""
    dash = index // len(PALETTE) % len(DASHES)
    return f'<span class="swatch s{dash}" style="border-top-color:var(--series-{index % len(PALETTE)})"></span>'


def run_head(run: Run, index: int, badge: bool = True) -> str:
    """The first cell of a run's row: its mark, its name, and its status unless it is finished."""
    told = f' <span class="badge">{escape(run.status)}</span>' if badge and not run.finished else ""
    name, _, options = run.label.partition(" ")
    small = f"<small>{escape(options)}</small>" if options else ""
    return f'<th scope="row">{swatch(index)}{escape(name)}{told}{small}</th>'


def _best(runs: Sequence[Run], column: Column) -> set[int]:
    """Rows that show the best figure of a column (ties as shown), where at least two runs have one."""
    found = {i: value for i, run in enumerate(runs) if (value := column.value(run)) is not None}
    if len(found) < 2 or not column.better:
        return set()
    target = column.show((max if column.better > 0 else min)(found.values()))
    best = {i for i, value in found.items() if column.show(value) == target}
    return best if len(best) < len(found) else set()


def _cell(run: Run, column: Column, best: bool) -> str:
    value, spread = column.value(run), column.spread(run)
    if value is None:
        return '<td data-value=""></td>'
    pm = f' <span class="pm">±{column.show(spread)}</span>' if spread is not None else ""
    shown = column.show(value)
    text = f'<span class="best">{shown}<span class="sr"> (best)</span></span>' if best else shown
    return f'<td data-value="{value!r}">{text}{pm}</td>'


def client_table(runs: Sequence[Run]) -> str:
    """One row a client: its samples and, for every run, the accuracy of its personal model (else the received one)."""
    first = next((run for run in runs if run.per_client), None)
    if first is None:
        return ""
    sizes = {split: first.per_client.get(f"samples_{split}") for split in ("train", "validation", "test")}
    present = {split: size for split, size in sizes.items() if size is not None}
    clients = first.clients
    values = {run.label: v for run in runs if (v := run.clients_at_end("personal")) is not None and len(v) == clients}
    own = first.dataset_of_client if len(first.dataset_of_client) == clients else []
    heads = (
        (["data set"] if own else []) + [f"{split} samples" for split in present] + [f"{label}, %" for label in values]
    )
    rows = "".join(
        _client_row(i, own, list(present.values()), list(values.values())) for i in rows_shown(values, clients)
    )
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in ["client", *heads])
    return (
        '<div class="scroll tall" tabindex="0" role="region" aria-label="Per-client results"><table data-sortable>'
        f'<caption class="sr">Per-client results</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _client_row(i: int, own: Sequence[str], sizes: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> str:
    name = f"<td>{escape(own[i])}</td>" if own else ""
    samples = "".join(f'<td data-value="{int(size[i])}">{int(size[i]):,}</td>' for size in sizes)
    return f'<tr><th scope="row">{i}</th>{name}{samples}{"".join(_share(v[i]) for v in values)}</tr>'


def rows_shown(values: dict[str, np.ndarray], clients: int) -> np.ndarray:
    """All clients, or the ``MAX_ROWS`` with the lowest accuracy, mean over runs, ascending by id."""
    if clients <= MAX_ROWS or not values:
        return np.arange(min(clients, MAX_ROWS))
    stacked = np.stack(list(values.values()))
    mean = np.where(np.isnan(stacked), 0, stacked).sum(0) / np.maximum((~np.isnan(stacked)).sum(0), 1)
    mean = np.where(np.isnan(stacked).all(0), np.inf, mean)
    return np.sort(np.argsort(mean, kind="stable")[:MAX_ROWS])


def _share(value: float) -> str:
    return '<td data-value=""></td>' if np.isnan(value) else f'<td data-value="{float(value)!r}">{percent(value)}</td>'


def tested_kinds(runs: Sequence[Run]) -> list[str]:
    """Kinds of model that any run was tested on, the deliverable first."""
    kinds = sorted(KINDS, key=lambda kind: kind != "personal")
    return [kind for kind in kinds if any(run.test(kind, "weighted_mean") is not None for run in runs)]
