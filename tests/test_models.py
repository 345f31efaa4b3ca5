"""What every registered model promises: its size, its head, masks, stacked clients, and a round of FedAvg."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_pfl as fp
from fedjax_pfl.algorithms import get
from fedjax_pfl.data.clients import client_data
from fedjax_pfl.engine.federation import Federation
from fedjax_pfl.engine.rounds import one_round
from fedjax_pfl.experiment.arguments import parse_run
from fedjax_pfl.experiment.config import Config, ModelConfig
from fedjax_pfl.models.model import Model, is_trainable, partition
from fedjax_pfl.models.registry import MODELS, build_model, check_kind

CLASSES = 3


class Case(NamedTuple):
    """A registered model at a size that compiles quickly: the shape of one sample, and options."""

    name: str
    shape: tuple[int, ...]
    options: dict[str, Any] = {}  # noqa: RUF012

    @property
    def id(self) -> str:
        return "-".join([self.name, *(f"{value}" for key, value in self.options.items() if key == "norm")])


CASES = [  # of several for one model, the last makes the round of FedAvg
    Case("mlp", (5,), {"hidden": (4,)}),
    Case("lenet5", (16, 16, 1)),
    Case("fedavg_cnn", (16, 16, 1)),
    Case("pfl_cnn", (6, 6, 2)),
    Case("resnet8", (4, 4, 2), {"width": 2}),
    Case("resnet8", (4, 4, 2), {"width": 2, "norm": "none"}),
    Case("resnet8", (4, 4, 2), {"width": 2, "norm": "batch"}),
    Case("resnet18", (8, 8, 1), {"width": 2, "norm_groups": 1}),
    Case("harcnn", (28, 2), {"hidden": (8,)}),
    Case("char_lstm", (6,), {"vocabulary": 9, "embedding": 4, "hidden": (5, 3)}),
]
every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def test_every_registered_model_has_a_case() -> None:
    graphs = {entry.name for entry in MODELS.values() if entry.kind == "graph"}  # see test_graph_models
    assert {case.name for case in CASES} == set(MODELS) - graphs


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "count"),
    [
        ("mlp", (28, 28, 1), 10, {}, 159_010),
        ("lenet5", (32, 32, 3), 10, {}, 62_006),
        ("fedavg_cnn", (28, 28, 1), 10, {}, 582_026),
        ("fedavg_cnn", (32, 32, 3), 10, {}, 878_538),
        ("fedavg_cnn", (32, 32, 3), 100, {}, 924_708),
        ("pfl_cnn", (32, 32, 3), 10, {}, 1_626_442),
        ("resnet8", (32, 32, 3), 10, {"norm": "batch"}, 78_042),
        ("resnet18", (32, 32, 3), 10, {"norm": "batch"}, 11_173_962),
        ("resnet18", (32, 32, 3), 10, {}, 11_173_962),
        ("harcnn", (128, 9), 6, {}, 2_253_958),
        ("char_lstm", (80,), 80, {}, 817_872),
    ],
)
def test_published_parameter_counts(name: str, shape: tuple, classes: int, options: dict, count: int) -> None:
    kind = np.int32 if MODELS[name].kind == "tokens" else np.float32
    assert build_model(name, classes, np.zeros((1, *shape), kind), **options).count() == count


def _inputs(case: Case, *batch: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if MODELS[case.name].kind == "tokens":
        return rng.integers(0, case.options["vocabulary"], (*batch, *case.shape), np.int32)
    return rng.normal(size=(*batch, *case.shape)).astype(np.float32)


def _model(case: Case) -> Model:
    return build_model(case.name, CLASSES, _inputs(case, 1), **case.options)


def _variables(model: Model, *stack: int, seed: int = 1) -> dict[str, Any]:
    """Drawn by NumPy, since compiling the initialisers takes longer; no bias is zero, no variance negative."""
    rng = np.random.default_rng(seed)
    values = {}
    for name, leaf in model.shapes().items():
        fan = max(1, leaf.size // leaf.shape[-1])
        values[name] = (rng.normal(size=(*stack, *leaf.shape)) / np.sqrt(fan)).astype(leaf.dtype)
        values[name] = abs(values[name]) if name.endswith("/var") else values[name]
    return values


def _gradient(model: Model) -> Any:
    """A training step's loss, gradient and running statistics."""

    def run(variables: dict, x: Any, y: Any, mask: Any, key: Any) -> Any:
        trainable, statistics = partition(variables, is_trainable)

        def loss(trainable: dict) -> Any:
            scores, new = model.apply(trainable | statistics, x, mask=mask, key=key, train=True)
            each = -jnp.take_along_axis(jax.nn.log_softmax(scores), y[:, None], 1)[:, 0]
            return jnp.where(mask, each, 0).sum() / mask.sum(), partition(new, is_trainable)[1]

        return jax.value_and_grad(loss, has_aux=True)(trainable)

    return run


def _close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        scale = max(1.0, float(np.abs(b).max()))
        np.testing.assert_allclose(a / scale, b / scale, atol=tolerance, err_msg=jax.tree_util.keystr(path))


@every
def test_stacked_padded_clients_equal_a_loop_over_their_real_samples(case: Case) -> None:
    model = _model(case)
    clients, x, keys = _variables(model, 2), _inputs(case, 2, 5), jax.random.split(jax.random.key(2), 2)
    y = np.arange(10).reshape(2, 5) % CLASSES
    mask = np.array([[True, True, True, False, False]] * 2)
    stacked = jax.jit(jax.vmap(_gradient(model)))
    padded = stacked(clients, x, y, mask, keys)

    # Equal keys draw equal dropout for the leading samples, so even there the real samples see the same network.
    one, real = jax.jit(_gradient(model)), (clients, x[:, :3], y[:, :3], mask[:, :3], keys)
    alone = [one(*jax.tree.map(lambda a, i=i: a[i], real)) for i in range(2)]
    assert any(np.abs(g).max() > 1e-3 for g in alone[0][1].values())
    _close(padded, jax.tree.map(lambda *rows: np.stack(rows), *alone))

    x[:, 3:] = _inputs(case, 2, 2, seed=7)
    _close(padded, stacked(clients, x, y, mask, keys), 1e-7)


@every
def test_head_and_features(case: Case) -> None:
    model = _model(case)
    heads = [name for name in model.shapes() if model.head(name)]
    assert sorted(heads) == ["params/head/bias", "params/head/kernel"]
    assert model.shapes()["params/head/bias"].shape == (CLASSES,)

    @jax.jit
    def run(variables: dict, x: Any) -> Any:
        z = model.features(variables, x)[0]
        return z, model.classify(variables, z), model.apply(variables, x)[0]

    variables = _variables(model)
    z, composed, whole = run(variables, _inputs(case, 2))
    assert z.shape == (2, model.shapes()["params/head/kernel"].shape[0])
    _close(composed, whole)
    _close(z @ variables["params/head/kernel"] + variables["params/head/bias"], whole)


@pytest.mark.parametrize("case", {case.name: case for case in CASES}.values(), ids=lambda case: case.id)
def test_a_round_of_fedavg_is_finite(case: Case) -> None:
    model = _model(case)
    start = jax.tree.map(jnp.asarray, _variables(model))
    model = dataclasses.replace(model, init=lambda key: start)
    x, y = _inputs(case, 8), np.arange(8) % CLASSES
    data = client_data({"x": x, "y": y}, CLASSES, [np.arange(3), np.arange(3, 8)])
    fed = Federation(model, jax.tree.map(jnp.asarray, data), batch_size=2, lr=0.1, client_chunk=2)
    algorithm = fp.build("fedavg", fed)
    env = fed.env(algorithm.hyper)
    state = algorithm.init(env, jax.random.key(0))
    end, info = jax.jit(lambda state: one_round(fed, algorithm, env, state, jax.random.key(1), 0, 1))(state)
    assert np.isfinite(info["loss"])
    assert np.array_equal(info["reported"], [True, True])
    for (path, before), after in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(end), strict=True):
        assert np.isfinite(after).all(), jax.tree_util.keystr(path)
        assert np.any(before != after), jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    ("name", "shape", "kind", "options", "message"),
    [
        ("resnet8", (32, 32, 3), float, {"norm": "layer"}, "norm must be 'group', 'batch' or 'none', got 'layer'"),
        ("resnet8", (32, 32, 3), float, {"norm_groups": 3}, "16 channels cannot form 3 equal groups.*1, 2, 4, 8, 16"),
        (
            "resnet8",
            (32, 32, 3),
            float,
            {"norm_groups": 4, "norm": "batch"},
            "norm_groups is an option of norm 'group' only",
        ),
        ("resnet8", (32, 32, 3), float, {"norm_groups": 0}, "norm_groups must be at least 1, found 0"),
        ("resnet18", (32, 32, 3), float, {"width": -2}, "width must be at least 1, found -2"),
        ("resnet18", (4, 4, 3), float, {}, r"4 stages.* at least 8 x 8 pixels.*\(1, 4, 4, 3\)"),
        ("resnet18", (784,), float, {}, r"needs images \(batch, height, width, channels\).*\(1, 784\)"),
        ("pfl_cnn", (5, 9, 3), float, {}, r"PflCNN needs images.* 6 x 6 .*\(1, 5, 9, 3\)"),
        ("pfl_cnn", (32, 32, 3), float, {"pool": "max"}, "takes no option 'pool'; its options: none"),
        ("harcnn", (27, 9), float, {}, r"at least 28 steps.*\(1, 27, 9\)"),
        ("harcnn", (561,), float, {}, r"windows \(batch, steps, channels\).*\(1, 561\); for rows of features use MLP"),
        ("char_lstm", (80,), float, {}, r"symbols \(batch, steps\) of an integer type.*float"),
        ("char_lstm", (8, 8), np.int32, {}, r"symbols \(batch, steps\).*\(1, 8, 8\)"),
        ("char_lstm", (80,), np.int32, {"vocabulary": 0}, "vocabulary must be at least 1, found 0"),
        ("char_lstm", (80,), np.int32, {"embedding": -1}, "embedding must be at least 1, found -1"),
        ("char_lstm", (80,), np.int32, {"hidden": (256, 0)}, r"hidden widths.*\[256, 0\]"),
    ],
)
def test_unusable_options_and_shapes_are_refused(
    name: str, shape: tuple, kind: Any, options: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(name, 10, np.zeros((1, *shape), kind), **options)


def test_every_option_reaches_the_command_line() -> None:
    fields = {field.name for field in dataclasses.fields(ModelConfig)} - {"model", "head"}
    assert fields == {option for entry in MODELS.values() for option in entry.options}
    tokens = "--model char_lstm --hidden 8 4 --vocabulary 9 --norm none --norm-groups 4 --width 8 --embedding 3"
    found = parse_run(get("fedavg"), tokens.split(), Config(), "run")[0].model
    assert found == ModelConfig(
        "char_lstm", (8, 4), norm="none", norm_groups=4, width=8, vocabulary=9, embedding=3
    )  # fmt: skip


def test_data_of_another_kind_names_the_models_that_fit() -> None:
    with pytest.raises(ValueError, match=r"resnet8 reads array data, text holds tokens data.*char_lstm"):
        check_kind("resnet8", "tokens", "text")
