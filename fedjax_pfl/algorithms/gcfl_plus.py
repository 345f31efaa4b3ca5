"""GCFL+: Federated Graph Classification over Non-IID Graphs, with clusters by series of gradient norms.

Xie, Ma, Xiong, Yang; NeurIPS 2021; https://arxiv.org/abs/2106.13423

    as GCFL (see ``gcfl``), but a cluster is split by the minimum cut of the graph with weights  max_kl d_kl - d_ij,
    where k, l, i and j are of the cluster, and d_ij is the dynamic time warping distance of the last L norms of the
    gradients of i and of j
    clusters split only where all series are full;  after a split all series start anew

A client's number of a round is the norm of its last minibatch's gradient in what is shared, as in the released code;
``series=update`` takes ||Delta_i|| instead, which that code has as a second variant. Differs from the paper: clients
that are absent add nothing to their series, and only the series of those who report need to be full. All clusters that
qualify in a round are split, and then the series start anew. Warping adds up absolute differences (see
``numerics.warping``); the library that the released code calls takes the root of the sum of squares.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms import gcfl
from fedjax_pfl.engine.federation import Algorithm, Federation
from fedjax_pfl.numerics import warping_distances


class Series(NamedTuple):
    """The last L norms of each client, oldest first, ``(slots, L)``, and how many there are, ``(slots,)`` int32."""

    norms: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True)
class Options(gcfl.Options):
    """GCFL+ (Xie et al. 2021): clusters of clients, split where the courses of their gradients disagree."""

    series_length: int = 10
    """Rounds L that are compared (10 for several data sets, 5 for one)."""
    series: str = "gradient"
    """What is compared: norms of the last gradient of each round, or of its update."""


def gcfl_plus(fed: Federation, options: Options = Options()) -> Algorithm:
    """GCFL+ in a federation.

    Raises:
        ValueError: an option out of range, no validation data.
    """
    L = options.series_length
    if L < 1:
        raise ValueError(f"gcfl_plus: series_length must be at least 1, found {L}")
    if options.series not in ("gradient", "update"):
        raise ValueError(f"gcfl_plus: series must be gradient or update, found {options.series!r}")

    def init(slots: int) -> Series:
        return Series(jnp.zeros((slots, L), jnp.result_type(float)), jnp.zeros(slots, jnp.int32))

    def record(series: Series, norms: jax.Array, reported: jax.Array) -> Series:
        full = jnp.concatenate([series.norms[:, 1:], norms[:, None]], 1)
        place = jnp.arange(L) == series.length[:, None]
        grown = jnp.where(place, norms[:, None], series.norms)
        new = jnp.where((series.length == L)[:, None], full, grown)
        length = jnp.minimum(series.length + 1, L)
        return Series(jnp.where(reported[:, None], new, series.norms), jnp.where(reported, length, series.length))

    def weigh(series: Series, products: jax.Array, same: jax.Array) -> tuple[jax.Array, jax.Array]:
        reported = jnp.diagonal(same)
        d = warping_distances(jax.lax.stop_gradient(series.norms), series.length, reported)
        return closeness(d, same), jnp.where(reported, series.length == L, True).all()

    def clear(series: Series) -> Series:
        return series._replace(length=jnp.zeros_like(series.length))

    memory = gcfl.Memory(init, record, weigh, clear, gradients=options.series == "gradient")
    return gcfl.clustered(fed, "gcfl_plus", options, memory)


def closeness(d: jax.Array, same: jax.Array) -> jax.Array:
    """The largest distance within a client's cluster minus its own ones: ``d (M, M)``, ``same (M, M)`` bool ->
    ``(M, M)``, of which the pairs in ``same`` (of one cluster) count."""
    own = jnp.where(same, d, 0).max(1)
    largest = jnp.where(same, own, 0).max(1)
    return largest[:, None] - d
