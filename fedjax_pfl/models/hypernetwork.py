"""A hypernetwork that modulates the last fully connected layer of a global model: one scale and shift per weight.

    gamma_i, beta_i = bound tanh(h(v_i; phi));    W_i = W_g * (1 + alpha_i gamma_i) + alpha_i beta_i,  the bias likewise

FedHR (JEIT 2026, https://doi.org/10.11999/JEIT260222), of which the abstract is public: that a light hypernetwork maps
a client's embedding, started from its label distribution, to a scale and shift of the last layer.  The sizes, the bound
and the form above are ours; the update of phi and v is that of pFedHN (Shamsian et al., ICML 2021).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedjax_pfl.models.model import Variables

Tree = Any
EXACT = jax.lax.Precision.HIGHEST


class Modulation(NamedTuple):
    """Scale gamma and shift beta of a head: of its kernel ``(..., d, C)`` and of its bias ``(..., C)``."""

    kernel_scale: jax.Array
    kernel_shift: jax.Array
    bias_scale: jax.Array
    bias_shift: jax.Array


class Modulator(nn.Module):
    """Client embedding ``v (..., E)`` -> `Modulation` of a head with kernel ``(d, C)`` and bias ``(C,)``.

    Dense layers with ReLU, then one of ``floats`` outputs, zero at first: a new modulator leaves every head as it is.
    Parameters: ``(E + 1) H_1 + (H_1 + 1) H_2 + ... + (H_n + 1) floats``, in JAX's default float.

    Raises:
        ValueError: a size below 1, a bound that is not positive, or an embedding of another size.

    Attributes:
      features: inputs d of the head.
      classes: outputs C of the head.
      embedding: size E of a client's embedding.
      hidden: widths H of the hidden layers.
      bound: every scale and shift is ``bound * tanh(.)``; below 1, no weight changes its sign by its scale.
    """

    features: int
    classes: int
    embedding: int = 32
    hidden: tuple[int, ...] = (100, 100)
    bound: float = 0.5

    @property
    def floats(self) -> int:
        """Numbers in one modulation, ``2 (d C + C)``: what a client receives beside the global model."""
        return 2 * (self.features + 1) * self.classes

    @nn.compact
    def __call__(self, v: jax.Array) -> Modulation:
        self._check(v)
        kind, d, C = jnp.result_type(float), self.features, self.classes
        for i, width in enumerate(self.hidden):
            v = nn.relu(nn.Dense(width, param_dtype=kind, name=f"hidden{i}")(v))
        out = nn.Dense(self.floats, kernel_init=nn.initializers.zeros, param_dtype=kind, name="out")(v)
        out = self.bound * jnp.tanh(out)
        scale, shift, bias_scale, bias_shift = jnp.split(out, (d * C, 2 * d * C, 2 * d * C + C), -1)
        kernel = (*out.shape[:-1], d, C)
        return Modulation(scale.reshape(kernel), shift.reshape(kernel), bias_scale, bias_shift)

    def _check(self, v: jax.Array) -> None:
        if min(self.features, self.classes, self.embedding, *self.hidden) < 1:
            raise ValueError(
                f"Modulator: sizes must be at least 1; found features={self.features}, classes={self.classes}, "
                f"embedding={self.embedding}, hidden={self.hidden}"
            )
        if not isinstance(self.bound, jax.Array) and not 0 < self.bound < float("inf"):
            raise ValueError(f"Modulator: bound must be positive and finite, found {self.bound}")
        if jnp.shape(v)[-1:] != (self.embedding,):
            raise ValueError(f"Modulator: embeddings must be (..., {self.embedding}), found {jnp.shape(v)}")


def modulate(head: Mapping[str, jax.Array], modulation: Modulation, alpha: jax.Array | float) -> Variables:
    """The head of one client, ``W_g (1 + alpha gamma) + alpha beta``, under the names and in the dtypes of ``head``.

    head: the variables of one dense layer: one kernel ``(d, C)`` and one bias ``(C,)``, under any names.
    alpha: the strength, a scalar; 0 gives the global head bit for bit. For many clients: ``jax.vmap``.

    Raises:
        ValueError: the head is not one dense layer with a bias, or the modulation is of another size.
    """
    by_rank = {jnp.ndim(leaf): name for name, leaf in head.items()}
    shapes = {name: jnp.shape(leaf) for name, leaf in head.items()}
    if len(head) != 2 or set(by_rank) != {1, 2}:
        raise ValueError(f"modulate needs a head of one kernel (d, C) and one bias (C,), found {shapes}: choose head=")
    kernel, bias = by_rank[2], by_rank[1]
    given = (modulation.kernel_scale.shape, modulation.bias_scale.shape)
    if (shapes[kernel], shapes[bias]) != given:
        raise ValueError(f"modulate: the head is {shapes} but the modulation {given}: make the Modulator of its size")
    parts = {
        kernel: (modulation.kernel_scale, modulation.kernel_shift),
        bias: (modulation.bias_scale, modulation.bias_shift),
    }
    alpha = jnp.asarray(alpha)

    def moved(name: str) -> jax.Array:
        (scale, shift), W = parts[name], head[name]
        return _exact_at_zero(alpha, W, (W * (1 + alpha * scale) + alpha * shift).astype(W.dtype))

    return {name: moved(name) for name in head}


@jax.custom_jvp
def _exact_at_zero(alpha: jax.Array, head: jax.Array, moved: jax.Array) -> jax.Array:
    """``head`` where alpha is 0 (adding ``0 * beta`` would turn -0 into 0), with the derivative of ``moved``."""
    return jnp.where(alpha == 0, head, moved)


@_exact_at_zero.defjvp
def _exact_at_zero_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
    return _exact_at_zero(*primals), tangents[2]


def embed_histogram(histogram: jax.Array, size: int, key: jax.Array) -> jax.Array:
    """First embeddings ``(..., size)`` of clients with label counts ``(..., C)``, in JAX's default float.

    The label counts, scaled to length 1, times a Gaussian ``(C, size)`` that only ``key`` decides: every entry
    has variance 1 whatever the client's mixture, and similar clients start close together. No labels give zeros.
    Whoever knows the projection can read the label proportions from the embedding: the server sees them.

    Raises:
        ValueError: no classes, or a size below 1.
    """
    histogram = jnp.asarray(histogram, jnp.result_type(float))
    if histogram.ndim < 1 or histogram.shape[-1] < 1 or size < 1:
        raise ValueError(f"embed_histogram needs counts (..., C) and size >= 1, found {histogram.shape} and {size}")
    squared = (histogram**2).sum(-1, keepdims=True)
    unit = histogram / jnp.sqrt(jnp.where(squared == 0, 1, squared))
    return jnp.matmul(unit, jax.random.normal(key, (histogram.shape[-1], size), unit.dtype), precision=EXACT)


def personal_heads(
    modulator: Modulator, phi: Tree, v: jax.Array, head: Mapping[str, jax.Array], alpha: jax.Array | float
) -> Variables:
    """The modulated head W_i of a client from v ``(E,)`` and a scalar alpha, or of many from ``(M, E)`` and ``(M,)``.

    Raises:
        ValueError: as `Modulator` and `modulate`.
    """
    modulation: Any = modulator.apply(phi, v)
    return (modulate if v.ndim == 1 else jax.vmap(modulate, (None, 0, 0)))(head, modulation, alpha)


def modulation_gradient(
    modulator: Modulator,
    phi: Tree,
    v: jax.Array,
    head: Mapping[str, jax.Array],
    alpha: jax.Array | float,
    change: Mapping[str, jax.Array],
    *,
    fixed_alpha: bool = True,
) -> tuple[Tree, jax.Array]:
    """Gradients in (phi, v) of a client or of many: the pull-back of ``change`` through ``(phi, v) -> W_i``.

    That in phi is summed over clients.

    change: what was sent minus what came back, named as ``head``, with leading axis M where v has one; descent along
        the gradients brings the next head that is sent closer to what came back.
    fixed_alpha: stop the gradient at alpha: where a whole round is differentiated, this update counts as one that does
        not depend on alpha (and so neither on what chose it). The value is the same.

    Raises:
        ValueError: as `personal_heads`; ``change`` has other names or shapes than the heads.
    """
    shapes = [{name: jnp.shape(leaf) for name, leaf in leaves.items()} for leaves in (head, change)]
    if {name: (*v.shape[:-1], *shape) for name, shape in shapes[0].items()} != shapes[1]:
        raise ValueError(f"modulation_gradient: the change {shapes[1]} is not one of the head {shapes[0]}")
    alpha = jax.lax.stop_gradient(alpha) if fixed_alpha else alpha
    _, pull = jax.vjp(lambda phi, v: personal_heads(modulator, phi, v, head, alpha), phi, v)
    return pull({name: jnp.asarray(change[name], leaf.dtype) for name, leaf in head.items()})
