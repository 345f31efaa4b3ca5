"""FedGCF's server: clusters by structure, the clients on the longest shortest paths, and who picks the ratio."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.aggregation import EXACT, safe_divide
from fedjax_pfl.algorithms import _policy
from fedjax_pfl.engine.federation import Env
from fedjax_pfl.numerics import Bandit, discounted_ucb, random_arm, ucb1

RATIOS = (0.1, 0.3, 0.5, 0.7, 0.9)  # arms: the share of the structural model
SIMILARITIES = ("update", "parameters")
DISTANCES = ("minmax", "one_minus_cosine", "euclidean")
POLICIES = "ucb, discounted, fixed:RATIO, random or oracle"


class Policy(NamedTuple):
    """Who picks the ratio: a bandit over the arms RATIOS, or nobody (None), where it is the hyper-parameter ``ratio``.

    measures: what comes of a ratio is measured on validation samples; oracle: all ratios are, to take the best.
    """

    bandit: Bandit | None
    measures: bool = False
    oracle: bool = False
    hyper: Mapping[str, float] = {}


def policy(name: str, c: float, discount: float) -> Policy:
    """The policy of a name; c and discount are those of the bandits.

    Raises:
        ValueError: an unknown policy, a ratio outside 0..1.
    """
    kind, colon, number = name.partition(":")
    if kind == "fixed":
        return Policy(None, hyper={"ratio": _policy.fixed_number("fedgcf", "the ratio", number)})
    makers: dict[str, Callable[[], Bandit]] = {
        "ucb": lambda: ucb1(c), "discounted": lambda: discounted_ucb(c, discount), "random": random_arm,
        "oracle": random_arm,
    }  # fmt: skip
    if colon or kind not in makers:
        raise ValueError(f"fedgcf: policy must be {POLICIES}, found {name!r}")
    return Policy(makers[kind](), measures=kind != "random", oracle=kind == "oracle")


def with_picked_ratio(
    who: Policy, state: Any, env: Env, fused: Callable[[jax.Array], Any], accuracy: Callable[[Any], jax.Array],
    key: jax.Array,
) -> tuple[Any, dict[str, jax.Array]]:  # fmt: skip
    """The state with the ratio that a policy picks, and what it has learned from it.

    state: FedGCF's, of which bandit and accuracy are read; fused: ratio -> state; accuracy: of a state.
    """
    if who.bandit is None:
        return fused(env.hyper["ratio"]), {"ratio": env.hyper["ratio"]}
    ratios = jnp.asarray(RATIOS, state.accuracy.dtype)
    if who.oracle:
        arm = jax.lax.map(lambda ratio: accuracy(fused(ratio)), ratios).argmax()
    else:
        arm = who.bandit.choose(state.bandit, key)
    new, told, gain = fused(ratios[arm]), {"ratio": ratios[arm]}, jnp.zeros_like(state.accuracy)
    if who.measures:
        found = accuracy(new)
        gain = told["reward"] = reward(found, state.accuracy)
        new = new._replace(accuracy=found)
    bandit = who.bandit.update(state.bandit, arm, gain)
    return new._replace(bandit=bandit), told | {f"arm{ratio:g}": bandit.plays[k] for k, ratio in enumerate(RATIOS)}


def cosines(products: jax.Array) -> jax.Array:
    """Cosines ``(M, M)`` from inner products; 0 with a vector of zeros."""
    norms = jnp.sqrt(jnp.maximum(jnp.diagonal(products), 0))
    return jnp.clip(safe_divide(products, norms[:, None] * norms), -1, 1)


def distances(products: jax.Array, kind: str, real: jax.Array, epsilon: float) -> jax.Array:
    """Edges ``(M, M)`` of the clients' graph from the inner products of their models.

    Infinite for a client with itself and with those that are not ``real (M,)``; all others are at least 0.
    minmax: 1 - s + epsilon with the cosines s scaled to 0..1 over all pairs: two edges can then be shorter than one
    (all 1 + epsilon where all cosines are equal).
    one_minus_cosine: 1 - s. euclidean: the distance of the vectors.
    """
    pair = real[:, None] & real & ~np.eye(len(products), dtype=bool)
    products = (products + products.T) / 2  # which a matrix product leaves equal but for rounding
    s = cosines(products)
    if kind == "minmax":
        low, high = jnp.where(pair, s, 1).min(), jnp.where(pair, s, -1).max()
        alike = high - low <= 10 * jnp.finfo(s.dtype).eps  # what rounding left of equal cosines is not to be scaled up
        d = 1 - jnp.where(alike, 0, safe_divide(s - low, high - low)) + epsilon
    elif kind == "one_minus_cosine":
        d = 1 - s
    else:
        squares = jnp.diagonal(products)
        d = jnp.sqrt(jnp.maximum(squares[:, None] + squares - 2 * products, 0))
    return jnp.where(pair, jnp.maximum(d, 0), jnp.inf)


def centred(products: jax.Array, real: jax.Array) -> jax.Array:
    """Inner products of vectors taken from the mean of the real ones: what k-means reads. Only those are read."""
    products = jnp.where(real[:, None] & real, products, 0)
    weights = real / jnp.maximum(real.sum(), 1)
    rows = jnp.matmul(products, weights.astype(products.dtype), precision=EXACT)
    return products - rows[:, None] - rows + weights @ rows


def stored(edges: jax.Array) -> jax.Array:
    """Edges ``(M, M)`` for the state, which holds finite numbers only: -1 for infinite ones."""
    return jnp.where(jnp.isfinite(edges), edges, -1)


def edges(stored: jax.Array) -> jax.Array:
    """Edges ``(M, M)`` from what is stored, infinite where there is none."""
    return jnp.where(stored < 0, jnp.inf, stored)


def shares(groups: jax.Array, n: jax.Array) -> jax.Array:
    """Weights ``(M, M)`` of n-weighted means over those in whose row ``groups (M, M)`` holds; rows of 0 for nobody."""
    weights = jnp.where(groups, n, 0)
    return safe_divide(weights, weights.sum(1, keepdims=True))


def in_order(products: jax.Array, order: jax.Array) -> jax.Array:
    """A matrix over slots as one over clients: rows and columns by number of the client."""
    return products[order][:, order]


def reward(accuracy: jax.Array, before: jax.Array) -> jax.Array:
    """Of a gain in accuracy, in 0..1: 1/2 for none, 0 and 1 from 5 points on; 1/2 where ``before`` is -1 for none."""
    return jnp.where(before < 0, 0.5, jnp.clip(0.5 + (accuracy - before) / 0.1, 0, 1))


def check(options: Any) -> None:
    """Refuse options out of range.

    Raises:
        ValueError: naming the option.
    """
    for option, known in (("similarity", SIMILARITIES), ("distance", DISTANCES)):
        if getattr(options, option) not in known:
            raise ValueError(f"fedgcf: {option} must be one of {', '.join(known)}, found {getattr(options, option)!r}")
    for option in ("clusters", "paths"):
        if getattr(options, option) < 1:
            raise ValueError(f"fedgcf: {option} must be at least 1, found {getattr(options, option)}")
    for option in ("epsilon", "exploration"):
        if not 0 <= getattr(options, option) < math.inf:
            raise ValueError(f"fedgcf: {option} must be finite and not negative, found {getattr(options, option)}")
    if not 0 < options.fading <= 1:
        raise ValueError(f"fedgcf: fading must lie in (0, 1], found {options.fading}")
