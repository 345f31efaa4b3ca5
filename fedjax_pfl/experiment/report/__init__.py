"""The report of one or several runs: a single page that works offline, and its figures as PNG."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fedjax_pfl.experiment.plots.style import inline_svg, save_png
from fedjax_pfl.experiment.report.figures import pictures
from fedjax_pfl.experiment.report.folder import read_runs
from fedjax_pfl.experiment.report.html import figure_element, page


def write_report(folders: Sequence[Path], out: Path, command: str) -> Path:
    """Write ``report.html`` about the runs in these folders, and ``figures/*.png`` (150 dpi) beside it.

    folders: run folders, in the order of the table's rows; out: the page (a name ending in ``.html``), or the folder to
    write ``report.html`` into, made where absent; command: the command line that the page gives.

    Returns:
        The path of the page; it appears whole or not at all.

    Raises:
        FileNotFoundError: a folder or a file of it is missing.
        ValueError: no folder is given or a file is damaged; the message names folder and file.
    """
    runs = read_runs([Path(folder) for folder in folders])
    path = Path(out) if Path(out).suffix == ".html" else Path(out) / "report.html"
    figures = path.parent / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, list[str]] = {}
    for picture in pictures(runs):
        save_png(picture.figure, figures / f"{picture.name}.png")
        picture.figure.set_layout_engine("none")  # keeps the layout just made
        svg = inline_svg(picture.figure, picture.name, picture.alt)
        drawn.setdefault(picture.section, []).append(figure_element(svg, picture.caption))
    partial = path.with_name(path.name + ".partial")
    partial.write_text(page(runs, command, drawn), encoding="utf-8")
    os.replace(partial, path)
    return path
