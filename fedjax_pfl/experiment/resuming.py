"""What must hold before a run is continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedjax_pfl.data import Partition
from fedjax_pfl.experiment import folder as files
from fedjax_pfl.experiment import toml
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.errors import UserError


def stored_config(path: Path) -> Config:
    """The configuration of the unfinished run in a folder.

    Raises:
        UserError: no run there, or one that has finished.
    """
    if not path.is_dir():
        raise UserError(f"cannot resume {path}: there is no such folder")
    if not (path / files.CONFIG).exists():
        raise UserError(f"cannot resume {path}: it holds no run (no {files.CONFIG})")
    summary = stored_summary(path)
    if summary is not None and summary.get("status") == "finished":
        raise UserError(
            f"the run in {path} has finished its {summary['rounds']} rounds: start another with --config "
            f"{path / files.CONFIG} and a new --out. More rounds are another run: schedules depend on their number"
        )
    return toml.read(path / files.CONFIG)


def with_own_partition(config: Config, folder: Path) -> Config:
    """The configuration with the partition that is kept in a run's folder, where its ``partition_file`` is gone."""
    own, file = folder / files.PARTITION, config.data.partition_file
    if file is None or Path(file).exists() or not own.exists():
        return config
    return config.replace(partition_file=str(own))


def stored_summary(path: Path) -> dict[str, Any] | None:
    """The summary in a run's folder; None where there is none that can be read."""
    try:
        return json.loads((path / files.SUMMARY).read_text("utf-8"))
    except (OSError, ValueError):
        return None


def refuse_changes(stored: Config, given: Config, folder: Path, out: Path | None) -> None:
    """A resumed run has the options that it was started with; only what leaves its rounds as they are may differ.

    Raises:
        UserError: naming the option.
    """
    if out is not None:
        raise UserError("--resume writes into the resumed folder: leave out --out")
    free = {"client_chunk", "checkpoint_seconds", "on_nonfinite"}
    before, after = stored.flat() | vars(stored.options), given.flat() | vars(given.options)
    for name in before:
        if before[name] != after[name] and name not in free:
            why = "; schedules depend on the number of rounds" if name == "rounds" else ""
            raise UserError(
                f"--{name.replace('_', '-')} {after[name]} conflicts with {folder}, which was started with "
                f"{before[name]}{why}: leave it out, or start another run with --config {folder / 'config.toml'}"
            )


def check_partition(path: Path, partition: Partition) -> None:
    """Refuse a folder whose clients are not those of the partition that its configuration gives now.

    Raises:
        UserError: the configuration or the data was changed. ValueError: the stored partition is damaged.
    """
    if not (path / files.PARTITION).exists():
        return
    stored = Partition.load(path / files.PARTITION)
    same_data = stored.labels_sha256 == partition.labels_sha256 or not stored.labels_sha256
    if not same_data:
        raise UserError(f"cannot resume {path}: the labels of the data were changed: restore the data")
    if stored.sha256 != partition.sha256:
        raise UserError(
            f"cannot resume {path}: it has {len(stored)} clients with partition {stored.sha256[:12]}, but its "
            f"configuration now gives {len(partition)} clients with partition "
            f"{partition.sha256[:12]}: the configuration or the data was changed: "
            "undo the change, or start another run with --config and a new --out"
        )
