"""FedGCF, its controls and baselines on the groups of graph sets: accuracy, ratios, communication.

    FEDJAX_PFL_DATA=DIR python benchmarks/fedgcf.py --groups ChemBio Social MIX --rounds 100 --seeds 3 --out runs/fedgcf

Every group is one ``fedjax-pfl compare`` (the command is printed), continued where it stopped; seeds side by side, one
client a data set. COLLAB is its 500-graph subset, as the whole set has 12.3 million edges. A line gives the mean over
data sets of the test accuracy at the last round, as received and after training, the same at the best validation round,
and the floats that were sent until the mean validation accuracy of the received models reached that of FedAvg's best.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from fedjax_pfl.data.sources.tu import CHEM_BIO
from fedjax_pfl.experiment import compare
from fedjax_pfl.experiment.cli import main as command_line

SOCIAL = ("COLLAB_500", "IMDB-BINARY", "IMDB-MULTI")
GROUPS = {
    "Five": CHEM_BIO[:5], "Molecules": CHEM_BIO[:7], "Small": tuple(name for name in CHEM_BIO if name != "DD"),
    "ChemBio": CHEM_BIO, "Social": SOCIAL, "MIX": CHEM_BIO + SOCIAL,
}  # fmt: skip
RATIOS = ("fixed:0.9", "fixed:0.7", "fixed:0.5", "fixed:0.3", "fixed:0.1", "fixed:1", "fixed:0")
POLICIES = ("discounted", "random", "oracle")
BASELINES = ("gcfl:epsilon1=0.15", "gcfl_plus:epsilon1=0.15", "fedstar", "fedavg", "fedprox:mu=0.01", "local")


@dataclasses.dataclass
class Options:
    """FedGCF against its controls and baselines."""

    groups: tuple[str, ...] = ("Molecules",)
    """Groups of data sets: Five (small ones), Molecules (7 sets), Small (ChemBio without DD), ChemBio, Social, MIX."""
    rounds: int = 100
    """Rounds of each method."""
    seeds: int = 3
    """Seeds side by side."""
    out: Path = Path("runs/fedgcf")
    """Folder of the comparisons, one a group; those that are there are taken as they are."""


def run(group: str, options: Options) -> Path:
    """The folder of the comparison on one group."""
    folder = options.out / group
    ours = ["fedgcf", *(f"fedgcf:policy={one}" for one in (*RATIOS, *POLICIES))]
    words = ["compare", *ours, *BASELINES, "--data", f"tu:{'+'.join(GROUPS[group])}", "--batch-size", "128"]
    words += ["--optimizer", "adam", "--lr", "0.001", "--weight-decay", "0.0005", "--test-fraction", "0.1"]
    words += ["--rounds", str(options.rounds), "--eval-every", "5", "--seeds", str(options.seeds)]
    words += ["--partition", "natural", "--out", str(folder)]
    if folder.exists():
        words = ["compare", "--resume", str(folder)]
    print(shlex.join(["fedjax-pfl", *words]), flush=True)
    command_line(words)
    return folder


def curves(path: Path, split: str, kind: str) -> np.ndarray:
    """Mean over data sets of the accuracy, ``(seeds, evaluations)``."""
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if (row["split"], row["kind"]) == (split, kind)]
    seeds = sorted({row["seed"] for row in rows})
    return np.array([[r["accuracy"]["uniform_mean"] for r in rows if r["seed"] == seed] for seed in seeds])


def table(folder: Path) -> Table:
    """One line a method."""
    made = Table(title=f"{folder.name}: per cent, mean and deviation over seeds")
    made.add_column("method", no_wrap=True)
    for head in ("received, last", "personal, last", "received, best validation", "personal, best", "million floats"):
        made.add_column(head, justify="right")
    paths = {path.name: path for path in compare.folders(folder)}
    goal = curves(paths["fedavg"], "validation", "received").mean(0).max()
    for name, path in paths.items():
        cells = []
        for pick in (last, best):
            cells += [spread(pick(path, kind)) for kind in ("received", "personal")]
        made.add_row(name, *cells, floats_until(path, goal))
    return made


def last(path: Path, kind: str) -> np.ndarray:
    """Test accuracy at the last round, ``(seeds,)``."""
    return curves(path, "test", kind)[:, -1]


def best(path: Path, kind: str) -> np.ndarray:
    """Test accuracy at the round with the best validation accuracy, ``(seeds,)``."""
    where = curves(path, "validation", kind).argmax(1)
    return np.take_along_axis(curves(path, "test", kind), where[:, None], 1)[:, 0]


def spread(values: np.ndarray) -> str:
    """Mean and deviation, in per cent."""
    return f"{100 * values.mean():.2f} ± {100 * values.std():.2f}"


def floats_until(path: Path, goal: float) -> str:
    """Floats that were sent, in millions, until the mean over seeds reached the goal on validation samples."""
    reached = curves(path, "validation", "received").mean(0) >= goal
    if not reached.any():
        return "not reached"
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    rounds = sorted({row["round"] for row in rows})
    sent = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    whole = [row["floats_up"] + row["floats_down"] for row in sent if row["seed"] == sent[0]["seed"]]
    return f"{sum(whole[: rounds[int(reached.argmax())]]) / 1e6:.1f}"


def main(options: Options) -> None:
    """All groups."""
    for group in options.groups:
        Console(width=150).print(table(run(group, options)))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
