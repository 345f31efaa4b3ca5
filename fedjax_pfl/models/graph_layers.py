"""Message-passing layers on a batch of graphs, `(N, F)` -> `(N, features)`, and what they share.

`graphs` is a `jraph.GraphsTuple` of which `senders` and `receivers` `(E,)` and an `adjacency` matrix among `globals`
are read here.  Every edge counts, also a node's edge to itself and each of several equal edges; a node without edges
and a batch without edges are defined.
Sums over edges are plain segment sums, differentiable any number of times, or, where the batch brings its adjacency
matrix, products with that.  Edges sorted by receiver, tables of neighbours and loops over edges gained too little on a
CPU to pay for the index arrays that they need.

All weights and biases start as PyTorch's `Linear` does: uniform within +-1/sqrt(inputs).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jraph
from flax import linen as nn

from fedjax_pfl.models.layers import Dense


def uniform_within(inputs: int) -> Callable[..., jax.Array]:
    """Initialiser uniform on +-1/sqrt(inputs)."""
    bound = inputs**-0.5

    def init(key: jax.Array, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def linear(features: int, inputs: int, name: str, use_bias: bool = True) -> Dense:
    """A dense layer of this project's graph models: `(..., inputs)` -> `(..., features)`."""
    init = uniform_within(inputs)
    return Dense(features, use_bias=use_bias, kernel_init=init, bias_init=init, name=name)


def adjacency(graphs: jraph.GraphsTuple) -> jax.Array | None:
    """The matrix `(N, N)` of edges from column to row, where the batch has one (see `data.graphs.Budget`)."""
    return graphs.globals.get("adjacency") if isinstance(graphs.globals, dict) else None


def aggregate(x: jax.Array, graphs: jraph.GraphsTuple) -> jax.Array:
    """Sum of the senders' rows at every receiver: `(N, F)` -> `(N, F)`, zero where no edge ends."""
    if (matrix := adjacency(graphs)) is not None:
        return jnp.matmul(matrix, x, precision=jax.lax.Precision.HIGHEST)
    return jraph.segment_sum(x[graphs.senders], graphs.receivers, x.shape[0])


def received(x: jax.Array, graphs: jraph.GraphsTuple) -> jax.Array:
    """Number of edges that end at each row of `x`: `(N,)` of its dtype."""
    if (matrix := adjacency(graphs)) is not None:
        return matrix.sum(1).astype(x.dtype)
    return jraph.segment_sum(jnp.ones(graphs.receivers.shape, x.dtype), graphs.receivers, x.shape[0])


class Dropout(nn.Dropout):
    """`flax.linen.Dropout` whose rate one half, the usual one, takes one random bit a value instead of 32.

    On a CPU, 32 bits a value would be a fifth of a training step.  Masks differ from Flax's for the same key, their
    distribution does not.  What a row keeps depends on the key and the row's number, not on how many rows follow.
    """

    def __call__(  # type: ignore[override]
        self, x: jax.Array, deterministic: bool | None = None, rng: jax.Array | None = None
    ) -> jax.Array:
        if (
            nn.merge_param("deterministic", self.deterministic, deterministic)
            or self.rate != 0.5
            or self.broadcast_dims
        ):
            return super().__call__(x, deterministic, rng)
        key = self.make_rng(self.rng_collection) if rng is None else rng
        words = jax.random.bits(key, (*x.shape[:-1], -(-x.shape[-1] // 32)), jnp.uint32)
        bits = (words[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
        keep = bits.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]
        return jnp.where(keep == 1, 2 * x, 0)


class GIN(nn.Module):
    """Graph isomorphism layer: MLP((1 + epsilon) x + sum over neighbours), MLP = dense, ReLU, dense of `features`.

    Xu et al., "How powerful are graph neural networks?", ICLR 2019.  `epsilon` is fixed, as in "GIN-0".
    """

    features: int
    epsilon: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, graphs: jraph.GraphsTuple) -> jax.Array:
        h = (1 + self.epsilon) * x + aggregate(x, graphs)
        h = nn.relu(linear(self.features, x.shape[-1], "dense1")(h))
        return linear(self.features, self.features, "dense2")(h)


class GCN(nn.Module):
    """Graph convolution: D^-1/2 (A + I) D^-1/2 x W + b, with D the edges that a node receives, and one for itself.

    Kipf and Welling, "Semi-supervised classification with graph convolutional networks", ICLR 2017.  The I is added
    for nodes with an edge to themselves too.
    """

    features: int

    @nn.compact
    def __call__(self, x: jax.Array, graphs: jraph.GraphsTuple) -> jax.Array:
        init = uniform_within(x.shape[-1])
        kernel = self.param("kernel", init, (x.shape[-1], self.features))
        bias = self.param("bias", init, (self.features,))
        scale = jax.lax.rsqrt(1 + received(x, graphs))[:, None]
        h = scale * (x @ kernel)
        return scale * (h + aggregate(h, graphs)) + bias


class GraphSAGE(nn.Module):
    """x W_self + b + (mean over neighbours) W_neighbours; the mean of no neighbours is zero.

    Hamilton et al., "Inductive representation learning on large graphs", NeurIPS 2017, the mean aggregator, all
    neighbours and no normalisation of the result.
    """

    features: int

    @nn.compact
    def __call__(self, x: jax.Array, graphs: jraph.GraphsTuple) -> jax.Array:
        mean = aggregate(x, graphs) / jnp.maximum(received(x, graphs), 1)[:, None]
        inputs = x.shape[-1]
        return linear(self.features, inputs, "self")(x) + linear(self.features, inputs, "neighbours", False)(mean)


class GAT(nn.Module):
    """Graph attention: softmax over a node and its neighbours of LeakyReLU(0.2)(a_s . h_sender + a_r . h_receiver).

    `features` are split over `heads`, whose results are concatenated; a node without edges attends to itself.
    Velickovic et al., "Graph attention networks", ICLR 2018.

    Raises:
        ValueError: the features cannot be split over the heads.
    """

    features: int
    heads: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, graphs: jraph.GraphsTuple) -> jax.Array:
        if self.heads < 1 or self.features % self.heads:
            raise ValueError(f"GAT: {self.features} features cannot be split over {self.heads} heads; choose a divisor")
        each = self.features // self.heads
        h = linear(self.features, x.shape[-1], "dense", False)(x)
        by_sender, by_receiver = (
            (h.reshape(-1, self.heads, each) * self.param(name, uniform_within(each), (self.heads, each))).sum(-1)
            for name in ("sender", "receiver")
        )
        own = jnp.arange(x.shape[0], dtype=graphs.senders.dtype)
        senders, receivers = (jnp.concatenate([ends, own]) for ends in (graphs.senders, graphs.receivers))
        logits = nn.leaky_relu(by_sender[senders] + by_receiver[receivers], 0.2)
        weights = jraph.segment_softmax(logits, receivers, x.shape[0])
        weights = jnp.repeat(weights, each, 1)  # sums of (edges, heads, each) would be four times slower on a CPU
        mixed = jraph.segment_sum(weights * h[senders], receivers, x.shape[0])
        bias = self.param("bias", uniform_within(x.shape[-1]), (self.features,))
        return mixed + bias
