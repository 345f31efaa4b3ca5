"""Classifiers of windows of sensor readings `(B, L, C)` and of sequences of symbols `(B, T)`."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedjax_pfl.models.layers import Conv, Dense, max_pool
from fedjax_pfl.models.recurrent import LSTM

_SHORTEST = 28  # two rounds of "kernel 9, pool 2" leave one step of 28


class HARCNN(nn.Module):
    """The CNN for human activities in PFL benchmarks: conv 32 and 64 (9, valid, pool 2), dense 1024 and 512, head.

    `(B, L, C)` -> `(B, num_classes)`; 2,253,958 parameters on windows of 128 steps and 9 sensors with 6 classes.  As in
    PFLlib (https://github.com/TsingZ0/PFLlib).

    Attributes:
      hidden: widths of the dense layers.
    """

    num_classes: int
    hidden: Sequence[int] = (1024, 512)

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        del train, mask
        if x.ndim != 3 or x.shape[1] < _SHORTEST:
            raise ValueError(
                f"HARCNN needs windows (batch, steps, channels) of at least {_SHORTEST} steps, got an input of shape "
                f"{x.shape}; for rows of features use MLP"
            )
        for name, features in (("conv1", 32), ("conv2", 64)):
            x = nn.relu(max_pool(Conv(features, (9,), name=name)(x), (2,)))
        x = x.reshape(x.shape[0], -1)
        for i, width in enumerate(self.hidden, start=1):
            x = nn.relu(Dense(width, name=f"dense{i}")(x))
        return Dense(self.num_classes, name="head")(x)


class CharLSTM(nn.Module):
    """LEAF's next-symbol classifier for Shakespeare: embedding 8, two LSTM layers of 256, head on the last step.

    Symbols `(B, T)`, integers from 0 below the vocabulary -> scores `(B, num_classes)` of the symbol that follows;
    817,872 parameters with 80 symbols.  A symbol outside the vocabulary cannot be seen when the model is traced: its
    scores are NaN.  The forget gate's bias starts at one.
    Caldas et al., "LEAF: a benchmark for federated settings", 2018 (https://arxiv.org/abs/1812.01097).

    Attributes:
      vocabulary: number of symbols (None: as many as classes).
      embedding: length of a symbol's vector.
      hidden: units of each LSTM layer.
    """

    num_classes: int
    vocabulary: int | None = None
    embedding: int = 8
    hidden: Sequence[int] = (256, 256)

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        del train, mask
        if x.ndim != 2 or not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(
                f"CharLSTM needs symbols (batch, steps) of an integer type, got an input of shape {x.shape} of "
                f"{x.dtype}"
            )
        x = nn.Embed(self.vocabulary or self.num_classes, self.embedding, name="embed")(x)
        for i, units in enumerate(self.hidden, start=1):
            x = LSTM(units, name=f"lstm{i}")(x)
        return Dense(self.num_classes, name="head")(x[:, -1])
