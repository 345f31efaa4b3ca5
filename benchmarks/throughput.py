"""How fast local work is: samples/s, client-steps/s, rounds/s, compile time and memory, beside the machine's own rate.

    python benchmarks/throughput.py --work w1 w2 lenet --chunks 1 2 4
    python benchmarks/throughput.py --work w2 --torch             # beside a bare PyTorch loop (pip install torch)
    python benchmarks/throughput.py --work w1 --lax               # beside a vmapped lax.conv
    python benchmarks/throughput.py --work w2 --sizes 0.3         # client sizes from Dirichlet(0.3)
    python benchmarks/throughput.py --work w2 --algorithms fedavg fedapa

All contenders are compiled and warmed up first, then timed in turn, again and again, with a matrix product of 2048 x
2048 timed in every turn; medians are printed, the JSON has every time. FLOPs of a sample's training step: 2 per
multiply-add, forward, backward to weights and backward to inputs (except the first layer's), no elementwise work.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import fedjax_pfl as fp
from fedjax_pfl.data.clients import client_data
from fedjax_pfl.models.layers import use_conv_implementation
from fedjax_pfl.models.registry import build_model

WORK = {  # name -> model, input shape, multiply-adds of each layer for one sample, in order
    "w1": ("fedavg_cnn", (28, 28, 1), (24 * 24 * 25 * 32, 8 * 8 * 800 * 64, 1024 * 512, 512 * 10)),
    "w2": ("mlp", (28, 28, 1), (784 * 200, 200 * 10)),
    "w4": ("fedavg_cnn", (32, 32, 3), (28 * 28 * 75 * 32, 10 * 10 * 800 * 64, 1600 * 512, 512 * 10)),
    "lenet": ("lenet5", (32, 32, 3), (28 * 28 * 75 * 6, 10 * 10 * 150 * 16, 400 * 120, 120 * 84, 84 * 10)),
}


@dataclasses.dataclass
class Options:
    """Throughput of one round of local work."""

    work: tuple[str, ...] = ("w1", "w2", "lenet")
    """w1: FedAvgCNN 28x28x1; w2: MLP 784-200-10; w4: FedAvgCNN 32x32x3; lenet: LeNet-5 32x32x3."""
    algorithms: tuple[str, ...] = ("fedavg",)
    """Methods whose whole round is timed."""
    clients: int = 100
    """Number of clients M, all of which take part."""
    samples: int = 100
    """Mean number of samples of a client."""
    batch: int = 10
    """Batch size."""
    chunks: tuple[int, ...] = (1, 2, 4)
    """Clients trained at once."""
    sizes: float | None = None
    """Client sizes from Dirichlet(sizes), at least one sample each; None: equal sizes."""
    rounds: int = 2
    """Rounds of a timed turn: they are a loop inside one program."""
    repeats: int = 5
    """Timed turns of every contender."""
    torch: bool = False
    """Also a bare PyTorch loop over the same clients, on all cores."""
    lax: bool = False
    """Also the convolutions of XLA under vmap, at the first chunk."""
    out: Path | None = None
    """JSON file for all times."""


@dataclasses.dataclass
class Contender:
    """Something that works through one round: how, and what is known about it."""

    name: str
    run: Callable[[], object]
    samples: int
    steps: int
    flops: float
    rounds: int = 1
    compile_s: float = 0.0
    bytes: int = 0
    seconds: list[float] = dataclasses.field(default_factory=list)


def sizes_of(options: Options) -> np.ndarray:
    """Samples of each client."""
    if options.sizes is None:
        return np.full(options.clients, options.samples)
    share = np.random.default_rng(0).dirichlet([options.sizes] * options.clients)
    return np.maximum((share * options.clients * options.samples).astype(int), 1)


def make_data(options: Options, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Random images as uint8, labels, and each client's rows."""
    rng = np.random.default_rng(0)
    sizes = sizes_of(options)
    x = rng.integers(0, 256, (sizes.sum(), *shape), dtype=np.uint8)
    return x, rng.integers(0, 10, len(x)), np.split(np.arange(len(x)), np.cumsum(sizes)[:-1])


def step_flops(work: str) -> float:
    """FLOPs of one sample's training step: 3 products a layer, 2 in the first."""
    first, *rest = WORK[work][2]
    return 2.0 * (2 * first + 3 * sum(rest))


def ours(options: Options, work: str, algorithm: str, chunk: int, implementation: str = "matmul") -> Contender:
    """One compiled round of a method."""
    model_name, shape, _ = WORK[work]
    x, y, rows = make_data(options, shape)
    data = jax.tree.map(jnp.asarray, client_data({"x": x, "y": y}, 10, rows))
    model = build_model(model_name, 10, x[:1])
    fed = fp.Federation(model, data, batch_size=options.batch, lr=0.01, scale=255.0, client_chunk=chunk)
    method = fp.build(algorithm, fed)
    simulation = fp.Simulation(fed, method, rounds=options.rounds, eval_every=options.rounds)
    holder = [simulation.init()]

    def run() -> None:
        holder[0], _ = simulation.advance(holder[0], 0, options.rounds)

    began = simulation.compile_s
    with use_conv_implementation(implementation):
        run()
    compile_s = simulation.compile_s - began
    memory = simulation.memory()
    total = memory["arguments"] + memory["temporaries"]
    name = f"{work} {algorithm} chunk {chunk}" + (" lax.conv" if implementation == "lax" else "")
    steps = int(sum(-(-len(r) // options.batch) for r in rows))
    steps, samples = steps * options.rounds, len(x) * options.rounds
    return Contender(name, run, samples, steps, step_flops(work) * samples, options.rounds, compile_s, total)


def torch_loop(options: Options, work: str) -> Contender:
    """FedAvg as a bare PyTorch loop: one module reused, the global weights loaded for each client."""
    import torch
    from torch import nn

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model_name, shape, _ = WORK[work]
    x, y, rows = make_data(options, shape)
    images = torch.from_numpy(x.transpose(0, 3, 1, 2).copy())
    labels = torch.from_numpy(y)
    model = torch_model(nn, model_name, shape)
    loss = nn.CrossEntropyLoss()
    rng = np.random.default_rng(0)
    weights = {name: value.clone() for name, value in model.state_dict().items()}

    def run() -> None:
        mean = {name: torch.zeros_like(value) for name, value in weights.items()}
        for own in rows:
            model.load_state_dict(weights)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for batch in torch.from_numpy(rng.permutation(own)).split(options.batch):
                optimizer.zero_grad()
                loss(model(images[batch].float() / 255), labels[batch]).backward()
                optimizer.step()
            for name, value in model.state_dict().items():
                mean[name] += value * (len(own) / len(x))
        weights.update(mean)

    steps = int(sum(-(-len(r) // options.batch) for r in rows))
    return Contender(f"{work} PyTorch loop", run, len(x), steps, step_flops(work) * len(x))


def torch_model(nn: Any, name: str, shape: tuple[int, ...]) -> Any:
    """The same model as a ``torch.nn.Sequential``."""
    if name == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))
    first, second, dense = (32, 64, (512,)) if name == "fedavg_cnn" else (6, 16, (120, 84))
    side = ((shape[0] - 4) // 2 - 4) // 2
    layers = [nn.Conv2d(shape[2], first, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(first, second, 5), nn.ReLU()]
    layers += [nn.MaxPool2d(2), nn.Flatten()]
    wide = side * side * second
    for width in dense:
        layers += [nn.Linear(wide, width), nn.ReLU()]
        wide = width
    return nn.Sequential(*layers, nn.Linear(wide, 10))


def contenders(options: Options) -> list[Contender]:
    """Everything that the options ask for, compiled."""
    found = []
    for work in options.work:
        found += [ours(options, work, name, chunk) for name in options.algorithms for chunk in options.chunks]
        if options.lax:
            found.append(ours(options, work, "fedavg", options.chunks[0], "lax"))
        if options.torch:
            found.append(torch_loop(options, work))
    return found


def main(options: Options) -> None:
    """Time all contenders in turn, print the table, write the JSON."""
    square = jnp.ones((2048, 2048))
    product = jax.jit(lambda a: a @ a).lower(square).compile()
    matmul = Contender("matmul 2048", lambda: product(square).block_until_ready(), 0, 0, 2.0 * 2048**3)
    everything = [matmul, *contenders(options)]
    for turn in range(options.repeats + 1):
        for contender in everything:
            began = time.perf_counter()
            contender.run()
            if turn:
                contender.seconds.append(time.perf_counter() - began)
    show(everything, matmul)
    if options.out:
        machine = {"platform": platform.platform(), "processor": platform.processor(), "jax": jax.__version__,
                   "device": jax.devices()[0].device_kind, "cores": len(os.sched_getaffinity(0))}  # fmt: skip
        rows = [{f.name: getattr(c, f.name) for f in dataclasses.fields(c) if f.name != "run"} for c in everything]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        record = {"options": dataclasses.asdict(options) | {"out": None}, "machine": machine, "peak_rss": peak}
        options.out.write_text(json.dumps(record | {"contenders": rows}, indent=1))


def show(everything: list[Contender], matmul: Contender) -> None:
    """The table, medians."""
    rate = matmul.flops / statistics.median(matmul.seconds)
    table = Table(title=f"medians of {len(matmul.seconds)}; matmul 2048: {rate / 1e9:.0f} GFLOP/s")
    table.add_column("round of")
    for column in ("s/round", "(min)", "samples/s", "client-steps/s", "GFLOP/s", "of matmul", "compile s", "MB"):
        table.add_column(column, justify="right")
    for c in everything[1:]:
        median = statistics.median(c.seconds)
        speed = c.flops / median
        table.add_row(
            c.name, f"{median / c.rounds:.3f}", f"{min(c.seconds) / c.rounds:.3f}", f"{c.samples / median:,.0f}",
            f"{c.steps / median:,.0f}", f"{speed / 1e9:.1f}", f"{speed / rate:.0%}", f"{c.compile_s:.1f}",
            f"{c.bytes / 1e6:.0f}",
        )  # fmt: skip
    Console(width=130).print(table)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
