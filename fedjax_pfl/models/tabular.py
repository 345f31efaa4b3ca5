"""Multilayer perceptron for rows of features, and for anything that is flattened into one."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from flax import linen as nn

from fedjax_pfl.models.layers import Dense


class MLP(nn.Module):
    """Dense layers with ReLU on the flattened input: `(B, ...)` -> `(B, num_classes)`.

    `hidden=(200,)` on 784 inputs is one of the two-layer networks of FedAvg's "2NN" family (McMahan et al., 2017).
    """

    num_classes: int
    hidden: Sequence[int] = (200,)

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        del train, mask
        x = x.reshape(x.shape[0], -1)
        for i, width in enumerate(self.hidden, start=1):
            x = nn.relu(Dense(width, name=f"dense{i}")(x))
        return Dense(self.num_classes, name="head")(x)
