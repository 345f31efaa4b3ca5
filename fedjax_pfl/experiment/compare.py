"""Several algorithms side by side: the same partition, initial model and cohorts, one folder, one report."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_pfl.algorithms import get
from fedjax_pfl.experiment import folder as files
from fedjax_pfl.experiment import toml
from fedjax_pfl.experiment.arguments import parse_entry
from fedjax_pfl.experiment.config import SECTIONS, Config
from fedjax_pfl.experiment.console import Display, Quiet
from fedjax_pfl.experiment.errors import UserError
from fedjax_pfl.experiment.resuming import stored_config, stored_summary
from fedjax_pfl.experiment.run import Prepared, prepare, resume, run_experiment

COMPARE = "compare.toml"


class Comparison(NamedTuple):
    """A comparison that has ended: its folder, (name, summary) of each run, the exit code (see ``Outcome``)."""

    folder: Path
    rows: list[tuple[str, dict[str, Any]]]
    code: int


def entries(specs: Sequence[str], base: Config) -> dict[str, Config]:
    """The configuration of every ``ALGORITHM[:key=value,...]``, by a name that is also its folder's.

    Raises:
        ValueError: an unknown algorithm or option, with the nearest name; a bad value.
    """
    found: dict[str, Config] = {}
    for spec in specs:
        name, _, rest = spec.partition(":")
        config = parse_entry(get(name), [pair for pair in rest.split(",") if pair], base)
        config.check()
        label = unique = re.sub(r"[^A-Za-z0-9._=+-]+", "-", spec)
        number = 2
        while unique in found:
            unique, number = f"{label}-{number}", number + 1
        found[unique] = config
    return found


def compare(
    specs: Sequence[str], base: Config, out: Path | None = None, *, display: Display | None = None, command: str = ""
) -> Comparison:
    """Run every entry with the common options of ``base``, each in a subfolder.

    Raises:
        ValueError: fewer than one entry, or one that cannot be run; nothing has been written then.
    """
    if not specs:
        raise UserError("compare needs algorithms: fedjax-pfl compare fedavg local fedapa:variant=released")
    configs = entries(specs, base)
    if out is not None:
        files.refuse_existing(out)
    prepared = _prepare(configs)
    path = files.create(out, f"{base.data.data.partition(':')[0]}-compare")
    files.write_text(path / COMPARE, _dumps(specs, base))
    return _run(path, prepared, display or Quiet(), command)


def resume_comparison(path: Path, *, display: Display | None = None, command: str = "") -> Comparison:
    """Continue a comparison: what has finished is kept, what was cut short goes on.

    Raises:
        UserError: no comparison there.
    """
    if not (path / COMPARE).exists():
        raise UserError(f"cannot resume {path}: it holds no comparison (no {COMPARE})")
    specs, base = read(path / COMPARE)
    return _run(path, _prepare(entries(specs, base)), display or Quiet(), command)


def read(path: Path) -> tuple[list[str], Config]:
    """The entries and the common options in a ``compare.toml``.

    Raises:
        UserError: it cannot be read, or is no such file.
    """
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    specs = document.pop("entries", None)
    if not isinstance(specs, list) or not all(isinstance(spec, str) for spec in specs):
        raise UserError(f"{path} is no comparison: it needs entries, a list of ALGORITHM[:key=value,...]")
    return specs, toml.from_tables(document, str(path))


def folders(path: Path) -> list[Path]:
    """The runs in a folder: those of a comparison in their order, or the folder itself.

    Raises:
        UserError: no run there.
    """
    if (path / COMPARE).exists():
        specs, base = read(path / COMPARE)
        found = [path / name for name in entries(specs, base) if (path / name / files.CONFIG).exists()]
        if not found:
            raise UserError(f"the comparison in {path} has no run yet")
        return found
    if not (path / files.CONFIG).exists():
        raise UserError(f"{path} holds no run" + ("" if path.is_dir() else ": there is no such folder"))
    return [path]


def _prepare(configs: dict[str, Config]) -> dict[str, Prepared]:
    """All runs, built before the first one starts, on one federation's data."""
    found: dict[str, Prepared] = {}
    for name, config in configs.items():
        found[name] = prepare(config, next(iter(found.values()), None))
    return found


def _run(path: Path, prepared: dict[str, Prepared], display: Display, command: str) -> Comparison:
    rows: list[tuple[str, dict[str, Any]]] = []
    code = 0
    for name in list(prepared):
        one = prepared.pop(name)  # what was compiled for it is freed after it has run
        code = max(code, _run_one(one, path / name, display, command))
        summary = stored_summary(path / name)
        if summary is not None:
            rows.append((name, summary))
        if code >= 128:
            break
    return Comparison(path, rows, code)


def _run_one(prepared: Prepared, path: Path, display: Display, command: str) -> int:
    summary = stored_summary(path)
    if summary is not None and summary.get("status") == "finished":
        display.note(f"{path} has finished already")
        return 0
    if (path / files.CONFIG).exists():
        if stored_config(path) != prepared.config:
            raise UserError(f"cannot resume {path}: its {files.CONFIG} differs from the comparison's")
        outcome = resume(path, display=display, prepared=prepared, command=command)
    else:
        outcome = run_experiment(prepared.config, path, display=display, prepared=prepared, command=command)
    if outcome.problem:
        display.warn(f"{path.name}: {outcome.problem}")
    return outcome.code


def _dumps(specs: Sequence[str], base: Config) -> str:
    return f"entries = {toml.value(list(specs))}\n" + toml.tables({name: getattr(base, name) for name in SECTIONS})
