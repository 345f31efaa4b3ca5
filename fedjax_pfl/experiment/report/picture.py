"""What the page needs to know of one figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Picture(NamedTuple):
    """A figure of the report; section is the id of the part of the page it belongs to."""

    section: str
    name: str
    figure: Figure
    caption: str
    alt: str
