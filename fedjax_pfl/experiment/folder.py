"""A run is a folder: its files, written whole or appended line by line, never as pickles.

config.toml         the complete configuration; ``fedjax-pfl run --config`` repeats the run
environment.json    versions, platform, devices
partition.npz       which client has which samples
metrics.jsonl       a line for every (evaluation, seed, split, kind): ``round`` (rounds done), ``seed``, ``split``,
                    ``kind``, and ``accuracy`` and ``loss``, each with ``weighted_mean``, ``uniform_mean``, ``std``,
                    ``worst_decile`` and ``min`` over clients
rounds.jsonl        a line for every (round, seed): ``round`` (counted from 1), ``seed``, ``loss`` and the algorithm's
                    other scalars, ``trains`` and ``reported`` (numbers of clients), ``failed`` (clients),
                    ``floats_up`` and ``floats_down``
per_client.npz      ``rounds`` (K,), ``seeds`` (S,), ``samples_train|validation|test`` (M,), and
                    ``<split>/<kind>/accuracy|loss`` (K, S, M), NaN where a client has no samples
clients.csv         a row for every (seed, client) after the last round
arrays.npz          what the algorithm shows of its last state, leaves (S, ...), ``label_histogram`` (M, C), and where
                    clients were held out ``unseen_before|after`` (S, H), their test accuracy
summary.json        the results; on several data sets also ``dataset_of_client``, ``datasets`` (test accuracy by data
                    set and kind) and ``datasets_mean`` (the uniform mean over them)
checkpoints/        the last two states
report.html         the report; its figures as PNG are in figures/

An absent number is null in JSON, NaN in arrays, blank in tables; never 0.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.experiment.errors import UserError

CONFIG, ENVIRONMENT, PARTITION = "config.toml", "environment.json", "partition.npz"
METRICS, ROUNDS, PER_CLIENT = "metrics.jsonl", "rounds.jsonl", "per_client.npz"
CLIENTS, ARRAYS, SUMMARY, CHECKPOINTS = "clients.csv", "arrays.npz", "summary.json", "checkpoints"


def holds_run(path: Path) -> bool:
    """Whether a folder holds a run (or what is left of one), or a comparison."""
    return any((path / name).exists() for name in (CONFIG, METRICS, SUMMARY, CHECKPOINTS, "compare.toml"))


def refuse_file(path: Path, option: str = "--out") -> None:
    """Refuse an output folder that is a file.

    Raises:
        UserError: naming the option.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file: give a folder with {option}")


def refuse_existing(path: Path, option: str = "--out") -> None:
    """Refuse an output folder that cannot be one, without writing anything.

    Raises:
        UserError: it holds a run already, or is a file.
    """
    refuse_file(path, option)
    if path.is_dir() and holds_run(path):
        raise UserError(f"{path} already holds a run: continue it with --resume {path}, or give another {option}")


def create(path: Path | None, stem: str) -> Path:
    """Make the folder of a run: the given one, or ``runs/STEM-N`` with the first number that is free.

    Raises:
        UserError: it holds a run already, or cannot be made.
    """
    if path is not None:
        refuse_existing(path)
    try:
        return _make(path, stem)
    except OSError as error:
        where = "runs" if path is None else path
        raise UserError(f"cannot make the folder {where} ({error.strerror}): give another --out") from error


def _make(path: Path | None, stem: str) -> Path:
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
        return path
    number = 1
    while True:
        try:
            (found := Path("runs") / f"{stem}-{number}").mkdir(parents=True)
            return found
        except FileExistsError:
            number += 1


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file whole or not at all; absent numbers become null."""
    write_text(path, json.dumps(plain(content), indent=2, allow_nan=False) + "\n")


def write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write an npz file whole or not at all."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    write_bytes(path, buffer.getvalue())


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an npz file, without pickles."""
    with np.load(path, allow_pickle=False) as found:
        return {name: found[name] for name in found.files}


def append_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append JSON objects, a line each."""
    text = "".join(json.dumps(plain(row), allow_nan=False) + "\n" for row in rows)
    with open(path, "a", encoding="utf-8") as stream:
        stream.write(text)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that ``append_rows`` wrote, up to the first line that a crash left unfinished."""
    rows: list[dict[str, Any]] = []
    if not path.exists():
        return rows
    for line in path.read_text("utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def plain(value: Any) -> Any:
    """The value in Python's own types, NaN and infinity as None."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def disk_full(error: BaseException) -> bool:
    """Whether an error says that the disk, or the quota on it, is full."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return full or "no space left on device" in str(error).lower()
