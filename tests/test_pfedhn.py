"""pFedHN: the hypernetwork, one server step by hand, and that it learns digits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import SIZES, assert_close, assert_equal, federation

import fedjax_pfl as fp
from fedjax_pfl.algorithms._generator import Generator, descend, pull_back, start
from fedjax_pfl.data.clients import client_data
from fedjax_pfl.data.sources import load
from fedjax_pfl.models.registry import build_model

M = len(SIZES)
SHAPES = (("params/a/kernel", (2, 3)), ("params/b/bias", (4,)))


def moved(tree: Any, seed: int, by: float = 0.2) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: leaf + by * jnp.asarray(rng.normal(size=leaf.shape)), tree)


def test_the_first_model_of_every_client_is_the_models_own_initial_one(float64: None) -> None:
    fed = federation()
    for options in ({}, {"private_head": True}, {"at_once": True}):
        algorithm = fp.build("pfedhn", fed, **options)
        env, key = fed.env(algorithm.hyper), jax.random.key(4)
        state = algorithm.init(env, key)
        for i in range(M):
            assert_equal(algorithm.received(env, state, i), fed.model.init(key))
    assert state.v[0].shape == (M, 1 + M // 4)
    assert len(np.unique(state.v[0][:, 0])) == M


def test_parameters_of_the_hypernetwork() -> None:
    generator = Generator(SHAPES)
    phi = generator.init(jax.random.key(0), jnp.zeros(6))
    layers = {name: sum(leaf.size for leaf in layer.values()) for name, layer in phi["params"].items()}
    square = 100 * 100 + 100
    assert layers == {
        "hidden0": 6 * 100 + 100, "hidden1": square, "hidden2": square, "hidden3": square,
        "params.a.kernel": 101 * 6, "params.b.bias": 101 * 4,
    }  # fmt: skip


@pytest.mark.parametrize("stacked", [False, True])
def test_the_pull_back_agrees_with_central_differences(stacked: bool, float64: None) -> None:
    generator, rng = Generator(SHAPES, 7), np.random.default_rng(1)
    v = jnp.asarray(rng.normal(size=(3, 4) if stacked else (4,)))
    initial = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in SHAPES}
    phi = moved(start(generator, initial, v[0] if stacked else v, jax.random.key(0)), 2)
    lead = v.shape[:-1]
    delta = {name: jnp.asarray(rng.normal(size=lead + shape)) for name, shape in SHAPES}

    def product(point: Any) -> float:
        made = [generator.apply(point[0], one) for one in point[1].reshape(-1, 4)]
        rows = [jax.tree.map(lambda leaf, i=i: leaf.reshape(len(made), -1)[i], delta) for i in range(len(made))]
        return sum(float((row[n] * one[n].ravel()).sum()) for row, one in zip(rows, made, strict=True) for n in row)

    gradient = pull_back(generator, phi, v, delta)
    for seed in range(3):
        direction = moved(jax.tree.map(jnp.zeros_like, (phi, v)), 10 + seed, 1.0)
        ahead, behind = (jax.tree.map(lambda p, d, h=h: p + h * d, (phi, v), direction) for h in (1e-6, -1e-6))
        exact = sum(jax.tree.leaves(jax.tree.map(lambda a, b: float((a * b).sum()), gradient, direction)))
        np.testing.assert_allclose(exact, (product(ahead) - product(behind)) / 2e-6, 1e-6)


def test_a_step_brings_what_is_sent_closer_to_what_came_back(float64: None) -> None:
    generator, rng = Generator(SHAPES, 7), np.random.default_rng(1)
    v = jnp.asarray(rng.normal(size=4))
    initial = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in SHAPES}
    phi = moved(start(generator, initial, v, jax.random.key(0)), 2)
    hyper = {"hyper_lr": 1e-3, "hyper_momentum": 0.9, "hyper_decay": 0.0, "hyper_clip": 50.0}
    sent = generator.apply(phi, v)
    back = moved(sent, 5, 0.5)
    gradient = pull_back(generator, phi, v, jax.tree.map(jnp.subtract, sent, back))
    (phi, v), _ = descend(hyper, (phi, v), gradient, jax.tree.map(jnp.zeros_like, gradient))
    distance = lambda made: sum(float(((made[n] - back[n]) ** 2).sum()) for n in made)  # noqa: E731
    assert distance(generator.apply(phi, v)) < 0.999 * distance(sent)


def test_sgd_is_that_of_torch(float64: None) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: no other SGD to compare with")
    rng = np.random.default_rng(0)
    p, velocity = {"a": rng.normal(size=(3, 2)), "b": rng.normal(size=4)}, {"a": np.zeros((3, 2)), "b": np.zeros(4)}
    other = {name: torch.tensor(value, requires_grad=True) for name, value in p.items()}
    optimizer = torch.optim.SGD(other.values(), 0.1, momentum=0.8, weight_decay=0.05)
    hyper = {"hyper_lr": 0.1, "hyper_momentum": 0.8, "hyper_decay": 0.05, "hyper_clip": 2.0}
    for scale in (0.1, 5.0, 1.0):
        gradient = {name: scale * rng.normal(size=value.shape) for name, value in p.items()}
        p, velocity = descend(hyper, p, jax.tree.map(jnp.asarray, gradient), velocity)
        for name, leaf in other.items():
            leaf.grad = torch.tensor(gradient[name])
        torch.nn.utils.clip_grad_norm_(other.values(), 2.0)
        optimizer.step()
    assert_close(jax.tree.map(np.asarray, p), {name: leaf.detach().numpy() for name, leaf in other.items()}, 1e-6)


def test_turns_differ_from_all_at_once_and_absent_embeddings_stay(float64: None) -> None:
    fed = federation()
    cohort = fp.everyone(fed.data)
    cohort = cohort._replace(reports=jnp.arange(M) != 2)
    after = []
    for at_once in (False, True):
        algorithm = fp.build("pfedhn", fed, at_once=at_once)
        env = fed.env(algorithm.hyper)
        state = algorithm.init(env, jax.random.key(4))
        state = state._replace(phi=(moved(state.phi[0], 0), state.phi[1]))
        new, info = jax.jit(algorithm.round)(env, state, cohort, jax.random.key(5))
        changed = (np.asarray(new.v[0]) != np.asarray(state.v[0])).all(1)
        assert changed.tolist() == info["reported"].tolist() == [True, True, False, True, True]
        after.append(new.phi[0])
    same = jax.tree.leaves(jax.tree.map(lambda a, b: bool(np.allclose(a, b)), *after))
    assert not all(same)


def test_a_newcomer_is_given_what_the_mean_embedding_generates(float64: None) -> None:
    fed = federation()
    algorithm = fp.build("pfedhn", fed, private_head=True)
    env = fed.env(algorithm.hyper)
    state = algorithm.init(env, jax.random.key(4))
    state = state._replace(phi=(moved(state.phi[0], 0), state.phi[1]))
    fresh = fed.model.init(jax.random.key(6))
    given = algorithm.newcomer(env, state, fresh)
    mean = state.v[0].mean(0)
    same = state._replace(v=(jnp.broadcast_to(mean, state.v[0].shape), state.v[1]))
    made = algorithm.received(env, same, 0)
    head = {name for name in fresh if fed.model.head(name)}
    assert_close({n: given[n] for n in given if n not in head}, {n: made[n] for n in made if n not in head})
    assert_equal({n: given[n] for n in head}, {n: fresh[n] for n in head})


def test_it_learns_digits() -> None:
    source = load("digits")
    order = np.argsort(source.y, kind="stable")[::3]  # every third digit; a client has one or two classes
    rows = [part[np.random.default_rng(0).permutation(len(part))] for part in np.array_split(order, 10)]
    data = client_data(
        {"x": source.x, "y": source.y}, 10, [part[:40] for part in rows], test=[part[40:] for part in rows]
    )
    model = build_model("mlp", 10, source.x[:1], hidden=(30,))
    fed = fp.Federation(model, jax.tree.map(jnp.asarray, data), shift=8.0, scale=8.0)
    algorithm = fp.build("pfedhn", fed)
    scores = fp.simulate(fed, algorithm, rounds=30, eval_every=30).records
    assert scores[0].scores["test"]["personal"].accuracy.mean() < 0.3
    assert scores[-1].scores["test"]["personal"].accuracy.mean() > 0.8


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("hyper_lr", -1.0), ("hyper_momentum", 1.0), ("hyper_decay", np.nan), ("hyper_clip", 0.0),
        ("embedding_size", -1), ("hyper_width", 0),
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=option):
        fp.build("pfedhn", federation(), **{option: value})


def test_a_private_head_has_to_be_named() -> None:
    model = fp.function_model(lambda key: {"w": jnp.zeros((6, 3))}, lambda p, x: x @ p["w"])
    for name, options in (("pfedhn", {"private_head": True}), ("fedrep", {})):
        with pytest.raises(ValueError, match="needs a model with a head"):
            fp.build(name, federation().replace(model=model), **options)
