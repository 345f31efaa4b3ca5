"""``fedjax-pfl partition``, ``--partition-file`` and ``--held-out`` on the command line."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from runs import quick_report  # noqa: F401

from fedjax_pfl.data import Partition, load
from fedjax_pfl.experiment import dealt
from fedjax_pfl.experiment.cli import main

TINY = ["--rounds", "2", "--eval-every", "2", "--hidden", "8"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_report: list[list[Path]]) -> None:  # noqa: F811
    monkeypatch.chdir(tmp_path)


def run(words: str) -> int:
    return main(words.split())


def test_a_partition_is_shown_saved_and_used_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("partition --clients 6 --alpha 0.3 --held-out 2 --partition-seed 4 --out p") == 0
    out = capsys.readouterr().out
    partition = Partition.load("p/partition.npz")
    assert partition.sha256 in out
    assert "held out 1" in out
    assert Path("p/partition.png").stat().st_size > 10_000
    rows = list(csv.DictReader(Path("p/partition.csv").read_text().splitlines()))
    assert [row["held_out"] for row in rows] == ["0"] * 4 + ["1"] * 2
    assert [int(row["train"]) for row in rows[:4]] == partition.sizes("train").tolist()

    assert main(["run", "fedavg", *TINY, "--partition-file", "p/partition.npz", "--out", "a"]) == 0
    assert "2 clients held out: test accuracy" in capsys.readouterr().out
    options = "--clients 6 --alpha 0.3 --held-out 2 --partition-seed 4"
    assert main(["run", "fedavg", *TINY, *options.split(), "--out", "b"]) == 0
    a, b = (json.loads(Path(run, "summary.json").read_text()) for run in "ab")
    assert a["partition_sha256"] == b["partition_sha256"] == partition.sha256
    assert a["test"] == b["test"]
    assert a["unseen"] == b["unseen"]
    assert a["unseen"]["clients"] == 2
    with np.load("a/arrays.npz") as arrays:
        assert arrays["unseen_after"].shape == (1, 2)


def test_a_run_keeps_its_own_partition(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run("partition --clients 4 --partition iid --out p") == 0
    assert main(["run", "fedavg", *TINY, "--partition-file", "p/partition.npz", "--out", "a"]) == 0
    Path("p/partition.npz").rename("elsewhere.npz")
    assert run("run --config a/config.toml --out b") == 0
    a, b = (json.loads(Path(run, "summary.json").read_text()) for run in "ab")
    assert a["test"] == b["test"]
    shutil.copytree("a", "c")
    Path("c/summary.json").unlink()
    shutil.rmtree("c/checkpoints")
    assert run("run --resume c") == 0
    assert json.loads(Path("c/summary.json").read_text())["test"] == a["test"]


def test_without_out_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("partition --clients 70 --partition iid") == 0
    assert "30 more clients are not shown" in capsys.readouterr().out
    assert not list(Path().iterdir())


def test_groups_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("partition --clients 4 --partition label_groups --groups 2") == 0
    assert "group" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("partition --alpha 0", "alpha must be positive"),
        ("partition --rounds 3", "unknown option --rounds"),
        ("partition --partition iid --alpha 0.5", "alpha belongs to dirichlet"),
        ("partition --partition naturall", "Did you mean 'natural'"),
        ("partition --partition natural", "this source has no clients of its own"),
        ("partition --held-out 20", "held_out must leave a client that trains"),
        ("run fedavg --partition-file p.npz --alpha 0.5", "says who has which samples: leave out --alpha"),
        ("run fedavg --partition-file p.npz --clients 3", "leave out --clients"),
        ("run fedavg --partition-file p.npz", "p.npz: no such file: make it, with: fedjax-pfl partition"),
        ("run fedavg --adapt-steps 3", "adapt_steps belongs to held_out"),
        ("partition --alpha x", "--alpha"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told_in_one_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 2
    error = capsys.readouterr().err
    assert message in " ".join(error.split())
    assert error.count("\n") == 1
    assert not list(Path().iterdir())


def test_a_partition_of_other_data_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("partition --clients 4 --out p") == 0
    assert main(["run", "fedavg", "--data", "synthetic", "--partition-file", "p/partition.npz"]) == 2
    assert "is of 1797 samples, the data has 800: it belongs to other data" in " ".join(capsys.readouterr().err.split())


def test_bars_show_what_is_there() -> None:
    assert dealt.bars(np.array([0, 1, 400, 800]), 800) == " ▁▄█"
    assert len(dealt.bars(np.ones(1000, int), 3)) == dealt.MAX_BARS
    assert load("digits").num_classes == 10
