"""The command line's options, made from the dataclasses of the configuration and of the algorithms."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from fedjax_pfl.algorithms import Entry, registry
from fedjax_pfl.experiment.config import SECTION_OF, SECTIONS, Config, DataConfig, PartitionOptions, TrainingConfig
from fedjax_pfl.experiment.errors import UserError, nearest

Parsed = TypeVar("Parsed")
MARKERS = (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone)


@dataclasses.dataclass(frozen=True)
class OutputOptions:
    """Where the run is written, and what it starts from."""

    out: Path | None = None
    """Folder of the run (default: a new one in runs/)."""
    config: Path | None = None
    """A config.toml to repeat; options given beside it replace its values."""
    resume: Path | None = None
    """Folder of an unfinished run to continue."""
    debug: bool = False
    """Show the whole traceback of an error."""


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """Write one report of runs or comparisons."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs or comparisons."""
    out: Path | None = None
    """Folder of the report (default: the only folder, or a new one in runs/)."""
    debug: bool = False
    """Show the whole traceback of an error."""


@dataclasses.dataclass(frozen=True)
class PartitionOutput:
    """Where the partition is written."""

    out: Path | None = None
    """Folder for partition.npz (for --partition-file), its picture and its table."""
    debug: bool = False
    """Show the whole traceback of an error."""


@dataclasses.dataclass(frozen=True)
class PartitionCommand:
    """Show who gets which samples, without training."""

    data: DataConfig = DataConfig()
    partition: PartitionOptions = PartitionOptions()
    output: PartitionOutput = PartitionOutput()


def run_options(entry: Entry | None) -> type:
    """The dataclass of ``run``: the algorithm's own options first, then the common ones."""
    own = [(entry.name, entry.options, entry.options())] if entry and dataclasses.fields(entry.options) else []
    common = SECTIONS | {"output": OutputOptions}
    parts = [*own, *((name, kind, kind()) for name, kind in common.items())]
    kind = dataclasses.make_dataclass("RunOptions", parts, frozen=True)
    kind.__doc__ = entry.title if entry else ""
    return kind


def parse_run(entry: Entry, tokens: Sequence[str], base: Config, prog: str) -> tuple[Config, OutputOptions]:
    """The configuration and the output options of ``run``; what is not given is as in ``base``."""
    kind = run_options(entry)
    values = {name: getattr(base, name) for name in SECTIONS} | {entry.name: base.options}
    given = {field.name: values.get(field.name, OutputOptions()) for field in dataclasses.fields(kind)}
    found = parse(kind, tokens, prog, (entry.options.__doc__ or entry.title).strip(), default=kind(**given))
    sections = {name: getattr(found, name) for name in SECTIONS}
    return Config(entry.name, getattr(found, entry.name, entry.options()), **sections), found.output


def parse_common(tokens: Sequence[str], base: Config, prog: str, description: str) -> tuple[Config, OutputOptions]:
    """The common options alone, as ``compare`` takes them."""
    kind = run_options(None)
    given = {name: getattr(base, name) for name in SECTIONS}
    found = parse(kind, tokens, prog, description, default=kind(**given))
    return dataclasses.replace(base, **{name: getattr(found, name) for name in SECTIONS}), found.output


def parse_entry(entry: Entry, pairs: Sequence[str], base: Config) -> Config:
    """The configuration of ``ALGORITHM:key=value,...``: own options, and those of the local work."""
    own = [(entry.name, entry.options, entry.options())] if dataclasses.fields(entry.options) else []
    kind = dataclasses.make_dataclass("EntryOptions", [*own, ("training", TrainingConfig, base.training)], frozen=True)
    for pair in pairs:
        if not re.fullmatch(r"\w[\w-]*=.+", pair):
            raise UserError(f"{entry.name}: {pair!r} is no option: write {entry.name}:KEY=VALUE,KEY=VALUE")
    tokens = [part for pair in pairs for part in ("--" + pair).split("=", 1)]
    markers = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff, tyro.conf.DisallowNone)
    try:
        found: Any = parse(kind, tokens, entry.name, "", markers=markers)
    except UserError as error:
        raise UserError(f"{entry.name}: {str(error).replace('--', '')}") from error
    options = getattr(found, entry.name, entry.options())
    return dataclasses.replace(base, algorithm=entry.name, options=options, training=found.training)


def parse(
    kind: type[Parsed], tokens: Sequence[str], prog: str, description: str, *, default: Parsed | None = None,
    markers: Sequence[Any] = MARKERS,
) -> Parsed:  # fmt: skip
    """An instance of a dataclass from the command line; ``--help`` prints and exits.

    Raises:
        UserError: in one line, an unknown option with the nearest name, or a value that does not fit.
    """
    told = io.StringIO()
    keywords: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(told):
            result: Any = tyro.cli(
                kind, prog=prog, description=description, args=list(tokens), return_unknown_args=True, config=markers,
                **keywords,
            )  # fmt: skip
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(one_line(told.getvalue())) from None
    found, unknown = result
    for token in unknown:
        if token.startswith("-"):
            name = token.split("=")[0].replace("_", "-")
            raise UserError(f"unknown option {name}{_hint(name, kind)}")
        raise UserError(f"unexpected argument {token!r}")
    return found


def one_line(box: str) -> str:
    """The message in one of tyro's boxes, without its frame and its hints about help."""
    lines = [line.strip(" │|").strip() for line in box.splitlines()]
    kept: list[str] = []
    for line in lines:
        if line.startswith(("╭", "+-")):
            continue
        if line.startswith(("─", "╰", "Argument helptext", "Got errors")):
            break
        kept.append(line)
    return (" ".join(" ".join(kept).split()) or " ".join(box.split())).removeprefix("Error parsing ")


def _hint(name: str, kind: type) -> str:
    """Where an option belongs that is unknown here, else the nearest one."""
    field = name.lstrip("-").replace("-", "_")
    owners = [entry.name for entry in registry().values() if field in vars(entry.options())]
    if owners:
        return f": it belongs to {', '.join(owners)}"
    if field in SECTION_OF:
        return ": it is the same for all entries, give it after them"
    return nearest(name, option_names(kind))


def option_names(kind: type) -> list[str]:
    """The options of a dataclass of sections, as they are typed."""
    found: list[str] = []
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        default = field.default
        inner = dataclasses.fields(default) if dataclasses.is_dataclass(default) else [field]
        found += ["--" + each.name.replace("_", "-") for each in inner]
    return found


def split_positional(tokens: Sequence[str]) -> tuple[list[str], list[str]]:
    """Positional arguments, and the options with their values, of a command with the common options."""
    fields = [field for kind in (*SECTIONS.values(), OutputOptions) for field in dataclasses.fields(kind)]
    flags = {"help"} | {prefix + field.name for field in fields if field.type == "bool" for prefix in ("", "no_")}
    many = {field.name for field in fields if "tuple" in str(field.type)}
    positional: list[str] = []
    options: list[str] = []
    queue = list(tokens)
    while queue:
        token = queue.pop(0)
        if not token.startswith("-"):
            positional.append(token)
            continue
        options.append(token)
        name = token.lstrip("-").replace("-", "_")
        if "=" in token or name in flags or token == "-h":
            continue
        if queue and not queue[0].startswith("--"):
            options.append(queue.pop(0))
        while name in many and queue and queue[0].isdigit():
            options.append(queue.pop(0))
    return positional, options


def value_of(option: str, tokens: Iterable[str]) -> Path | None:
    """The path behind ``--option`` in the tokens, before they are parsed."""
    queue = list(tokens)
    for place, token in enumerate(queue):
        if token.startswith(f"--{option}="):
            return Path(token.split("=", 1)[1])
        if token == f"--{option}":
            if place + 1 == len(queue) or queue[place + 1].startswith("--"):
                raise UserError(f"--{option} needs a value")
            return Path(queue[place + 1])
    return None
