"""The tiny federation that tests share, and the list of methods that the common test runs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedjax_pfl as fp
from fedjax_pfl.data.clients import ClientData, client_data
from fedjax_pfl.data.encodings import degree_index, walk_probabilities
from fedjax_pfl.data.graphs import Budget, GraphReader
from fedjax_pfl.engine import random
from fedjax_pfl.engine.federation import Federation
from fedjax_pfl.models.norms import BatchNorm
from fedjax_pfl.models.registry import build_model

SIZES = (7, 3, 12, 5, 10)
FEATURES, CLASSES = 6, 3
GRAPH_LABELS, GRAPH_CLASSES = (2, 4), (2, 3)  # of two data sets of graphs


class Case(NamedTuple):
    """A method with options; ``differentiable``: hyper-parameters in which a round has a gradient."""

    name: str
    options: dict[str, Any] = {}  # noqa: RUF012
    differentiable: tuple[str, ...] = ()
    one_device: bool = False
    form: str = "plain"  # or a family: a plain model that has the forms of a graph model
    keeps: bool = False  # clients have momentum, and keep it from round to round

    def federation(self, data: ClientData | None = None, **options: Any) -> Federation:
        if self.keeps:
            options = {"optimizer": momentum, "keep_optimizer": True} | options
        return (family_federation if self.form == "family" else federation)(data, **options)

    @property
    def id(self) -> str:
        return "-".join([self.name, *(f"{k}_{v}" for k, v in self.options.items())])


momentum = functools.partial(optax.sgd, momentum=0.5)
SPLITS_SOON = {"epsilon1": 1e9, "epsilon2": 0.0, "first_split": 1}  # GCFL splits from the second round on

CASES = [
    Case("local", {}, ("lr",)),
    Case("fedavg", {}, ("lr",)),
    Case("fedavg_ft", {"epochs": 2}, ("lr",)),
    Case("fedprox", {"mu": 0.3}, ("lr", "mu")),
    Case("fedper", {}, ("lr",), keeps=True),
    Case("ditto", {"lam": 0.7}, ("lr", "lam"), keeps=True),
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
    Case("fixed_mixing", {"self_weight": 0.4}, ("lr", "self_weight"), keeps=True),
    Case("fedapa", {"eta": 0.2}, ("lr", "eta", "self_weight")),
    Case("fedapa", {"eta": 0.2, "variant": "printed"}, ("lr", "eta"), keeps=True),
    Case("fedapa", {"eta": 0.2, "variant": "released"}, (), one_device=True),
    Case("fedapa", {"eta": 0.2, "centring": "row", "floor": 0.01}, ("lr", "eta")),
    Case("fedapa", {"eta": 0.1, "centring": "cosine"}, ("lr", "eta")),
    Case("fedhr", {"policy": "fixed:0.7"}, ("lr", "hyper_lr")),
    Case("fedhr", {"policy": "ddpg", "warm_up": 4, "agent_steps": 2}),
    Case("fedgcf", {"policy": "fixed:0.7", "clusters": 2}, ("lr", "ratio"), form="family", keeps=True),
    Case("fedgcf", {"policy": "ucb", "paths": 2}, form="family"),
    Case("fedstar", {}, ("lr",), form="family", keeps=True),
    Case("gcfl", SPLITS_SOON, ("lr",), keeps=True),
    Case("gcfl_plus", SPLITS_SOON | {"series_length": 2}, ("lr",)),
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


class FamilyNet(nn.Module):
    """Features -> 4 (input) -> 4 (core) -> head, smooth: with the names of graph networks, but compiled sooner."""

    form: str = "raw"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kind = jnp.result_type(float)
        x = jnp.cos(3 * x) if self.form == "structure" else x
        for name in ("input", "core"):
            x = nn.tanh(nn.Dense(4, name=name, param_dtype=kind)(x))
        return nn.Dense(CLASSES, name="head", param_dtype=kind)(x)


class TwoStreams(nn.Module):
    """Features -> 4 (structure), and beside it -> 4 (input) -> head, smooth: with the names of FedStar's network."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kind = jnp.result_type(float)
        s, x = (nn.tanh(nn.Dense(4, name=name, param_dtype=kind)(x)) for name in ("structure", "input"))
        return nn.Dense(CLASSES, name="head", param_dtype=kind)(jnp.concatenate([s, x], -1))


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


def family_federation(data: ClientData | None = None, **options: Any) -> Federation:
    """The tiny federation with a model that has the forms and the core of a graph model."""
    modules = {"raw": FamilyNet(), "structure": FamilyNet("structure"), "two_stream": TwoStreams()}
    models = {form: fp.flax_model(module, np.zeros((1, FEATURES))) for form, module in modules.items()}
    model = dataclasses.replace(models["raw"], related=models.__getitem__)
    return federation(data, **options).replace(model=model)


def graph_data(sizes: tuple[int, ...] = SIZES, seed: int = 0) -> ClientData:
    """Clients of unequal size with graphs of 1 to 6 nodes, by turns of the one and the other of two data sets."""
    rng = np.random.default_rng(seed)
    owner = np.concatenate([np.repeat(np.arange(len(sizes)), sizes), np.repeat(np.arange(len(sizes)), 6)])
    dataset, nodes = owner % 2, rng.integers(1, 7, len(owner))
    y = rng.integers(0, np.array(GRAPH_CLASSES)[dataset])
    edges = rng.integers(0, 2 * nodes + 1)
    x = np.stack([np.cumsum(nodes) - nodes, nodes, np.cumsum(edges) - edges, edges, dataset], 1).astype(np.int32)
    senders, receivers = (rng.integers(0, np.repeat(nodes, edges)).astype(np.int32) for _ in range(2))
    labels = np.array(GRAPH_LABELS)[dataset]
    node_label = (rng.integers(0, np.repeat(labels, nodes)) + np.repeat(y, nodes)) % np.repeat(labels, nodes)
    tables = {"senders": senders, "receivers": receivers, "node_label": node_label.astype(np.int32)}
    tables |= {"walk": walk_probabilities(x, senders, receivers), "degree": degree_index(x, senders)}
    facts = {"labels_of_dataset": GRAPH_LABELS, "classes_of_dataset": GRAPH_CLASSES}
    tables |= {name: np.array(value, np.int32) for name, value in facts.items()}
    train = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    held = np.arange(sum(sizes), len(owner)).reshape(len(sizes), -1)
    reader = GraphReader((Budget(16, 48, 4, together=2),))
    return client_data(
        {"x": x, "y": y}, CLASSES, train, list(held[:, :2]), list(held[:, 2:]), tables=tables, reader=reader
    )  # fmt: skip


def graph_federation(data: ClientData | None = None, **options: Any) -> Federation:
    """The tiny federation of graphs: as ``federation``, two GIN layers of width 4 without dropout."""
    data = graph_data() if data is None else data
    model = build_model("gin", CLASSES, data.gather(np.zeros(1, int))["x"], layers=2, hidden=(4,), drop=0.0)
    if options.get("mesh") is None:
        data = jax.tree.map(jnp.asarray, data)
    return Federation(model, data, **({"batch_size": 4, "local_epochs": 2, "lr": 0.1, "client_chunk": 2} | options))


def trained(fed: Federation, starts: list[Any], key: jax.Array, round_: int) -> list[Any]:
    """Plain minibatch descent of every client, one after another, on the batches of a round from the root key."""
    split, size = fed.data.train, fed.batch_size
    drawn = random.shuffled_rows(split, fed.data.ids, random.stream(key, random.ROUND, round_), fed.local_epochs)

    @jax.jit
    def step(variables: Any, rows: jax.Array, mask: jax.Array) -> Any:
        def loss(variables: Any) -> jax.Array:
            batch = fed.data.gather(rows)
            scores = fed.model.apply(variables, fed.prepare(batch), mask=mask, key=None, train=True)[0]
            return jnp.where(mask, fed.loss(scores, batch["y"]), 0).sum() / mask.sum()

        return jax.tree.map(lambda p, g: p - fed.lr * g, variables, jax.grad(loss)(variables))

    found = []
    for i, variables in enumerate(starts):
        for order in np.asarray(drawn)[:, int(split.start[i]) : int(split.start[i] + split.count[i])]:
            for rows in np.split(order, range(size, len(order), size)):
                variables = step(variables, np.resize(rows, size), np.arange(size) < len(rows))
        found.append(variables)
    return found


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
