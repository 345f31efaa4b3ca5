"""Graph classification: sets of the TUDataset collection, one or several side by side.

The groups are the settings of GCFL (Xie et al., "Federated Graph Classification over Non-IID Graphs", NeurIPS 2021,
https://arxiv.org/abs/2106.13423): molecules and proteins, social networks, and all thirteen.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from fedjax_pfl.data.archives import open_files
from fedjax_pfl.data.budgets import budgets_for
from fedjax_pfl.data.checks import unknown_name
from fedjax_pfl.data.encodings import cached_walk, degree_index
from fedjax_pfl.data.graphs import GraphReader
from fedjax_pfl.data.sources.base import Source, SourceEntry, parse_options
from fedjax_pfl.data.sources.cache import cache_folder
from fedjax_pfl.data.sources.fetch import fetch
from fedjax_pfl.data.sources.finding import find_any
from fedjax_pfl.data.sources.tu_files import Graphs, read_graphs

CHEM_BIO = ("MUTAG", "BZR", "COX2", "DHFR", "PTC_MR", "AIDS", "NCI1", "ENZYMES", "DD", "PROTEINS")
SOCIAL = ("COLLAB", "IMDB-BINARY", "IMDB-MULTI")
GROUPS = {"ChemBio": CHEM_BIO, "Social": SOCIAL, "MIX": CHEM_BIO + SOCIAL}
DEGREES = {"COLLAB": 491, "COLLAB_500": 491, "IMDB-BINARY": 135, "IMDB-MULTI": 88}  # the largest of each whole set
ADDRESS = "https://www.chrsmrrs.com/graphkerneldatasets/"
LARGEST = 2**31 - 1
ATTRIBUTES = ",attributes"


def _tu(argument: str, data_dir: Path | None) -> Source:
    """``x (n, 5)`` int32: a graph's first node, nodes, first edge and edges in the tables, and its data set's number.

    y: the class within its data set, 0, 1, ... in the order of the published labels; ``num_classes`` is the largest.
    tables: ``senders``, ``receivers (E,)`` int32, node numbers within the graph, both directions as published;
    ``node_label (N,)`` int32, 0, 1, ... in the order of the set's labels, and for sets without labels the degree
    (entries of a node as sender), at most the largest degree of the published set; ``walk (N, 16)`` float32 and
    ``degree (N,)`` int32, see ``data.encodings``; ``labels_of_dataset``, ``classes_of_dataset (D,)`` int32; with the
    option ``attributes`` ``node_attributes (N, F)`` float32, for a single set that has them.
    Several sets are a client each, unless partitioned otherwise.
    """
    argument, attributes = _options(argument)
    names = _names(argument)
    places = [_find(name, data_dir) for name in names]
    titles = tuple(name if name in GROUPS["MIX"] else Path(name).stem for name in names)
    if len(set(titles)) < len(titles):
        raise ValueError(f"tu:{argument} names {max(titles, key=titles.count)} twice: name each data set once")
    sets = [_read(place) for place in places]
    x = _places(sets, argument)
    classes, y = zip(*(_ranked(one.label) for one in sets), strict=True)
    tables = _tables(sets, titles) | {"classes_of_dataset": np.array(classes, np.int32)}
    if attributes:
        tables["node_attributes"] = _attributes(sets, argument)
    several = len(sets) > 1
    dataset = np.repeat(np.arange(len(sets), dtype=np.int32), [len(one.label) for one in sets]) if several else None
    return Source(
        f"tu:{argument}{ATTRIBUTES if attributes else ''}", x, _concatenated(list(y)), max(classes), dataset,
        kind="graph", tables=tables, reader=GraphReader(budgets_for(x)), dataset=dataset,
        datasets=titles if several else (), licence=TU.licence, where=", ".join(str(place) for place in places),
    )  # fmt: skip


def _tables(sets: list[Graphs], titles: tuple[str, ...]) -> dict[str, np.ndarray]:
    """What all graphs have in common, of all sets one behind the other."""
    labels, node_label = zip(*(_node_labels(one, title) for one, title in zip(sets, titles, strict=True)), strict=True)
    rows = [_places([one], title) for one, title in zip(sets, titles, strict=True)]
    walk = [cached_walk(x, one.senders, one.receivers, _cache()) for x, one in zip(rows, sets, strict=True)]
    degree = [degree_index(x, one.senders) for x, one in zip(rows, sets, strict=True)]
    return {
        "senders": _concatenated([one.senders for one in sets]),
        "receivers": _concatenated([one.receivers for one in sets]),
        "node_label": _concatenated(list(node_label)),
        "walk": _concatenated(walk),
        "degree": _concatenated(degree),
        "labels_of_dataset": np.array(labels, np.int32),
    }


def _options(argument: str) -> tuple[str, bool]:
    """The argument without its option, and whether that is given."""
    names, *items = argument.split(",")
    return names, "attributes" in parse_options(items, ("attributes",), "tu")


def _attributes(sets: list[Graphs], argument: str) -> np.ndarray:
    if len(sets) > 1 or sets[0].attributes is None:
        raise ValueError(f"tu:{argument}{ATTRIBUTES}: only a single data set that has node attributes can give them")
    return sets[0].attributes


def _names(argument: str) -> list[str]:
    """The data sets, or paths of such, that an argument names."""
    names = [part.strip() for part in argument.split("+") if part.strip()]
    if not names:
        raise ValueError(f"tu needs data sets: tu:MUTAG, tu:MUTAG+BZR, a folder or zip, or {', '.join(GROUPS)}")
    return [name for part in names for name in GROUPS.get(part, (part,))]


def _find(name: str, data_dir: Path | None) -> Path:
    """Where a set lies: a path, or ``NAME.zip``, ``NAME/`` or ``NAME.npz`` in one of the usual folders, or fetched."""
    path = os.sep in name or Path(name).suffix in (".zip", ".npz")
    usual = [f"{folder}{name}{end}" for folder in ("", "tu/") for end in (".zip", "", ".npz")]
    known = GROUPS["MIX"]
    try:
        return find_any(name if path else "", usual, data_dir, "correct the name, or give a path")
    except FileNotFoundError as error:
        if path or (data_dir is not None and not data_dir.is_dir()):
            raise
        if name not in known:
            raise FileNotFoundError(f"{unknown_name('data set of tu', name, [*GROUPS, *known])}; {error}") from error
    address = f"{ADDRESS}{name}.zip"
    remedy = f"fetch {address} and put it as tu/{name}.zip into the data folder (--data-dir)"
    remedy += ", or take tu:COLLAB_500 where that is there" if name == "COLLAB" else ""
    if data_dir is not None:
        raise FileNotFoundError(f"{name} was not found in {data_dir} nor beside it: {remedy}")
    try:
        return fetch(address, _cache() / f"{name}.zip", _check)
    except OSError as error:
        raise FileNotFoundError(f"{name} was not found and cannot be fetched ({error}): {remedy}") from error


def _cache() -> Path:
    return cache_folder() / "tu"


def _check(path: Path) -> None:
    """Refuse a download that is no archive with the files of a set, such as a page of a network that wants a login."""
    with open_files(path) as files:
        for ending in ("_A.txt", "_graph_indicator.txt", "_graph_labels.txt"):
            if not any(name.endswith(ending) for name in files.names()):
                raise ValueError(f"has no NAME{ending}")


def _read(place: Path) -> Graphs:
    """The graphs of a file; one in the cache is nobody's but ours, so it can be fetched anew."""
    try:
        return read_graphs(place)
    except (ValueError, FileNotFoundError) as error:
        if place.parent != _cache():
            raise
        raise ValueError(f"{error}; it is a download in the cache: delete {place}, then it is fetched anew") from error


def _places(sets: list[Graphs], argument: str) -> np.ndarray:
    """First node, nodes, first edge, edges and data set of all graphs: ``(n, 5)`` int32."""
    nodes, edges = (np.concatenate(leaves) for leaves in ([one.nodes for one in sets], [one.edges for one in sets]))
    if max(nodes.sum(), edges.sum()) > LARGEST:
        raise ValueError(f"tu:{argument} has more than {LARGEST} nodes or edges: name fewer data sets")
    dataset = np.repeat(np.arange(len(sets)), [len(one.nodes) for one in sets])
    columns = [np.cumsum(nodes) - nodes, nodes, np.cumsum(edges) - edges, edges, dataset]
    return np.stack(columns, 1).astype(np.int32)


def _ranked(values: np.ndarray) -> tuple[int, np.ndarray]:
    """How many distinct values there are, and for each value its rank among them (int32)."""
    distinct, rank = np.unique(values, return_inverse=True)
    return len(distinct), rank.reshape(values.shape).astype(np.int32)


def _node_labels(one: Graphs, title: str) -> tuple[int, np.ndarray]:
    if one.node_label is not None:
        return _ranked(one.node_label)
    first = np.cumsum(one.nodes) - one.nodes
    degree = np.bincount(one.senders + np.repeat(first, one.edges), minlength=int(one.nodes.sum()))
    cap = DEGREES.get(title, int(degree.max()))
    return cap + 1, np.minimum(degree, cap).astype(np.int32)


def _concatenated(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


TU = SourceEntry(
    "tu",
    "tu:NAME[+NAME...][,attributes]",
    f"graphs of the TUDataset collection: {', '.join(GROUPS['MIX'])}, a folder or zip, or {', '.join(GROUPS)}",
    "none stated for most; cite the sources (see TUDataset)",
    _tu,
)
