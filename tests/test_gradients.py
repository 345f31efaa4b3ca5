"""Gradients through whole rounds of a ReLU and max-pool network, and FedAPA's step as the gradient of its proxy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import CLASSES, Case, assert_close, build, federation

import fedjax_pfl as fp
from fedjax_pfl.aggregation import mix
from fedjax_pfl.data.clients import ClientData, client_data
from fedjax_pfl.engine import tree
from fedjax_pfl.engine.rounds import one_round
from fedjax_pfl.evaluation import scores_of
from fedjax_pfl.models.layers import Conv, max_pool

pytestmark = pytest.mark.usefixtures("float64")
SIZES, KEY, ROUNDS = (5, 3, 6, 4), jax.random.key(5), 3


class ConvNet(nn.Module):
    """8 x 8 pixels -> 3 x 3 convolution, ReLU, 2 x 2 max-pool -> head."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = max_pool(nn.relu(Conv(2, (3, 3), name="conv")(x)), (2, 2))
        return nn.Dense(CLASSES, name="head")(x.reshape(x.shape[0], -1))


def images() -> ClientData:
    rng = np.random.default_rng(0)
    total = sum(SIZES) + 2 * len(SIZES)
    rows = np.split(np.arange(total), np.cumsum([*SIZES, *[2] * len(SIZES)])[:-1])
    y = rng.integers(0, CLASSES, total)
    x = rng.normal(size=(total, 8, 8, 1)) + y[:, None, None, None]
    return client_data({"x": x, "y": y}, CLASSES, rows[: len(SIZES)], rows[len(SIZES) :])


class Program(NamedTuple):
    """A method, and as one compiled function of (hyper, state) its validation losses after 1 and after 3 rounds and
    the gradient of their sum with given weights."""

    algorithm: fp.Algorithm
    env: fp.Env
    losses: Callable[[Any, jax.Array], tuple[jax.Array, Any]]


@functools.cache
def program(name: str) -> Program:
    fed = federation(images(), participation=fp.Participation(0.75, 0.2), differentiable=True, batch_size=4, lr=0.2)
    fed = fed.replace(model=fp.flax_model(ConvNet(), np.zeros((1, 8, 8, 1))), local_epochs=1)
    case = CASES[name]
    algorithm = build(case, fed)
    env = fed.env(algorithm.hyper)

    def losses(point: Any) -> jax.Array:
        hyper, state = point
        changed = env._replace(hyper=env.hyper | hyper)

        def advance(state: Any, round_: jax.Array) -> Any:
            state = one_round(fed, algorithm, changed, state, KEY, round_, ROUNDS)[0]
            served = algorithm.serve(changed, state)
            return state, scores_of(fed, algorithm, changed, served, algorithm.received, "validation").loss.mean()

        return jax.lax.scan(advance, state, jnp.arange(ROUNDS, dtype=jnp.int32))[1][jnp.array([0, ROUNDS - 1])]

    def with_gradient(point: Any, weights: jax.Array) -> tuple[jax.Array, Any]:
        value, pull = jax.vjp(losses, point)
        return value, pull(weights)[0]

    return Program(algorithm, env, jax.jit(with_gradient))


CASES = {
    case.name: case
    for case in (
        Case("fedavg", {}, ("lr",)),
        Case("fedprox", {"mu": 0.3}, ("lr", "mu")),
        Case("fedper", {}, ("lr",)),
        Case("fedapa", {"eta": 0.05}, ("lr", "eta")),
    )
}


def start(case: Program, scattered: bool) -> Any:
    """Round 0 (all bodies equal, A the identity), or unequal bodies and weights inside (0, 1)."""
    state = case.algorithm.init(case.env, KEY)
    if not scattered:
        return state
    keys = iter(jax.random.split(jax.random.key(9), 99))
    moved = jax.tree.map(lambda a: a + 0.2 * jax.random.normal(next(keys), a.shape), state)
    if hasattr(state, "A"):
        A = jax.random.uniform(next(keys), state.A.shape, minval=0.3, maxval=0.7)
        moved = moved._replace(A=A / A.sum(1, keepdims=True))
    return moved


def random_like(leaf: jax.Array, seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), leaf.shape, leaf.dtype)


def directions(point: Any) -> dict[str, Any]:
    """One direction for each hyper-parameter, for A, and for everything that is a model parameter."""
    hyper, state = point
    nothing = jax.tree.map(jnp.zeros_like, point)
    found = {name: (nothing[0] | {name: jnp.ones_like(value)}, nothing[1]) for name, value in hyper.items()}
    if hasattr(state, "A"):
        found["A"] = nothing[0], nothing[1]._replace(A=random_like(state.A, 1))
    leaves, structure = jax.tree.flatten(state._replace(A=None) if hasattr(state, "A") else state)
    drawn = structure.unflatten([random_like(leaf, 2 + k) for k, leaf in enumerate(leaves)])
    found["parameters"] = nothing[0], drawn._replace(A=nothing[1].A) if hasattr(state, "A") else drawn
    return found


@pytest.mark.parametrize("begin", ["round 0", "scattered"])
@pytest.mark.parametrize("name", CASES)
def test_gradient_of_a_relu_and_max_pool_network(name: str, begin: str) -> None:
    case = program(name)
    point = ({n: case.env.hyper[n] for n in CASES[name].differentiable}, start(case, begin == "scattered"))
    gradients, h = [case.losses(point, weights)[1] for weights in jnp.eye(2)], 1e-6
    for what, direction in directions(point).items():
        sides = [jax.tree.map(lambda p, d, s=s: p + s * h * d, point, direction) for s in (1.0, -1.0)]
        above, below = (case.losses(side, jnp.ones(2))[0] for side in sides)
        exact = np.array([tree.dot(gradient, direction) for gradient in gradients])
        assert abs(exact[1]) > 1e-5, "a gradient that is nothing proves nothing"
        np.testing.assert_allclose(exact, (above - below) / (2 * h), rtol=1e-3, atol=1e-8, err_msg=what)


# FedAPA's step.


@pytest.mark.parametrize(("variant", "sign"), [("descent", -1.0), ("printed", 1.0)])
@pytest.mark.parametrize("begin", ["round 0", "scattered"])
def test_the_step_of_the_weights_is_the_gradient_of_the_proxy_loss(begin: str, variant: str, sign: float) -> None:
    """0.5 ||theta_i - sum_j a_ij theta_j||^2, the trained theta_i held fixed: descent goes down, Eq 7 as printed up."""
    algorithm, env, advance, eta = fedapa_round(variant)
    state = start(Program(algorithm, env, advance), begin == "scattered")
    new = advance(state)

    def proxy(A: jax.Array) -> jax.Array:
        apart = tree.subtract(new.theta, mix(A, state.theta))
        return 0.5 * tree.dot(apart, apart)

    gradient = jax.grad(proxy)(state.A)
    assert abs(gradient).max() > 1e-3
    A = jnp.clip(state.A + sign * eta * gradient, 0, 1)
    A = jnp.where(jnp.eye(len(A)) == 1, 0.5, A)
    assert_close(new.A, A / A.sum(1, keepdims=True), 1e-10)
    if begin == "scattered":
        step = sign * eta * gradient
        assert (proxy(state.A + 0.01 * step) < proxy(state.A)) == (variant == "descent")


@functools.cache
def fedapa_round(variant: str) -> tuple[fp.Algorithm, fp.Env, Callable[[Any], Any], float]:
    fed = federation()
    algorithm = fp.build("fedapa", fed, variant=variant, eta=0.05)
    env = fed.env(algorithm.hyper)
    return algorithm, env, jax.jit(lambda s: one_round(fed, algorithm, env, s, KEY, 0, 1)[0]), 0.05
