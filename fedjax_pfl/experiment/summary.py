"""The results of a run as one dictionary: ``summary.json``."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from fedjax_pfl.data import Partition, Source
from fedjax_pfl.evaluation import KINDS, mean_over_clients
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.record import Recorder, over_clients

STATISTICS = ("weighted_mean", "uniform_mean", "std", "worst_decile", "min")
MOST_FAILURES = 20
HEADLINES = (*STATISTICS, "last_k_mean", "at_best_validation")


def results(
    config: Config, recorder: Recorder, source: Source | None = None, partition: Partition | None = None
) -> dict[str, Any]:
    """What the evaluations and the rounds say; the parts on time and memory come from the run itself.

    source, partition: what the run is on, for the accuracy by data set.
    """
    return {
        "algorithm": config.algorithm,
        "options": dataclasses.asdict(config.options),
        "seeds": recorder.seeds,
        "rounds": recorder.records[-1].round,
        "rounds_planned": config.rounds.rounds,
        "clients": len(recorder.samples["train"]),
        "clients_without_test_samples": int((recorder.samples["test"] == 0).sum()),
        "last_k": len(last_evaluations(recorder, config.rounds.last_k)),
        "test": {kind: accuracy_of(recorder, kind, config.rounds.last_k) for kind in KINDS},
        **by_data_set(recorder, source, partition),
        "communication": communication(recorder),
        "target": target(recorder, config.rounds.target_accuracy),
        "failures": failures(recorder)[:MOST_FAILURES],
        "failed_updates": len(failures(recorder)),
    }


def accuracy_of(recorder: Recorder, kind: str, last_k: int) -> dict[str, Any] | None:
    """Test accuracy of one kind of model: the last round, the mean of the last evaluations, and the round that is best
    on validation; means over seeds, ``per_seed`` lists, ``std_over_seeds`` (of the population). None where absent.
    """
    if kind not in recorder.records[-1].scores.get("test", {}):
        return None
    samples = recorder.samples["test"]
    last = recorder.records[-1].scores["test"][kind].accuracy
    per_seed = [over_clients(one, samples) for one in last]
    curve = mean_over_clients(recorder.curves("test", kind, "accuracy").astype(np.float64), samples)
    best = best_round(recorder, kind)
    for s, one in enumerate(per_seed):
        one["last_k_mean"] = float(curve[last_evaluations(recorder, last_k), s].mean())
        one["at_best_validation"] = float("nan") if best is None else float(curve[best[s], s])
    lists = {name: [one[name] for one in per_seed] for name in HEADLINES}
    found: dict[str, Any] = {name: float(np.mean(values)) for name, values in lists.items()}
    found["per_seed"] = lists
    found["std_over_seeds"] = {name: float(np.std(values)) for name, values in lists.items()}
    found["best_validation_round"] = None if best is None else [recorder.records[k].round for k in best]
    return found


def by_data_set(recorder: Recorder, source: Source | None, partition: Partition | None) -> dict[str, Any]:
    """Test accuracy after the last round by data set; nothing where the source is a single one.

    ``dataset_of_client``: the name of the data set that a client has samples of. ``datasets``: ``name -> kind -> {mean,
    std_over_seeds, per_seed}``, the mean over the data set's clients weighted by their test samples. ``datasets_mean``:
    ``kind -> ...``, the uniform mean over the data sets that have test samples.
    """
    if source is None or partition is None or source.dataset is None or len(source.datasets) < 2:
        return {}
    number = np.array([source.dataset[rows[0]] for rows in partition.samples_of_clients()])
    found: dict[str, Any] = {name: {} for name in source.datasets}
    mean: dict[str, Any] = {}
    for kind, scores in recorder.records[-1].scores.get("test", {}).items():
        weights = [np.where(number == i, recorder.samples["test"], 0) for i in range(len(found))]
        each = np.stack([mean_over_clients(np.asarray(scores.accuracy, np.float64), w) for w in weights])  # (D, S)
        for name, values in zip(found, each, strict=True):
            found[name][kind] = _over_seeds(values)
        measured = ~np.isnan(each).all(1)
        mean[kind] = _over_seeds(each[measured].mean(0) if measured.any() else each[0])
    return {"dataset_of_client": [source.datasets[i] for i in number], "datasets": found, "datasets_mean": mean}


def _over_seeds(values: np.ndarray) -> dict[str, Any]:
    return {"mean": float(values.mean()), "std_over_seeds": float(values.std()), "per_seed": values.tolist()}


def last_evaluations(recorder: Recorder, last_k: int) -> list[int]:
    """The last ``last_k`` evaluations, that of the untrained model left out where there is another."""
    trained = [k for k, record in enumerate(recorder.records) if record.round > 0]
    return trained[-last_k:] or [0]


def best_round(recorder: Recorder, kind: str) -> list[int] | None:
    """For every seed the first evaluation with the best validation accuracy (weighted mean); None without any."""
    if kind not in recorder.records[-1].scores.get("validation", {}):
        return None
    curves = recorder.curves("validation", kind, "accuracy").astype(np.float64)
    return [int(k) for k in mean_over_clients(curves, recorder.samples["validation"]).argmax(0)]


def communication(recorder: Recorder) -> dict[str, int]:
    """Floats sent in all rounds, the mean over seeds (Python integers: they outgrow 32 bits)."""
    seeds = len(recorder.seeds)
    return {name: sum(row[name] for row in recorder.rounds) // seeds for name in ("floats_up", "floats_down")}


def target(recorder: Recorder, accuracy: float | None) -> dict[str, Any] | None:
    """Total communication to a target test accuracy (weighted mean over clients) of each kind of model.

    ``rounds`` and ``floats`` (up and down, of all participants) until the first evaluation that reaches it, a list over
    seeds with None where it was not reached; None without a target.
    """
    if accuracy is None:
        return None
    found: dict[str, Any] = {"accuracy": accuracy}
    for kind in recorder.records[-1].scores.get("test", {}):
        curve = mean_over_clients(
            recorder.curves("test", kind, "accuracy").astype(np.float64), recorder.samples["test"]
        )
        at = [
            next((r.round for r, ok in zip(recorder.records, one >= accuracy, strict=True) if ok), None)
            for one in curve.T
        ]
        found[kind] = {
            "rounds": at,
            "floats": [_floats_until(recorder, s, r) for s, r in zip(recorder.seeds, at, strict=True)],
        }
    return found


def _floats_until(recorder: Recorder, seed: int, last: int | None) -> int | None:
    if last is None:
        return None
    rows = [row for row in recorder.rounds if row["seed"] == seed and row["round"] <= last]
    return sum(row["floats_up"] + row["floats_down"] for row in rows)


def failures(recorder: Recorder) -> list[dict[str, int]]:
    """Updates that were not finite: seed, round (counted from 1), client."""
    return [
        {"seed": row["seed"], "round": row["round"], "client": client}
        for row in recorder.rounds
        for client in row["failed"]
    ]
