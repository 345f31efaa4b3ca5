"""Every data set with its models: samples/s of stacked clients, and of a Python loop over clients and jitted steps.

    FEDJAX_PFL_DATA=DIR python benchmarks/modalities.py
    FEDJAX_PFL_DATA=DIR python benchmarks/modalities.py --only shakespeare/char_lstm uci_har/harcnn --repeats 7

One round of FedAvg, M equal clients, every client joins. Stacked: the compiled round (shuffles, training, mean). Loop:
the same model, loss and optimiser; for each client and minibatch one call of a jitted step that gathers its batch, as a
simulator that does not stack clients works; then the mean. Both are compiled and warmed up, then timed in turn;
medians. A row whose data is not found is left out with the reason.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console
from rich.table import Table

import fedjax_pfl as fp
from fedjax_pfl.data import Source, client_data, load
from fedjax_pfl.models.registry import build_model

PAIRS = (  # data, model, samples of a client
    ("digits", "mlp", 60),
    ("mnist", "fedavg_cnn", 60),
    ("fashion_mnist", "lenet5", 60),
    ("femnist:leaf/mnist_writers.zip", "fedavg_cnn", 40),
    ("cifar10", "lenet5", 60),
    ("cifar10", "fedavg_cnn", 60),
    ("cifar10", "pfl_cnn", 60),
    ("cifar10", "resnet8", 60),
    ("cifar10", "resnet18", 10),
    ("cifar100", "fedavg_cnn", 60),
    ("uci_har", "harcnn", 60),
    ("shakespeare", "char_lstm", 20),
    ("cora", "mlp", 60),
)


@dataclasses.dataclass
class Options:
    """Stacked clients beside a loop of jitted steps."""

    only: tuple[str, ...] = ()
    """Pairs such as cifar10/resnet8 (default: all)."""
    clients: int = 20
    """Number of clients M."""
    batch: int = 10
    """Batch size."""
    chunk: int | None = None
    """Clients trained at once (default: by the backend)."""
    repeats: int = 5
    """Timed turns."""
    out: Path | None = None
    """JSON file for all times."""


def federation(source: Source, model: str, samples: int, options: Options) -> fp.Federation:
    """Clients with ``samples`` random samples each."""
    total = samples * options.clients
    rows = np.random.default_rng(0).permutation(len(source))[:total]
    if len(rows) < total:
        raise ValueError(f"{source.name} has fewer than {total} samples")
    lists = np.split(np.sort(rows), options.clients)
    data = client_data(source.examples(), source.num_classes, lists, tables=source.tables, reader=source.reader)
    made = build_model(model, source.num_classes, source.sample())
    return fp.Federation(
        made, jax.tree.map(jnp.asarray, data), batch_size=options.batch, lr=0.01, shift=source.shift,
        scale=source.scale, client_chunk=options.chunk,
    )  # fmt: skip


def stacked(fed: fp.Federation) -> Callable[[], object]:
    """A compiled round."""
    simulation = fp.Simulation(fed, fp.build("fedavg", fed), rounds=1, eval_every=1)
    holder = [simulation.init()]

    def run() -> None:
        holder[0], _ = simulation.advance(holder[0], 0, 1)

    return run


def loop(fed: fp.Federation) -> Callable[[], object]:
    """Client after client, minibatch after minibatch."""
    rng = np.random.default_rng(0)
    split = jax.tree.map(np.asarray, fed.data.train)
    optimizer = optax.sgd(fed.lr)

    @jax.jit
    def step(data: Any, variables: Any, rows: jax.Array, key: jax.Array) -> Any:
        trainable = {name: leaf for name, leaf in variables.items() if name.startswith("params/")}

        def objective(trainable: Any) -> Any:
            batch = data.gather(rows)
            scores, new = fed.model.apply(variables | trainable, fed.prepare(batch), key=key, train=True)
            return fed.loss(scores, batch["y"]).mean(), new

        gradient, new = jax.grad(objective, has_aux=True)(trainable)
        return new | optax.apply_updates(trainable, optimizer.update(gradient, optimizer.init(trainable))[0])

    @jax.jit
    def mean(models: list[Any]) -> Any:
        return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *models)

    holder = [fed.model.init(jax.random.key(0))]
    key = jax.random.key(1)

    def run() -> None:
        models = []
        for start, count in zip(split.start, split.count, strict=True):
            variables = holder[0]
            order = rng.permutation(split.rows[start : start + count])
            for rows in np.split(order, range(fed.batch_size, count, fed.batch_size)):
                variables = step(fed.data, variables, rows, key)
            models.append(variables)
        holder[0] = jax.block_until_ready(mean(models))

    return run


def measure(data: str, model: str, samples: int, options: Options) -> dict[str, Any]:
    """Both ways in turn."""
    fed = federation(load(data), model, samples, options)
    ways = {"stacked": stacked(fed), "loop": loop(fed)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.repeats + 1):
        for name, run in ways.items():
            began = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    total = samples * options.clients
    rates = {name: total / statistics.median(times) for name, times in seconds.items()}
    row = {"data": data, "model": model, "parameters": fed.model.count(), "samples": samples, "chunk": fed.chunk}
    return row | {"seconds": seconds, "samples_per_s": rates, "ratio": rates["stacked"] / rates["loop"]}


def main(options: Options) -> None:
    """All pairs; the table is printed at the end."""
    console, rows = Console(width=120), []
    for data, model, samples in PAIRS:
        if options.only and f"{data}/{model}" not in options.only:
            continue
        try:
            rows.append(measure(data, model, samples, options))
        except (FileNotFoundError, ValueError) as error:
            console.print(f"{data}/{model} is left out: {error}")
            continue
        console.print(f"{data}/{model}: {rows[-1]['ratio']:.2f}x")
    table = Table(title=f"{options.clients} clients, batch {options.batch}, medians of {options.repeats}")
    for head in ("data", "model", "parameters", "samples/client", "chunk", "stacked samples/s", "loop", "ratio"):
        table.add_column(head, justify="left" if head in ("data", "model") else "right")
    for row in rows:
        table.add_row(
            row["data"], row["model"], f"{row['parameters']:,}", str(row["samples"]), str(row["chunk"]),
            f"{row['samples_per_s']['stacked']:,.0f}", f"{row['samples_per_s']['loop']:,.0f}", f"{row['ratio']:.2f}",
        )  # fmt: skip
    console.print(table)
    if options.out:
        options.out.write_text(json.dumps({"jax": jax.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
