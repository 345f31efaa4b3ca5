"""The panels over rounds: training loss, and what the methods tell of themselves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedjax_pfl.experiment.plots.curves import mean_present, plot_choices, plot_curves
from fedjax_pfl.experiment.plots.style import WIDTH, Look, few_ticks, legend, looks_of, new_figure, printable, styled
from fedjax_pfl.experiment.report.data import Run
from fedjax_pfl.experiment.report.picture import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_PANELS = 12
"""Panels drawn; further ones are named in the caption."""
MAX_LINES = 10
"""Lines of one panel of a group at most."""
GROUPS = {"arm": "plays of each arm", "cluster": "clients in each cluster"}
"""Diagnostics named by this and a number are lines of one panel."""
CHOICES = {"ratio": "ratio in every round"}
"""Diagnostics that take few values, drawn as dots."""


class Panel(NamedTuple):
    """One small chart: its title, and what draws it on an axes, given the looks of the runs."""

    title: str
    draw: Callable[[Axes, dict[str, Look]], object]


@styled
def diagnostics(runs: Sequence[Run], looks: dict[str, Look]) -> list[Picture]:
    """The figure of all panels, or nothing where no run has rounds."""
    panels = list(_panels(runs))
    if not panels:
        return []
    shown, columns = panels[:MAX_PANELS], min(3, len(panels))
    lines = -(-len(shown) // columns)
    figure = new_figure(WIDTH, 0.5 + (3.0 if len(shown) == 1 else 2.1) * lines)
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for ax, panel in zip(axes, shown, strict=False):
        panel.draw(ax, looks)
        ax.set_title(printable(panel.title, 40))
    for ax in axes[len(shown) :]:
        ax.set_visible(False)
    legend(figure, looks)
    alt = "Small multiples over rounds: " + ", ".join(panel.title for panel in shown)
    return [Picture("training", "training", figure, _caption(runs, panels), alt)]


def _caption(runs: Sequence[Run], panels: Sequence[Panel]) -> str:
    several, shown = max(len(run.seeds) for run in runs) > 1, {panel.title for panel in panels[:MAX_PANELS]}
    over = ", mean and standard deviation over seeds" if several else ""
    caption = f"Training loss and the methods' own diagnostics at every round{over}. "
    caption += "A panel shows the methods that report it."
    if any(title.startswith(told) for title in shown for told in GROUPS.values()):
        caption += " Lines with a name of their own are of one method" + (", means over seeds." if several else ".")
    if shown & set(CHOICES.values()):
        caption += " Dots are the choices" + (" of the first seed." if several else ".")
        caption += " Beside them stands how often each was taken." if len(_having(runs, "ratio")) == 1 else ""
    more = [panel.title for panel in panels[MAX_PANELS:]]
    return caption + (f" Not drawn: {', '.join(more)}." if more else "")


def _panels(runs: Sequence[Run]) -> Iterator[Panel]:
    grouped: set[str] = set()
    for name in _told(runs):
        group = _group(name)
        if group is None:
            yield _chosen(runs, name) if name in CHOICES else _plain(runs, name)
        elif group not in grouped:
            grouped.add(group)
            having = [run for run in runs if any(_group(one) == group for one in run.diagnostics)]
            for run in having:
                yield _lines(run, group, f": {run.label}" if len(having) > 1 else "")


def _having(runs: Sequence[Run], name: str) -> list[Run]:
    return [run for run in runs if name in run.diagnostics]


def _plain(runs: Sequence[Run], name: str) -> Panel:
    def draw(ax: Axes, looks: dict[str, Look]) -> None:
        curves = {run.label: run.diagnostic(name) for run in _having(runs, name)}
        plot_curves(curves, ax, None, looks, percent=False, name_lines=False)

    return Panel("training loss" if name == "loss" else name.replace("_", " "), draw)


def _chosen(runs: Sequence[Run], name: str) -> Panel:
    def draw(ax: Axes, looks: dict[str, Look]) -> None:
        found = {run.label: run.diagnostic(name) for run in _having(runs, name)}
        plot_choices({label: (rounds, values[:, 0]) for label, (rounds, values) in found.items()}, ax, looks=looks)

    return Panel(CHOICES[name], draw)


def _lines(run: Run, group: str, whose: str) -> Panel:
    """One line for every member of a group, named at its end."""
    names = sorted((name for name in run.diagnostics if _group(name) == group), key=lambda name: _number(name, group))
    shown = names[:MAX_LINES]

    def draw(ax: Axes, looks: dict[str, Look]) -> None:
        found = {name.removeprefix(group): run.diagnostic(name) for name in shown}
        curves = {label: (rounds, mean_present(values)) for label, (rounds, values) in found.items()}
        plot_curves(curves, ax, None, looks_of(curves), percent=False)
        ax.yaxis.set_major_locator(few_ticks(5, integer=True))

    first = f" ({MAX_LINES} of {len(names)})" if len(names) > MAX_LINES else ""
    return Panel(f"{GROUPS[group]}{first}{whose}", draw)


def _group(name: str) -> str | None:
    found = re.fullmatch(rf"({'|'.join(GROUPS)})\d+(\.\d+)?", name)
    return found[1] if found else None


def _number(name: str, group: str) -> float:
    return float(name.removeprefix(group))


def _told(runs: Sequence[Run]) -> list[str]:
    """Diagnostics worth a panel: the loss, those of the methods, participation where it varies."""
    names = list(dict.fromkeys(name for run in runs for name in run.diagnostics))
    bookkeeping = ("trains", "reported", "floats_up", "floats_down")
    own = [name for name in names if name not in bookkeeping]
    return own + [
        name
        for name in ("trains", "reported")
        if name in names and any(_varies(run.diagnostic(name)[1]) for run in runs)
    ]


def _varies(values: np.ndarray) -> bool:
    finite = values[np.isfinite(values)]
    return finite.size > 0 and bool(np.ptp(finite) > 0)
