"""What a run has measured so far: kept in memory, written as it grows, read back when the run is resumed."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.data import Partition, Source
from fedjax_pfl.data.clients import SPLITS
from fedjax_pfl.engine.rounds import Info, floats_sent
from fedjax_pfl.engine.simulation import Record
from fedjax_pfl.evaluation import EVALUATED, KINDS, Scores, summary
from fedjax_pfl.experiment import folder as files

MEASURES = ("accuracy", "loss")


class Recorder:
    """Evaluations and rounds of one run.

    floats: what one participant uploads and downloads in a round.
    """

    def __init__(self, path: Path, seeds: list[int], partition: Partition, floats: tuple[int, int]) -> None:
        self.path, self.seeds, self.floats = path, seeds, floats
        self.samples = {split: partition.sizes(split) for split in SPLITS}
        self.records: list[Record] = []
        self.rounds: list[dict[str, Any]] = []

    def add_rounds(self, first: int, info: Info) -> None:
        """Diagnostics of the rounds from number ``first`` (counted from 0) on, leaves ``(seeds, rounds, ...)``."""
        if not info:
            return
        seeds, count = info["loss"].shape
        rows = [self._round_row(first, info, s, r) for r in range(count) for s in range(seeds)]
        self.rounds += rows
        files.append_rows(self.path / files.ROUNDS, rows)

    def add_evaluation(self, record: Record) -> None:
        """One evaluation of all clients."""
        self.records.append(record)
        files.append_rows(self.path / files.METRICS, self._metric_rows(record))

    def save_arrays(self) -> None:
        """Write ``per_client.npz`` with all evaluations so far."""
        files.write_arrays(self.path / files.PER_CLIENT, self.arrays())

    def arrays(self) -> dict[str, np.ndarray]:
        """The content of ``per_client.npz``."""
        arrays = {"rounds": np.array([one.round for one in self.records], np.int64), "seeds": np.array(self.seeds)}
        arrays |= {f"samples_{split}": sizes for split, sizes in self.samples.items()}
        for split, kind, measure in self.measured():
            arrays[f"{split}/{kind}/{measure}"] = self.curves(split, kind, measure)
        return arrays

    def measured(self) -> Iterator[tuple[str, str, str]]:
        """The (split, kind, measure) that this run has."""
        for split, kinds in self.records[-1].scores.items() if self.records else ():
            for kind in kinds:
                yield from ((split, kind, measure) for measure in MEASURES)

    def curves(self, split: str, kind: str, measure: str) -> np.ndarray:
        """One measure of every client at every evaluation: ``(K, S, M)`` float32."""
        return np.stack([getattr(one.scores[split][kind], measure) for one in self.records]).astype(np.float32)

    def restore(self, round_: int) -> None:
        """Take up what was recorded up to ``round_`` rounds and drop, also from the files, what came later."""
        metrics = [row for row in files.read_rows(self.path / files.METRICS) if row["round"] <= round_]
        self.rounds = [row for row in files.read_rows(self.path / files.ROUNDS) if row["round"] <= round_]
        arrays = files.read_arrays(self.path / files.PER_CLIENT)
        for k in np.flatnonzero(arrays["rounds"] <= round_):
            scores: dict[str, dict[str, Scores]] = {}
            for name in (name for name in arrays if name.endswith("/accuracy")):
                split, kind, _ = name.split("/")
                scores.setdefault(split, {})[kind] = Scores(arrays[name][k], arrays[f"{split}/{kind}/loss"][k])
            self.records.append(Record(int(arrays["rounds"][k]), scores))
        self._rewrite(files.METRICS, metrics)
        self._rewrite(files.ROUNDS, self.rounds)

    def forget(self) -> None:
        """Drop what files of an earlier start hold, of which no state was saved."""
        for name in (files.METRICS, files.ROUNDS, files.PER_CLIENT):
            (self.path / name).unlink(missing_ok=True)

    def write_clients(self, partition: Partition, source: Source) -> None:
        """Write ``clients.csv``: every client of every seed at the last evaluation."""
        last, table = self.records[-1], partition.table(source.y)
        pairs = ((split, kind) for split in EVALUATED for kind in KINDS)
        columns = [(split, kind) for split, kind in pairs if kind in last.scores.get(split, {})]
        head = ["seed", "client", *(f"samples_{split}" for split in SPLITS), "classes"]
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([*head, *(f"{split}_{kind}_accuracy" for split, kind in columns)])
        for s, seed in enumerate(self.seeds):
            for row in table:
                accuracy = [last.scores[split][kind].accuracy[s, row["client"]] for split, kind in columns]
                shown = ["" if np.isnan(value) else f"{value:.6f}" for value in accuracy]
                classes = " ".join(map(str, row["classes"]))
                writer.writerow([seed, row["client"], *(row[split] for split in SPLITS), classes, *shown])
        files.write_text(self.path / files.CLIENTS, out.getvalue())

    def _rewrite(self, name: str, rows: list[dict[str, Any]]) -> None:
        partial = self.path / f"{name}.partial"
        partial.unlink(missing_ok=True)
        files.append_rows(partial, rows)
        partial.replace(self.path / name)

    def _round_row(self, first: int, info: Info, s: int, r: int) -> dict[str, Any]:
        one = {name: value[s, r] for name, value in info.items()}
        trains, reported = int(one["trains"].sum()), int(one["reported"].sum())
        scalars = {name: value for name, value in one.items() if value.ndim == 0}
        return {"round": first + r + 1, "seed": self.seeds[s]} | files.plain(scalars) | {
            "trains": trains, "reported": reported, "failed": np.flatnonzero(info["failed"][s, r]).tolist(),
            **{name: int(value) for name, value in floats_sent(one, self.floats).items()},
        }  # fmt: skip

    def _metric_rows(self, record: Record) -> Iterator[dict[str, Any]]:
        for s, seed in enumerate(self.seeds):
            for split in EVALUATED:
                for kind in (kind for kind in KINDS if kind in record.scores.get(split, {})):
                    scores, samples = record.scores[split][kind], self.samples[split]
                    yield {
                        "round": record.round, "seed": seed, "split": split, "kind": kind,
                        "accuracy": over_clients(scores.accuracy[s], samples),
                        "loss": over_clients(scores.loss[s], samples, worst_is_high=True),
                    }  # fmt: skip


def over_clients(values: np.ndarray, samples: np.ndarray, worst_is_high: bool = False) -> dict[str, float]:
    """Summaries of one measure over clients; the worst decile of a loss is its highest tenth."""
    found = summary(values.astype(np.float64), samples)
    found.pop("clients_without_samples")
    if worst_is_high:
        found["worst_decile"] = -summary(-values.astype(np.float64), samples)["worst_decile"]
    return found
