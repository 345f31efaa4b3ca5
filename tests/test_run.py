"""A run and its folder: formats, resuming bit for bit, interruptions, full disks, memory, updates not finite."""

from __future__ import annotations

import csv
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from common import federation
from runs import SignalAt, assert_same_run, assert_same_state, compilation_cache, tiny  # noqa: F401

import fedjax_pfl as fp
from fedjax_pfl.data import Partition
from fedjax_pfl.engine.simulation import Simulation
from fedjax_pfl.experiment import folder as files
from fedjax_pfl.experiment import memory, session, toml
from fedjax_pfl.experiment.errors import UserError
from fedjax_pfl.experiment.resuming import stored_config
from fedjax_pfl.experiment.run import Prepared, prepare, resume, run_experiment
from fedjax_pfl.experiment.session import Outcome


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    """A run whose programs are compiled once; FedAPA has rows, artifacts and no global model."""
    return prepare(tiny("fedapa", seeds=2, join_ratio=0.5, dropout=0.2))


@pytest.fixture(scope="module")
def whole(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run without a break."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    return run_experiment(prepared.config, out, prepared=prepared, command="the command")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_folder_has_its_files_in_their_formats(whole: Outcome, prepared: Prepared) -> None:
    path, partition = whole.folder, prepared.extras.partition
    assert toml.read(path / files.CONFIG) == prepared.config
    assert Partition.load(path / files.PARTITION).sha256 == partition.sha256
    environment = json.loads((path / files.ENVIRONMENT).read_text())
    assert environment["jax"] == jax.__version__
    assert {"python", "jaxlib", "flax", "optax", "numpy", "fedjax_pfl", "device_kind", "x64"} <= environment.keys()
    metrics = rows(path / files.METRICS)
    assert len(metrics) == 4 * 2 * 2 * 2  # evaluations, seeds, splits, kinds (no shared model)
    assert {row["round"] for row in metrics} == {0, 2, 4, 6}
    assert set(metrics[0]) == {"round", "seed", "split", "kind", "accuracy", "loss"}
    assert set(metrics[0]["loss"]) == {"weighted_mean", "uniform_mean", "std", "worst_decile", "min"}
    assert metrics[-1]["loss"]["worst_decile"] >= metrics[-1]["loss"]["uniform_mean"]
    assert metrics[-1]["accuracy"]["worst_decile"] <= metrics[-1]["accuracy"]["uniform_mean"]
    rounds = rows(path / files.ROUNDS)
    assert [(row["round"], row["seed"]) for row in rounds] == [(r, s) for r in range(1, 7) for s in (0, 1)]
    up, down = prepared.algorithm.floats
    assert all(row["trains"] == 2 and row["floats_down"] == 2 * down for row in rounds)
    assert all(row["floats_up"] == row["reported"] * up and row["reported"] <= 2 for row in rounds)
    per_client = files.read_arrays(path / files.PER_CLIENT)
    assert per_client["test/personal/accuracy"].shape == (4, 2, 4)
    assert per_client["test/personal/accuracy"].dtype == np.float32
    assert per_client["rounds"].tolist() == [0, 2, 4, 6]
    assert per_client["samples_test"].tolist() == partition.sizes("test").tolist()
    arrays = files.read_arrays(path / files.ARRAYS)
    assert arrays["aggregation_weights"].shape == (2, 4, 4)
    assert arrays["label_histogram"].sum() == partition.sizes("train").sum()


def test_the_summary_says_what_the_folder_holds(whole: Outcome) -> None:
    path, summary = whole.folder, json.loads((whole.folder / files.SUMMARY).read_text())
    assert summary == whole.summary
    assert summary["status"] == "finished"
    assert summary["command"] == "the command"
    assert summary["algorithm"] == "fedapa"
    assert summary["options"]["variant"] == "descent"
    assert (summary["seeds"], summary["rounds"], summary["clients"]) == ([0, 1], 6, 4)
    assert summary["partition_sha256"] == Partition.load(path / files.PARTITION).sha256
    assert summary["partition_notes"] == list(Partition.load(path / files.PARTITION).notes)
    assert summary["test"]["shared"] is None
    personal, metrics = summary["test"]["personal"], rows(path / files.METRICS)

    def curve(split: str, seed: int) -> list[float]:
        return [
            row["accuracy"]["weighted_mean"] for row in metrics
            if (row["split"], row["kind"], row["seed"]) == (split, "personal", seed)
        ]  # fmt: skip

    test, validation = ([curve(split, seed) for seed in (0, 1)] for split in ("test", "validation"))
    assert personal["per_seed"]["weighted_mean"] == pytest.approx([one[-1] for one in test])
    assert personal["weighted_mean"] == pytest.approx(np.mean([one[-1] for one in test]))
    assert personal["std_over_seeds"]["weighted_mean"] == pytest.approx(np.std([one[-1] for one in test]))
    assert personal["per_seed"]["last_k_mean"] == pytest.approx([np.mean(one[1:]) for one in test])
    best = [int(np.argmax(one)) for one in validation]
    assert personal["per_seed"]["at_best_validation"] == pytest.approx([test[s][best[s]] for s in (0, 1)])
    assert personal["best_validation_round"] == [2 * k for k in best]
    rounds = rows(path / files.ROUNDS)
    assert summary["communication"]["floats_up"] == sum(row["floats_up"] for row in rounds) // 2
    timing = summary["timing"]
    assert {"compile_s", "run_s", "rounds_per_s", "client_steps_per_s", "samples_per_s"} <= timing.keys()
    assert timing["samples_per_s"] > timing["client_steps_per_s"] > timing["rounds_per_s"] > 0
    assert summary["memory"]["peak_bytes"] > 0
    assert summary["memory"]["predicted_bytes"] > 0
    assert "process" in summary["memory"]["peak_source"]


def test_clients_csv_has_the_last_round(whole: Outcome) -> None:
    with open(whole.folder / files.CLIENTS, newline="") as stream:
        table = list(csv.DictReader(stream))
    assert [(row["seed"], row["client"]) for row in table] == [(str(s), str(c)) for s in (0, 1) for c in range(4)]
    last = files.read_arrays(whole.folder / files.PER_CLIENT)["test/personal/accuracy"][-1]
    found = np.array([float(row["test_personal_accuracy"]) for row in table]).reshape(2, 4)
    np.testing.assert_allclose(found, last, atol=1e-6)
    assert all(row["classes"] for row in table)


@pytest.mark.parametrize("round_", [2, 4])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_and_resumed_equals_unbroken_bit_for_bit(
    whole: Outcome, prepared: Prepared, tmp_path: Path, round_: int, number: int, code: int
) -> None:
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    path = tmp_path / "run"
    stopped = run_experiment(prepared.config, path, prepared=prepared, display=SignalAt(round_, number))
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert stopped.code == code
    assert (stopped.summary["status"], stopped.summary["rounds"]) == ("interrupted", round_)
    again = resume(path, prepared=prepared)
    assert again.code == 0
    assert again.summary["status"] == "finished"
    assert again.summary["test"] == whole.summary["test"]
    assert again.summary["communication"] == whole.summary["communication"]
    assert_same_state(again.state, whole.state)
    assert_same_run(path, whole.folder)
    with pytest.raises(UserError, match="has finished its 6 rounds"):
        stored_config(path)


KILLED = """
import os, signal, sys, threading
from pathlib import Path
import jax
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
from fedjax_pfl.experiment.checkpoint import Checkpoints
from fedjax_pfl.experiment.run import run_experiment
from fedjax_pfl.experiment.toml import read
save = Checkpoints.save

def save_and_die(self, state, round_):
    if round_ == 4:
        threading.Timer(float(sys.argv[4]), os.kill, (os.getpid(), signal.SIGKILL)).start()
        while True:  # one write after the other, so that death finds one in the middle
            save(self, state, round_)
    save(self, state, round_)

Checkpoints.save = save_and_die
run_experiment(read(Path(sys.argv[2])), Path(sys.argv[3]))
"""


def test_killed_in_the_middle_of_a_write_it_resumes(
    whole: Outcome,
    prepared: Prepared,
    tmp_path: Path,
    compilation_cache: str,  # noqa: F811
) -> None:
    path = tmp_path / "run"
    arguments = [compilation_cache, str(whole.folder / files.CONFIG), str(path), "0.15"]
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (path / files.SUMMARY).exists()
    with open(path / files.METRICS, "a") as stream:
        stream.write('{"round": 6, "seed": 0, "spl')  # a line cut short
    again = resume(path, prepared=prepared)
    assert_same_state(again.state, whole.state)
    assert_same_run(path, whole.folder)


def test_without_a_checkpoint_a_resumed_run_starts_again(whole: Outcome, prepared: Prepared, tmp_path: Path) -> None:
    path = tmp_path / "run"
    stopped = run_experiment(prepared.config, path, prepared=prepared, display=SignalAt(0))
    assert stopped.summary["rounds"] == 0
    assert not (path / files.CHECKPOINTS).exists()
    assert_same_state(resume(path, prepared=prepared).state, whole.state)
    assert_same_run(path, whole.folder)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    whole: Outcome, prepared: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    run_experiment(prepared.config, path, prepared=prepared, display=SignalAt(4))
    for file in (path / files.CHECKPOINTS / "4" / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    again = resume(path, prepared=prepared)
    assert "the checkpoint of round 4" in " ".join(capsys.readouterr().out.split())
    assert_same_state(again.state, whole.state)
    assert_same_run(path, whole.folder)


def test_what_is_no_unfinished_run_of_this_kind_is_refused(prepared: Prepared, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        resume(tmp_path / "nothing")
    with pytest.raises(UserError, match="holds no run"):
        resume(tmp_path)
    path = tmp_path / "run"
    run_experiment(prepared.config, path, prepared=prepared, display=SignalAt(2))
    config = (path / files.CONFIG).read_text()
    (path / files.CONFIG).write_text(config.replace("clients = 4", "clients = 5"))
    with pytest.raises(UserError, match=r"it has 4 clients .* now gives 5 clients"):
        resume(path)
    (path / files.CONFIG).write_text(config.replace("lr = 0.05", "lr = 0.01"))
    with pytest.raises(UserError, match="another run: their configuration differs"):
        resume(path)
    (path / files.CONFIG).write_text(config)
    (path / files.PARTITION).write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"partition\.npz"):
        resume(path, prepared=prepared)


def test_a_folder_that_holds_a_run_is_left_alone(whole: Outcome, prepared: Prepared) -> None:
    before = {file: file.read_bytes() for file in whole.folder.rglob("*") if file.is_file()}
    with pytest.raises(UserError, match="already holds a run: continue it with --resume"):
        run_experiment(prepared.config, whole.folder, prepared=prepared)
    assert {file: file.read_bytes() for file in whole.folder.rglob("*") if file.is_file()} == before


def test_a_full_disk_keeps_the_last_checkpoint(
    whole: Outcome, prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "run", files.write_bytes
    calls: list[Path] = []

    def full(target: Path, content: bytes) -> None:
        if target.name == files.PER_CLIENT:
            calls.append(target)
            if len(calls) == 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(target, content)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_bytes", full)
        with pytest.raises(UserError, match=r"disk of .*run is full; the checkpoint of round 2 is kept") as caught:
            run_experiment(prepared.config, path, prepared=prepared)
    assert caught.value.code == 1
    assert_same_state(resume(path, prepared=prepared).state, whole.state)
    assert_same_run(path, whole.folder)


def test_out_of_memory_becomes_advice(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **keywords: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes.")

    monkeypatch.setattr(session.simulate, "run", fail)
    with pytest.raises(UserError, match="out of memory: set --client-chunk below 2, or fewer --seeds"):
        run_experiment(prepared.config, tmp_path / "run", prepared=prepared)


def test_predicted_memory_is_of_the_right_size(whole: Outcome, prepared: Prepared) -> None:
    compiled = sum(prepared.simulation.memory().values())
    predicted = memory.predicted_bytes(prepared.simulation)
    assert compiled / 10 < predicted.total < compiled * 10
    assert predicted.data == sum(leaf.nbytes for leaf in jax.tree.leaves(prepared.fed.data))


def test_predicted_memory_counts_every_model_that_is_trained() -> None:
    fed = federation()
    ditto, fedavg = (Simulation(fed, fp.build(name, fed), rounds=1) for name in ("ditto", "fedavg"))
    assert memory.predicted_bytes(ditto).chunk == 2 * memory.predicted_bytes(fedavg).chunk


def test_an_update_that_is_not_finite_stops_the_run_with_a_sound_state(tmp_path: Path) -> None:
    out = run_experiment(tiny("fedavg", lr=1e38), tmp_path / "run")
    assert out.code == 1
    assert out.problem is not None
    assert "round 1 is not finite" in out.problem
    assert out.summary["status"] == "nonfinite"
    assert out.summary["rounds"] == 2
    assert out.summary["failures"][0]["round"] == 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(out.state))
    assert (tmp_path / "run" / files.CHECKPOINTS / "2").is_dir()
    on = run_experiment(tiny("fedavg", lr=1e38, on_nonfinite="continue"), tmp_path / "on")
    assert (on.code, on.problem, on.summary["rounds"]) == (0, None, 6)
    assert on.summary["failed_updates"] > len(on.summary["failures"]) > 0


def test_the_communication_to_a_target_is_what_was_sent_until_then(tmp_path: Path) -> None:
    target = 0.2
    out = run_experiment(tiny(seeds=2, dropout=0.3, target_accuracy=target), tmp_path / "run")
    metrics, rounds = (rows(tmp_path / "run" / name) for name in (files.METRICS, files.ROUNDS))
    for place, seed in enumerate((0, 1)):
        test = [m for m in metrics if (m["seed"], m["split"], m["kind"]) == (seed, "test", "shared")]
        reached = [m["round"] for m in test if m["accuracy"]["weighted_mean"] >= target]
        found = out.summary["target"]["shared"]
        assert found["rounds"][place] == (reached[0] if reached else None)
        sent = sum(r["floats_up"] + r["floats_down"] for r in rounds if r["seed"] == seed and r["round"] <= reached[0])
        assert found["floats"][place] == sent > 0
    never = run_experiment(tiny(rounds=2, target_accuracy=1.0), tmp_path / "never")
    assert never.summary["target"]["personal"] == {"rounds": [None], "floats": [None]}
    with pytest.raises(ValueError, match="target_accuracy must lie in"):
        tiny(target_accuracy=1.5)


def test_absent_measurements_are_null_and_blank(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(41, 5)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(41) % 3, client=np.minimum(np.arange(41) // 10, 4))
    data = {"data": f"npz:{tmp_path / 'data.npz'}", "partition": "natural", "clients": None, "min_samples": 1}
    out = run_experiment(tiny(**data, validation_fraction=0.0), tmp_path / "run")
    assert out.summary["clients"] == 5
    assert out.summary["clients_without_test_samples"] == 1
    assert out.summary["test"]["personal"]["at_best_validation"] is None
    assert out.summary["test"]["personal"]["best_validation_round"] is None
    text = (tmp_path / "run" / files.METRICS).read_text()
    assert "NaN" not in text
    assert '"validation"' not in text
    with open(tmp_path / "run" / files.CLIENTS, newline="") as stream:
        table = list(csv.DictReader(stream))
    assert [row["test_personal_accuracy"] == "" for row in table] == [False] * 4 + [True]
    assert np.isnan(files.read_arrays(tmp_path / "run" / files.PER_CLIENT)["test/personal/accuracy"][:, :, 4]).all()


@pytest.mark.parametrize("changes", [{"lr_schedule": "cosine", "optimizer": "adam"}, {"devices": 3}])
def test_other_ways_to_train_run_and_resume(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = tiny(**changes)
    prepared = prepare(config)
    whole = run_experiment(config, tmp_path / "whole", prepared=prepared)
    run_experiment(config, tmp_path / "run", prepared=prepared, display=SignalAt(4))
    assert_same_state(resume(tmp_path / "run", prepared=prepared).state, whole.state)
    if "devices" in changes:
        one = run_experiment(tiny(), tmp_path / "one")
        kinds = ("test/personal/loss", "test/received/loss")
        a, b = (files.read_arrays(path / files.PER_CLIENT) for path in (whole.folder, one.folder))
        for kind in kinds:
            np.testing.assert_allclose(a[kind], b[kind], rtol=1e-3, atol=1e-4)


def test_the_report_can_be_written_of_a_finished_and_an_interrupted_run(
    whole: Outcome, prepared: Prepared, tmp_path: Path
) -> None:
    report = pytest.importorskip("fedjax_pfl.experiment.report")
    run_experiment(prepared.config, tmp_path / "run", prepared=prepared, display=SignalAt(2))
    path = report.write_report([whole.folder, tmp_path / "run"], tmp_path / "both", "the command")
    assert path.parent == tmp_path / "both"
    assert "the command" in path.read_text()
