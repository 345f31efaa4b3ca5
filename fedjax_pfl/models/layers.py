"""Layers that stay fast when `jax.vmap` gives every client its own weights.

`vmap` over `lax.conv_general_dilated` with per-client kernels lowers to a grouped convolution, slow in both
directions.  Here a convolution is slices, a concatenation and one matrix product, pooling is comparisons of slices,
and a dense layer's weight gradient is a sum that fuses with the optimiser's update.  Values and derivatives of every
order, forward and reverse mode, equal those of `flax.linen` up to rounding; parameters have the same names and shapes.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

Implementation = Literal["matmul", "lax"]
Padding = Literal["VALID", "SAME"]

_DEFAULT: dict[str, Implementation] = {"cpu": "matmul", "gpu": "matmul", "tpu": "matmul"}
_override: list[Implementation] = []


def conv_implementation() -> Implementation:
    """Implementation that `Conv` uses when its field is None: "matmul" or "lax"."""
    return _override[-1] if _override else _DEFAULT.get(jax.default_backend(), "matmul")


@contextlib.contextmanager
def use_conv_implementation(implementation: Implementation) -> Iterator[None]:
    """Chooses the implementation for everything traced inside the `with` block."""
    _override.append(_checked(implementation))
    try:
        yield
    finally:
        _override.pop()


def _checked(implementation: Implementation) -> Implementation:
    if implementation not in ("matmul", "lax"):
        raise ValueError(f"conv implementation must be 'matmul' or 'lax', got {implementation!r}")
    return implementation


def conv(
    x: jax.Array,
    kernel: jax.Array,
    strides: tuple[int, ...],
    padding: Padding,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Cross-correlation of `x (B, H, W, Cin)` with `kernel (kh, kw, Cin, Cout)` -> `(B, OH, OW, Cout)`.

    One spatial axis goes the same way: `x (B, L, Cin)`, `kernel (k, Cin, Cout)` -> `(B, OL, Cout)`.
    """
    if _checked(implementation or conv_implementation()) == "lax":
        spatial = "HW"[: kernel.ndim - 2]
        dims = (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")
        return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=dims)
    if kernel.ndim == 3:
        return conv(x[:, None], kernel[None], (1, *strides), padding, "matmul")[:, 0]
    pads = lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], strides, padding)
    return _matmul_conv(jnp.pad(x, ((0, 0), *pads, (0, 0))) if any(map(any, pads)) else x, kernel, strides)


def _matmul_conv(x: jax.Array, kernel: jax.Array, strides: tuple[int, ...]) -> jax.Array:
    """Valid convolution as one product; a row of its left factor sees the inputs of `block` neighbouring outputs."""
    (kh, kw, cin, cout), (sh, sw), batch = kernel.shape, strides, x.shape[0]
    oh, ow = (x.shape[1] - kh) // sh + 1, (x.shape[2] - kw) // sw + 1
    block = _block(kernel.shape, ow, sw) if jax.default_backend() == "cpu" else 1
    count, span = -(-ow // block), (block - 1) * sw + kw
    missing = (count * block - 1) * sw + kw - x.shape[2]
    if missing > 0:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0)))
    if block == 1:
        parts = [
            x[:, i : i + (oh - 1) * sh + 1 : sh, j : j + (ow - 1) * sw + 1 : sw] for i in range(kh) for j in range(kw)
        ]
        patches = jnp.concatenate(parts, -1)
    else:
        starts = range(0, count * block * sw, block * sw)
        patches = jnp.stack(
            [
                jnp.concatenate(
                    [
                        x[:, i : i + (oh - 1) * sh + 1 : sh, j : j + span].reshape(batch, oh, span * cin)
                        for i in range(kh)
                    ],
                    -1,
                )
                for j in starts
            ],
            2,
        )
    y = patches.reshape(batch * oh * count, -1) @ _banded(kernel, block, sw)
    return y.reshape(batch, oh, count * block, cout)[:, :, :ow]


def _banded(kernel: jax.Array, block: int, stride: int) -> jax.Array:
    """The kernel shifted once for every output of a block: `(kh * span * Cin, block * Cout)`, zero off the band."""
    shifts = [(q * stride, (block - 1 - q) * stride) for q in range(block)]
    columns = [jnp.pad(kernel, ((0, 0), shift, (0, 0), (0, 0))) for shift in shifts]
    return jnp.stack(columns, 3).reshape(-1, block * kernel.shape[-1])


@functools.cache
def _block(kernel_shape: tuple[int, ...], outputs: int, stride: int) -> int:
    """Outputs per row of the product that cost least; it decides speed only.

    Thin channels make thin products.  A block multiplies the arithmetic by `span / kw`, and divides the rows and the
    copied bytes.  The cost of an output is taken as `(N + 32) (K + 32) / block` for a product with K terms and N
    columns (padded to vectors of 8); the constants were fitted to the four convolutions of LeNet-5 and FedAvgCNN at
    batch 10 on one AVX-512 CPU with 2 cores, and are untested elsewhere.
    """
    kh, kw, cin, cout = kernel_shape

    def cost(block: int) -> float:
        terms, columns = kh * ((block - 1) * stride + kw) * cin, -(-block * cout // 8) * 8
        return (columns + 32) * (terms + 32) * -(-outputs // block)

    return min(range(1, min(outputs, 16) + 1), key=cost)


class Conv(nn.Module):
    """`flax.linen.Conv` with the same parameters, fast under `vmap` over clients.

    Attributes:
      features: output channels.
      kernel_size: `(kh, kw)` for inputs `(B, H, W, C)` or `(k,)` for inputs `(B, L, C)`.
      strides: one step for every spatial axis, or one per axis.
      padding: "VALID" or "SAME".
      use_bias: whether to add a bias `(features,)`.
      implementation: "matmul", "lax", or None for `conv_implementation()`.
    """

    features: int
    kernel_size: Sequence[int]
    strides: int | Sequence[int] = 1
    padding: Padding = "VALID"
    use_bias: bool = True
    implementation: Implementation | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Any = nn.initializers.lecun_normal()
    bias_init: Any = nn.initializers.zeros_init()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        window = tuple(self.kernel_size)
        strides = (self.strides,) * len(window) if isinstance(self.strides, int) else tuple(self.strides)
        if len(window) not in (1, 2) or len(strides) != len(window) or x.ndim != len(window) + 2:
            raise ValueError(
                f"Conv {self.name}: kernel_size {window} and strides {strides} do not fit an input of "
                f"shape {x.shape}; give one entry per spatial axis of (B, H, W, C) or (B, L, C)"
            )
        if self.padding not in ("VALID", "SAME"):
            raise ValueError(f"Conv {self.name}: padding must be 'VALID' or 'SAME', got {self.padding!r}")
        if self.padding == "VALID" and any(n < k for n, k in zip(x.shape[1:-1], window, strict=True)):
            raise ValueError(f"Conv {self.name}: the input {x.shape} is smaller than the kernel {window}")
        kernel = self.param("kernel", self.kernel_init, (*window, x.shape[-1], self.features), self.param_dtype)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
        y = conv(x, kernel, strides, self.padding, self.implementation)
        return y if bias is None else y + bias


@jax.custom_jvp
def _small_batch_dot(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return x @ kernel


@_small_batch_dot.defjvp
def _small_batch_dot_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x, kernel), (dx, dkernel) = primals, tangents
    # The transpose of this sum is B outer products added elementwise: they fuse with the optimiser's update, so the
    # gradient of a large kernel is never stored, and a chunk of one client never transposes it.
    rows = [(row[:, None] * dkernel).sum(0) for row in x]
    return x @ kernel, dx @ kernel + jnp.stack(rows)


def _dense_dot(x: jax.Array, kernel: jax.Array, dimensions: Any, precision: Any = None, **kwargs: Any) -> jax.Array:
    small = x.ndim == 2 and x.shape[0] <= 16 and kernel.size >= 4096 and precision is None and not kwargs
    if small and jax.default_backend() == "cpu":
        return _small_batch_dot(x, kernel)
    return lax.dot_general(x, kernel, dimensions, precision=precision, **kwargs)


class Dense(nn.Dense):
    """`flax.linen.Dense` whose weight gradient, for at most 16 samples on a CPU, fuses with the update that uses it."""

    dot_general: Any = _dense_dot


def _windows(x: jax.Array, window: Sequence[int]) -> tuple[jax.Array, tuple[int, ...]]:
    """`(B, H, W, C)` -> `(B, H // wh, wh, W // ww, ww, C)`, rest of the last window dropped; and the window axes."""
    window = tuple(window)
    if x.ndim != len(window) + 2:
        raise ValueError(f"a window {window} does not fit an input of shape {x.shape}: one entry per spatial axis")
    counts = [n // w for n, w in zip(x.shape[1:-1], window, strict=True)]
    if min(counts) == 0:
        raise ValueError(f"the pooling window {window} is larger than the input {x.shape}")
    x = x[(slice(None), *(slice(n * w) for n, w in zip(counts, window, strict=True)))]
    split = [size for pair in zip(counts, window, strict=True) for size in pair]
    return x.reshape(x.shape[0], *split, x.shape[-1]), tuple(range(2, 2 + 2 * len(window), 2))


def max_pool(x: jax.Array, window: Sequence[int]) -> jax.Array:
    """Maximum over non-overlapping windows: `(B, H, W, C)` -> `(B, H // wh, W // ww, C)`; `(B, L, C)` likewise.

    Equals `flax.linen.max_pool(x, window, strides=window)`, also in the gradient: where several entries of a window
    share the maximum, all of it goes to the first of them in row-major order.  NaN propagates.
    """
    x, axes = _windows(x, window)
    for axis in reversed(axes):  # the last axis first, so that ties go to the first row and then its first column
        x = functools.reduce(_first_max, [lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])])
    return x


def _first_max(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.where((b > a) | (b != b), b, a)  # jnp.maximum would halve the gradient between equals


def avg_pool(x: jax.Array, window: Sequence[int]) -> jax.Array:
    """Mean over non-overlapping windows, shapes as in `max_pool`; equals `flax.linen.avg_pool` with those strides."""
    x, axes = _windows(x, window)
    return x.sum(axes) / math.prod(window)
