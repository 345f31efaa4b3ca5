"""Fixed mixing: every client receives its own body with a fixed weight and the mean of all others with the rest.

The control of methods that learn aggregation weights: whatever they learn has to beat this.

    theta_bar_i = s theta_i + (1 - s) / (M - 1) sum_{j != i} theta_j;  the head phi_i is private, as in FedPer
    client: theta_i, phi_i <- E epochs of SGD from theta_bar_i, phi_i

As in FedAPA's first round every client starts from one initial model; ``personal`` is the client's model after its
last local training. One device or many hold one stack of bodies; no M x M matrix exists.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax

from fedjax_pfl.algorithms._mixing import Row, body_floats, initial_rows, mean_body, newcomer, personal, train_all
from fedjax_pfl.engine import local, tree
from fedjax_pfl.engine.cohort import Cohort
from fedjax_pfl.engine.federation import Algorithm, Env, Federation
from fedjax_pfl.models.model import Variables


class State(NamedTuple):
    """theta, phi, optimizer: bodies, heads and kept optimisers, or None, leaves ``(slots, ...)``; mean: of all bodies
    while it is asked, else None."""

    theta: Variables
    phi: Variables
    optimizer: Any = None
    mean: Variables | None = None


@dataclasses.dataclass(frozen=True)
class Options:
    """Uniform peers and a fixed self weight: the control of methods that learn aggregation weights."""

    self_weight: float = 0.6
    """Weight s of a client's own body; its peers share 1 - s equally."""


def fixed_mixing(fed: Federation, options: Options = Options()) -> Algorithm:
    """Fixed mixing in a federation.

    Raises:
        ValueError: the self weight is outside [0, 1].
    """
    if not 0 <= options.self_weight <= 1:
        raise ValueError(f"fixed_mixing needs a self_weight in [0, 1], found {options.self_weight}")

    def mixed(env: Env, theta: Variables, mean: Variables) -> Variables:
        """theta_bar_i = a theta_i + b mean, of one client or, by broadcasting, of all."""
        clients, s = env.data.num_clients, env.hyper["self_weight"]
        b = (1 - s) * clients / (clients - 1) if clients > 1 else 0.0
        return jax.tree.map(lambda own, m: (1 - b) * own + b * m, theta, mean)

    def init(env: Env, key: jax.Array) -> State:
        return State(*initial_rows(fed, env, key))

    def round_(env: Env, state: State, cohort: Cohort, key: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        theta_bar = mixed(env, state.theta, mean_body(env, state.theta))
        rows = Row(state.theta, state.phi, theta_bar, state.optimizer)
        rows, metrics, reported = train_all(fed, env, cohort, key, rows)
        return State(rows.theta, rows.phi, rows.optimizer), local.information(metrics, reported)

    def serve(env: Env, state: State) -> State:
        return state._replace(mean=mean_body(env, state.theta))

    def received(env: Env, state: State, i: jax.Array) -> Variables:
        average = mean_body(env, state.theta) if state.mean is None else state.mean
        return mixed(env, tree.take(state.theta, i), average) | tree.take(state.phi, i)

    body = body_floats(fed)
    return Algorithm(
        "fixed_mixing", init, round_, received, personal, None, fed.scores,
        rows=("theta", "phi", "optimizer"), floats=(body, body), hyper=fed.hyper(self_weight=options.self_weight),
        serve=serve, newcomer=newcomer, keeps_optimizer=True,
    )  # fmt: skip
