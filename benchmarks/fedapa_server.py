"""FedAPA's server step beside the two matrix products that it needs, A Theta and Theta Delta^T, timed in turn.

python benchmarks/fedapa_server.py --clients 100 --model mlp
"""

from __future__ import annotations

import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import fedjax_pfl as fp
from fedjax_pfl.aggregation import mix
from fedjax_pfl.algorithms.fedapa import learned, weight_gradient
from fedjax_pfl.engine import tree
from fedjax_pfl.models.registry import build_model


@dataclasses.dataclass
class Options:
    """FedAPA's server step."""

    clients: int = 100
    """Number of clients M."""
    model: str = "mlp"
    """Name of the model, on 28x28x1 images."""
    centring: str = "none"
    """none, row or cosine."""
    repeats: int = 15
    """Timed turns."""


def main(options: Options) -> None:
    """Time both and print medians and their ratio, turn by turn."""
    M = options.clients
    x, y = np.zeros((M, 28, 28, 1), np.uint8), np.arange(M) % 10
    data = jax.tree.map(jnp.asarray, fp.client_data({"x": x, "y": y}, 10, list(np.arange(M)[:, None])))
    fed = fp.Federation(build_model(options.model, 10, x[:1]), data)
    method = fp.build("fedapa", fed)
    env = fed.env(method.hyper)
    state = method.init(env, jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), len(state.theta))
    theta = {n: v + jax.random.normal(k, v.shape) for (n, v), k in zip(state.theta.items(), keys, strict=True)}
    returned = jax.tree.map(lambda v: v * 1.01, theta)
    A = jnp.full((M, M), 1 / M)
    flat = lambda t: jnp.concatenate([v.reshape(M, -1) for v in t.values()], 1)  # noqa: E731
    Theta, Delta = flat(theta), flat(returned)

    @jax.jit
    def server(A: jax.Array, theta: tree.Tree, returned: tree.Tree) -> tuple[jax.Array, jax.Array]:
        theta_bar = mix(A, theta)
        delta = tree.subtract(returned, theta_bar)
        return learned(env, A, weight_gradient(env, options.centring, A, theta, delta)), theta_bar

    first, second = jax.jit(lambda A, T: A @ T), jax.jit(lambda T, D: T @ D.T)
    contenders = {
        "server step": lambda: server(A, theta, returned),
        "products": lambda: (first(A, Theta), second(Theta, Delta)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(options.repeats + 1):
        for name, run in contenders.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            if turn:
                seconds[name].append(time.perf_counter() - began)
    for name, times in seconds.items():
        print(f"{name:12s} median {statistics.median(times) * 1e3:8.2f} ms   min {min(times) * 1e3:8.2f} ms")
    ratios = [a / b for a, b in zip(*seconds.values(), strict=True)]
    print(f"ratio        median {statistics.median(ratios):8.2f}      of {options.repeats} turns")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
