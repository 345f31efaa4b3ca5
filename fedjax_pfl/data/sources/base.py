"""What a data source is: host arrays with labels, and what a partition or a report may want to know about them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fedjax_pfl.data.checks import check_values, unknown_name
from fedjax_pfl.data.clients import Reader

DATA_VARIABLE = "FEDJAX_PFL_DATA"


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """All samples of one data set on the host, checked when built.

    x: ``(n, ...)`` uint8 or float32; a model sees ``(x - shift) / scale``. With a reader, places in the tables (int32).
    y: ``(n,)`` int32 in ``0..num_classes-1``.
    client: ``(n,)`` natural client ids (integers or text), or None.
    group: ``(n,)`` the known group of each sample's client in generated data, or None.
    official_test: ``(n,)`` bool, the samples of the published test set, or None.
    kind: what a model is given: ``array`` (numbers), ``tokens`` (whole numbers that stand for symbols), ``graph``, or
        ``nodes`` of one graph: arrays as they are, and graphs once they are dealt (see ``data.subgraphs``).
    tables, reader: what samples have in common, such as the text that windows are cut from, and how a batch of ``x`` is
        read from it (see ``ClientData``).
    segment, overlap: ``(n,)`` the recording that a sample was cut from, in whose order the samples stand, and how many
        of the following samples share content with a sample: splits cut such segments in order and leave a gap.
    dataset, datasets: ``(n,)`` which of several data sets a sample is from, and their names; None for a single one.

    Raises:
        ValueError: no samples, lengths that differ, labels out of range, NaN or infinite features.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    num_classes: int
    client: np.ndarray | None = None
    group: np.ndarray | None = None
    official_test: np.ndarray | None = None
    shift: np.ndarray | float = 0.0
    scale: np.ndarray | float = 1.0
    kind: Literal["array", "tokens", "graph", "nodes"] = "array"
    tables: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    reader: Reader | None = None
    segment: np.ndarray | None = None
    overlap: int = 0
    dataset: np.ndarray | None = None
    datasets: tuple[str, ...] = ()
    licence: str = ""
    where: str = ""

    def __post_init__(self) -> None:
        arrays = {"x": self.x, "y": self.y, "client": self.client, "group": self.group, "test": self.official_test}
        arrays |= {"segment": self.segment, "dataset": self.dataset}
        lengths = {name: len(leaf) for name, leaf in arrays.items() if leaf is not None}
        if not lengths["y"]:
            raise ValueError(f"{self.name}: the data set is empty")
        if len(set(lengths.values())) > 1:
            raise ValueError(f"{self.name}: all arrays need one entry a sample, found lengths {lengths}")
        check_values(self.examples(), self.num_classes, self.name)

    def __len__(self) -> int:
        return len(self.y)

    def examples(self) -> dict[str, np.ndarray]:
        """The leaves that go to the device, as views."""
        return {"x": self.x, "y": self.y}

    def sample(self) -> Any:
        """A batch of one sample as a model is given it, before shift and scale."""
        return self.x[:1] if self.reader is None else self.reader(self.x[:1], self.tables)


class SourceEntry(NamedTuple):
    """One row of the registry; ``load`` takes the text behind the colon and an optional base folder."""

    name: str
    usage: str
    description: str
    licence: str
    load: Callable[[str, Path | None], Source]


def locate(path: str, data_dir: Path | None) -> Path:
    """The first existing candidate of a path, or an error with all of them."""
    if data_dir is not None and not Path(data_dir).is_dir():
        raise FileNotFoundError(f"the data folder {str(data_dir)!r} does not exist: correct --data-dir")
    bases = [data_dir, Path(), os.environ.get(DATA_VARIABLE)]
    candidates = list(dict.fromkeys(Path(base) / Path(path).expanduser() for base in bases if base is not None))
    for candidate in candidates:
        if candidate.exists():
            return candidate
    tried = ", ".join(str(candidate.absolute()) for candidate in candidates)
    raise FileNotFoundError(f"{path!r} was not found (tried {tried}): give a path, --data-dir or set {DATA_VARIABLE}")


def parse_options(items: Sequence[str], known: Collection[str], source: str) -> dict[str, str]:
    """The texts of ``KEY=VALUE`` items by key, blanks around them dropped; a key alone has the value "".

    Raises:
        ValueError: unknown key (with the nearest one), a key twice.
    """
    given: dict[str, str] = {}
    for item in items:
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in known:
            raise unknown_name(f"option of {source}", key, known)
        if key in given:
            raise ValueError(f"{source}: the option {key} is given twice: drop one")
        given[key] = value
    return given
