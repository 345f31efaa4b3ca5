"""What the tests of runs share: a tiny configuration, a compilation cache, a report that is quick to write."""

from __future__ import annotations

import os
import signal
import sys
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache as cache

from fedjax_pfl.experiment.config import Config, configure
from fedjax_pfl.experiment.console import Accuracy, Quiet

TINY = {"clients": 4, "rounds": 6, "eval_every": 2, "hidden": (8,), "checkpoint_seconds": 0.0}
CACHE_OPTIONS = {
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def tiny(algorithm: str = "fedavg", options: dict[str, Any] | None = None, **changes: Any) -> Config:
    """Four clients of digits, six rounds, three evaluations after the first, a checkpoint at each."""
    return configure(algorithm, options, **(TINY | changes))


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory: pytest.TempPathFactory):
    """Compile each program once for all tests of a file."""
    before = {name: getattr(jax.config, name) for name in CACHE_OPTIONS}
    folder = str(tmp_path_factory.mktemp("compiled"))
    for name, value in (CACHE_OPTIONS | {"jax_compilation_cache_dir": folder}).items():
        jax.config.update(name, value)
    cache.reset_cache()
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)
    cache.reset_cache()


@pytest.fixture
def quick_report(monkeypatch: pytest.MonkeyPatch) -> list[list[Path]]:
    """A report that is one line of text; the list gains the folders of each that is written."""
    written: list[list[Path]] = []

    def write_report(folders: list[Path], out: Path, command: str) -> Path:
        written.append(list(folders))
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.html").write_text(command)
        return out / "report.html"

    module = types.ModuleType("fedjax_pfl.experiment.report")
    module.write_report = write_report
    monkeypatch.setitem(sys.modules, "fedjax_pfl.experiment.report", module)
    return written


class SignalAt(Quiet):
    """A display that sends this process a signal when a round is shown."""

    def __init__(self, round_: int, number: int = signal.SIGINT) -> None:
        super().__init__()
        self.round, self.number = round_, number

    def update(self, round_: int, accuracy: Accuracy, seconds: float) -> None:
        if round_ == self.round:
            os.kill(os.getpid(), self.number)


def assert_same_run(one: Path, two: Path) -> None:
    """What two folders have recorded is equal bit for bit."""
    for name in ("metrics.jsonl", "rounds.jsonl", "clients.csv"):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    for name in ("per_client.npz", "arrays.npz"):
        with np.load(one / name) as a, np.load(two / name) as b:
            assert a.files == b.files
            for key in a.files:
                np.testing.assert_array_equal(a[key], b[key], err_msg=f"{name}: {key}")


def assert_same_state(one: Any, two: Any) -> None:
    """Two states are equal bit for bit."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(a, b)
