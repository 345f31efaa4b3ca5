"""A long short-term memory layer that stays fast when `jax.vmap` gives every client its own weights.

The input products of all steps are one matrix product in front of the scan, and the four gates of the recurrent
product are one product inside it.  The derivative with respect to the recurrent kernel is one product over all steps
instead of a running sum inside the scan, which would read and write the whole kernel at every step.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax


def _gates(before: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    i, f, g, o = jnp.split(before, 4, -1)
    return nn.sigmoid(i), nn.sigmoid(f), jnp.tanh(g), nn.sigmoid(o)


def _scan(inputs: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Hidden states, cells `(T, B, H)` and gates before their activation `(T, B, 4 H)`."""

    def step(carry: tuple[jax.Array, jax.Array], row: jax.Array) -> tuple[Any, tuple[jax.Array, jax.Array, jax.Array]]:
        hidden, cell = carry
        before = row + hidden @ kernel
        i, f, g, o = _gates(before)
        cell = f * cell + i * g
        hidden = o * jnp.tanh(cell)
        return (hidden, cell), (hidden, cell, before)

    zero = jnp.zeros((inputs.shape[1], kernel.shape[0]), inputs.dtype)
    return lax.scan(step, (zero, zero), inputs)[1]


@jax.custom_jvp
def lstm(inputs: jax.Array, kernel: jax.Array) -> jax.Array:
    """Hidden states `(T, B, H)` of an LSTM started at zero.

    inputs: `(T, B, 4 H)`, input products and biases of the gates i, f, g, o. kernel: `(H, 4 H)`, the recurrent one.
    Differentiable any number of times, forward and reverse.
    """
    return _scan(inputs, kernel)[0]


@lstm.defjvp
def _lstm_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (inputs, kernel), (dinputs, dkernel) = primals, tangents
    hiddens, cells, before = _scan(inputs, kernel)
    i, f, g, o = _gates(before)
    tanh, cells = jnp.tanh(cells), _delayed(cells)
    slopes = (g * i * (1 - i), cells * f * (1 - f), i * (1 - g * g), f, tanh * o * (1 - o), o * (1 - tanh * tanh))
    drive = dinputs + _delayed(hiddens) @ dkernel  # all steps at once: the transpose sums over them in one product

    def step(carry: tuple[jax.Array, jax.Array], row: tuple[jax.Array, Any]) -> tuple[Any, jax.Array]:
        (dhidden, dcell), (drive, (by_i, by_f, by_g, keep, by_o, by_cell)) = carry, row
        di, df, dg, do = jnp.split(drive + dhidden @ kernel, 4, -1)
        dcell = keep * dcell + by_i * di + by_f * df + by_g * dg
        dhidden = by_o * do + by_cell * dcell
        return (dhidden, dcell), dhidden

    zero = jnp.zeros_like(hiddens[0])
    return hiddens, lax.scan(step, (zero, zero), (drive, slopes))[1]


def _delayed(states: jax.Array) -> jax.Array:
    """The states before each step: zero, then all but the last."""
    return jnp.concatenate([jnp.zeros_like(states[:1]), states[:-1]])


class LSTM(nn.Module):
    """A long short-term memory layer: `(B, T, C)` -> `(B, T, H)`, all hidden states.

    Parameters: `input_kernel (C, 4 H)`, `recurrent_kernel (H, 4 H)`, `bias (4 H,)`, the columns in the order of the
    gates i, f, g, o: one bias per gate, `4 H (C + H + 1)` in all.  Both kernels are drawn as one Glorot-uniform matrix
    `(C + H, 4 H)`; the bias starts at zero and, for the gate f, at `forget_bias`.
    Hochreiter and Schmidhuber, "Long short-term memory", Neural Computation, 1997; Gers et al., 2000, for the gate f.

    Attributes:
      hidden: number of units H.
      forget_bias: first value of the bias of f; adding a constant 1 to the gate, as some libraries do, is the same.
    """

    hidden: int
    forget_bias: float = 1.0
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if x.ndim != 3 or x.shape[1] == 0:
            raise ValueError(f"LSTM {self.name} needs sequences (batch, steps, features), got an input of {x.shape}")
        size, features = self.hidden, x.shape[-1]
        glorot = _uniform((6 / (features + 5 * size)) ** 0.5)
        kernel = self.param("input_kernel", glorot, (features, 4 * size), self.param_dtype)
        recurrent = self.param("recurrent_kernel", glorot, (size, 4 * size), self.param_dtype)
        bias = self.param("bias", self._bias, (4 * size,), self.param_dtype)
        x, kernel, recurrent, bias = nn.dtypes.promote_dtype(x, kernel, recurrent, bias)
        rows = x.swapaxes(0, 1).reshape(-1, features) @ kernel + bias
        return lstm(rows.reshape(x.shape[1], x.shape[0], 4 * size), recurrent).swapaxes(0, 1)

    def _bias(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        del key
        return jnp.zeros(shape, dtype).at[self.hidden : 2 * self.hidden].set(self.forget_bias)


def _uniform(limit: float) -> Any:
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -limit, limit)
