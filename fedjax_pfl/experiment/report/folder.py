"""Reading run folders for a report, with clear errors; nothing is unpickled."""

from __future__ import annotations

import dataclasses
import functools
import json
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.experiment.report.data import FINISHED, Run, labels_of

SHOWN = ("aggregation_weights", "cluster", "embedding", "label_histogram", "path_ends", "topology")


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """Read run folders and label each by its algorithm and what differs among them."""
    runs = [read_run(folder) for folder in folders]
    if not runs:
        raise ValueError("no run folder given: name at least one")
    return [dataclasses.replace(run, label=label) for run, label in zip(runs, labels_of(runs), strict=True)]


def read_run(folder: Path) -> Run:
    """Read one run folder.

    Raises:
        FileNotFoundError: no such folder, or a file that its status says it should have is missing.
        ValueError: a file is damaged; the message names the folder and the file.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such run folder")
    summary = _read(folder, "summary.json", json.loads)
    finished = str(summary.get("status", "")).lower() in FINISHED
    lines = functools.partial(_read, folder, parse=json_lines, optional=not finished)
    return Run(
        folder=folder,
        summary=summary,
        config=_flat(_read(folder, "config.toml", tomllib.loads)),
        environment=_read(folder, "environment.json", json.loads),
        metrics=lines("metrics.jsonl") or [],
        rounds=lines("rounds.jsonl") or [],
        per_client=_arrays(folder, "per_client.npz", optional=not finished),
        arrays=_arrays(folder, "arrays.npz", SHOWN, optional=True),
    )


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _read(folder: Path, name: str, parse: Callable[[str], Any], optional: bool = False) -> Any:
    try:
        return parse((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if optional:
            return None
        raise _missing(folder, name) from error
    except ValueError as error:
        raise ValueError(f"{folder}: {name} is damaged ({error})") from error


def _missing(folder: Path, name: str) -> FileNotFoundError:
    return FileNotFoundError(f"{folder}: {name} is missing: not a run folder, or a run that ended before it wrote it")


def json_lines(text: str) -> list[dict[str, Any]]:
    """One record a line; a last line cut short by a killed process is left out."""
    lines = text.splitlines()
    records = []
    for i, line in enumerate(lines):
        try:
            records.append(json.loads(line))
        except ValueError:
            if i < len(lines) - 1 or text.endswith("\n"):
                raise
    return records


def _arrays(
    folder: Path, name: str, wanted: Sequence[str] | None = None, optional: bool = False
) -> dict[str, np.ndarray]:
    if not (folder / name).exists():
        if optional:
            return {}
        raise _missing(folder, name)
    try:
        with np.load(folder / name, allow_pickle=False) as stored:
            return {key: stored[key] for key in stored.files if wanted is None or key in wanted}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{folder}: {name} is damaged ({error})") from error
