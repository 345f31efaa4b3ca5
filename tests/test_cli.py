"""The command: end to end on tiny runs, options in any order, every error in one line with nothing written."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from rich.console import Console
from runs import assert_same_run, compilation_cache, quick_report  # noqa: F401

import fedjax_pfl
from fedjax_pfl.algorithms import registry
from fedjax_pfl.data import PARTITIONS, SOURCES
from fedjax_pfl.experiment import arguments, cli, compare, console
from fedjax_pfl.experiment import run as experiment
from fedjax_pfl.experiment.cli import main
from fedjax_pfl.experiment.resuming import stored_summary
from fedjax_pfl.models.registry import MODELS

TINY = ["--clients", "4", "--rounds", "4", "--eval-every", "2", "--hidden", "8", "--checkpoint-seconds", "0"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_report: list[list[Path]]) -> None:  # noqa: F811
    monkeypatch.chdir(tmp_path)


def run(*words: str) -> int:
    return main([part for word in words for part in word.split()])


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.rstrip().splitlines()[-1]


def test_run_writes_a_numbered_folder_and_ends_with_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "fedavg", *TINY]) == 0
    out = capsys.readouterr().out
    assert out.rstrip().splitlines()[-1] == "runs/digits-fedavg-1/report.html"
    for shown in (
        "predicted memory",
        "compiling",
        "round 2/4",
        "round 4/4",
        "rounds/s",
        "weighted mean",
        "client-steps/s",
    ):
        assert shown in out
    assert "command" in (summary := stored_summary(Path("runs/digits-fedavg-1")) or {})
    assert summary["command"] == "fedjax-pfl " + " ".join(["run", "fedavg", *TINY])
    assert main(["run", "fedavg", *TINY]) == 0
    assert last_line(capsys) == "runs/digits-fedavg-2/report.html"
    assert_same_run(Path("runs/digits-fedavg-1"), Path("runs/digits-fedavg-2"))


def test_options_mix_in_any_order_and_a_file_repeats_the_run() -> None:
    assert main(["run", "fedprox", "--mu", "0.3", *TINY, "--out", "one"]) == 0
    underscored = [word.replace("-", "_") if word.startswith("--") else word for word in TINY]
    underscored = [word.replace("__", "--", 1) for word in underscored]
    assert main(["run", "--out=two", *underscored, "fedprox", "--mu=0.3"]) == 0
    assert main(["run", "--config", "one/config.toml", "--out", "three"]) == 0
    for other in ("two", "three"):
        assert Path(other, "config.toml").read_text() == Path("one/config.toml").read_text()
        assert_same_run(Path("one"), Path(other))
    assert main(["run", "--config", "one/config.toml", "--rounds", "2", "--out", "four"]) == 0
    assert (stored_summary(Path("four")) or {})["rounds"] == 2
    assert main(["run", "fedavg", "--config", "one/config.toml"]) == 2


def test_interrupted_it_says_how_to_resume_and_resumes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["run", "fedavg", *TINY, "--out", "whole"]) == 0
    capsys.readouterr()
    update = console.Display.update

    def interrupt(self: console.Display, round_: int, accuracy: console.Accuracy, seconds: float) -> None:
        update(self, round_, accuracy, seconds)
        if round_ == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(console.Display, "update", interrupt)
        assert main(["run", "fedavg", *TINY, "--out", "run"]) == 143
    out = capsys.readouterr().out
    assert "finishing the current rounds" in out
    assert "fedjax-pfl run --resume run" in out
    for given in ("--rounds 9", "--clients 5", "--lr 0.5", "--seed 3", "--model lenet5", "--no-balance --balance"):
        assert run("run --resume run", given) == 2
        error = capsys.readouterr().err
        assert f"{given.split()[-2] if given[-1].isdigit() else given.split('--')[-1].split()[0]}"[-5:] in error
        assert "conflicts with run" in error
    assert run("run --resume run --out other") == 2
    assert "leave out --out" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        taken: list[int | None] = []
        resume = experiment.resume
        patch.setattr(
            experiment, "resume", lambda *a, **k: taken.append(k["prepared"].fed.chunk) or resume(*a, **k)
        )  # fmt: skip
        assert run("run --resume run --rounds 4 --client-chunk 4") == 0
    assert taken == [4]
    assert_same_run(Path("run"), Path("whole"))
    assert run("run --resume run") == 2
    assert "has finished its 4 rounds" in capsys.readouterr().err


def test_without_any_test_sample_there_is_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "fedavg", *TINY, "--test-fraction", "0"]) == 0
    out = capsys.readouterr().out
    assert "no client has test samples: test accuracy is not measured" in out
    assert "weighted mean" not in out


def test_updates_that_are_not_finite_are_told_with_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "fedavg", *TINY, "--lr", "1e30", "--seed", "7"]
    assert main(words) == 1
    error = capsys.readouterr().err
    assert "round 1 is not finite (seed 7;" in error
    assert "round 2 is saved. Run again with a lower --lr, or go on, counting such updates: --resume" in error
    assert main([*words, "--on-nonfinite", "continue"]) == 0
    assert "16 updates were not finite and were left out" in capsys.readouterr().out


def test_compare_gives_one_table_one_report_and_equal_conditions(
    capsys: pytest.CaptureFixture[str],
    quick_report: list[list[Path]],  # noqa: F811
) -> None:
    words = ["compare", "fedavg", "--seeds", "2", *TINY, "fedprox:mu=0.0", "fedavg:lr=0.2", "--out", "c"]
    assert main(words) == 0
    out = capsys.readouterr().out
    names = ["fedavg", "fedprox-mu=0.0", "fedavg-lr=0.2"]
    assert out.rstrip().splitlines()[-1] == "c/report.html"
    assert all(name in out for name in names)
    assert "±" in out
    assert quick_report == [[Path("c", name) for name in names]]
    summaries = [stored_summary(Path("c", name)) or {} for name in names]
    assert len({summary["partition_sha256"] for summary in summaries}) == 1
    starts = {json.loads(line)["accuracy"]["weighted_mean"] for name in names
              for line in Path("c", name, "metrics.jsonl").read_text().splitlines()[:1]}  # fmt: skip
    assert len(starts) == 1, "the same initial model"
    means = [summary["test"]["personal"]["weighted_mean"] for summary in summaries]
    assert means[1] == pytest.approx(means[0]), "mu = 0 is FedAvg"
    assert means[2] != pytest.approx(means[0])
    assert run("report c --out both") == 0
    assert quick_report[-1] == quick_report[0]
    assert run("report c/fedavg") == 0
    assert last_line(capsys) == "c/fedavg/report.html"

    shutil.rmtree("c/fedavg-lr=0.2")
    Path("c/fedprox-mu=0.0/summary.json").unlink()
    assert run("compare --resume c") == 0
    assert "c/fedavg has finished already" in capsys.readouterr().out
    again = [stored_summary(Path("c", name)) or {} for name in names]
    assert [one["test"] for one in again] == [one["test"] for one in summaries]


def test_help_shows_own_options_first_with_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("run fedprox --help") == 0
    out = capsys.readouterr().out
    assert out.index("--mu") < out.index("--data ") < out.index("--rounds") < out.index("--out")
    assert "default: 0.1" in out
    for words in ("--help", "run --help", "compare --help", "list --help", "report --help"):
        assert run(words) == 0
        assert "fedjax-pfl" in capsys.readouterr().out


def test_version_and_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.strip() == f"fedjax-pfl {fedjax_pfl.__version__}"
    known = {"algorithms": registry(), "data": SOURCES, "models": MODELS, "partitions": PARTITIONS}
    for name, entries in known.items():
        assert run("list", name) == 0
        out = capsys.readouterr().out
        assert all(entry in out for entry in entries)


ERRORS = [
    ("rn", "unknown command 'rn': did you mean 'run'?"),
    ("run", "run needs an algorithm: .*fedavg"),
    ("run fedavgg", "unknown algorithm 'fedavgg': did you mean 'fedavg'?"),
    ("run fedavg --roundz 3", "unknown option --roundz: did you mean '--rounds'?"),
    ("run fedavg --eta 3", "unknown option --eta: it belongs to fedapa"),
    ("run fedavg --xyz 3", "unknown option --xyz; known: --data, "),
    ("run fedprox --muu 3", "unknown option --muu: did you mean '--mu'?"),
    ("run fedavg --rounds x", "--rounds: .*'x'"),
    ("run fedavg --rounds", "--rounds"),
    ("run fedavg extra", "unexpected argument 'extra'"),
    ("run fedavg --rounds 0", "rounds must be at least 1, found 0"),
    ("run fedavg --batch-size 0", "batch_size must be at least 1, found 0"),
    ("run fedavg --join-ratio 2", "join ratio must be in"),
    ("run fedavg --dropout 1", "dropout must be in"),
    ("run fedavg --alpha 0", "alpha must be positive"),
    ("run fedavg --optimizer adm", "'adm' .*'sgd', 'adam', 'adamw'"),
    ("run fedrep --optimizer-state keep", "fedrep cannot keep .*--optimizer-state restart"),
    ("compare local fedkd --optimizer-state keep", "fedkd cannot keep"),
    ("run fedavg --data digitz", "unknown data source 'digitz'. Did you mean 'digits'"),
    ("run fedavg --data npz:nothing.npz", "nothing.npz' was not found"),
    ("run fedavg --partition dirichlt", "unknown partition 'dirichlt'. Did you mean 'dirichlet'"),
    ("run fedavg --partition natural", "natural"),
    ("run fedavg --model mlpp", "unknown model 'mlpp'. Did you mean 'mlp'"),
    ("run fedavg --model lenet5", "at least 16 x 16 pixels"),
    ("run fedavg --model fedavg_cnn --hidden 3", "takes no option 'hidden'; its options: activation, pool"),
    ("run fedavg --head foot", "head 'foot' matches no parameter .*dense1/kernel"),
    ("run fedavg --clients 5000", "5000 clients need as many samples"),
    ("run fedavg --min-samples 500", "largest minimum that can be met is 89"),
    ("run fedavg --devices 99", "devices must be 1 to"),
    ("run fedprox --mu -1", "fedprox needs mu >= 0, found -1.0"),
    ("run --config nothing.toml", "there is no configuration nothing.toml"),
    ("run --resume nothing", "cannot resume nothing: there is no such folder"),
    ("run --resume a --config b", "leave out --config"),
    ("compare", "compare needs algorithms"),
    ("compare fedavg fedprx", "unknown algorithm 'fedprx': did you mean 'fedprox'?"),
    ("compare fedavg fedprox:muu=1", "fedprox: unknown option muu: did you mean 'mu'?"),
    ("compare fedavg fedprox:mu=x", "fedprox: .*'x'"),
    ("compare fedavg fedprox:mu", "write fedprox:KEY=VALUE"),
    ("compare fedavg fedprox:rounds=3", "fedprox: unknown option rounds: it is the same for all entries"),
    ("compare fedavg --roundz 3", "did you mean '--rounds'?"),
    ("compare --resume nothing", "holds no comparison"),
    ("list", "list needs one of"),
    ("list modells", "did you mean 'models'?"),
    ("report", "report needs the folder of a run"),
    ("report nothing", "nothing holds no run"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), ERRORS, ids=[words for words, _ in ERRORS])
def test_an_error_is_one_line_and_writes_nothing(
    words: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("error: ")
    assert re.search(message.replace("?", r"\?"), error), error
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ValueError, match="rounds must be at least 1"):
        run("run fedavg --rounds 0 --debug")


def test_a_broken_data_file_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import numpy as np

    x, y = np.ones((30, 4), np.float32), np.arange(30) % 3
    x[3, 2] = np.nan
    np.savez("nan.npz", x=x, y=y)
    np.savez("labels.npz", x=np.ones((30, 4), np.float32), y=y + 1)
    np.savez("empty.npz", x=np.ones((0, 4), np.float32), y=y[:0])
    Path("text.npz").write_text("no arrays")
    for name, message in (
        ("nan", "NaN or infinite"),
        ("labels", "instead of 0..C-1"),
        ("empty", "empty"),
        ("text", "text"),
    ):
        assert run(f"run fedavg --data npz:{name}.npz") == 2
        assert message in capsys.readouterr().err
    assert not Path("runs").exists()


def test_an_existing_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("old").mkdir()
    Path("old/config.toml").write_text("mine")
    Path("file").write_text("mine")
    assert run("run fedavg --out old") == 2
    assert "old already holds a run" in capsys.readouterr().err
    assert run("compare fedavg --out old") == 2
    assert run("run fedavg --out file") == 2
    assert "file is a file" in capsys.readouterr().err
    assert run("run fedavg --out file/below") == 2
    assert "cannot make the folder file/below (Not a directory): give another --out" in capsys.readouterr().err
    assert run("report old --out file") == 2
    assert "file is a file: give a folder with --out" in capsys.readouterr().err
    assert [path.name for path in Path("old").iterdir()] == ["config.toml"]


def test_positional_arguments_are_told_from_values() -> None:
    words = (
        "fedavg --seeds 3 --balance fedapa:eta=1 --hidden 20 10 local --lr=0.1 fedper --momentum -0.5 --no-balance x"
    )
    positional, options = arguments.split_positional(words.split())
    assert positional == ["fedavg", "fedapa:eta=1", "local", "fedper", "x"]
    assert [*positional, *options] != words.split()
    assert sorted([*positional, *options]) == sorted(words.split())


def test_entries_have_names_of_their_own() -> None:
    found = compare.entries(["fedavg", "fedavg", "fedprox:mu=1"], cli.Config())
    assert list(found) == ["fedavg", "fedavg-2", "fedprox-mu=1"]


def test_a_terminal_shows_a_live_bar() -> None:
    with open(os.devnull, "w") as nowhere:
        screen = Console(file=nowhere, force_terminal=True, record=True, width=120)
        display = console.Display(screen)
        assert display.live
        display.start("fedavg", 0, 10)
        display.update(5, console.Accuracy("validation", {"received": 0.25, "personal": 0.5}), 2.0)
        task = display._bar.tasks[0]
        assert task.completed == 5
        assert task.fields["text"] == "validation 0.5000  2.5 rounds/s  2 s left"
        display.stop()
        display.stop()
