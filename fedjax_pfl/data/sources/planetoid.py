"""Node classification: citation graphs in Planetoid's files, and graphs of one's own as npz.

Yang, Cohen, Salakhutdinov: "Revisiting Semi-Supervised Learning with Graph Embeddings", ICML 2016,
https://arxiv.org/abs/1603.08861, whose split leaves 1,000 nodes for testing. Its 20 training nodes a class and 500
validation nodes are not kept apart: a partition deals out all other labelled nodes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.data.archives import open_files
from fedjax_pfl.data.columns import read_columns
from fedjax_pfl.data.files import read_npz
from fedjax_pfl.data.pickles import read_pickle
from fedjax_pfl.data.rows import Rows
from fedjax_pfl.data.sources.base import Source, SourceEntry, locate
from fedjax_pfl.data.sources.finding import find_any

CELLS = 1 << 28  # of a dense feature table
ADDRESS = "https://github.com/kimiyoung/planetoid/tree/master/data"


class Nodes(NamedTuple):
    """One graph: features ``(N, F)``, label ``(N,)`` with -1 for none, undirected edges ``(E, 2)``, test nodes."""

    features: np.ndarray
    label: np.ndarray
    edges: np.ndarray
    test: np.ndarray
    classes: int


def _remedy(name: str) -> str:
    return f"fetch the files ind.{name}.* of {ADDRESS} and give their folder"


def read_planetoid(path: Path, name: str) -> Nodes:
    """The graph of the eight files ``ind.NAME.*`` in a folder or archive; nodes that no file names have no label.

    Raises:
        FileNotFoundError: a missing file.
        ValueError: a file of another structure (see ``read_pickle``), sizes that do not fit each other.
    """
    with open_files(path) as files:
        if files.find(f"ind.{name}.graph") is None:
            raise FileNotFoundError(f"{path}: has no ind.{name}.graph: {_remedy(name)}")

        def stored(part: str) -> Any:
            member = files.find(f"ind.{name}.{part}") or f"ind.{name}.{part}"
            return read_pickle(files.open(member), name=files.place(member))

        index_file = files.find(f"ind.{name}.test.index") or f"ind.{name}.test.index"
        test = read_columns(files.read(index_file), files.place(index_file), 1, whole=True)[:, 0]
        parts = {part: stored(part) for part in ("x", "tx", "allx")}
        targets = {part: stored(part) for part in ("y", "ty", "ally")}
        graph = stored("graph")
    return _assembled(parts, targets, graph, test, f"{path}, ind.{name}")


def _assembled(parts: dict[str, Any], targets: dict[str, Any], graph: Any, test: np.ndarray, place: str) -> Nodes:
    """Nodes in the order of the graph: first those of ``allx``, then the test nodes where ``test.index`` says."""
    first, hidden, known = (_dense(parts[part], f"{place}.{part}") for part in ("x", "tx", "allx"))
    sizes = [len(targets[part]) if _is_one_hot(targets[part]) else -1 for part in ("y", "ty", "ally")]
    if sizes != [len(first), len(hidden), len(known)] or len(test) != len(hidden):
        raise ValueError(
            f"{place}: labels must be 0 and 1, a row for each of x, tx and allx and of test.index: damaged"
        )
    columns = targets["ally"].shape[1]
    if known.shape[1] != hidden.shape[1] or columns != targets["ty"].shape[1] or len(first) > len(known):
        raise ValueError(f"{place}: x, tx and allx, or y, ty and ally, differ in their columns: fetch them again")
    total = len(graph) if isinstance(graph, dict) else 0
    if len(np.unique(test)) < len(test) or test.min() < len(known) or test.max() >= total:
        raise ValueError(f"{place}.test.index: needs distinct nodes in {len(known)}..{total - 1}: damaged")
    if total * known.shape[1] > CELLS:
        raise ValueError(f"{place}.graph: has {total} nodes, more than fit: damaged")
    features = np.zeros((total, known.shape[1]), np.float32)
    label = np.full(total, -1, np.int32)
    for rows, values, hot in ((slice(len(known)), known, "ally"), (test, hidden, "ty")):
        features[rows] = values
        label[rows] = np.where(targets[hot].sum(1) == 1, targets[hot].argmax(1), -1)
    return Nodes(features, label, _edges(graph, f"{place}.graph"), test, columns)


def _dense(matrix: Any, place: str) -> np.ndarray:
    """Features ``(rows, F)`` float32 of a csr matrix or an array."""
    shape: tuple[int, ...] = getattr(matrix, "shape", ())
    if len(shape) != 2 or shape[0] * shape[1] > CELLS or matrix.dtype.kind not in "biuf":
        raise ValueError(f"{place}: needs a matrix of numbers, of at most {CELLS} cells: damaged, fetch it again")
    dense = (matrix if isinstance(matrix, np.ndarray) else matrix.toarray()).astype(np.float32)
    if not np.isfinite(dense).all():
        raise ValueError(f"{place}: row {np.argwhere(~np.isfinite(dense))[0][0]} is not finite: fetch it again")
    return dense


def _is_one_hot(labels: Any) -> bool:
    return isinstance(labels, np.ndarray) and labels.ndim == 2 and labels.dtype.kind in "biuf" and (
        bool(np.isin(labels, (0, 1)).all())
    )  # fmt: skip


def _edges(graph: dict[Any, Any], place: str) -> np.ndarray:
    """Undirected edges of ``{node: neighbours}``: ``(E, 2)``, each once, the smaller node first, sorted."""
    if not all(type(node) is int and isinstance(near, list) for node, near in graph.items()):
        raise ValueError(f"{place}: needs {{node: [neighbours]}}: damaged, fetch it again")
    if not all(type(other) is int for near in graph.values() for other in near):
        raise ValueError(f"{place}: a neighbour is no whole number: damaged, fetch it again")
    nodes = np.repeat(np.array(list(graph), np.int64), [len(near) for near in graph.values()])
    others = np.array([other for near in graph.values() for other in near], np.int64)
    pairs = np.stack([nodes, others], 1)
    if sorted(graph) != list(range(len(graph))) or (pairs.size and (pairs.min() < 0 or pairs.max() >= len(graph))):
        raise ValueError(f"{place}: nodes must be 0..{len(graph) - 1}: damaged, fetch it again")
    return np.unique(np.sort(pairs, 1), axis=0)


def read_nodes(path: Path) -> Nodes:
    """The graph of an npz file: ``x (N, F)``, ``y (N,)`` (-1: none), ``edges (E, 2)``, optionally ``test`` nodes.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a missing array, another shape or kind, nodes out of range.
    """
    found = read_npz(path, ["x", "y", "edges", "test"])
    found.setdefault("test", np.zeros(0, np.int64))
    axes = {"x": 2, "y": 1, "edges": 2, "test": 1}
    wrong = [name for name, count in axes.items() if name not in found or found[name].ndim != count]
    wrong += [name for name in found if found[name].dtype.kind not in ("biuf" if name == "x" else "iu")]
    if wrong or len(found["x"]) != len(found["y"]) or found["edges"].shape[1] != 2:
        raise ValueError(
            f"{path}: needs numbers x (nodes, features), whole numbers y (nodes,), edges (edges, 2) and optionally "
            f"test (nodes,): wrong are {', '.join(wrong) or 'the lengths'}"
        )
    total, label = len(found["y"]), found["y"].astype(np.int64)
    for name in ("edges", "test"):
        if found[name].size and (found[name].min() < 0 or found[name].max() >= total):
            raise ValueError(f"{path}: {name} names nodes outside of 0..{total - 1}: damaged")
    if label.min(initial=0) < -1 or label.max(initial=-1) < 0:
        raise ValueError(f"{path}: y must be 0..C-1, or -1 for nodes without a label")
    edges = np.unique(np.sort(found["edges"].astype(np.int64), 1), axis=0)
    classes = int(label.max()) + 1
    return Nodes(_dense(found["x"], f"{path}, x"), label.astype(np.int32), edges, found["test"], classes)


def _source(name: str, path: Path, nodes: Nodes, licence: str) -> Source:
    """``x (n,)`` int32 labelled nodes, read as their rows of ``features (N, F)``; uint8 where all are 0 or 1.

    tables: also ``senders``, ``receivers (E,)`` int32, both directions of each edge, self-loops once.
    """
    x = np.flatnonzero(nodes.label >= 0).astype(np.int32)
    test = np.zeros(len(nodes.label), bool)
    test[nodes.test] = True
    binary = bool(np.isin(nodes.features, (0, 1)).all())
    back = nodes.edges[nodes.edges[:, 0] != nodes.edges[:, 1]][:, ::-1]
    both = np.concatenate([nodes.edges, back])
    both = both[np.lexsort((both[:, 1], both[:, 0]))].astype(np.int32)
    tables = {
        "features": nodes.features.astype(np.uint8) if binary else nodes.features,
        "senders": np.ascontiguousarray(both[:, 0]),
        "receivers": np.ascontiguousarray(both[:, 1]),
    }
    return Source(
        f"{name}:{path}", x, nodes.label[x], nodes.classes, official_test=test[x] if len(nodes.test) else None,
        tables=tables, reader=Rows("features"), licence=licence, where=str(path),
    )  # fmt: skip


def _entry(name: str, title: str) -> SourceEntry:
    def load(argument: str, data_dir: Path | None) -> Source:
        usual = [f"{folder}{name}{end}" for folder in ("planetoid/", "") for end in (".npz", ".zip", "")]
        usual += ["planetoid/data", "planetoid"]
        path = find_any(argument, usual, data_dir, _remedy(name))
        nodes = read_nodes(path) if path.suffix == ".npz" else read_planetoid(path, name)
        return _source(name, path, nodes, licence)

    licence = "none stated; cite the authors"
    return SourceEntry(
        name, f"{name}[:PATH]", f"nodes of the citation graph {title}, published test nodes", licence, load
    )


def _node(argument: str, data_dir: Path | None) -> Source:
    if not argument:
        raise ValueError("node needs a file: node:FILE with arrays x, y, edges and optionally test")
    path = locate(argument, data_dir)
    return _source("node", path, read_nodes(path), NODE.licence)


CORA, CITESEER, PUBMED = _entry("cora", "Cora"), _entry("citeseer", "CiteSeer"), _entry("pubmed", "PubMed")
NODE = SourceEntry(
    "node", "node:FILE", "nodes of one graph: npz with x, y, edges, optionally test", "the file's own", _node
)
