"""A hypernetwork that generates all parameters of a client's model from the client's embedding: pFedHN's server."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedjax_pfl.aggregation import EXACT
from fedjax_pfl.algorithms._distillation import clipped
from fedjax_pfl.engine import tree
from fedjax_pfl.models.model import Variables

Tree = Any


class Generator(nn.Module):
    """Embedding ``v (E,)`` -> variables of the given names and shapes, in JAX's default float.

    One dense layer on the embedding and ``layers`` hidden ones, all ``width`` wide with ReLU (the last layer's too),
    then one dense output a variable: with P generated floats about ``(width + 1) P`` parameters.

    Attributes:
      shapes: ``((name, shape), ...)`` of the variables.
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    width: int = 100
    layers: int = 3

    @nn.compact
    def __call__(self, v: jax.Array) -> Variables:
        options: dict[str, Any] = {"param_dtype": jnp.result_type(float), "precision": EXACT}
        for i in range(1 + self.layers):
            v = nn.relu(nn.Dense(self.width, name=f"hidden{i}", **options)(v))
        outputs = {
            name: nn.Dense(math.prod(shape), name=output(name), kernel_init=nn.initializers.zeros, **options)(v)
            for name, shape in self.shapes
        }
        return {name: outputs[name].reshape(shape) for name, shape in self.shapes}


def output(name: str) -> str:
    """The name of the layer that generates a variable."""
    return name.replace("/", ".")


def start(generator: Generator, initial: Mapping[str, jax.Array], v: jax.Array, key: jax.Array) -> Tree:
    """First parameters phi: the outputs' kernels are zero and their biases the model's own initial values, so that
    every client is generated exactly that model at first."""
    layers = dict(generator.init(key, v)["params"])
    for name, _ in generator.shapes:
        layers[output(name)] = layers[output(name)] | {"bias": jnp.ravel(initial[name])}
    return {"params": layers}


def pull_back(generator: Generator, phi: Tree, v: jax.Array, delta: Mapping[str, jax.Array]) -> tuple[Tree, jax.Array]:
    """The pull-back of Delta through ``(phi, v) -> theta``; v and Delta of one client, or both stacked.

    delta: sent minus returned: descent brings what is sent next closer to what came back.
    """
    generate: Any = generator.apply if v.ndim == 1 else jax.vmap(generator.apply, (None, 0))
    return jax.vjp(generate, phi, v)[1](dict(delta))


def descend(hyper: Mapping[str, jax.Array], parameters: Tree, gradient: Tree, velocity: Tree) -> tuple[Tree, Tree]:
    """A step of SGD with momentum and weight decay on a clipped gradient: ``(parameters, velocity)``.

    hyper: ``hyper_lr``, ``hyper_momentum``, ``hyper_decay`` and ``hyper_clip``. The decay is added after the clip and
        enters the momentum.
    """
    direction = tree.add(clipped(gradient, hyper["hyper_clip"]), tree.scale(hyper["hyper_decay"], parameters))
    velocity = tree.add(tree.scale(hyper["hyper_momentum"], velocity), direction)
    return tree.subtract(parameters, tree.scale(hyper["hyper_lr"], velocity)), velocity
