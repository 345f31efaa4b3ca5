"""FedGCF, its controls and baselines on the groups of graph sets: accuracy, ratios, communication.

    FEDJAX_PFL_DATA=DIR python benchmarks/fedgcf.py --groups ChemBio Social MIX --seeds 0 1 2 --out runs/fedgcf

Every seed of a group is one ``fedjax-pfl compare`` (the command is printed), continued where it stopped; one client a
data set. Seeds are runs of their own, so that several processes, a core each, can share them. The table takes whatever
is finished, here or, in ``fedgcf.jsonl``, elsewhere: ``--keep`` adds what is finished here, ``--seeds`` with no number
runs nothing. Social has the 500-graph subset of COLLAB, as the whole set, that of Social_whole and MIX_whole, has 12.3
million edges. ``--samples 300`` takes 300 graphs of each set at most; clients keep their Adam from round to round, or
it starts anew (``--optimizer-state restart``). With three clients, K = 3 clusters are the
clients themselves: on Social FedGCF also runs with K = 1 and 2. A line of the table gives the mean over data sets of
the test accuracy at the last round, as received (beside it the mean over all samples) and after training, the same at
the best validation round, and the floats that were sent until the mean validation accuracy of the received models
reached that of FedAvg's best.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from fedjax_pfl.data.sources.tu import CHEM_BIO
from fedjax_pfl.experiment.cli import keep_programs
from fedjax_pfl.experiment.cli import main as command_line
from fedjax_pfl.experiment.report.folder import json_lines

SOCIAL = ("COLLAB_500", "IMDB-BINARY", "IMDB-MULTI")
WHOLE = ("COLLAB", *SOCIAL[1:])
GROUPS = {
    "Five": CHEM_BIO[:5], "Molecules": CHEM_BIO[:7], "Small": tuple(name for name in CHEM_BIO if name != "DD"),
    "ChemBio": CHEM_BIO, "Social": SOCIAL, "MIX": CHEM_BIO + SOCIAL,
    "Social_whole": WHOLE, "MIX_whole": CHEM_BIO + WHOLE,
}  # fmt: skip
RATIOS = ("fixed:0.9", "fixed:0.7", "fixed:0.5", "fixed:0.3", "fixed:0.1", "fixed:1", "fixed:0")
POLICIES = ("random", "discounted")
BASELINES = ("gcfl:epsilon1=0.3", "gcfl_plus:epsilon1=0.3", "fedstar", "fedavg", "fedprox:mu=0.01", "local")


@dataclasses.dataclass
class Options:
    """FedGCF against its controls and baselines."""

    groups: tuple[str, ...] = ("Molecules",)
    """Groups of data sets: Five (small ones), Molecules (7 sets), Small (ChemBio without DD), ChemBio, Social, MIX,
    Social_whole, MIX_whole."""
    rounds: int = 100
    """Rounds of each method."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds that this process runs; none: the table of what is there."""
    methods: tuple[str, ...] = ()
    """Which of the methods (of a comparison that is begun here), such as fedgcf fedavg local (default: all)."""
    samples: int | None = None
    """Graphs of each set at most."""
    optimizer_state: Literal["keep", "restart"] = "keep"
    """What becomes of a client's Adam after a round."""
    out: Path = Path("runs/fedgcf")
    """Folder of the comparisons, GROUP/SEED; those that are there are taken as they are."""
    results: Path = Path(__file__).with_suffix(".jsonl")
    """Curves of runs that were finished elsewhere, a line each; they are in the table too."""
    keep: bool = False
    """Write what is finished here into that file."""


def run(group: str, seed: int, options: Options) -> None:
    """One comparison on one group."""
    folder = options.out / group / str(seed)
    clusters = ("fedgcf:clusters=1", "fedgcf:clusters=2") if len(GROUPS[group]) < 4 else ()
    every = ("fedgcf", *(f"fedgcf:policy={one}" for one in (*RATIOS, *POLICIES)), *clusters, *BASELINES)
    words = ["compare", *(options.methods or every)]
    words += ["--data", f"tu:{'+'.join(GROUPS[group])}", "--batch-size", "128"]
    words += ["--optimizer", "adam", "--lr", "0.001", "--weight-decay", "0.0005", "--test-fraction", "0.1"]
    words += ["--rounds", str(options.rounds), "--eval-every", "5", "--seed", str(seed)]
    words += ["--partition", "natural", "--optimizer-state", options.optimizer_state, "--out", str(folder)]
    words += ["--samples", str(options.samples)] if options.samples else []
    if folder.exists():
        words = ["compare", "--resume", str(folder)]
    print(shlex.join(["fedjax-pfl", *words]), flush=True)
    command_line(words)


class Curves(NamedTuple):
    """What a finished run says of its method: at every evaluation, means over data sets and over their samples."""

    group: str
    samples: int | None
    optimizer_state: str
    rounds: int
    method: str
    seed: int
    floats: list[int]
    """Sent until then."""
    accuracy: dict[str, list[float]]
    """``"test received" -> at every evaluation``, to four digits."""
    weighted: dict[str, list[float]]
    """The same of means over samples."""


def curves(group: str, options: Options, folder: Path) -> Curves:
    """Those of one run folder."""
    rows, rounds = (json_lines((folder / f"{name}.jsonl").read_text()) for name in ("metrics", "rounds"))
    sent = np.cumsum([0, *(row["floats_up"] + row["floats_down"] for row in rounds)])
    means: dict[str, dict[str, list[float]]] = {"uniform_mean": {}, "weighted_mean": {}}
    for row in rows:
        for mean, found in means.items():
            found.setdefault(f"{row['split']} {row['kind']}", []).append(round(row["accuracy"][mean], 4))
    floats = [int(sent[when]) for when in sorted({row["round"] for row in rows})]
    seed = int(folder.parent.name)
    setting = (group, options.samples, options.optimizer_state, len(rounds), folder.name, seed)
    return Curves(*setting, floats, *means.values())


def gather(group: str, options: Options) -> list[Curves]:
    """Those of all finished runs of the group: in the file of results, and in the folder, which takes precedence."""
    written = [Curves(**row) for row in json_lines(options.results.read_text())] if options.results.exists() else []
    found = {one[:6]: one for one in written}
    for path in sorted((options.out / group).glob("*/*/summary.json")):
        if json.loads(path.read_text())["status"] == "finished":
            one = curves(group, options, path.parent)
            found[one[:6]] = one
    if options.keep:
        lines = sorted(json.dumps(one._asdict()) for one in found.values())
        options.results.write_text("".join(f"{line}\n" for line in lines))
    wanted = (group, options.samples, options.optimizer_state, options.rounds)
    return [one for one in found.values() if one[:4] == wanted]


def table(group: str, every: list[Curves]) -> Table:
    """One line a method."""
    made = Table(title=f"{group}: per cent, mean and deviation over seeds", box=box.MARKDOWN)
    made.add_column("method", no_wrap=True)
    heads = ("seeds", "received, last", "of samples", "personal, last", "received, best validation", "personal, best")
    for head in (*heads, "m. floats"):
        made.add_column(head, justify="right")
    methods: dict[str, list[Curves]] = {}
    for one in every:
        methods.setdefault(one.method, []).append(one)
    goal = over(methods["fedavg"], "validation received").mean(0).max() if "fedavg" in methods else np.inf
    for name, runs in methods.items():
        of_samples = np.array([run.weighted["test received"][-1] for run in runs])
        cells = [last(runs, "received"), of_samples, last(runs, "personal")]
        cells += [best(runs, kind) for kind in ("received", "personal")]
        made.add_row(name, str(len(runs)), *map(spread, cells), floats_until(runs, goal))
    return made


def over(runs: list[Curves], which: str) -> np.ndarray:
    """Accuracy, ``(seeds, evaluations)``."""
    return np.array([run.accuracy[which] for run in runs])


def last(runs: list[Curves], kind: str) -> np.ndarray:
    """Test accuracy at the last round, ``(seeds,)``."""
    return over(runs, f"test {kind}")[:, -1]


def best(runs: list[Curves], kind: str) -> np.ndarray:
    """Test accuracy at the round with the best validation accuracy, ``(seeds,)``."""
    where = over(runs, f"validation {kind}").argmax(1)
    return np.take_along_axis(over(runs, f"test {kind}"), where[:, None], 1)[:, 0]


def spread(values: np.ndarray) -> str:
    """Mean and, of several, deviation, in per cent."""
    return f"{100 * values.mean():.2f}" + (f" ± {100 * values.std():.2f}" if len(values) > 1 else "")


def floats_until(runs: list[Curves], goal: float) -> str:
    """Floats that were sent, in millions, until the mean over seeds reached the goal on validation samples."""
    reached = over(runs, "validation received").mean(0) >= goal
    if not reached.any():
        return "not reached" if np.isfinite(goal) else ""
    return f"{runs[0].floats[int(reached.argmax())] / 1e6:.1f}"


def main(options: Options) -> None:
    """All groups."""
    keep_programs()  # the next seed compiles nothing
    for group in options.groups:
        for seed in options.seeds:
            run(group, seed, options)
        Console(width=150).print(table(group, gather(group, options)))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
