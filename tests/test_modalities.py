"""Every kind of data from its file to the results of a run: text, nodes, windows, tables, images."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from runs import quick_report  # noqa: F401

from fedjax_pfl.experiment.cli import main

QUICK = ["--rounds", "2", "--eval-every", "2", "--clients", "3", "--batch-size", "4"]
LINES = "O for a Muse of fire, that would ascend the brightest heaven of invention, a kingdom for a stage. "


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_report: list[list[Path]]) -> None:  # noqa: F811
    monkeypatch.chdir(tmp_path)


def play() -> str:
    Path("play.txt").write_text("\n\n".join(f"{role}:\n{LINES * 9}" for role in ("CHORUS", "KING", "QUEEN")) + "\n")
    return "shakespeare:play.txt,stride=9"


def nodes() -> str:
    rng = np.random.default_rng(0)
    y = np.arange(60) % 3
    x = (rng.random((60, 12)) < 0.2 + 0.5 * (np.arange(12) % 3 == y[:, None])).astype(np.uint8)
    pairs = np.unique(np.sort(rng.integers(0, 60, (150, 2)), axis=1), axis=0)
    np.savez("nodes.npz", x=x, y=y, edges=pairs)
    return "node:nodes.npz"


def windows() -> str:
    rng = np.random.default_rng(0)
    y = np.arange(90) % 3
    x = rng.normal(size=(90, 30, 2)).astype(np.float32) + y[:, None, None]
    np.savez("windows.npz", x=x, y=y, client=np.arange(90) // 30)
    return "npz:windows.npz"


def table() -> str:
    rows = [f"{i % 3 + i / 999:.3f},{i % 5},{'abc'[i % 3]},{i // 30}" for i in range(90)]
    Path("table.csv").write_text("\n".join(["height,width,kind,user", *rows]) + "\n")
    return "csv:table.csv,label=kind,client=user"


def images() -> str:
    rng = np.random.default_rng(0)
    np.savez("images.npz", x=rng.integers(0, 256, (90, 8, 8, 3), dtype=np.uint8), y=np.arange(90) % 3)
    return "npz:images.npz"


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (play, "--model char_lstm --embedding 4 --hidden 8 --partition natural"),
        (nodes, "--model mlp --hidden 8 --alpha 10"),
        (windows, "--model harcnn --hidden 8 4 --partition natural"),
        (table, "--model mlp --hidden 8 --partition natural"),
        (images, "--model resnet8 --width 2 --norm batch --partition feature_shift --groups 2"),
    ],
)
def test_a_run_ends_with_results(make, options: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "fedper", "--data", make(), *QUICK, *options.split(), "--held-out", "1", "--adapt-steps", "2"]
    assert main([*words, "--out", "run"]) == 0
    out = capsys.readouterr().out
    assert "predicted memory" in out
    assert "1 client held out: test accuracy" in out
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["clients"] == 2
    assert 0 <= summary["test"]["personal"]["weighted_mean"] <= 1
    assert summary["unseen"]["clients"] == 1


def test_a_model_of_another_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "fedper", "--data", play(), *QUICK, "--partition", "natural", "--model", "mlp"]) == 2
    assert "model mlp reads array data" in " ".join(capsys.readouterr().err.split())


def test_a_mistyped_model_is_told_before_data_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "fedper", "--data", "npz:absent.npz", "--model", "lenet55"]) == 2
    assert "Did you mean 'lenet5'" in capsys.readouterr().err
