"""Partition of a graph's nodes by its communities."""

from __future__ import annotations

import heapq
from collections import deque
from typing import Any

import numpy as np

from fedjax_pfl.data.assign.base import Assignment, Pool, number_of_clients
from fedjax_pfl.data.config import PartitionConfig


def community(pool: Pool, config: PartitionConfig, rng: np.random.Generator) -> Assignment:
    """Louvain communities (Blondel et al., 2008) go to clients, the largest first, each to the smallest client.

    A community that is larger than a fair share of the nodes is cut into pieces of that size, of neighbouring nodes
    (in the order of a breadth-first search). Communities depend on the seed, and on the version of networkx.

    Raises:
        ValueError: samples without edges, a client below the minimum.
    """
    clients, total = number_of_clients(pool, config), len(pool.labels)
    if pool.edges is None or not len(pool.edges):
        raise ValueError("community: needs edges between samples, this data has none: use cora, node:FILE, or iid")
    found, near = _communities(total, pool.edges, int(rng.integers(2**31)))
    fair = total // clients
    pieces = [piece for one in found for piece in _cut(one, near, fair)]
    pieces.sort(key=lambda piece: (-len(piece), piece[0]))
    parts: list[list[int]] = [[] for _ in range(clients)]
    queue = [(0, client) for client in range(clients)]
    for piece in pieces:
        size, client = heapq.heappop(queue)
        parts[client] += piece
        heapq.heappush(queue, (size + len(piece), client))
    least = min(map(len, parts))
    if least < config.min_samples:
        raise ValueError(
            f"community: the smallest client has {least} samples, the minimum is {config.min_samples}: lower "
            "min_samples or clients"
        )
    cut = sum(len(one) > fair for one in found)
    notes = [f"{len(found)} communities" + (f", {cut} of them cut, larger than a fair share of {fair}" if cut else "")]
    return Assignment([np.sort(np.array(part, np.int64)) for part in parts], notes)


def _communities(total: int, edges: np.ndarray, seed: int) -> tuple[list[list[int]], Any]:
    """The communities, nodes ascending, in the order of their first nodes; and the graph."""
    import networkx  # here, so that nothing else waits for it

    graph = networkx.Graph()
    graph.add_nodes_from(range(total))
    graph.add_edges_from(edges.tolist())
    return sorted(sorted(one) for one in networkx.community.louvain_communities(graph, seed=seed)), graph.adj


def _cut(nodes: list[int], near: Any, size: int) -> list[list[int]]:
    """A community in pieces of at most ``size`` nodes, neighbours together; as it is where it is no larger."""
    if len(nodes) <= size:
        return [nodes]
    left, order = set(nodes), []
    for start in nodes:
        queue = deque([start] if start in left else [])
        left.discard(start)
        while queue:
            node = queue.popleft()
            order.append(node)
            fresh = sorted(left.intersection(near[node]))
            left.difference_update(fresh)
            queue.extend(fresh)
    return [order[begin : begin + size] for begin in range(0, len(order), size)]
