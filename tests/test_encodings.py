"""Structural encodings: against direct powers of the walk's matrix, against networkx, and on degenerate graphs."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_pfl.data import encodings
from fedjax_pfl.data.encodings import cached_walk, degree_index, walk_probabilities

Edges = list[tuple[int, int]]


def tables(graphs: list[tuple[int, Edges]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, senders and receivers of graphs that are given as (nodes, directed edges)."""
    nodes, edges = (np.array(counts) for counts in ([n for n, _ in graphs], [len(e) for _, e in graphs]))
    rows = [np.cumsum(nodes) - nodes, nodes, np.cumsum(edges) - edges, edges, np.zeros(len(graphs), int)]
    pairs = np.array([pair for _, edges in graphs for pair in edges], np.int32).reshape(-1, 2)
    return np.stack(rows, 1).astype(np.int32), pairs[:, 0], pairs[:, 1]


def direct(nodes: int, edges: Edges) -> np.ndarray:
    A = np.zeros((nodes, nodes))
    for sender, receiver in edges:
        A[receiver, sender] += 1
    degree = A.sum(0)
    P = A @ np.diag(np.where(degree > 0, 1 / np.maximum(degree, 1), 0))
    return np.stack([np.diag(np.linalg.matrix_power(P, k)) for k in range(1, 17)], 1)


@st.composite
def sets(draw: st.DrawFn) -> list[tuple[int, Edges]]:
    graphs = []
    for _ in range(draw(st.integers(1, 5))):
        nodes = draw(st.integers(1, 12))
        node = st.integers(0, nodes - 1)
        graphs.append((nodes, draw(st.lists(st.tuples(node, node), max_size=3 * nodes))))
    return graphs


@settings(max_examples=60, deadline=None)
@given(sets(), st.booleans())
def test_walks_are_powers_of_the_matrix(graphs: list[tuple[int, Edges]], sparse: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if sparse:
            patch.setattr(encodings, "DENSE", 0)
        found = walk_probabilities(*tables(graphs))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.concatenate([direct(*graph) for graph in graphs]), rtol=1e-5, atol=1e-6)


def test_both_forms_agree_on_large_graphs() -> None:
    graphs = []
    for seed, nodes in enumerate((40, 290, 300)):
        links = nx.random_geometric_graph(nodes, 1.6 / nodes**0.5, seed=seed).edges
        graphs.append((nodes, [pair for a, b in links for pair in ((a, b), (b, a))]))
    rows = tables(graphs)
    assert (rows[0][1:, 1] > encodings.DENSE).all()
    sparse = walk_probabilities(*rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encodings, "DENSE", 1000)
        dense = walk_probabilities(*rows)
    np.testing.assert_allclose(sparse, dense, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dense[:40], direct(*graphs[0]), rtol=1e-5, atol=1e-6)


def test_walks_and_degrees_of_networkx() -> None:
    graph = nx.karate_club_graph()
    edges = [pair for a, b in graph.edges for pair in ((a, b), (b, a))]
    P = nx.google_matrix(graph, alpha=1, weight=None)
    rows = tables([(34, edges)])
    for k in (1, 2, 3, 16):
        expected = np.diag(np.linalg.matrix_power(P, k))
        np.testing.assert_allclose(walk_probabilities(*rows)[:, k - 1], expected, rtol=1e-5, atol=1e-6)
    expected = [min(degree, 16) - 1 for _, degree in graph.degree]
    found = degree_index(rows[0], rows[1])
    assert found.tolist() == expected
    assert found.dtype == np.int32


def test_degenerate_graphs() -> None:
    rows = tables([(3, []), (2, [(0, 0)]), (2, [(0, 1), (0, 1), (1, 0), (1, 0)]), (1, [])])
    walk = walk_probabilities(*rows)
    assert not walk[:3].any()  # no edges
    assert walk[3].tolist() == [1] * 16  # nowhere to go but to itself
    assert not walk[4].any()  # isolated
    np.testing.assert_array_equal(walk[5], [0, 1] * 8)
    assert not walk[7].any()
    assert degree_index(rows[0], rows[1]).tolist() == [0, 0, 0, 0, 0, 1, 1, 0]
    assert degree_index(*tables([(2, [(0, 1)] * 40)])[:2]).tolist() == [15, 0]


def test_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tables([(3, [(0, 1), (1, 0), (1, 2), (2, 1)])])
    usual = cached_walk(*rows, tmp_path)
    assert not list(tmp_path.iterdir())  # too small to be kept
    monkeypatch.setattr(encodings, "KEPT", 0)
    np.testing.assert_array_equal(cached_walk(*rows, tmp_path / "new"), usual)
    (path,) = (tmp_path / "new").iterdir()
    monkeypatch.setattr(encodings, "walk_probabilities", lambda *rows: pytest.fail("computed again"))
    np.testing.assert_array_equal(cached_walk(*rows, tmp_path / "new"), usual)
    monkeypatch.undo()
    monkeypatch.setattr(encodings, "KEPT", 0)
    content = path.read_bytes()
    for damaged in (content[:-40], b"", content[:140] + b"\x01" + content[141:], content + bytes(9000)):
        path.write_bytes(damaged)
        np.testing.assert_array_equal(cached_walk(*rows, tmp_path / "new"), usual)
        assert path.read_bytes() == content  # written anew
    (tmp_path / "file").write_text("")
    np.testing.assert_array_equal(cached_walk(*rows, tmp_path / "file" / "below"), usual)  # no folder: no cache
    other = tables([(3, [(0, 1), (1, 0), (2, 1), (1, 2)])])
    cached_walk(*other, tmp_path / "new")
    assert len(list((tmp_path / "new").iterdir())) == 2
