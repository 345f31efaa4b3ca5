"""What ``fedjax-pfl list`` shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from rich.markup import escape
from rich.table import Table


def algorithms() -> Table:
    """Every method with its own options and their defaults, and its paper."""
    from fedjax_pfl.algorithms import registry

    rows = []
    for entry in registry().values():
        options = [f"{field.name}={field.default}" for field in dataclasses.fields(entry.options)]
        rows.append((entry.name, " ".join(options), entry.title))
    return _table(("algorithm", "own options", "paper"), rows)


def data() -> Table:
    """Every data source: how it is written, what it is, its licence."""
    from fedjax_pfl.data import SOURCES

    rows = [(entry.usage, entry.description, entry.licence) for entry in SOURCES.values()]
    return _table(("data", "what it is", "licence"), rows)


def models() -> Table:
    """Every model with the options that it takes."""
    from fedjax_pfl.models.registry import MODELS

    rows = [(e.name, e.description, " ".join("--" + o.replace("_", "-") for o in e.options)) for e in MODELS.values()]
    return _table(("model", "what it is", "options"), rows)


def partitions() -> Table:
    """Every partition with the options that only some partitions read."""
    from fedjax_pfl.data import PARTITIONS

    rows = [
        (entry.name, entry.description, " ".join("--" + name.replace("_", "-") for name in entry.options))
        for entry in PARTITIONS.values()
    ]
    return _table(("partition", "what it is", "options"), rows)


LISTS: dict[str, Callable[[], Table]] = {
    "algorithms": algorithms, "data": data, "models": models, "partitions": partitions
}  # fmt: skip


def _table(heads: Iterable[str], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table()
    for place, head in enumerate(heads):
        table.add_column(head, no_wrap=place == 0, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table
