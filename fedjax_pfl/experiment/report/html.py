"""The page of a report: one HTML text that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from fedjax_pfl import __version__
from fedjax_pfl.experiment.plots.style import DARK_PALETTE, PALETTE
from fedjax_pfl.experiment.report import sections
from fedjax_pfl.experiment.report.data import Run
from fedjax_pfl.experiment.report.tables import percent

SECTIONS = {
    "results": "Results",
    "curves": "Learning curves",
    "clients": "Clients",
    "data": "Data",
    "weights": "Aggregation weights",
    "topology": "Clusters of clients",
    "embedding": "Client embeddings",
    "communication": "Communication",
    "training": "Training",
    "reproduce": "Reproduce",
}
STATUS = {
    "interrupted": "was interrupted",
    "nonfinite": "stopped because an update was not finite",
}


def page(runs: Sequence[Run], command: str, drawn: Mapping[str, Sequence[str]]) -> str:
    """The whole document. drawn: figure elements (see ``figure_element``) by the section they belong to."""
    parts = {name: list(drawn.get(name, ())) for name in SECTIONS}
    parts["results"].insert(0, sections.results(runs))
    parts["clients"] += sections.clients(runs)
    parts["reproduce"] += sections.reproduce(runs, command)
    shown = {name: title for name, title in SECTIONS.items() if parts[name]}
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title in shown.items())
    body = "\n".join(
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>'
        f"{''.join(parts[name])}</section>"
        for name, title in shown.items()
    )
    return (
        f'<!doctype html>\n<html lang="en"><head>{_head(title_of(runs))}</head>\n<body>'
        f'<header class="top"><div class="wrap">{_header(runs)}</div></header>\n'
        f'<nav aria-label="Sections"><div class="wrap">{links}</div></nav>\n<main class="wrap">{body}</main>\n'
        f'<footer><div class="wrap">Written by fedjax_pfl {escape(__version__)}; needs no network.</div></footer>'
        f"<script>{resource('report.js')}</script></body></html>\n"
    )


def _head(title: str) -> str:
    """A content policy lets the page load nothing and run only its own script, whatever a run's texts hold."""
    digest = base64.b64encode(hashlib.sha256(resource("report.js").encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    return (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>\n<style>{stylesheet()}</style>"
    )


def resource(name: str) -> str:
    """A text file of this package."""
    return (files("fedjax_pfl.experiment.report") / name).read_text(encoding="utf-8")


def stylesheet() -> str:
    """The style sheet with the figures' colours for light and dark pages."""
    light, dark = ("".join(f"--series-{i}: {c};" for i, c in enumerate(p)) for p in (PALETTE, DARK_PALETTE))
    return resource("report.css").replace("LIGHT_SERIES", light).replace("DARK_SERIES", dark)


def figure_element(svg: str, caption: str) -> str:
    """A figure with its caption."""
    return f'<figure><div class="pan">{svg}</div><figcaption><p>{escape(caption)}</p></figcaption></figure>\n'


def title_of(runs: Sequence[Run]) -> str:
    """What was run on what."""
    names = list(dict.fromkeys(run.algorithm for run in runs))
    told = names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
    told = told if len(names) <= 5 else f"{len(names)} algorithms"
    data = _common(runs, _data)
    return f"{told} on {data}" if data else told


def _data(run: Run) -> str:
    return str(run.summary.get("data") or run.setting("data", "data.data", "data.name") or "")


def _partition(run: Run) -> str:
    method = str(run.setting("partition", "data.partition", "partition.method", "partition.name") or "")
    alpha = run.setting("alpha", "data.alpha", "partition.alpha")
    classes = run.setting("classes_per_client", "data.classes_per_client", "partition.classes_per_client")
    if method == "dirichlet" and alpha is not None:
        return f"Dirichlet({alpha:g})"
    return f"{method}, {classes} classes each" if method == "pathological" and classes is not None else method


def _common(runs: Sequence[Run], fact: Callable[[Run], Any]) -> str:
    """A fact of the runs; where they differ, every value."""
    return ", ".join(dict.fromkeys(text for run in runs if (text := str(fact(run) or ""))))


def _header(runs: Sequence[Run]) -> str:
    facts = {
        "data": _common(runs, _data),
        "partition": _common(runs, _partition),
        "clients": _common(runs, lambda run: f"{run.clients:,}"),
        "rounds": _common(runs, lambda run: f"{int(run.summary.get('rounds') or 0):,}"),
        "seeds": _common(runs, lambda run: _seeds(run.seeds)),
        "model": _common(runs, lambda run: run.setting("model", "model.model", "model.name")),
    }
    cells = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items() if value)
    return (
        f'<p class="kicker">Personalized federated learning, experiment report</p><h1>{escape(title_of(runs))}</h1>'
        f'<p class="lead">{escape(_finding(runs))}</p>{_notices(runs)}<dl class="facts">{cells}</dl>'
    )


def _seeds(seeds: Sequence[Any]) -> str:
    return f"{len(seeds)} ({', '.join(map(str, seeds))})" if len(seeds) <= 5 else str(len(seeds))


def _finding(runs: Sequence[Run]) -> str:
    """The headline in words."""
    means = [(value, run) for run in runs if (value := run.test("personal", "weighted_mean")) is not None]
    if not means:
        return "No test accuracy was measured."
    (value, run), *others = sorted(means, key=lambda pair: -pair[0])
    spread = run.spread("personal", "weighted_mean")
    told = f"{percent(value)}%" + (f" ± {percent(spread)}" if spread is not None else "")
    told = told.replace(" ", "\N{NO-BREAK SPACE}")
    seeds = f" and {len(run.seeds)} seeds" if len(run.seeds) > 1 else ""
    over = f"weighted by samples over {run.clients:,} client{'s' * (run.clients != 1)}{seeds}"
    if not others:
        return f"The personal models of {run.label} reach {told} test accuracy, {over}."
    tied = [one.label for mean, one in others if percent(mean) == percent(value)]
    if tied:
        names = f"{', '.join([run.label, *tied[:-1]])} and {tied[-1]}"
        return f"{names} have the same highest mean test accuracy of personal models: {told}, {over}."
    return (
        f"{run.label} has the highest mean test accuracy of personal models: {told}, {over}. "
        f"{others[0][1].label} follows with {percent(others[0][0])}%."
    )


def _notices(runs: Sequence[Run]) -> str:
    """What a reader must know before comparing: runs cut short, unlike settings, failures."""
    notices = [_cut_short(run) for run in runs if not run.finished]
    for fact, name in (("partition_sha256", "partition"), ("rounds", "number of rounds"), ("seeds", "seeds")):
        if len({str(run.summary.get(fact)) for run in runs}) > 1:
            notices.append(f"The runs differ in their {name}: do not compare them one to one.")
    notices += [f"{run.label}: {sections.failures_of(run)}." for run in runs if run.summary.get("failures")]
    if not notices:
        return ""
    return '<div class="notice" role="note">' + "".join(f"<p>{escape(text)}</p>" for text in notices) + "</div>"


def _cut_short(run: Run) -> str:
    planned = run.summary.get("rounds_planned")
    after = f" after {run.summary.get('rounds')} of {planned} rounds" if planned else ""
    what = STATUS.get(run.status, f"has the status {run.status}")
    return f"{run.label} {what}{after}: its figures are those of its last evaluation."
