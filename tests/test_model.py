"""Models: heads by path and by predicate, features and classify, modules and functions of the user's own."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import CLASSES, FEATURES, Net, assert_close, assert_equal, federation

import fedjax_pfl as fp
from fedjax_pfl.models.model import Model, is_trainable, partition

X = np.random.default_rng(0).normal(size=(5, FEATURES))
SAMPLE = np.zeros((1, FEATURES))
KEY = jax.random.key(0)


class Declared(nn.Module):
    """Layers in ``setup``; something follows the head."""

    def setup(self) -> None:
        self.body = nn.Dense(4)
        self.head = nn.Dense(CLASSES)

    def __call__(self, x: jax.Array) -> jax.Array:
        return 2 * nn.tanh(self.head(nn.tanh(self.body(x))))


class Tail(nn.Module):
    """A hidden and an output layer."""

    @nn.compact
    def __call__(self, z: jax.Array) -> jax.Array:
        return nn.Dense(CLASSES, name="out")(nn.tanh(nn.Dense(3, name="inner")(z)))


class Deep(nn.Module):
    """A head inside another module, another layer called ``out``, dropout, and running statistics in front."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        x = nn.BatchNorm(use_running_average=not train, name="bn")(x, mask=None if mask is None else mask[:, None])
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return Tail(name="classifier")(nn.tanh(nn.Dense(4, name="out")(x)))


MODELS = {
    "compact": lambda: fp.flax_model(Net(), SAMPLE),
    "setup": lambda: fp.flax_model(Declared(), SAMPLE),
    "module of modules": lambda: fp.flax_model(Deep(), SAMPLE, head="classifier"),
    "nested path": lambda: fp.flax_model(Deep(), SAMPLE, head="classifier/out"),
}


def moved(variables: dict[str, Any]) -> dict[str, Any]:
    """Away from biases of zero."""
    return {n: v + 0.1 * jnp.cos(jnp.arange(v.size, dtype=v.dtype)).reshape(v.shape) for n, v in variables.items()}


@pytest.mark.parametrize("name", MODELS)
def test_features_and_classify_compose_to_apply(name: str, float64: None) -> None:
    model = MODELS[name]()
    model.require_features("any method")
    variables = moved(model.init(KEY))
    composed = lambda v: model.classify(v, model.features(v, X)[0])  # noqa: E731
    whole = lambda v: model.apply(v, X)[0]  # noqa: E731
    assert_close(composed(variables), whole(variables), 1e-13)
    gradients = [jax.grad(lambda v, f=f: (f(v) ** 2).sum())(variables) for f in (composed, whole)]
    assert_close(*gradients, 1e-12)
    z = model.features(variables, X)[0]
    by_head = jax.grad(lambda v: (model.classify(v, z) ** 2).sum())(variables)
    for path, gradient in by_head.items():
        assert np.any(gradient) == model.head(path), path
        if model.head(path):
            np.testing.assert_allclose(gradient, gradients[1][path], 1e-12, 1e-12)


def test_features_of_a_nested_head_are_its_input(float64: None) -> None:
    shallow, deep = MODELS["module of modules"](), MODELS["nested path"]()
    variables = shallow.init(KEY)
    assert shallow.features(variables, X)[0].shape == (5, 4)
    assert deep.features(variables, X)[0].shape == (5, 3)
    assert {n for n in deep.shapes() if deep.head(n)} == {"params/classifier/out/kernel", "params/classifier/out/bias"}
    top = fp.flax_model(Deep(), SAMPLE, head="out")
    assert {n for n in top.shapes() if top.head(n)} == {"params/out/kernel", "params/out/bias"}, "a path from the top"
    assert {n for n in shallow.shapes() if shallow.head(n)} == {
        f"params/classifier/{layer}/{leaf}" for layer in ("inner", "out") for leaf in ("kernel", "bias")
    }


def test_training_mode_passes_mask_and_key_and_updates_statistics_only(float64: None) -> None:
    model = MODELS["nested path"]()
    variables = model.init(KEY)
    mask = jnp.array([True, True, True, False, False])
    run = lambda x, seed: model.apply(variables, x, mask=mask, key=jax.random.key(seed), train=True)  # noqa: E731
    scores, updated = run(X, 1)
    changed = {n for n in variables if not np.array_equal(variables[n], updated[n])}
    assert changed == {"batch_stats/bn/mean", "batch_stats/bn/var"} == {n for n in variables if not is_trainable(n)}
    assert changed <= {n for n in variables if model.is_norm(n)}
    assert model.is_norm("params/bn/scale")
    assert not model.is_norm("params/out/kernel")
    np.testing.assert_allclose(updated["batch_stats/bn/mean"], 0.01 * X[:3].mean(0), 1e-10)
    assert not np.allclose(scores, run(X, 2)[0]), "dropout follows the key"
    np.testing.assert_array_equal(scores, run(X, 1)[0])
    padded = np.concatenate([X[:3], 99 + X[3:]])
    np.testing.assert_allclose(run(padded, 1)[0][:3], scores[:3], 1e-12)
    assert_equal(model.features(variables, X, mask=mask, key=jax.random.key(1), train=True)[1], updated)


def test_a_head_by_predicate() -> None:
    model = fp.flax_model(Net(), SAMPLE, head=lambda path: path.endswith("bias"))
    assert {n for n in model.shapes() if model.head(n)} == {"params/dense1/bias", "params/head/bias"}
    assert model.count(model.head) == 4 + CLASSES
    with pytest.raises(ValueError, match=r"fedrep needs the features in front of the head.*'Net'"):
        model.require_features("fedrep")


@pytest.mark.parametrize("head", ["classifier", "hea", "dense1/kern", lambda path: False])
def test_a_head_that_matches_nothing_lists_the_paths(head: Any) -> None:
    with pytest.raises(ValueError, match="matches no parameter of model 'Net'") as caught:
        fp.flax_model(Net(), SAMPLE, head=head)
    for path in ("dense1/bias", "dense1/kernel", "head/bias", "head/kernel"):
        assert path in str(caught.value)


def test_a_head_that_matches_everything_is_refused() -> None:
    with pytest.raises(ValueError, match="matches every parameter"):
        fp.flax_model(Net(), SAMPLE, head=lambda path: True)


# Functions.


def init_pair(key: jax.Array) -> Any:
    a, b = jax.random.split(key)
    body = [{"w": jax.random.normal(a, (FEATURES, 4))}, (jnp.zeros(4), jnp.ones(()))]
    return {"body": body, "last": (0.3 * jax.random.normal(b, (4, CLASSES)), jnp.zeros(CLASSES))}


def features_pair(params: Any, x: jax.Array) -> jax.Array:
    first, (bias, factor) = params["body"]
    return jnp.tanh(factor * (x @ first["w"] + bias))


def classify_pair(params: Any, z: jax.Array) -> jax.Array:
    return z @ params["last"][0] + params["last"][1]


def apply_pair(params: Any, x: jax.Array) -> jax.Array:
    return classify_pair(params, features_pair(params, x))


def pair(**options: Any) -> Model:
    return fp.function_model(init_pair, apply_pair, **options)


def test_function_model_keeps_the_structure_of_its_parameters(float64: None) -> None:
    model = pair(head="last", features=features_pair, classify=classify_pair, name="mine")
    assert {n: v.shape for n, v in model.shapes().items()} == {
        "params/body/0/w": (FEATURES, 4), "params/body/1/0": (4,), "params/body/1/1": (),
        "params/last/0": (4, CLASSES), "params/last/1": (CLASSES,),
    }  # fmt: skip
    assert {n for n in model.shapes() if model.head(n)} == {"params/last/0", "params/last/1"}
    variables = moved(model.init(KEY))
    assert all(leaf.dtype == np.float64 for leaf in variables.values())
    shuffled = dict(reversed(variables.items()))
    by_hand = np.tanh(variables["params/body/1/1"] * (X @ variables["params/body/0/w"] + variables["params/body/1/0"]))
    by_hand = by_hand @ variables["params/last/0"] + variables["params/last/1"]
    np.testing.assert_allclose(model.apply(shuffled, X)[0], by_hand, 1e-12)
    model.require_features("any method")
    np.testing.assert_allclose(model.classify(variables, model.features(variables, X)[0]), by_hand, 1e-12)
    assert_equal(model.apply(variables, X, mask=np.ones(5, bool), key=KEY, train=True)[1], variables)


def test_function_model_without_a_head() -> None:
    model = pair(name="mine")
    assert not any(model.head(n) for n in model.shapes())
    assert model.count() == FEATURES * 4 + 4 + 1 + 4 * CLASSES + CLASSES
    with pytest.raises(ValueError, match=r"fedrep needs the features.*'mine'"):
        model.require_features("fedrep")
    with pytest.raises(ValueError, match=r"matches no parameter.*body/0/w, body/1/0, body/1/1, last/0, last/1"):
        pair(head="head")


@pytest.mark.parametrize("kind", ["module", "functions"])
def test_models_of_ones_own_run_and_learn(kind: str) -> None:
    model = MODELS["nested path"]() if kind == "module" else pair(head="last")
    fed = federation().replace(model=model)
    result = fp.simulate(fed, fp.build("fedper", fed), rounds=15, eval_every=15)
    loss = result.info["loss"][0]
    assert loss[-3:].mean() < 0.9 * loss[:3].mean()
    first, last = (record.scores["test"]["received"].accuracy for record in (result.records[0], result.records[-1]))
    assert last.mean() > first.mean()
    head = {name for name in model.shapes() if model.head(name)}
    assert set(result.state.private) == head
    assert set(result.state.shared) == set(model.shapes()) - head


def test_partition_and_merge() -> None:
    variables = {"params/a/kernel": 1, "params/b/kernel": 2, "batch_stats/a/mean": 3}
    yes, no = partition(variables, is_trainable)
    assert yes == {"params/a/kernel": 1, "params/b/kernel": 2}
    assert no == {"batch_stats/a/mean": 3}
    assert yes | no == variables
    assert partition(variables, lambda name: False) == ({}, variables)


def test_a_module_whose_options_have_no_defaults() -> None:
    class Strict(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool, mask: jax.Array | None) -> jax.Array:
            return nn.Dense(CLASSES, name="head")(nn.Dense(4)(x) * (2.0 if train else 1.0))

    model = fp.flax_model(Strict(), np.zeros((1, FEATURES)))
    variables, x = model.init(jax.random.key(0)), jnp.ones((2, FEATURES))
    z = model.features(variables, x)[0]
    assert_close(model.classify(variables, z), model.apply(variables, x)[0], 1e-6)
