"""Image classifiers of the federated-learning papers, for inputs `(B, H, W, C)` of floats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
from flax import linen as nn

from fedjax_pfl.models.layers import Conv, Dense, avg_pool, max_pool

Activation = Literal["relu", "tanh"]
Pool = Literal["max", "mean"]

_SMALLEST = 16  # two rounds of "5x5 valid convolution, 2x2 pool" leave one pixel of 16


def _conv_block(x: jax.Array, features: int, name: str, activation: Activation, pool: Pool) -> jax.Array:
    """5x5 valid convolution, activation and 2x2 pooling: `(B, H, W, C)` -> `(B, (H - 4) // 2, (W - 4) // 2, F)`.

    Both activations are increasing, so the maximum is taken before them: the same value for a quarter of the work.
    """
    x = Conv(features, (5, 5), name=name)(x)
    if pool == "max":
        return _activate(max_pool(x, (2, 2)), activation)
    return avg_pool(_activate(x, activation), (2, 2))


def _activate(x: jax.Array, activation: Activation) -> jax.Array:
    return nn.relu(x) if activation == "relu" else nn.tanh(x)


def _check(model: nn.Module, shape: tuple[int, ...], activation: str, pool: str) -> None:
    if activation not in ("relu", "tanh") or pool not in ("max", "mean"):
        raise ValueError(
            f"{type(model).__name__}: activation must be 'relu' or 'tanh' and pool 'max' or 'mean', "
            f"got {activation!r} and {pool!r}"
        )
    _check_images(model, shape, _SMALLEST)


def _check_images(model: nn.Module, shape: tuple[int, ...], smallest: int) -> None:
    if len(shape) != 4 or min(shape[1:3]) < smallest:
        raise ValueError(
            f"{type(model).__name__} needs images (batch, height, width, channels) of at least {smallest} x {smallest} "
            f"pixels, got an input of shape {shape}; pad or enlarge the images, or use MLP"
        )


class LeNet5(nn.Module):
    """LeNet-5 as the PFL papers use it: conv 6 and 16 (5x5 valid, 2x2 pool each), dense 120 and 84, head.

    `(B, H, W, C)` -> `(B, num_classes)`; 62,006 parameters on 32x32x3 with 10 classes.
    LeCun et al., "Gradient-based learning applied to document recognition", Proceedings of the IEEE, 1998.
    """

    num_classes: int
    activation: Activation = "relu"
    pool: Pool = "max"

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        del train, mask
        _check(self, x.shape, self.activation, self.pool)
        x = _conv_block(x, 6, "conv1", self.activation, self.pool)
        x = _conv_block(x, 16, "conv2", self.activation, self.pool)
        x = x.reshape(x.shape[0], -1)
        x = _activate(Dense(120, name="dense1")(x), self.activation)
        x = _activate(Dense(84, name="dense2")(x), self.activation)
        return Dense(self.num_classes, name="head")(x)


class FedAvgCNN(nn.Module):
    """The CNN of FedAvg's MNIST experiments with valid padding: conv 32 and 64 (5x5, 2x2 pool), dense 512, head.

    `(B, H, W, C)` -> `(B, num_classes)`; 582,026 parameters on 28x28x1 and 878,538 on 32x32x3 with 10 classes.
    McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017
    (https://arxiv.org/abs/1602.05629), in the valid-padding form common in PFL benchmarks.
    """

    num_classes: int
    activation: Activation = "relu"
    pool: Pool = "max"

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        del train, mask
        _check(self, x.shape, self.activation, self.pool)
        x = _conv_block(x, 32, "conv1", self.activation, self.pool)
        x = _conv_block(x, 64, "conv2", self.activation, self.pool)
        x = x.reshape(x.shape[0], -1)
        x = _activate(Dense(512, name="dense1")(x), self.activation)
        return Dense(self.num_classes, name="head")(x)


class PflCNN(nn.Module):
    """The CIFAR-10 CNN of the pfl-research benchmarks: conv 32 and 64 (3x3 valid), 2x2 pool, dense 128, head.

    `(B, H, W, C)` -> `(B, num_classes)`; 1,626,442 parameters on 32x32x3 with 10 classes.  Kernels start
    Glorot-uniform, biases at zero.  Training needs a key for dropout, which follows the pooling and the dense layer.
    Granqvist et al., "pfl-research: simulation framework for accelerating research in private federated learning",
    2024 (https://arxiv.org/abs/2404.06430); `simple_cnn` in benchmarks/model of https://github.com/apple/pfl-research.

    Attributes:
      rates: probabilities with which a value is dropped after the pooling and after the dense layer.
    """

    num_classes: int
    rates: Sequence[float] = (0.25, 0.5)

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        del mask
        _check_images(self, x.shape, 6)
        start: dict[str, Any] = {"kernel_init": nn.initializers.glorot_uniform()}
        x = nn.relu(Conv(32, (3, 3), name="conv1", **start)(x))
        x = nn.relu(max_pool(Conv(64, (3, 3), name="conv2", **start)(x), (2, 2)))
        x = nn.Dropout(self.rates[0], deterministic=not train)(x).reshape(x.shape[0], -1)
        x = nn.relu(Dense(128, name="dense1", **start)(x))
        x = nn.Dropout(self.rates[1], deterministic=not train)(x)
        return Dense(self.num_classes, name="head", **start)(x)
