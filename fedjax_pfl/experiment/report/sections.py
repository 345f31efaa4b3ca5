"""The written parts of a report: results, the clients' table, and what is needed to repeat the runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

from fedjax_pfl.experiment.plots.style import quantity
from fedjax_pfl.experiment.report import tables
from fedjax_pfl.experiment.report.data import Run

TERMS = {
    "personal": "The method's deliverable: the model that a client would use in the end.",
    "received": "What the server would send a client now, before any local training, with the client's private parts.",
    "shared": "The one global model, the same for every client, where the method has one.",
}
TIMING = {
    "compile_s": "compile,&nbsp;s",
    "run_s": "run,&nbsp;s",
    "rounds_per_s": "rounds/s",
    "client_steps_per_s": "client steps/s",
    "samples_per_s": "samples/s",
}


def results(runs: Sequence[Run]) -> str:
    """The result table with its terms, and all summaries folded away."""
    terms = "".join(f"<div><dt>{name}</dt><dd>{escape(text)}</dd></div>" for name, text in TERMS.items())
    card = f'{tables.result_table(runs)}<p class="note">{escape(_reading(runs))}</p><dl class="terms">{terms}</dl>'
    if held := tables.unseen_table(runs):
        found = next(one for run in runs if (one := run.summary.get("unseen")))
        note = f"{found['clients']} clients never trained: before and after {found['steps']} local steps."
        card += f'{held}<p class="note">{escape(note)}</p>'
    kinds = tables.tested_kinds(runs)
    card, more = _card(card) + _data_sets(runs), "".join(tables.kind_table(runs, kind) for kind in kinds)
    more += "".join(tables.dataset_table(runs, kind) for kind in kinds if kind != "personal")
    if not more:
        return card
    return card + _card(_folded("All summaries of every kind of model, with their spread over seeds", more))


def _data_sets(runs: Sequence[Run]) -> str:
    """The card of the accuracy by data set, or nothing where all runs are on a single one."""
    table = tables.dataset_table(runs, "personal")
    if not table:
        return ""
    note = (
        "Test accuracy of the personal models in per cent after the last round. Within a data set clients are weighted "
        "by their test samples; in the mean over data sets each counts alike. Blank where a run has no test samples of "
        "a data set."
    )
    return _card(f'<h3>By data set</h3>{table}<p class="note">{escape(note)}</p>')


def _reading(runs: Sequence[Run]) -> str:
    notes = ["Test accuracy in per cent after the last round; blank where a method has no such model or measurement."]
    if max(len(run.seeds) for run in runs) > 1:
        notes.append("± is one standard deviation over seeds: a smaller difference is no evidence.")
    if len(runs) > 1:
        notes.append("A wedge marks the best of each column.")
    notes.append("Worst decile: mean of the lowest tenth of the clients.")
    last = {run.summary["last_k"] for run in runs if run.summary.get("last_k")}
    if len(last) == 1:
        notes.append(f"Last k: the last {last.pop()} evaluations.")
    notes.append("At best validation: test accuracy at the round with the best validation accuracy.")
    return " ".join(notes)


def clients(runs: Sequence[Run]) -> list[str]:
    """The folded table of the clients, or nothing where no run has per-client results."""
    table = tables.client_table(runs)
    if not table:
        return []
    count = max(run.clients for run in runs)
    which = f"{count:,}" if count <= tables.MAX_ROWS else f"the {tables.MAX_ROWS} of {count:,} with the lowest accuracy"
    note = (
        "Personal test accuracy at the last evaluation, mean over seeds; blank for a client without test samples. "
        "clients.csv in a run's folder holds every client and seed."
    )
    return [_card(_folded(f"Table of clients ({which})", f'<p class="note">{note}</p>{table}'))]


def reproduce(runs: Sequence[Run], command: str) -> list[str]:
    """The commands, the runs' status, time, memory and partition, and the machine."""
    told = dict.fromkeys(str(text) for run in runs if (text := run.summary.get("command")) and text != command)
    own = "".join(f"<pre><code>{escape(text)}</code></pre>" for text in told)
    return [
        _card(f"<h3>Command</h3><pre><code>{escape(command)}</code></pre>"
              + (f"<h3>Commands of the runs</h3>{own}" if own else "")),
        _card(f"<h3>Runs</h3>{_runs(runs)}"),
        _card(f"<h3>Environment</h3>{pairs(_environment(runs))}"),
    ]  # fmt: skip


def failures_of(run: Run) -> str:
    """The updates that were not finite, the first three by name."""
    failures = run.summary["failures"]
    if not isinstance(failures, list):
        return f"failures were recorded: {plain(failures)}"
    first = "; ".join(plain(one) for one in failures[:3]) + ("; ..." if len(failures) > 3 else "")
    return f"{len(failures):,} update{'s were' if len(failures) > 1 else ' was'} not finite ({first})"


def plain(value: Any) -> str:
    """A value in words."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {plain(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(map(plain, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def pairs(items: Iterable[tuple[str, str]]) -> str:
    """Names and values side by side."""
    return '<dl class="pairs">' + "".join(f"<dt>{escape(n)}</dt><dd>{escape(v)}</dd>" for n, v in items) + "</dl>"


def _card(content: str) -> str:
    return f'<div class="card">{content}</div>\n'


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def _environment(runs: Sequence[Run]) -> Iterator[tuple[str, str]]:
    """Every fact about the machine; where runs differ, all values."""
    for name in dict.fromkeys(name for run in runs for name in run.environment):
        values = dict.fromkeys(plain(v) for run in runs if (v := run.environment.get(name)) is not None)
        if values:
            yield name.replace("_", " "), " | ".join(values)


def _runs(runs: Sequence[Run]) -> str:
    heads = [
        "run",
        "status",
        "failures",
        *TIMING.values(),
        "predicted memory",
        "peak memory",
        "partition sha256",
        "folder",
    ]
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    rows = "".join(_run_row(run, i) for i, run in enumerate(runs))
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Runs"><table class="names">'
        '<caption class="sr">Status, time, memory and partition of every run</caption>'
        f'<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div><p class="note">{escape(_sources(runs))}</p>'
    )


def _sources(runs: Sequence[Run]) -> str:
    """Where the memory figures come from; the partition's whole hash, and what is to be known of it."""
    peaks = dict.fromkeys(str((run.summary.get("memory") or {}).get("peak_source") or "") for run in runs)
    hashes = dict.fromkeys(str(run.summary.get("partition_sha256") or "") for run in runs)
    notes = [f"Peak memory: {' | '.join(filter(None, peaks))}."] if any(peaks) else []
    notes += [f"Partition sha256: {'; '.join(filter(None, hashes))}."] if any(hashes) else []
    told = dict.fromkeys(str(note) for run in runs for note in run.summary.get("partition_notes") or ())
    notes += [f"Partition: {'; '.join(told)}."] if told else []
    return " ".join(notes)


def _run_row(run: Run, index: int) -> str:
    failures = run.summary.get("failures")
    count = len(failures) if isinstance(failures, list | dict) else failures
    sha = escape(str(run.summary.get("partition_sha256") or ""))
    cells = [
        f'<span class="badge{" fine" * run.finished}">{escape(run.status)}</span>',
        "" if count is None else escape(str(count)),
        *("" if (v := run.figure("timing", name)) is None else quantity(v) for name in TIMING),
        _bytes(run.figure("memory", "predicted_bytes")),
        _bytes(run.figure("memory", "peak_bytes")),
        f'<code class="sha">{sha}</code>',
        f'<code class="sha">{escape(run.folder.name)}</code>',
    ]
    return f"<tr>{tables.run_head(run, index, badge=False)}" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _bytes(value: float | None) -> str:
    if value is None:
        return ""
    for scale, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= scale:
            return f"{value / scale:.3g} {name}"
    return f"{value:.0f} B"
