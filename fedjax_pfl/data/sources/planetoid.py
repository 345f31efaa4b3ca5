"""Node classification: citation graphs in Planetoid's files, and graphs of one's own as npz.

Yang, Cohen, Salakhutdinov: "Revisiting Semi-Supervised Learning with Graph Embeddings", ICML 2016,
https://arxiv.org/abs/1603.08861, whose split leaves 1,000 nodes for testing. Its 20 training nodes a class and 500
validation nodes are not kept apart: a partition deals out all other labelled nodes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedjax_pfl.data.rows import Rows
from fedjax_pfl.data.sources.base import Source, SourceEntry, locate
from fedjax_pfl.data.sources.finding import find_any
from fedjax_pfl.data.sources.planetoid_files import Nodes, read_nodes, read_planetoid, remedy


def _source(name: str, path: Path, nodes: Nodes, licence: str) -> Source:
    """``x (n,)`` int32 labelled nodes, read as their rows of ``features (N, F)``; uint8 where all are 0 or 1.

    tables: also ``senders``, ``receivers (E,)`` int32, both directions of each edge, self-loops once.
    """
    x = np.flatnonzero(nodes.label >= 0).astype(np.int32)
    test = np.zeros(len(nodes.label), bool)
    test[nodes.test] = True
    binary = all(bool(((row == 0) | (row == 1)).all()) for row in nodes.features)  # row by row: no copy of a table
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
        kind="nodes", tables=tables, reader=Rows("features"), licence=licence, where=str(path),
    )  # fmt: skip


def _entry(name: str, title: str) -> SourceEntry:
    def load(argument: str, data_dir: Path | None) -> Source:
        usual = [f"{folder}{name}{end}" for folder in ("planetoid/", "") for end in (".npz", ".zip", "")]
        usual += ["planetoid/data", "planetoid"]
        path = find_any(argument, usual, data_dir, remedy(name))
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
