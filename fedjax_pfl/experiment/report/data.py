"""What a report needs to know of one run, and the labels that tell runs apart."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.experiment.plots.style import printable

FINISHED = ("finished", "completed")
RESERVED = ("round", "seed")


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """What one run folder holds."""

    folder: Path
    summary: dict[str, Any]
    config: dict[str, Any]
    """Every setting by its dotted name."""
    environment: dict[str, Any]
    metrics: list[dict[str, Any]]
    rounds: list[dict[str, Any]]
    per_client: dict[str, np.ndarray]
    arrays: dict[str, np.ndarray]
    label: str = ""

    @property
    def algorithm(self) -> str:
        """Name of the algorithm."""
        return str(self.summary.get("algorithm", "?"))

    @property
    def options(self) -> dict[str, Any]:
        """The algorithm's own options."""
        return dict(self.summary.get("options") or {})

    @property
    def seeds(self) -> list[Any]:
        """Seeds of the run."""
        seeds = self.summary.get("seeds")
        return list(seeds) if isinstance(seeds, list) else list(range(int(seeds or 1)))

    @property
    def status(self) -> str:
        """How the run ended: finished, interrupted, nonfinite."""
        return str(self.summary.get("status") or "unknown")

    @property
    def finished(self) -> bool:
        """Whether all rounds were run."""
        return self.status.lower() in FINISHED

    @property
    def clients(self) -> int:
        """Number of clients."""
        return int(self.summary.get("clients") or len(self.per_client.get("samples_train", ())))

    @property
    def dataset_of_client(self) -> list[str]:
        """The data set of each client; empty for a run on a single data set."""
        return list(self.summary.get("dataset_of_client") or ())

    @functools.cached_property
    def names(self) -> list[str]:
        """What a client is called: its data set, with its number where others have it too, else its number."""
        own = self.dataset_of_client
        if not own:
            return [str(i) for i in range(self.clients)]
        count = Counter(own)
        return [name if count[name] == 1 else f"{name} {i}" for i, name in enumerate(own)]

    def setting(self, *names: str) -> Any:
        """The first of these settings that the configuration has, or None."""
        return next((self.config[name] for name in names if self.config.get(name) is not None), None)

    def test(self, kind: str, statistic: str) -> float | None:
        """A headline figure on the test split, or None where the run has none."""
        return number(((self.summary.get("test") or {}).get(kind) or {}).get(statistic))

    def spread(self, kind: str, statistic: str) -> float | None:
        """Its standard deviation over seeds; None with one seed."""
        of_kind = (self.summary.get("test") or {}).get(kind) or {}
        return number((of_kind.get("std_over_seeds") or {}).get(statistic)) if len(self.seeds) > 1 else None

    def of_data_set(self, name: str | None, kind: str, statistic: str) -> float | None:
        """Test accuracy on a data set, or the mean over data sets: ``mean``, or ``std_over_seeds`` of several seeds."""
        if statistic == "std_over_seeds" and len(self.seeds) < 2:
            return None
        found = (self.summary.get("datasets") or {}).get(name) if name else self.summary.get("datasets_mean")
        return number(((found or {}).get(kind) or {}).get(statistic))

    def figure(self, group: str, name: str) -> float | None:
        """An entry of the summary's ``communication``, ``timing`` or ``memory``."""
        return number((self.summary.get(group) or {}).get(name))

    def curve(self, kind: str, split: str = "test") -> tuple[np.ndarray, np.ndarray]:
        """Weighted mean accuracy: evaluated rounds ``(K,)`` and values ``(K, S)``, NaN where absent."""
        chosen = [line for line in self.metrics if line.get("split") == split and line.get("kind") == kind]
        return pivot(chosen, lambda line: (line.get("accuracy") or {}).get("weighted_mean"))

    def diagnostic(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """A scalar of every round: rounds ``(R,)`` and values ``(R, S)``."""
        return pivot(self.rounds, lambda line: line.get(name))

    @functools.cached_property
    def diagnostics(self) -> list[str]:
        """Names of the scalars of the rounds, the loss first."""
        names = dict.fromkeys(name for line in self.rounds for name in line if name not in RESERVED)
        scalar = [name for name in names if any(number(line.get(name)) is not None for line in self.rounds)]
        return sorted(scalar, key=lambda name: name != "loss")

    def clients_at_end(self, kind: str, split: str = "test") -> np.ndarray | None:
        """Accuracy of each client at the last evaluation, mean over seeds: ``(M,)``, NaN without samples."""
        values = self.per_client.get(f"{split}/{kind}/accuracy")
        if values is None or not values.size:
            return None
        last = values[-1]
        present = (~np.isnan(last)).sum(0)
        return np.where(present > 0, np.nansum(last, axis=0) / np.maximum(present, 1), np.nan)

    def floats(self) -> tuple[np.ndarray, np.ndarray]:
        """Floats sent up and down until each round, mean over seeds: rounds ``(R,)``, totals ``(R,)``."""
        rounds, up = self.diagnostic("floats_up")
        _, down = self.diagnostic("floats_down")
        if not len(rounds):
            return rounds, np.zeros(0)
        return rounds, np.cumsum(np.nan_to_num(up).mean(1) + np.nan_to_num(down).mean(1))


def number(value: Any) -> float | None:
    """A finite number as float; anything else is absent."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        return None
    return float(value)


def pivot(lines: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], Any]) -> tuple[np.ndarray, np.ndarray]:
    """Records with ``round`` and ``seed`` as rounds ``(R,)`` and values ``(R, S)``; later records win."""
    rounds = np.array(sorted({line["round"] for line in lines}), float)
    seeds = sorted({line["seed"] for line in lines}, key=str)
    row, column = {r: i for i, r in enumerate(rounds)}, {s: i for i, s in enumerate(seeds)}
    values = np.full((len(rounds), len(seeds)), np.nan)
    for line in lines:
        found = number(value(line))
        if found is not None:
            values[row[line["round"]], column[line["seed"]]] = found
    return rounds, values


def labels_of(runs: Sequence[Run]) -> list[str]:
    """Algorithm plus the options that differ among runs of it; for twins then differing settings, then the folder."""
    told: list[list[str]] = [[] for _ in runs]
    stages: list[Callable[[Run], dict[str, Any]]] = [
        lambda run: run.options,
        lambda run: run.config,
        lambda run: {"folder": run.folder.name},
    ]
    for settings in stages:
        groups: dict[tuple[str, ...], list[int]] = {}
        for i, run in enumerate(runs):
            groups.setdefault((run.algorithm, *told[i]), []).append(i)
        for twins in groups.values():
            for i, words in zip(twins, _differing([settings(runs[i]) for i in twins]), strict=True):
                told[i] += words
    labels = [run.algorithm + (f" ({', '.join(t)})" if t else "") for run, t in zip(runs, told, strict=True)]
    labels = [printable(label, 200) for label in labels]
    return [label if labels.count(label) == 1 else f"{label} #{i + 1}" for i, label in enumerate(labels)]


def _differing(settings: Sequence[dict[str, Any]]) -> list[list[str]]:
    """For each of several settings its ``name=value`` where not all have the same value."""
    names = dict.fromkeys(name for one in settings for name in one)
    differ = [name for name in names if any(one.get(name) != settings[0].get(name) for one in settings)]
    return [[f"{n.rpartition('.')[2]}={_short(one[n])}" for n in differ if n in one] for one in settings]


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
