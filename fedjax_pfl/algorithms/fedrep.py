"""FedRep: Exploiting Shared Representations for Personalized Federated Learning.

Collins, Hassani, Mokhtari, Shakkottai; ICML 2021; https://arxiv.org/abs/2102.07078

    server: body theta^0; every client i: head phi_i
    each round t, each client i of the cohort S:
        phi_i   <- tau_h epochs of SGD on the head from phi_i, the body theta^t held fixed
        theta_i <- E epochs of SGD on the body from theta^t, the head phi_i held fixed
    theta^{t+1} = sum_{i in S} n_i theta_i / sum_{i in S} n_i

Differs from the paper: the mean is weighted by n_i, as in FedAvg; all heads start equal (the initial model is the same
for every method of a comparison); the paper takes tau_h = 10 heads' epochs and one of the body. Each phase has its own
draws and a fresh optimiser, which sees the trained part only (so does its weight decay). Running statistics belong to
the body: the head's phase leaves them. ``loss`` is that of the body's phase.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import optax

from fedjax_pfl.aggregation import mean_of_sums
from fedjax_pfl.algorithms._mixing import body_floats, split
from fedjax_pfl.engine import local, tree
from fedjax_pfl.engine.clients import Client, run_clients
from fedjax_pfl.engine.cohort import Cohort
from fedjax_pfl.engine.federation import Algorithm, Env, Federation
from fedjax_pfl.models.model import Predicate, Variables, partition


class State(NamedTuple):
    """theta: the averaged body; phi: the clients' heads and statistics that stay, leaves ``(slots, ...)``."""

    theta: Variables
    phi: Variables


@dataclasses.dataclass(frozen=True)
class Options:
    """FedRep (Collins et al. 2021): first the client's own head is trained, then the averaged body."""

    head_epochs: int = 1
    """Epochs tau_h on the head; the body is trained for the federation's local epochs."""


def fedrep(fed: Federation, options: Options = Options()) -> Algorithm:
    """FedRep in a federation.

    Raises:
        ValueError: fewer than one epoch on the head, or a model whose head is not named.
    """
    if options.head_epochs < 1:
        raise ValueError(f"fedrep needs at least 1 epoch on the head, found {options.head_epochs}")
    if not any(fed.model.head(name) for name in fed.model.shapes()):
        raise ValueError(f"fedrep needs a model with a head: name that of {fed.model.name!r} (head=...)")
    of_head = training_only(fed, fed.model.head)
    of_body = training_only(fed, lambda name: not fed.model.head(name))

    def init(env: Env, key: jax.Array) -> State:
        theta, phi = split(fed, fed.model.init(key))
        return State(theta, fed.initial_rows(env, phi))

    def begin(fed: Federation) -> Any:
        return lambda client, phi, common: local.begin(fed, common[1], common[0] | phi)

    def step(fed: Federation) -> Any:
        return lambda carry, batch, t, key: local.step(fed, carry, batch, key)

    def end_head(client: Client, carry: local.Training, phi: Variables) -> tuple[Variables, None]:
        head, _ = partition(carry.variables, fed.model.head)
        return phi | head, None

    def end_body(client: Client, carry: local.Training, phi: Variables) -> Any:
        theta, phi = split(fed, carry.variables)
        return phi, (tree.scale(client.samples, theta), local.metrics(client, carry))

    def round_(env: Env, state: State, cohort: Cohort, key: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        common: dict[str, Any] = {"common": (state.theta, fed.learning_rate(env, cohort.round)), "data": env.data}
        heads, _, with_head = run_clients(
            begin(of_head), step(of_head), end_head, rows=state.phi, work=fed.work(epochs=options.head_epochs),
            key=jax.random.fold_in(key, HEAD), who=cohort.trains & cohort.reports, **common,
        )  # fmt: skip
        phi, (sums, metrics), reported = run_clients(
            begin(of_body), step(of_body), end_body, rows=heads, work=fed.work(), key=key, who=with_head, **common
        )
        phi = jax.vmap(tree.where)(reported, phi, state.phi)  # a body that failed takes its head's phase back
        theta = mean_of_sums(sums, metrics.weight, otherwise=state.theta)
        return State(theta, phi), local.information(metrics, reported)

    def received(env: Env, state: State, i: jax.Array) -> Variables:
        return state.theta | tree.take(state.phi, i)

    body = body_floats(fed)
    return Algorithm(
        "fedrep", init, round_, received, received, None, fed.scores, rows=("phi",), floats=(body, body),
        hyper=fed.hyper(), newcomer=lambda env, state, fresh: fresh | state.theta,
    )  # fmt: skip


HEAD = 1  # folds the head's phase into the key of the round: its order of samples is not the body's


def training_only(fed: Federation, trained: Predicate) -> Federation:
    """The federation whose optimiser trains the parameters named by ``trained`` and leaves the others as they are."""

    def optimizer(lr: Any) -> optax.GradientTransformation:
        label = lambda parameters: {name: "on" if trained(name) else "off" for name in parameters}  # noqa: E731
        return optax.partition({"on": fed.optimizer(lr), "off": optax.set_to_zero()}, label)

    return fed.replace(optimizer=optimizer)
