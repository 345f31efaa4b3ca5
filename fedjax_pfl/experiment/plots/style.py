"""The look of every figure: palette, axes, legends, and their export as inline SVG that follows the page's theme."""

from __future__ import annotations

import functools
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")
T = TypeVar("T")

# Six hues that stay at least 15 apart (100 x OKLab distance) under simulated deuteranopia and protanopia, 11 under
# tritanopia; every hue has 3:1 contrast on its page. More series than hues repeat them with other dashes and markers.
PALETTE = ("#385af8", "#d7720a", "#21a698", "#750a56", "#7b5102", "#4a01af")
DARK_PALETTE = ("#6d8dff", "#f08a32", "#7befcf", "#d07fb0", "#fdc50f", "#b9b4fc")
INK, MUTED, GRID, BLANK, SURFACE = "#1b1f27", "#5c6472", "#e2e5ea", "#cdd2da", "#ffffff"
SEQUENTIAL = ("#f5f7fd", "#c3cffc", "#8196f6", "#385af8", "#1c2f9c", "#0b1240")
DASHES = ("-", (0, (4, 1.6)), (0, (1.2, 1.4)))
WIDTH = 9.6
"""Inches of every figure, so that their text has one size on a page."""
MARKERS = ("o", "s", "^", "D", "v", "p", "<", ">", "h", "d", "8", "*", "P")
THEME = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    BLANK: "var(--blank)",
    SURFACE: "var(--surface)",
    **{colour: f"var(--series-{index})" for index, colour in enumerate(PALETTE)},
}
STYLE = {
    "font.family": ["DejaVu Sans"],
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8.0,
    "axes.labelsize": 8.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.linewidth": 0.6,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "xtick.major.size": 3.0,
    "ytick.major.size": 0.0,
    "xtick.major.width": 0.6,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "figure.facecolor": SURFACE,
    "svg.fonttype": "none",
    "svg.hashsalt": "fedjax_pfl",
}


class Look(NamedTuple):
    """How one series is drawn, the same in every figure."""

    colour: str
    dash: Any
    marker: str


def looks_of(labels: Iterable[str]) -> dict[str, Look]:
    """A look for each label in order: no two of the first 18 have the same colour and dash, of 78 colour and mark."""
    return {
        label: Look(PALETTE[i % len(PALETTE)], DASHES[i // len(PALETTE) % len(DASHES)], MARKERS[i % len(MARKERS)])
        for i, label in enumerate(dict.fromkeys(labels))
    }


def styled(function: Callable[P, T]) -> Callable[P, T]:
    """Run a drawing function under this module's style, leaving matplotlib's global settings as they were."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        import matplotlib

        with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
            return function(*args, **kwargs)

    return wrapped


def new_figure(width: float, height: float) -> Figure:
    """An empty figure (inches) on the Agg canvas, without pyplot; a notebook shows it as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    spacing = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06, wspace=0.04, hspace=0.06)
    figure = Figure(figsize=(width, height), layout=spacing)
    FigureCanvasAgg(figure)
    figure._repr_png_ = functools.partial(png_bytes, figure)  # type: ignore[attr-defined]
    return figure


def figure_of(ax: Axes) -> Figure:
    """The figure at the root of an axes."""
    return ax.get_figure(root=True)  # type: ignore[return-value]


def axes_or_new(ax: Axes | None, height: float) -> Axes:
    """The given axes, or the only one of a new figure."""
    return new_figure(WIDTH, height).subplots() if ax is None else ax


def printable(text: object, limit: int = 44) -> str:
    """Text for a figure: control characters replaced, long text cut with an ellipsis."""
    clean = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text))
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def few_ticks(most: int, integer: bool = False) -> Any:
    """At most about this many ticks at round numbers."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(most, integer=integer)


def percent_axis(axis: Any) -> None:
    """Tick labels of a share, in per cent."""
    axis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")


def quantity(value: float) -> str:
    """A count with an SI suffix and three digits: 1234567 -> ``1.23 M``."""
    if not math.isfinite(value):
        return ""
    for scale, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale * 0.9995:
            return f"{value / scale:.3g} {suffix}"
    return f"{value:.3g}"


def legend(figure: Figure, looks: Mapping[str, Look], lines: bool = True) -> None:
    """One legend above the panels, in the order of the looks; left out when there is a single series."""
    from matplotlib.lines import Line2D

    if len(looks) < 2:
        return
    handles = [
        Line2D([], [], color=look.colour, linestyle=look.dash if lines else "none", marker=look.marker, markersize=4,
               linewidth=1.6, label=printable(label, 36))
        for label, look in looks.items()
    ]  # fmt: skip
    longest = max(len(printable(label, 36)) for label in looks)
    columns = max(1, min(len(handles), int(118 / (longest + 8))))
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, fontsize=8.5, handlelength=2.6,
                  columnspacing=1.6, borderaxespad=0.2)  # fmt: skip


@styled
def png_bytes(figure: Figure, dpi: int = 150) -> bytes:
    """The figure as PNG on a white ground."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=dpi, facecolor=SURFACE)
    return stream.getvalue()


def save_png(figure: Figure, path: Path, dpi: int = 150) -> None:
    """Write the figure as PNG."""
    path.write_bytes(png_bytes(figure, dpi))


@styled
def inline_svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an SVG element to put in a page: transparent, its colours the page's ``--ink``, ``--series-0``, ...

    name: prefix of the element ids, unique in the page; description: text for a screen reader.
    """
    from html import escape

    stream = io.StringIO()
    figure.savefig(stream, format="svg", facecolor="none", dpi=200, metadata={"Date": None, "Creator": None})
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<style type="text/css">.*?</style>', "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<(?:g|path|use|rect|clipPath|image|defs)\b[^>]*?\b)id="', rf'\1id="{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    svg = re.sub("|".join(THEME), lambda found: THEME[found[0]], svg)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--sans)", svg)
    size = re.search(r'viewBox="[^"]*"', svg)
    assert size is not None
    head = f'<svg class="plot" role="img" aria-label="{escape(printable(description, 1000))}" {size[0]} xmlns:xlink="http://www.w3.org/1999/xlink">'
    return head + svg[svg.index(">") + 1 :]
