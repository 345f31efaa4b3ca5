"""FedAPA: Server-side Gradient-Based Adaptive Personalized Aggregation for Federated Learning on Heterogeneous Data.

Sun, Sun, Pan, Fu, Guo; IJCAI 2025; https://arxiv.org/abs/2502.07456

    server: bodies theta_j and a row A_i of weights for each client; a_ii = 1, a_ij = 0
    each round: for every client i of the cohort
        theta_bar_i = sum_j a_ij theta_j                                     (Eq 5)
        client: theta_i, phi_i <- E epochs of SGD from theta_bar_i, phi_i     (Eq 4)
        Delta_i = theta_i - theta_bar_i                                      (Eq 6)
        A_i <- A_i - eta (grad_{A_i} theta_bar_i)^T Delta_i                  (Eq 7)
        clip a_ij to [0, 1];  a_ii <- 0.5;  A_i <- A_i / sum_j a_ij

The gradient is the pull-back of Delta through the aggregation function itself (``jax.vjp``), over all shared
parameters; running statistics are mixed but have no part in it.

Three variants, and where they differ from the paper and from the released code:
- ``descent`` (default): Eq 7 with the sign that lowers the proxy loss 1/2 ||Delta_i||^2. With theta_i held fixed its
  gradient in a_ij is -<theta_j, Delta_i>, so Eq 7 as printed climbs it. All clients see the bodies of the last round.
- ``printed``: Eq 7 to the letter.
- ``released``: as the published code runs. Clients take turns and see the bodies that earlier ones just returned; a
  row is normalised at the start of its client's turn, and clipped (self weight 1) at the end; the server's SGD has
  momentum 0.9 over the whole matrix, so that rows of absent clients move on; the clients' optimiser state lives on
  over rounds. The code also uses client momentum 0.9 and cohorts uniform in 0.6 M .. M: these are options of the run.
  Our reading where the code's order matters: turns go by client number, the gradient is taken at the normalised row,
  and only the row of the client is clipped.

Ours, not the paper's: ``centring="row"`` subtracts the mean over j of a row's gradient (Theta^T Delta is dominated by
a part that all j share); ``centring="cosine"`` uses cos(theta_j - theta_bar_i, Delta_i), free of the model's size
(it has no derivative in the bodies where they coincide, as they do before the first round).
``floor`` lets a weight that was clipped return. ``received`` is theta_bar_i with the client's head, the box's output;
``personal`` is the client's model after its last local training, which the published code measures.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

import jax
import jax.numpy as jnp

from fedjax_pfl.aggregation import EXACT, gram, mix
from fedjax_pfl.algorithms._mixing import (
    Row,
    body_floats,
    initial_rows,
    mean_body,
    newcomer,
    personal,
    train_all,
    train_one,
    weight_diagnostics,
)  # fmt: skip
from fedjax_pfl.engine import local, tree
from fedjax_pfl.engine.cohort import Cohort
from fedjax_pfl.engine.federation import Algorithm, Env, Federation
from fedjax_pfl.models.model import Variables, is_trainable, partition

Info = dict[str, jax.Array]
MOMENTUM = 0.9  # of the released server


class State(NamedTuple):
    """Every field has one row a client.

    theta, phi: bodies and heads, leaves ``(slots, ...)``; A: aggregation weights ``(slots, slots)``; sent: theta_bar
    while ``received`` is being asked, else None; velocity: server momentum ``(slots, slots)`` (``released`` only, else
    None); optimizer: the clients' optimisers where they are kept (always by ``released``), else None.
    """

    theta: Variables
    phi: Variables
    A: jax.Array
    sent: Variables | None = None
    velocity: jax.Array | None = None
    optimizer: Any = None


@dataclasses.dataclass(frozen=True)
class Options:
    """FedAPA (Sun et al. 2025): the server learns each client's aggregation weights from its parameter delta."""

    variant: Literal["descent", "printed", "released"] = "descent"
    """descent: the sign that lowers the proxy loss; printed: Eq 7 to the letter; released: as the published code."""
    eta: float = 0.01
    """Server learning rate eta of the aggregation weights A."""
    centring: Literal["none", "row", "cosine"] = "none"
    """Of the gradient (our extension, descent only): none; row: minus its mean over peers; cosine: scale-free."""
    self_weight: float = 0.5
    """Self weight a_ii that is set before each normalisation (descent only; released: 1)."""
    floor: float = 0.0
    """Lower bound of the other weights before normalisation (our extension, descent only)."""

    def check(self) -> None:
        """Refuse what is out of range and combinations that are none of the variants.

        Raises:
            ValueError: naming the option.
        """
        for name in ("variant", "centring"):
            allowed = get_args(get_type_hints(Options)[name])
            if getattr(self, name) not in allowed:
                raise ValueError(f"fedapa: {name} must be one of {', '.join(allowed)}; found {getattr(self, name)!r}")
        if not 0 <= self.eta < float("inf"):
            raise ValueError(f"fedapa: eta must be finite and not negative, found {self.eta}")
        if not 0 < self.self_weight <= 1 or not 0 <= self.floor < 1:
            raise ValueError("fedapa: self_weight must be in (0, 1] and floor in [0, 1)")
        for field in ("centring", "self_weight", "floor"):
            changed = getattr(self, field) != Options.__dataclass_fields__[field].default
            if self.variant != "descent" and changed:
                raise ValueError(f"fedapa: {field} belongs to variant 'descent'; {self.variant!r} fixes it")


def fedapa(fed: Federation, options: Options = Options()) -> Algorithm:
    """FedAPA in a federation.

    Raises:
        ValueError: an option out of range or of another variant; ``released`` over several devices.
    """
    options.check()
    released = options.variant == "released"
    if released and fed.mesh is not None:
        raise ValueError("fedapa: variant 'released' takes clients one after another: run it on one device")
    fed = fed.replace(keep_optimizer=released or fed.keep_optimizer)
    sign = -1.0 if options.variant == "printed" else 1.0

    def init(env: Env, key: jax.Array) -> State:
        theta, phi, optimizer = initial_rows(fed, env, key)
        A = jnp.eye(env.data.slots, dtype=jnp.result_type(float))
        return State(theta, phi, A, None, jnp.zeros_like(A) if released else None, optimizer)

    def round_(env: Env, state: State, cohort: Cohort, key: jax.Array) -> tuple[State, Info]:
        theta_bar = mix(state.A, state.theta, fed.mesh)  # Eq 5
        rows = Row(state.theta, state.phi, theta_bar, state.optimizer)
        rows, metrics, reported = train_all(fed, env, cohort, key, rows)  # Eq 4
        delta = rows.change  # Eq 6
        gradient = weight_gradient(env, options.centring, state.A, state.theta, delta, fed.mesh)
        learns = reported & jnp.isfinite(gradient).all(1)  # a row whose gradient overflows stays
        A = jnp.where(learns[:, None], learned(env, state.A, sign * gradient), state.A)
        info = local.information(metrics, reported) | weight_diagnostics(env, A)
        return State(rows.theta, rows.phi, A, optimizer=rows.optimizer), info

    def round_released(env: Env, state: State, cohort: Cohort, key: jax.Array) -> tuple[State, Info]:
        train = train_one(fed, env, cohort, key)
        who = cohort.trains & cohort.reports

        def turn(state: State, i: jax.Array) -> tuple[State, tuple[local.Metrics, jax.Array]]:
            A_i = normalised(state.A[i])
            theta_bar, pull = jax.vjp(lambda a: tree.take(mix(a[None], state.theta), 0), A_i)  # Eq 5
            theta, phi, optimizer = tree.take((state.theta, state.phi, state.optimizer), i)
            row, metrics = train(i, Row(theta, phi, theta_bar, optimizer), who[i])  # Eq 4
            sent_minus_returned = tree.scale(-1.0, row.change)  # minus Eq 6: the step below is a descent
            (g,) = pull(_parameters(sent_minus_returned))
            velocity = tree.scale(MOMENTUM, state.velocity).at[i].add(g)
            A = state.A.at[i].set(A_i) - env.hyper["eta"] * velocity  # Eq 7, with momentum over all rows
            A = A.at[i].set(jnp.clip(A[i], 0.0, 1.0).at[i].set(1.0))
            good = who[i] & tree.all_finite((row, velocity))
            mine = tree.where(good, (row.theta, row.phi, row.optimizer), (theta, phi, optimizer))
            old = (state.theta, state.phi, state.optimizer)
            rows = jax.tree.map(lambda all_, new: all_.at[i].set(new), old, mine)  # one row, not a pass over all
            A, velocity = tree.where(good, (A, velocity), (state.A, state.velocity))
            metrics = tree.where(good, metrics, tree.zeros_like(metrics))
            return State(rows[0], rows[1], A, None, velocity, rows[2]), (metrics, good)

        state, (metrics, reported) = jax.lax.scan(turn, state, jnp.arange(env.data.slots))
        info = local.information(jax.tree.map(lambda a: a.sum(0), metrics), reported)
        return state, info | weight_diagnostics(env, normalised(state.A))

    def served_weights(state: State) -> jax.Array:
        return normalised(state.A) if released else state.A

    def serve(env: Env, state: State) -> State:
        return state._replace(sent=mix(served_weights(state), state.theta, fed.mesh))

    def received(env: Env, state: State, i: jax.Array) -> Variables:
        state = state if state.sent else serve(env, state)
        return tree.take(state.sent, i) | tree.take(state.phi, i)

    body = body_floats(fed)
    hyper = fed.hyper(eta=options.eta, self_weight=options.self_weight, floor=options.floor)
    return Algorithm(
        "fedapa", init, round_released if released else round_, received, personal, None, fed.scores,
        rows=State._fields, floats=(body, body), hyper=hyper, serve=serve,
        artifacts=lambda env, state: {"aggregation_weights": served_weights(state)}, newcomer=newcomer,
        keeps_optimizer=True,
    )  # fmt: skip


def learned(env: Env, A: jax.Array, ascent: jax.Array) -> jax.Array:
    """A step of eta along ``ascent`` (Eq 7), then clip, self weight and normalisation of all rows."""
    A = jnp.clip(A + env.hyper["eta"] * ascent, env.hyper["floor"], 1.0)
    A = jnp.where(env.data.real, A, 0)
    A = jnp.where(jnp.eye(len(A), dtype=bool), env.hyper["self_weight"], A)
    return normalised(A)


def normalised(A: jax.Array) -> jax.Array:
    """Rows divided by their sum; a row of zeros stays."""
    total = A.sum(-1, keepdims=True)
    return A / jnp.where(total == 0, 1, total)


def _parameters(theta: Variables) -> Variables:
    """A cotangent that is zero on running statistics: they have no part in the gradient."""
    return {name: leaf if is_trainable(name) else jnp.zeros_like(leaf) for name, leaf in theta.items()}


def weight_gradient(
    env: Env, centring: str, A: jax.Array, theta: Variables, delta: Variables, mesh: Any = None
) -> jax.Array:
    """``(grad_A theta_bar)^T Delta``, the pull-back of Delta through the aggregation, ``(slots, slots)``.

    With centring, bodies are taken relative to their mean, which is the same as subtracting from every row of the
    gradient its mean; ``cosine`` then divides <theta_j - theta_bar_i, Delta_i> by both norms.
    """
    theta, delta = partition(theta, is_trainable)[0], partition(delta, is_trainable)[0]
    if centring != "none":
        theta = tree.subtract(theta, mean_body(env, theta))
    gradient = jax.vjp(lambda A: mix(A, theta, mesh), A)[1](delta)[0]
    if centring != "cosine":
        return gradient
    G = gram(theta, theta, mesh)
    AG = jnp.matmul(A, G, precision=EXACT)
    squared = jnp.diagonal(G)[None, :] - 2 * AG + (AG * A).sum(1)[:, None]  # ||theta_j - theta_bar_i||^2
    distance = jnp.sqrt(jnp.maximum(squared, 0) + 1e-24)
    change = sum((leaf**2).reshape(len(leaf), -1).sum(1) for leaf in delta.values())  # ||Delta_i||^2
    cosine = (gradient - (A * gradient).sum(1, keepdims=True)) / distance / jnp.sqrt(change + 1e-24)[:, None]
    return jnp.clip(cosine, -1, 1)
