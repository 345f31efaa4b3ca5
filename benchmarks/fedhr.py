"""FedHR, its controls and baselines: global accuracy (GA), personal accuracy (PA), total communication (TCC).

    python benchmarks/fedhr.py --data digits --out runs/fedhr-digits
    FEDJAX_PFL_DATA=DIR python benchmarks/fedhr.py --data uci_har mnist --out runs/fedhr

Every data set is one ``fedjax-pfl compare`` (the command is printed), continued where it stopped; five seeds at once. A
line gives PA and GA at the last round, PA as received, validation accuracy of the received models (by which a strength
would be chosen), and floats until PA reaches the target.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from fedjax_pfl.experiment import compare
from fedjax_pfl.experiment.cli import keep_programs
from fedjax_pfl.experiment.cli import main as command_line
from fedjax_pfl.experiment.report.folder import json_lines

SETTINGS = {
    "digits": "--clients 20 --rounds 50 --target-accuracy 0.94",
    "mnist": "--clients 100 --join-ratio 0.1 --rounds 30 --batch-size 32 --lr 0.1 --eval-every 10 "
    "--target-accuracy 0.85",
    "uci_har": "--partition natural --rounds 20 --batch-size 32 --lr 0.05 --eval-every 5 --target-accuracy 0.65",
    "cifar10": "--samples 10000 --partition pathological --clients 100 --join-ratio 0.1 --rounds 40 --model lenet5 "
    "--batch-size 32 --lr 0.1 --eval-every 20 --target-accuracy 0.7",
    "shakespeare": "--partition natural --model char_lstm --hidden 32 --join-ratio 0.25 --rounds 20 --lr 1.0 "
    "--eval-every 5 --target-accuracy 0.25",
}
SOURCES = {"shakespeare": "shakespeare:stride=80,min_chars=12000"}  # 25 roles; other sets are called as their source
STRENGTHS = ("fixed:0", "fixed:0.25", "fixed:0.5", "fixed:0.75", "fixed:1", "random")
REMEDIES = ("gain=received", "gain_metric=loss")
MORE = ("policy=greedy-validation", "gain=shared", "gain=nothing", "gain=received,discount=0",
        "gain=received,sigma=0.5,warm_up=256")  # fmt: skip
BASELINES = ("fedavg", "fedavg_ft", "fedprox:mu=0.1", "ditto", "fedkd", "fedbn", "fedper", "pfedhn", "local")


@dataclasses.dataclass
class Options:
    """FedHR against its controls and baselines."""

    data: tuple[str, ...] = ("digits",)
    """Data sets: digits, mnist, uci_har, cifar10, shakespeare."""
    seeds: int = 5
    """Seeds side by side."""
    out: Path = Path("runs/fedhr")
    """Folder of the comparisons, one a data set; those that are there are taken as they are."""


def specs(data: str) -> list[str]:
    """What is compared: FedHR with its controls, remedies (more of them on the smallest set), and the baselines."""
    remedies = REMEDIES + (MORE if data == "digits" else ())
    ours = ["fedhr", *(f"fedhr:{one}" for one in remedies), *(f"fedhr:policy={one}" for one in STRENGTHS)]
    return [*ours, *BASELINES]


def run(data: str, options: Options) -> Path:
    """The folder of the comparison on one data set."""
    folder = options.out / data
    words = ["compare", *specs(data), "--data", SOURCES.get(data, data), *SETTINGS[data].split()]
    words += ["--seeds", str(options.seeds), "--out", str(folder)]
    if folder.exists():
        words = ["compare", "--resume", str(folder)]
    print(shlex.join(["fedjax-pfl", *words]), flush=True)
    command_line(words)
    return folder


def table(folder: Path) -> Table:
    """One line a method."""
    goal = float(SETTINGS[folder.name].split("--target-accuracy ")[1].split()[0])
    made = Table(title=f"{folder.name}: mean and deviation over seeds", box=box.MARKDOWN)
    made.add_column("method", no_wrap=True)
    for head in ("PA", "GA", "PA received", "validation, received", "TCC, million floats", "alpha"):
        made.add_column(head, justify="right")
    for path in compare.folders(folder):
        summary = json.loads((path / "summary.json").read_text())
        cells = [spread(summary["test"][kind]) for kind in ("personal", "shared", "received")]
        made.add_row(path.name, *cells, received_on_validation(path), until(path, goal), last_alpha(path))
    return made


def spread(found: dict | None) -> str:
    """Mean and deviation."""
    return "" if found is None else f"{found['weighted_mean']:.4f} ± {found['std_over_seeds']['weighted_mean']:.4f}"


def until(path: Path, goal: float) -> str:
    """Floats until PA on test samples reaches the goal: mean of the seeds in which it does, in millions.

    Taken from the curves, so that another goal needs no other run.
    """
    sent, found = json_lines((path / "rounds.jsonl").read_text()), json_lines((path / "metrics.jsonl").read_text())
    found = [row for row in found if (row["split"], row["kind"]) == ("test", "personal")]
    seeds, totals = sorted({row["seed"] for row in found}), []
    for seed in seeds:
        at = [row["round"] for row in found if row["seed"] == seed and row["accuracy"]["weighted_mean"] >= goal]
        mine = [row["floats_up"] + row["floats_down"] for row in sent if row["seed"] == seed]
        totals += [sum(mine[: at[0]])] if at else []
    share = "" if len(totals) == len(seeds) else f" ({len(totals)} of {len(seeds)})"
    return f"{np.mean(totals) / 1e6:.2f}{share}" if totals else "not reached"


def received_on_validation(path: Path) -> str:
    """At the last round."""
    kept = [
        row
        for row in json_lines((path / "metrics.jsonl").read_text())
        if (row["split"], row["kind"]) == ("validation", "received")
    ]
    last = [row["accuracy"]["weighted_mean"] for row in kept if row["round"] == kept[-1]["round"]]
    return f"{np.mean(last):.4f}"


def last_alpha(path: Path) -> str:
    """Mean strength in the last fifth of the rounds."""
    rows = json_lines((path / "rounds.jsonl").read_text())
    values = [row["alpha"] for row in rows if row.get("alpha") is not None and row["round"] > 0.8 * rows[-1]["round"]]
    return f"{np.mean(values):.2f}" if values else ""


def main(options: Options) -> None:
    """All data sets."""
    keep_programs()
    for data in options.data:
        Console(width=140).print(table(run(data, options)))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
