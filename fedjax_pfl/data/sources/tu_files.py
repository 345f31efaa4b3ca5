"""Sets of graphs on disk: the text files of the TUDataset collection, and the same as one npz.

Morris et al.: "TUDataset: A collection of benchmark datasets for learning with graphs", 2020,
https://arxiv.org/abs/2007.08663. Nodes and graphs count from 1 there, and each edge is listed in both directions.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_pfl.data.archives import Files, open_files
from fedjax_pfl.data.columns import read_columns
from fedjax_pfl.data.files import read_npz


class Graphs(NamedTuple):
    """All graphs of one set, one behind the other: G graphs, N nodes, E directed edges.

    nodes, edges: ``(G,)`` int64, how many each has; label: ``(G,)`` int64 as published.
    senders, receivers: ``(E,)`` int32 node numbers within the graph, sorted by graph.
    node_label: ``(N,)`` int64 as published, or None; attributes: ``(N, F)`` float32, or None.
    """

    nodes: np.ndarray
    edges: np.ndarray
    label: np.ndarray
    senders: np.ndarray
    receivers: np.ndarray
    node_label: np.ndarray | None = None
    attributes: np.ndarray | None = None


def read_graphs(path: Path) -> Graphs:
    """The graphs of a folder or archive with ``NAME_A.txt`` and so on, or of an npz file.

    Duplicate edges, self-loops, isolated nodes and graphs without edges are kept as they are.

    Raises:
        FileNotFoundError: a missing file.
        ValueError: edges to absent nodes or between graphs, lengths that differ, other than whole numbers (with line).
    """
    if path.suffix == ".npz":
        return _read_npz(path)
    with open_files(path) as files:
        found = [name for name in files.names() if name.endswith("_A.txt")]
        if len(found) != 1:
            raise FileNotFoundError(f"{path}: needs one NAME_A.txt in TUDataset layout, found {found or 'none'}")
        return _read_texts(files, found[0].removesuffix("A.txt"))


def _read_texts(files: Files, stem: str) -> Graphs:
    def column(part: str, columns: int | None, whole: bool) -> np.ndarray:
        name = f"{stem}{part}.txt"
        return read_columns(files.read(name), files.place(name), columns, commas=True, whole=whole)

    label = column("graph_labels", 1, True)[:, 0]
    indicator = column("graph_indicator", 1, True)[:, 0]
    nodes = _nodes(indicator, len(label), files.place(f"{stem}graph_indicator.txt"), f"{stem}graph_labels.txt")
    text = files.read(f"{stem}A.txt")
    place = files.place(f"{stem}A.txt")
    pairs = read_columns(text, place, 2, commas=True, whole=True) if text.strip() else np.zeros((0, 2), np.int64)
    node_label = attributes = None
    if f"{stem}node_labels.txt" in files.names():
        node_label = column("node_labels", 1, True)[:, 0]
        _one_a_node(files, f"{stem}node_labels.txt", len(node_label), len(indicator))
    if f"{stem}node_attributes.txt" in files.names():
        attributes = column("node_attributes", None, False).astype(np.float32)
        _one_a_node(files, f"{stem}node_attributes.txt", len(attributes), len(indicator))
    edges, senders, receivers = _local(pairs, indicator, nodes, place)
    return Graphs(nodes, edges, label, senders, receivers, node_label, attributes)


def _one_a_node(files: Files, name: str, found: int, nodes: int) -> None:
    if found != nodes:
        raise ValueError(f"{files.place(name)}: has {found} lines for {nodes} nodes of the graph indicator: damaged")


def _nodes(indicator: np.ndarray, graphs: int, place: str, label_file: str) -> np.ndarray:
    """Nodes of each graph; graphs must be numbered 1, 2, ... in order, none of them without a node."""
    step = np.diff(indicator, prepend=0)
    wrong = (step < 0) | (step > 1)
    wrong[0] = indicator[0] != 1
    if wrong.any():
        line = int(wrong.argmax())
        raise ValueError(
            f"{place}: line {line + 1}: graph {indicator[line]} after {indicator[line - 1] if line else 'nothing'}: "
            "graphs must be numbered 1, 2, ... in order and have nodes"
        )
    if indicator[-1] != graphs:
        raise ValueError(f"{place}: numbers {indicator[-1]} graphs, but {label_file} has {graphs} lines: damaged")
    return np.bincount(indicator - 1)


def _local(
    pairs: np.ndarray, indicator: np.ndarray, nodes: np.ndarray, place: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How many edges each graph has, and senders and receivers numbered within the graph."""
    absent = ((pairs < 1) | (pairs > len(indicator))).any(1)
    if absent.any():
        line = int(absent.argmax())
        raise ValueError(f"{place}: line {line + 1}: edge {pairs[line].tolist()}, but nodes are 1..{len(indicator)}")
    graph = indicator[pairs[:, 0] - 1] - 1
    apart = graph != indicator[pairs[:, 1] - 1] - 1
    if apart.any():
        line = int(apart.argmax())
        raise ValueError(f"{place}: line {line + 1}: edge {pairs[line].tolist()} joins two graphs: damaged or edited")
    if (np.diff(graph) < 0).any():
        order = np.argsort(graph, kind="stable")
        pairs, graph = pairs[order], graph[order]
    first = np.cumsum(nodes) - nodes
    local = (pairs - 1 - first[graph][:, None]).astype(np.int32)
    edges = np.bincount(graph, minlength=len(nodes))
    return edges, np.ascontiguousarray(local[:, 0]), np.ascontiguousarray(local[:, 1])


def _read_npz(path: Path) -> Graphs:
    """``num_nodes``, ``num_edges``, ``graph_label`` of each graph; ``src``, ``dst`` of each undirected edge, once."""
    names = ["num_nodes", "num_edges", "graph_label", "src", "dst"]
    found = read_npz(path, names)
    whole = all(found[name].ndim == 1 and found[name].dtype.kind in "iu" for name in found)
    if len(found) < len(names) or not whole:
        raise ValueError(
            f"{path}: needs whole numbers {', '.join(names)}, each with one axis, found {', '.join(found)}"
        )
    nodes, edges, label = (found[name].astype(np.int64) for name in names[:3])
    source, target = found["src"], found["dst"]
    if not len(nodes) == len(edges) == len(label) > 0 or nodes.min() < 1 or edges.min() < 0:
        raise ValueError(f"{path}: num_nodes, num_edges and graph_label need one entry a graph, and graphs need nodes")
    if not edges.sum() == len(source) == len(target):
        raise ValueError(f"{path}: num_edges add up to {edges.sum()}, but src has {len(source)} and dst {len(target)}")
    graph = np.repeat(np.arange(len(nodes)), edges)
    absent = (source < 0) | (target < 0) | (np.maximum(source, target) >= nodes[graph])
    if absent.any():
        edge = int(absent.argmax())
        raise ValueError(f"{path}: edge {edge} of src and dst leads out of graph {graph[edge]}: damaged")
    back = np.flatnonzero(source != target)
    both = np.concatenate([graph, graph[back]])
    order = np.argsort(both.astype(np.uint16) if len(nodes) < 1 << 16 else both, kind="stable")
    senders = np.concatenate([source, target[back]])[order].astype(np.int32)
    receivers = np.concatenate([target, source[back]])[order].astype(np.int32)
    return Graphs(nodes, np.bincount(both, minlength=len(nodes)), label, senders, receivers)
