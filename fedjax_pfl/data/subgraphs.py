"""Graphs of clients: each client of a partition has the part of one large graph that its own nodes span."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedjax_pfl.data.encodings import cached_walk, degree_index
from fedjax_pfl.data.nodes import COLUMNS, NodeReader
from fedjax_pfl.data.partition import Partition
from fedjax_pfl.data.sources.base import Source
from fedjax_pfl.data.sources.cache import cache_folder


class EdgeCount(NamedTuple):
    """Undirected edges, self-loops included: within a client, between two, and at nodes that no client has."""

    within: int
    between: int
    outside: int

    @property
    def lost(self) -> float:
        """The share of edges that no client sees, in [0, 1]; 0 where there are none."""
        return (self.between + self.outside) / max(sum(self), 1)


def subgraphs(source: Source, partition: Partition) -> Source:
    """A source of nodes as graph models read it: each client's graph holds all of its nodes and the edges among them.

    Training, validation and test nodes of a client are in one graph; its labels alone are kept apart. Edges between
    clients are lost, see ``count_edges``. Clients that are held out have their graphs too. x: ``(n, 5)`` int32, see
    ``data.nodes``; zeros for samples of no client. tables: ``features`` as they are; ``node (N,)`` int32, rows of them,
    client after client, ascending; ``senders``, ``receivers (E,)`` int32, places within the client's graph;
    ``walk (N, 16)`` float32 and ``degree (N,)`` int32 of that graph, see ``data.encodings``.

    Raises:
        ValueError: a source without edges between its samples, a partition of other data.
    """
    if source.kind != "nodes":
        raise ValueError(f"{source.name} holds {source.kind} data without edges between its samples: it has no graphs")
    if len(source) != partition.samples:
        raise ValueError(f"the partition is of {partition.samples} samples, {source.name} has {len(source)}")
    parts = clients_of(partition)
    samples = np.concatenate(parts)
    sizes = np.array([len(part) for part in parts])
    client = np.repeat(np.arange(len(parts)), sizes)
    first = np.cumsum(sizes) - sizes
    place = np.arange(len(samples)) - first[client]
    senders, receivers, edges = _edges(source, source.x[samples], client, place, len(parts))
    graphs = np.stack([first, sizes, np.cumsum(edges) - edges, edges], 1).astype(np.int32)
    x = np.zeros((len(source), COLUMNS), np.int32)
    x[samples] = np.concatenate([graphs[client], place[:, None]], 1)
    tables = {
        "features": source.tables["features"], "node": source.x[samples].astype(np.int32),
        "senders": _filled(senders), "receivers": _filled(receivers),
        "walk": cached_walk(graphs, senders, receivers, cache_folder() / "nodes"),
        "degree": degree_index(graphs, senders),
    }  # fmt: skip
    reader = NodeReader(int(sizes.max()) + 1, max(int(edges.max()), 1))
    return dataclasses.replace(source, x=x, tables=tables, reader=reader, kind="graph")


def _filled(ends: np.ndarray) -> np.ndarray:
    """Ends of edges; one that no client has where there are none, since nothing can be read from an empty table."""
    return ends if len(ends) else np.zeros(1, np.int32)


def _edges(
    source: Source, nodes: np.ndarray, client: np.ndarray, place: np.ndarray, clients: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Senders and receivers of the edges within clients, client after client, and how many each client has."""
    total = len(source.tables["features"])
    owner, at = np.full(total, -1), np.zeros(total, np.int64)
    owner[nodes], at[nodes] = client, place
    ends = source.tables["senders"], source.tables["receivers"]
    kept = (owner[ends[0]] == owner[ends[1]]) & (owner[ends[0]] >= 0)
    senders, receivers = (end[kept] for end in ends)
    order = np.lexsort((at[senders], at[receivers], owner[senders]))
    found = (at[end[order]].astype(np.int32) for end in (senders, receivers))
    return *found, np.bincount(owner[senders], minlength=clients)


def clients_of(partition: Partition) -> list[np.ndarray]:
    """The samples of each client, ascending, all splits together; those that train first, then those held out."""
    every = [partition, *([] if partition.unseen is None else [partition.unseen])]
    return [np.sort(part) for one in every for part in one.samples_of_clients()]


def count_edges(source: Source, parts: Sequence[np.ndarray]) -> EdgeCount:
    """Where the edges of a source of nodes lie if these are the samples of its clients."""
    owner = np.full(len(source.tables["features"]), -1)
    for client, part in enumerate(parts):
        owner[source.x[part]] = client
    senders, receivers = source.tables["senders"], source.tables["receivers"]
    once = senders <= receivers
    a, b = owner[senders[once]], owner[receivers[once]]
    outside = (a < 0) | (b < 0)
    return EdgeCount(int(((a == b) & ~outside).sum()), int(((a != b) & ~outside).sum()), int(outside.sum()))


def edge_note(source: Source, parts: Sequence[np.ndarray]) -> str:
    """What a reader of a partition should know about the edges."""
    count = count_edges(source, parts)
    note = f"{count.between:,} of {sum(count):,} edges lie between clients"
    note += f", {count.outside:,} end at nodes of no client" if count.outside else ""
    return f"{note}: graph models do without these {100 * count.lost:.1f}%"


def edges_of_samples(source: Source) -> np.ndarray | None:
    """The edges among the samples of a source of nodes, each once and no self-loops: ``(E, 2)`` samples; else None."""
    if source.kind != "nodes":
        return None
    sample = np.full(len(source.tables["features"]), -1)
    sample[source.x] = np.arange(len(source))
    ends = np.stack([sample[source.tables[name]] for name in ("senders", "receivers")], 1)
    return ends[(ends[:, 0] < ends[:, 1]) & (ends[:, 0] >= 0)]
