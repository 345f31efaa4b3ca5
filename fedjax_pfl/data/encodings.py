"""Structural encodings of graphs: random-walk return probabilities and clipped degrees of all nodes, on the host.

They are the inputs of the structural models of FedStar (Tan et al., "Federated Learning on Non-IID Graphs via
Structural Knowledge Sharing", AAAI 2023, https://arxiv.org/abs/2211.13009).
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

STEPS = 16
DEGREES = 16
POWERS = (1, 3, 5, 7, 8)  # the diagonals of all powers up to 16 are sums over products of two of these
PAIRS = {
    1: (1, 0), 2: (1, 1), 3: (3, 0), 4: (1, 3), 5: (5, 0), 6: (3, 3), 7: (7, 0), 8: (8, 0), 9: (8, 1), 10: (5, 5),
    11: (8, 3), 12: (5, 7), 13: (8, 5), 14: (7, 7), 15: (8, 7), 16: (8, 8),
}  # fmt: skip
DENSE = 256  # larger sparse graphs are taken some columns at a time,
COLUMNS = 256  # so many
AT_ONCE = 1 << 22  # entries of a stack of dense matrices
KEPT = 1 << 24  # sum of squared numbers of nodes from which on the result is kept: some seconds of work
VERSION = 1


def degree_index(x: np.ndarray, senders: np.ndarray) -> np.ndarray:
    """The degree of each node (edges that it sends, self-loops and repetitions counted) as an index 0..15.

    x: ``(n, 5)`` graph rows, one behind the other; senders: ``(E,)`` node numbers within the graph.

    Returns:
        ``(N,)`` int32, ``clip(degree, 1, 16) - 1``: an isolated node counts as one of degree 1.
    """
    degree = np.bincount(senders + np.repeat(x[:, 0], x[:, 3]), minlength=int(x[:, 1].sum()))
    return (np.clip(degree, 1, DEGREES) - 1).astype(np.int32)


def walk_probabilities(x: np.ndarray, senders: np.ndarray, receivers: np.ndarray) -> np.ndarray:
    """The probabilities that a random walk is back at its node after k = 1..16 steps: ``diag((A D^-1)^k)``.

    A node without edges has zeros. Graphs are taken together by size; nothing larger than one graph is held densely.

    x: ``(n, 5)`` graph rows, one behind the other; senders, receivers: ``(E,)`` node numbers within the graph.

    Returns:
        ``(N, 16)`` float32.
    """
    from threadpoolctl import threadpool_limits  # a requirement of scikit-learn

    walk = np.zeros((int(x[:, 1].sum()), STEPS), np.float32)
    first, nodes, edges = x[:, 0], x[:, 1], x[:, 3]
    small = (nodes <= DENSE) | (edges * 32.0 > nodes * nodes.astype(float))
    for rows, width in _stacks(np.flatnonzero(small), nodes):
        with threadpool_limits(1):  # products of small matrices: threads would wait for each other most of the time
            powers = _powers(_dense(x[rows], width, senders, receivers))
        returns = _diagonals(powers)
        inside = np.arange(width) < nodes[rows, None]
        walk[(first[rows, None] + np.arange(width))[inside]] = returns[inside]
    for row in np.flatnonzero(~small):
        walk[first[row] : first[row] + nodes[row]] = _by_columns(*_sparse(x[row], senders, receivers))
    return np.minimum(walk, 1)  # rounding


def _stacks(rows: np.ndarray, nodes: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """Graphs of about the same size, and the size to which they are padded."""
    width = np.maximum(8, -(-nodes[rows] // 8) * 8)
    for size in np.unique(width):
        own = rows[width == size]
        many = max(1, AT_ONCE // int(size) ** 2)
        for begin in range(0, len(own), many):
            yield own[begin : begin + many], int(size)


def _dense(x: np.ndarray, width: int, senders: np.ndarray, receivers: np.ndarray) -> np.ndarray:
    """``A D^-1`` of each graph, padded: ``(g, width, width)`` float32."""
    edges = np.concatenate([np.arange(begin, begin + count) for begin, count in x[:, 2:4]])
    graph = np.repeat(np.arange(len(x)), x[:, 3])
    cells = (graph * width + receivers[edges]) * width + senders[edges]
    steps = np.bincount(cells, minlength=len(x) * width * width).reshape(len(x), width, width).astype(np.float32)
    return steps / np.maximum(steps.sum(1, keepdims=True), 1)


def _sparse(x: np.ndarray, senders: np.ndarray, receivers: np.ndarray) -> tuple[Any, np.ndarray]:
    """``A`` of one graph and the degrees, float32."""
    from scipy.sparse import csr_array

    edges, nodes = slice(x[2], x[2] + x[3]), int(x[1])
    degree = np.bincount(senders[edges], minlength=nodes).astype(np.float32)
    entries = np.ones(x[3], np.float32)
    return csr_array((entries, (receivers[edges], senders[edges])), (nodes, nodes)), degree


def _powers(step: np.ndarray) -> dict[int, np.ndarray]:
    two = step @ step
    three = two @ step
    five = three @ two
    seven = five @ two
    return dict(zip(POWERS, (step, three, five, seven, seven @ step), strict=True))


def _diagonals(powers: dict[int, np.ndarray]) -> np.ndarray:
    """The diagonals of the powers 1..16, ``(g, nodes, 16)``."""

    def diagonal(a: int, b: int) -> np.ndarray:
        return np.einsum("gij,gji->gi", powers[a], powers[b]) if b else np.einsum("gii->gi", powers[a])

    return np.stack([diagonal(*PAIRS[k]) for k in range(1, STEPS + 1)], -1)


def _by_columns(edges: Any, degree: np.ndarray) -> np.ndarray:
    """The diagonals of the powers 1..16 of ``P = A D^-1`` for a sparse A, ``(nodes, 16)``, some columns at a time.

    Where A is symmetric ``diag(P^(a+b))_j = d_j sum_i P^a_ij P^b_ij / d_i``, so that powers up to 8 are enough.
    """
    nodes, inverse = len(degree), 1 / np.maximum(degree, 1)
    symmetric = abs(edges - edges.T).nnz == 0
    step = edges.multiply(inverse).tocsr()
    found = np.zeros((nodes, STEPS), np.float32)
    for begin in range(0, nodes, COLUMNS):
        own = np.arange(begin, min(begin + COLUMNS, nodes))
        power = np.zeros((nodes, len(own)), np.float32)
        power[own, own - begin] = 1
        kept: list[np.ndarray] = []
        for k in range(STEPS // 2 if symmetric else STEPS):
            power = step @ power
            kept += [power] if symmetric else []
            found[own, k] = power[own, own - begin]
        for k, other in enumerate(kept, STEPS // 2):
            found[own, k] = degree[own] * np.einsum("ij,ij,i->j", power, other, inverse)
    return found


def cached_walk(x: np.ndarray, senders: np.ndarray, receivers: np.ndarray, folder: Path) -> np.ndarray:
    """``walk_probabilities``, kept in a folder under a name made of the graphs, where they are many.

    A file that is damaged or of another shape is computed anew; a folder that cannot be written to is no error.
    """
    if (x[:, 1].astype(float) ** 2).sum() < KEPT:
        return walk_probabilities(x, senders, receivers)
    content = hashlib.sha256(str(VERSION).encode())
    for array in (x[:, 1], x[:, 3], senders, receivers):
        content.update(np.ascontiguousarray(array, np.int32).data)
    path = folder / f"walk-{content.hexdigest()[:32]}.npy"
    found = _stored(path, (int(x[:, 1].sum()), STEPS))
    if found is not None:
        return found
    walk = walk_probabilities(x, senders, receivers)
    _store(path, walk)
    return walk


def _stored(path: Path, shape: tuple[int, int]) -> np.ndarray | None:
    """The array of a file and the check behind it; None where there is no sound one."""
    try:
        if path.stat().st_size > 4096 + shape[0] * shape[1] * 4:
            return None
        with open(path, "rb") as stream:
            array = np.load(stream, allow_pickle=False)
            check = stream.read()
    except (OSError, ValueError, EOFError):
        return None
    sound = array.shape == shape and array.dtype == np.float32 and check == hashlib.sha256(array.data).digest()
    return array if sound else None


def _store(path: Path, array: np.ndarray) -> None:
    """Write the whole file or none."""
    partial = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".partial-", delete=False) as stream:
            partial = stream.name
            np.save(stream, array)
            stream.write(hashlib.sha256(array.data).digest())
        os.replace(partial, path)
    except OSError:
        if partial:
            Path(partial).unlink(missing_ok=True)
