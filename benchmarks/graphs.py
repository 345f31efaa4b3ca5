"""A round of FedAvg on graphs beside a plain loop of PyTorch Geometric over the same clients, batches and network.

    FEDJAX_PFL_DATA=DIR python benchmarks/graphs.py                # pip install torch torch_geometric

GIN of three layers of 64, dropout 0.5, batches of 128 graphs, Adam, one local epoch, every client in every round: NCI1
dealt to ten clients, and seven molecule sets and three social ones, a client each, which share the core. Our rounds on
one device, and on two where a CPU has two cores; and on one with sums over edges everywhere, where dense graphs get
them by a product with their adjacency matrix. All contenders are compiled and warmed up, then timed in turn; medians
are printed. No contender evaluates anything. The loop keeps a module and an optimiser a client and draws its batches by
PyG's loader.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import fedjax_pfl as fp
from fedjax_pfl.data.budgets import Cost, budgets_for
from fedjax_pfl.data.graphs import GraphReader
from fedjax_pfl.data.sources.tu import CHEM_BIO
from fedjax_pfl.engine.sharding import divide_cpu
from fedjax_pfl.experiment.config import Config, configure
from fedjax_pfl.experiment.setup import Extras, build_algorithm, build_federation

WORK = {
    "NCI1": {"data": "tu:NCI1", "partition": "iid", "clients": 10},
    "molecules": {"data": f"tu:{'+'.join(CHEM_BIO[:7])}", "partition": "natural"},
    "social": {"data": "tu:COLLAB_500+IMDB-BINARY+IMDB-MULTI", "partition": "natural"},
}
LOCAL = {
    "batch_size": 128, "optimizer": "adam", "optimizer_state": "keep", "lr": 0.001, "weight_decay": 5e-4,
    "test_fraction": 0.1,
}  # fmt: skip


@dataclasses.dataclass
class Options:
    """A round on graphs."""

    work: tuple[str, ...] = ("NCI1", "molecules", "social")
    """NCI1: ten clients of one set; molecules, social: seven and three sets, a client each."""
    rounds: int = 5
    """Rounds of a timed turn."""
    repeats: int = 5
    """Timed turns of every contender."""
    torch: bool = True
    """Also the loop of PyTorch Geometric, on all cores."""


def ours(config: Config, rounds: int, extras: Extras | None) -> tuple[Callable[[], object], Extras]:
    """So many compiled rounds."""
    fed, extras = build_federation(config, extras)
    simulation = fp.Simulation(fed, build_algorithm(config, fed), rounds=rounds, eval_every=rounds)
    holder = [simulation.init()]

    def run() -> None:
        holder[0], _ = simulation.advance(holder[0], 0, rounds)

    return run, extras


def over_edges(extras: Extras) -> Extras:
    """The same graphs, packed so that no adjacency matrix is used."""
    reader = GraphReader(budgets_for(extras.source.x, Cost(pair=np.inf)))
    return extras._replace(source=dataclasses.replace(extras.source, reader=reader))


def torch_loop(extras: Extras, rounds: int) -> Callable[[], object]:
    """The same rounds as a loop over clients and batches; what data sets differ in stays at its client."""
    import torch
    from torch_geometric.loader import DataLoader

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    train = extras.partition.train
    loaders = [DataLoader([torch_graph(extras, row) for row in rows], batch_size=128, shuffle=True) for rows in train]
    sets = [int(extras.source.x[rows[0], 4]) for rows in train]
    labels, classes = (extras.source.tables[f"{name}_of_dataset"] for name in ("labels", "classes"))
    models = [torch_model(int(labels[own]), int(classes[own])) for own in sets]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.001, weight_decay=5e-4) for model in models]
    share = np.array([len(rows) for rows in train]) / sum(len(rows) for rows in train)
    several = len(set(sets)) > 1
    names = [name for name, _ in models[0].named_parameters() if name.startswith("core") or not several]

    def run() -> None:
        for _ in range(rounds):
            for model, loader, optimizer in zip(models, loaders, optimizers, strict=True):
                model.train()
                for batch in loader:
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(model(batch), batch.y).backward()
                    optimizer.step()
            every = [dict(model.named_parameters()) for model in models]
            with torch.no_grad():
                for name in names:
                    mean = sum(w * own[name] for w, own in zip(share, every, strict=True))
                    for own in every:
                        own[name].copy_(mean)

    return run


def torch_graph(extras: Extras, row: int) -> Any:
    """One graph, its node labels as one-hot floats."""
    import torch
    from torch_geometric.data import Data

    source, tables = extras.source, extras.source.tables
    node, nodes, edge, edges, own = source.x[row]
    label = torch.from_numpy(tables["node_label"][node : node + nodes].astype(np.int64))
    ends = np.stack([tables[name][edge : edge + edges] for name in ("senders", "receivers")]).astype(np.int64)
    x = torch.nn.functional.one_hot(label, int(tables["labels_of_dataset"][own])).float()
    return Data(x=x, edge_index=torch.from_numpy(ends), y=torch.tensor([int(source.y[row])]))


def torch_model(labels: int, classes: int, hidden: int = 64) -> Any:
    """The same network."""
    import torch
    from torch import nn
    from torch_geometric.nn import GINConv, global_add_pool

    def layer() -> nn.Module:
        return GINConv(nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden)))

    class GIN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.input = nn.Linear(labels, hidden)
            self.core = nn.ModuleList(layer() for _ in range(3))
            self.post = nn.Linear(hidden, hidden)
            self.head = nn.Linear(hidden, classes)

        def forward(self, batch: Any) -> torch.Tensor:
            x = self.input(batch.x)
            for one in self.core:
                x = nn.functional.dropout(one(x, batch.edge_index).relu(), 0.5, self.training)
            x = self.post(global_add_pool(x, batch.batch)).relu()
            return self.head(nn.functional.dropout(x, 0.5, self.training))

    return GIN()


def main(options: Options) -> None:
    """Time all contenders in turn, print the table."""
    divide_cpu(2)
    for work in options.work:
        contenders, extras = {}, None
        for devices in range(1, min(jax.device_count(), 2) + 1):
            config = configure("fedavg", **WORK[work], **LOCAL, devices=devices)
            contenders[f"ours, devices: {devices}"], extras = ours(config, options.rounds, extras)
        if any(budget.dense for budget in extras.source.reader.budgets):
            config = configure("fedavg", **WORK[work], **LOCAL)
            contenders["ours, sums over edges"], _ = ours(config, options.rounds, over_edges(extras))
        if options.torch:
            contenders["PyTorch Geometric"] = torch_loop(extras, options.rounds)
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(options.repeats + 1):
            for name, run in contenders.items():
                began = time.perf_counter()
                run()
                if turn:
                    seconds[name].append((time.perf_counter() - began) / options.rounds)
        show(work, seconds)


def show(work: str, seconds: dict[str, list[float]]) -> None:
    """Medians and ranges of the turns, and the ratio to the slowest contender."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    table = Table(title=f"{work}, seconds a round: medians of {len(next(iter(seconds.values())))} turns")
    table.add_column("contender")
    for column in ("median", "least", "most", "times faster"):
        table.add_column(column, justify="right")
    for name, values in seconds.items():
        ratio = max(medians.values()) / medians[name]
        table.add_row(name, f"{medians[name]:.3f}", f"{min(values):.3f}", f"{max(values):.3f}", f"{ratio:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
