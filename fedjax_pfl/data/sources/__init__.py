"""The registry of data sources, and the way to load one by name."""

from __future__ import annotations

from pathlib import Path

from fedjax_pfl.data.checks import unknown_name
from fedjax_pfl.data.sources.base import DATA_VARIABLE, Source, SourceEntry
from fedjax_pfl.data.sources.digits import DIGITS
from fedjax_pfl.data.sources.folder import FOLDER
from fedjax_pfl.data.sources.har import UCI_HAR, UCI_HAR_FEATURES
from fedjax_pfl.data.sources.idx import MNIST_IDX
from fedjax_pfl.data.sources.leaf import FEMNIST, LEAF_SHAKESPEARE
from fedjax_pfl.data.sources.named import NAMED_ENTRIES
from fedjax_pfl.data.sources.npz import NPZ
from fedjax_pfl.data.sources.planetoid import CITESEER, CORA, NODE, PUBMED
from fedjax_pfl.data.sources.synthetic import SYNTHETIC
from fedjax_pfl.data.sources.table import CSV, PARQUET
from fedjax_pfl.data.sources.text import SHAKESPEARE
from fedjax_pfl.data.sources.tfds import TFDS
from fedjax_pfl.data.sources.tu import TU

__all__ = ["DATA_VARIABLE", "SOURCES", "Source", "SourceEntry", "load"]

_ENTRIES = (
    DIGITS, MNIST_IDX, NPZ, SYNTHETIC, FEMNIST, UCI_HAR, UCI_HAR_FEATURES, SHAKESPEARE, LEAF_SHAKESPEARE, TU, CORA,
    CITESEER, PUBMED, NODE, *NAMED_ENTRIES, TFDS, FOLDER, CSV, PARQUET,
)  # fmt: skip
SOURCES: dict[str, SourceEntry] = {entry.name: entry for entry in _ENTRIES}


def load(name: str, data_dir: str | Path | None = None) -> Source:
    """The source called ``name``, such as ``digits``, ``mnist-idx:DIR``, ``npz:FILE`` or ``synthetic:groups=4``.

    A relative path is looked for in ``data_dir``, then as it stands, then in the folder that the environment variable
    ``FEDJAX_PFL_DATA`` names. A folder without a prefix is read as ``mnist-idx``.

    Raises:
        ValueError: unknown name (with the nearest one), unknown or bad option, unusable file.
        FileNotFoundError: missing files, with the places tried and where to get them.
    """
    base = Path(data_dir) if data_dir is not None else None
    kind, _, argument = name.partition(":")
    if kind not in SOURCES and Path(name).is_dir():
        kind, argument = "mnist-idx", name
    if kind not in SOURCES:
        raise unknown_name("data source", kind, SOURCES)
    return SOURCES[kind].load(argument, base)
