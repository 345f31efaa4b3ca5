"""What a person sees: a live bar on a terminal, plain lines elsewhere, tables, errors in one line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from fedjax_pfl.evaluation import KINDS, mean_over_clients

HEADINGS = {
    "weighted_mean": "weighted mean", "uniform_mean": "uniform mean", "std": "std over clients", "min": "min",
    "worst_decile": "worst decile", "last_k_mean": "mean of last", "at_best_validation": "at best validation",
}  # fmt: skip


class Accuracy(NamedTuple):
    """What one evaluation says: weighted mean accuracy of every kind of model on a split, the mean over seeds."""

    split: str
    means: dict[str, float]

    @classmethod
    def of(cls, scores: dict[str, Any], samples: dict[str, np.ndarray]) -> Accuracy:
        """On validation where there is one, else on test.

        scores: ``split -> kind -> Scores``, leaves ``(seeds, clients)``; samples: ``split -> (clients,)``.
        """
        split = next((name for name in ("validation", "test") if name in scores), "")
        found = scores.get(split, {})
        kinds = [kind for kind in KINDS if kind in found]
        return cls(split, {k: float(mean_over_clients(found[k].accuracy, samples[split]).mean()) for k in kinds})

    def text(self) -> str:
        """The means of all kinds, ``validation accuracy: received 0.89, personal 0.91``."""
        shown = [f"{kind} {self.means[kind]:.4f}" for kind in KINDS if kind in self.means]
        return f"{self.split} accuracy: {', '.join(shown)}" if shown else "nothing to evaluate on"

    def short(self) -> str:
        """The mean of the method's deliverable alone, ``validation 0.91``: a bar has to fit a narrow terminal."""
        return f"{self.split} {self.means['personal']:.4f}" if "personal" in self.means else ""


def make_console(stderr: bool = False) -> Console:
    """A console as wide as the terminal, or wide enough for tables where there is none."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=140)


class Display:
    """The progress of runs on a console.

    live: a bar that is drawn anew (default: where the console is a terminal) instead of a line for each evaluation.
    """

    def __init__(self, console: Console | None = None, live: bool | None = None) -> None:
        self.console = console or make_console()
        self.live = self.console.is_terminal if live is None else live
        self._bar: Progress | None = None
        self._task: Any = None
        self._first = 0
        self._rounds = 0
        self._label = ""

    def note(self, text: str, style: str = "dim") -> None:
        """One line that is true once."""
        self.console.print(escape(text), style=style, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """One line that the user should see."""
        self.note(text, "yellow")

    def start(self, label: str, first: int, rounds: int) -> None:
        """The run begins, at round ``first``; its first step is the compilation."""
        self._first, self._rounds, self._label = first, rounds, label
        if not self.live:
            self.note(f"{label}: compiling ...")
            return
        columns = (
            TextColumn("{task.fields[label]}"), BarColumn(bar_width=10),
            TextColumn("round {task.completed}/{task.total}"), TextColumn("{task.fields[text]}"),
        )  # fmt: skip
        self._bar = Progress(*columns, console=self.console, transient=True)
        self._task = self._bar.add_task("", total=rounds, completed=first, label=label, text="compiling ...")
        self._bar.start()

    def update(self, round_: int, accuracy: Accuracy, seconds: float) -> None:
        """An evaluation after ``round_`` rounds, ``seconds`` of running (without compiling) after the start."""
        done, speed = round_ - self._first, ""
        if done and seconds > 0:
            rate = done / seconds
            speed = f"  {number(rate)} rounds/s  {duration((self._rounds - round_) / rate)} left"
        if self._bar is not None:
            self._bar.update(self._task, completed=round_, text=accuracy.short() + speed)
        elif not self.live:
            self.note(f"{self._label}: round {round_}/{self._rounds}  {accuracy.text()}{speed}", "")

    def stop(self) -> None:
        """The run has ended: the bar goes away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class Quiet(Display):
    """A display for notebooks and tests: warnings only."""

    def note(self, text: str, style: str = "dim") -> None:
        if style != "dim":
            super().note(text, style)

    def start(self, label: str, first: int, rounds: int) -> None:
        """Nothing to see."""

    def update(self, round_: int, accuracy: Accuracy, seconds: float) -> None:
        """Nothing to see."""


def results_table(summary: dict[str, Any]) -> Table:
    """Test accuracy of one run: a column for every kind of model, mean and deviation over seeds."""
    seeds, kinds = len(summary["seeds"]), [kind for kind in KINDS if summary["test"][kind] is not None]
    rounds = f"{summary['rounds']} rounds" + (f", {seeds} seeds" if seeds > 1 else "")
    table = Table(title=f"{summary['algorithm']}: test accuracy after {rounds}", title_justify="left")
    table.add_column("")
    for kind in kinds:
        table.add_column(kind, justify="right")
    for name, heading in HEADINGS.items():
        label = heading.replace("last", f"last {summary['last_k']} evaluations")
        table.add_row(label, *(spread(summary["test"][kind], name, seeds) for kind in kinds))
    return table


def target_text(summary: dict[str, Any]) -> str:
    """When the target accuracy was reached and what was sent until then, or nothing."""
    found, seeds = summary.get("target"), len(summary["seeds"])
    if not found:
        return ""
    parts = []
    for kind in (kind for kind in KINDS if kind in found):
        floats = [one for one in found[kind]["floats"] if one is not None]
        rounds = [one for one in found[kind]["rounds"] if one is not None]
        which = f"{len(floats)} of {seeds} seeds, " if seeds > 1 else ""
        means = f"{np.mean(rounds):.4g} rounds, {np.mean(floats):,.0f} floats" if floats else "not reached"
        parts.append(f"{kind} {which if floats else ''}{means}")
    return f"to test accuracy {found['accuracy']:g}: {'; '.join(parts)}"


def unseen_text(summary: dict[str, Any]) -> str:
    """Accuracy of the clients that were held out, or nothing."""
    found, seeds = summary.get("unseen"), len(summary["seeds"])
    if not found:
        return ""
    before, after = (_of_unseen(found, when, seeds) for when in ("before", "after"))
    steps, clients = found["steps"], found["clients"]
    who = f"{clients} client{'s' * (clients > 1)} held out"
    return f"{who}: test accuracy {before} before and {after} after {steps} local steps"


def _of_unseen(found: dict[str, Any] | None, when: str, seeds: int) -> str:
    """Mean accuracy of the clients that were held out, ``before`` or ``after`` they adapt; blank where absent."""
    if not found:
        return ""
    spread = f" ± {found[when]['std_over_seeds']:.4f}" if seeds > 1 else ""
    return f"{found[when]['weighted_mean']:.4f}{spread}"


def speed_text(summary: dict[str, Any]) -> str:
    """How fast a run was and how much memory it took."""
    timing, memory = summary["timing"], summary["memory"]
    return (
        f"{number(timing['rounds_per_s'])} rounds/s, {number(timing['client_steps_per_s'])} client-steps/s, "
        f"{number(timing['samples_per_s'])} samples/s; compiled in {timing['compile_s']:.1f} s, ran for "
        f"{timing['run_s']:.2f} s; peak memory {size(memory['peak_bytes'])} ({memory['peak_source']})"
    )


def comparison_table(rows: Sequence[tuple[str, dict[str, Any]]]) -> Table:
    """Test accuracy of several runs, a row each."""
    table = Table(title="test accuracy, mean and deviation over seeds", title_justify="left")
    table.add_column("algorithm", no_wrap=True)
    heads = ["received", "personal", "shared", "personal uniform", "worst decile", "floats sent", "rounds/s"]
    targets = [summary["target"]["accuracy"] for _, summary in rows if summary.get("target")]
    held = any(summary.get("unseen") for _, summary in rows)
    heads += ["held out before", "after"] if held else []
    heads += [f"floats to {targets[0]:g}"] if targets else []
    for head in heads:
        table.add_column(head, justify="right")
    for label, summary in rows:
        seeds, test = len(summary["seeds"]), summary["test"]
        cells = [spread(test[kind], "weighted_mean", seeds) for kind in KINDS]
        cells += [spread(test["personal"], name, seeds) for name in ("uniform_mean", "worst_decile")]
        sent = sum(summary["communication"].values())
        before_after = [_of_unseen(summary.get("unseen"), when, seeds) for when in ("before", "after") if held]
        to_target = [_to_target(summary["target"], seeds)] if targets else []
        table.add_row(label, *cells, f"{sent:,}", number(summary["timing"]["rounds_per_s"]), *before_after, *to_target)
    return table


def dataset_table(rows: Sequence[tuple[str, dict[str, Any]]]) -> Table | None:
    """Test accuracy of the personal models, a row a data set, a column a run; None where all are on a single one."""
    names = list(dict.fromkeys(name for _, summary in rows for name in summary.get("datasets") or ()))
    if not names:
        return None
    table = Table(title="personal test accuracy by data set, mean and deviation over seeds", title_justify="left")
    table.add_column("data set", no_wrap=True)
    for label, _ in rows:
        table.add_column(escape(label), justify="right")
    for name in names:
        cells = [_by_data_set((s.get("datasets") or {}).get(name), len(s["seeds"])) for _, s in rows]
        table.add_row(escape(name), *cells)
    table.add_section()
    table.add_row("mean", *(_by_data_set(s.get("datasets_mean"), len(s["seeds"])) for _, s in rows))
    return table


def _by_data_set(found: dict[str, Any] | None, seeds: int) -> str:
    one = (found or {}).get("personal") or {"mean": None}
    if one["mean"] is None:
        return ""
    return f"{one['mean']:.4f}" + (f" ± {one['std_over_seeds']:.4f}" if seeds > 1 else "")


def _to_target(found: dict[str, Any] | None, seeds: int) -> str:
    """Mean floats until the personal models reach the target; how many seeds did where not all."""
    floats = [one for one in (found or {}).get("personal", {}).get("floats", ()) if one is not None]
    if not floats:
        return "not reached"
    return f"{np.mean(floats):,.0f}" + (f" ({len(floats)} of {seeds})" if len(floats) < seeds else "")


def spread(found: dict[str, Any] | None, name: str, seeds: int) -> str:
    """Mean and deviation over seeds, blank where the number is absent."""
    value = None if found is None else found[name]
    if found is None or value is None or math.isnan(value):
        return ""
    return f"{value:.4f}" + (f" ± {found['std_over_seeds'][name]:.4f}" if seeds > 1 else "")


def number(value: float | None) -> str:
    """Three digits, blank where absent."""
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def size(count: float) -> str:
    """Bytes with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def duration(seconds: float) -> str:
    """Seconds as 7 s, 2 min 05 s or 3 h 20 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
