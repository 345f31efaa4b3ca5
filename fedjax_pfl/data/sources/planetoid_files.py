"""Graphs of nodes on disk: the eight files of Planetoid, and one npz file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.data.archives import open_files
from fedjax_pfl.data.columns import read_columns
from fedjax_pfl.data.files import read_npz
from fedjax_pfl.data.pickles import read_pickle

CELLS = 1 << 28  # of a dense feature table
SPARSE = 1024  # a dense table may have so many cells a stored entry (real: up to 118), and SLACK more
SLACK = 1 << 20
FILE = 1 << 28  # bytes of one file
ADDRESS = "https://github.com/kimiyoung/planetoid/tree/master/data"


class Nodes(NamedTuple):
    """One graph: features ``(N, F)``, label ``(N,)`` with -1 for none, undirected edges ``(E, 2)``, test nodes."""

    features: np.ndarray
    label: np.ndarray
    edges: np.ndarray
    test: np.ndarray
    classes: int


def remedy(name: str) -> str:
    """Where the files of a citation graph are."""
    return f"fetch the files ind.{name}.* of {ADDRESS} and give their folder"


def read_planetoid(path: Path, name: str) -> Nodes:
    """The graph of the eight files ``ind.NAME.*`` in a folder or archive; nodes that no file names have no label.

    Raises:
        FileNotFoundError: a missing file.
        ValueError: a file of another structure (see ``read_pickle``), sizes that do not fit each other.
    """
    with open_files(path) as files:
        if files.find(f"ind.{name}.graph") is None:
            raise FileNotFoundError(f"{path}: has no ind.{name}.graph: {remedy(name)}")

        def stored(part: str) -> Any:
            member = files.find(f"ind.{name}.{part}") or f"ind.{name}.{part}"
            return read_pickle(files.open(member, FILE), name=files.place(member))

        index_file = files.find(f"ind.{name}.test.index") or f"ind.{name}.test.index"
        test = read_columns(files.read(index_file), files.place(index_file), 1, whole=True)[:, 0]
        parts = {part: stored(part) for part in ("x", "tx", "allx")}
        targets = {part: stored(part) for part in ("y", "ty", "ally")}
        graph = stored("graph")
    return _assembled(parts, targets, graph, test, f"{path}, ind.{name}")


def _assembled(parts: dict[str, Any], targets: dict[str, Any], graph: Any, test: np.ndarray, place: str) -> Nodes:
    """Nodes in the order of the graph: first those of ``allx``, then the test nodes where ``test.index`` says."""
    (first, _), (hidden, wide), (known, width) = (
        _shape(parts[part], f"{place}.{part}") for part in ("x", "tx", "allx")
    )
    sizes = [len(targets[part]) if _is_one_hot(targets[part]) else -1 for part in ("y", "ty", "ally")]
    if sizes != [first, hidden, known] or len(test) != hidden:
        raise ValueError(
            f"{place}: labels must be 0 and 1, a row for each of x, tx and allx and of test.index: damaged"
        )
    columns = targets["ally"].shape[1]
    if width != wide or columns != targets["ty"].shape[1] or first > known:
        raise ValueError(f"{place}: x, tx and allx, or y, ty and ally, differ in their columns: fetch them again")
    total = len(graph) if isinstance(graph, dict) else 0
    if len(np.unique(test)) < len(test) or test.min() < known or test.max() >= total:
        raise ValueError(f"{place}.test.index: needs distinct nodes in {known}..{total - 1}: damaged")
    most = min(CELLS, SPARSE * int(parts["allx"].size + parts["tx"].size) + SLACK)
    if total * width > most:
        raise ValueError(f"{place}: {total} nodes with {width} features are more than {most} cells: damaged")
    features = np.zeros((total, width), np.float32)
    label = np.full(total, -1, np.int32)
    for rows, part, hot in ((slice(known), "allx", "ally"), (test, "tx", "ty")):
        _put(features, rows, parts[part], f"{place}.{part}")
        label[rows] = np.where(targets[hot].sum(1) == 1, targets[hot].argmax(1), -1)
    return Nodes(features, label, _edges(graph, f"{place}.graph"), test, columns)


def _shape(matrix: Any, place: str) -> tuple[int, int]:
    """Rows and columns of a csr matrix or an array, which is not touched."""
    shape: tuple[int, ...] = getattr(matrix, "shape", ())
    if len(shape) != 2 or shape[0] * shape[1] > CELLS or matrix.dtype.kind not in "biuf":
        raise ValueError(f"{place}: needs a matrix of numbers, of at most {CELLS} cells: damaged, fetch it again")
    return shape[0], shape[1]


def _put(features: np.ndarray, rows: Any, matrix: Any, place: str) -> None:
    """Write a csr matrix or an array into some rows of the float32 features, entry by entry."""
    with np.errstate(over="ignore"):
        if isinstance(matrix, np.ndarray):
            features[rows] = matrix
        else:
            row = np.arange(len(features))[rows].repeat(np.diff(matrix.indptr))
            np.add.at(features, (row, matrix.indices), matrix.data.astype(np.float32))  # entries of one place add up
    _check_finite(features, place, rows)


def _check_finite(features: np.ndarray, place: str, rows: Any = slice(None)) -> None:
    good = np.isfinite(features).all(1)[rows]
    if not good.all():
        raise ValueError(f"{place}: row {int(good.argmin())} is not finite: fetch it again")


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
    with np.errstate(over="ignore"):
        features = found["x"].astype(np.float32)
    _check_finite(features, f"{path}, x")
    return Nodes(features, label.astype(np.int32), edges, found["test"], classes)
