"""The tiny federation that tests share, and the list of methods that the common test runs."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import fedjax_pfl as fp
from fedjax_pfl.data.clients import ClientData, client_data
from fedjax_pfl.engine.federation import Federation
from fedjax_pfl.models.norms import BatchNorm

SIZES = (7, 3, 12, 5, 10)
FEATURES, CLASSES = 6, 3


class Case(NamedTuple):
    """A method with options; ``differentiable``: hyper-parameters in which a round has a gradient."""

    name: str
    options: dict[str, Any] = {}  # noqa: RUF012
    differentiable: tuple[str, ...] = ()
    one_device: bool = False

    @property
    def id(self) -> str:
        return "-".join([self.name, *(f"{k}_{v}" for k, v in self.options.items())])


CASES = [
    Case("local", {}, ("lr",)),
    Case("fedavg", {}, ("lr",)),
    Case("fedavg_ft", {"epochs": 2}, ("lr",)),
    Case("fedprox", {"mu": 0.3}, ("lr", "mu")),
    Case("fedper", {}, ("lr",)),
    Case("ditto", {"lam": 0.7}, ("lr", "lam")),
    Case("fedbn", {}, ("lr",)),
    Case("fedrep", {"head_epochs": 2}, ("lr",)),
    Case("fedkd", {"energy_first": 0.8, "energy_last": 0.9}, ("lr",)),
    Case(
        "pfedhn",
        {"hyper_width": 5, "hyper_lr": 1e-3},
        ("lr", "hyper_lr", "hyper_momentum", "hyper_decay"),
        one_device=True,
    ),
    Case("pfedhn", {"hyper_width": 5, "private_head": True, "at_once": True}, ("lr", "hyper_lr", "hyper_decay")),
    Case("fixed_mixing", {"self_weight": 0.4}, ("lr", "self_weight")),
    Case("fedapa", {"eta": 0.2}, ("lr", "eta", "self_weight")),
    Case("fedapa", {"eta": 0.2, "variant": "printed"}, ("lr", "eta")),
    Case("fedapa", {"eta": 0.2, "variant": "released"}, (), one_device=True),
    Case("fedapa", {"eta": 0.2, "centring": "row", "floor": 0.01}, ("lr", "eta")),
    Case("fedapa", {"eta": 0.1, "centring": "cosine"}, ("lr", "eta")),
    Case("fedhr", {"policy": "fixed:0.7"}, ("lr", "hyper_lr")),
    Case("fedhr", {"policy": "ddpg", "warm_up": 4, "agent_steps": 2}),
]


class Net(nn.Module):
    """Features -> 4 -> head, smooth."""

    classes: int = CLASSES
    hidden: int = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kind = jnp.result_type(float)  # drawn in double precision where the test uses it
        x = nn.tanh(nn.Dense(self.hidden, name="dense1", param_dtype=kind)(x.reshape(x.shape[0], -1)))
        return nn.Dense(self.classes, name="head", param_dtype=kind)(x)


class NormNet(nn.Module):
    """Features -> 4 -> batch norm -> head, smooth."""

    classes: int = CLASSES
    hidden: int = 4

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        kind = jnp.result_type(float)
        x = nn.Dense(self.hidden, name="dense1", param_dtype=kind)(x.reshape(x.shape[0], -1))
        x = nn.tanh(BatchNorm(name="norm", param_dtype=kind)(x, not train, mask=mask))
        return nn.Dense(self.classes, name="head", param_dtype=kind)(x)


def tiny_data(sizes: tuple[int, ...] = SIZES, seed: int = 0, tested: int = 4) -> ClientData:
    """Clients of unequal size, with two validation samples and ``tested`` test samples each, on the host."""
    rng = np.random.default_rng(seed)
    total = sum(sizes) + (2 + tested) * len(sizes)
    y = rng.integers(0, CLASSES, total)
    x = rng.normal(size=(total, FEATURES)) + np.eye(CLASSES, FEATURES)[y]
    train = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    held = np.arange(sum(sizes), total).reshape(len(sizes), -1)
    return client_data({"x": x, "y": y}, CLASSES, train, list(held[:, :2]), list(held[:, 2:]))


def federation(data: ClientData | None = None, module: nn.Module | None = None, **options: Any) -> Federation:
    """The tiny federation: batch size 4, two local epochs, chunks of two clients."""
    data = tiny_data() if data is None else data
    model = fp.flax_model(module or Net(), np.zeros((1, FEATURES)))
    if options.get("mesh") is None:
        data = jax.tree.map(jnp.asarray, data)
    return Federation(model, data, **({"batch_size": 4, "local_epochs": 2, "lr": 0.3, "client_chunk": 2} | options))


def build(case: Case, fed: Federation) -> fp.Algorithm:
    return fp.build(case.name, fed, **case.options)


def assert_close(a: Any, b: Any, tolerance: float = 1e-10) -> None:
    """Equal structure, and every leaf equal to rounding (NaN where both are)."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, tolerance, tolerance, err_msg=jax.tree_util.keystr(path))


def assert_equal(a: Any, b: Any) -> None:
    """Equal bit for bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
