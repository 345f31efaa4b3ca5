"""FedHR: personalized federated learning by hypernetwork modulation and reinforcement learning.

Journal of Electronics and Information Technology, 2026; https://doi.org/10.11999/JEIT260222 (the abstract is public)

    server: global model W_g (body and head), hypernetwork h(.; phi), client embeddings v_i, agent mu(.)
    each round t, every client i of the cohort S:
        gamma_i, beta_i = h(v_i; phi)                                scale and shift of the head
        s_i = (KL(local || global), ||w_i - W_g||, cosine distance, local accuracy, t / T)
        alpha_i = mu(s_i) in [0, 1]                                  strength of the modulation
        W_i = W_g with head  W (1 + alpha_i gamma_i) + alpha_i beta_i
        w_i <- E epochs of minibatch SGD from W_i
        r_i = accuracy(w_i) - accuracy(W_i) - penalty ||w_i - W_g|| / ||W_g||
    W_g <- sum_{i in S} n_i w_i / sum_{i in S} n_i
    (phi, v_i) descend the pull-back of (W_i - w_i) through the head of W_i
    mu learns by DDPG from (s_i, alpha_i, r_i, s_i')

Ours, where the abstract is silent: the form of the modulation, its bound and its zero start; embeddings from label
proportions (which the server then sees); the update of phi and v with alpha held fixed; KL, accuracies and rewards on
validation samples; one agent for all clients; s_i' is the client's state when it next takes part. ``personal`` is the
model after local training, ``received`` the modulated one, ``shared`` has alpha = 0. Under ``fixed:0`` the global model
takes FedAvg's way, draw by draw. For alpha there are controls: ``fixed:ALPHA``, ``random``, and ``greedy-validation``,
the alpha of a grid with the least validation loss of W_i.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_pfl.aggregation import mean_of_sums
from fedjax_pfl.algorithms import _strength
from fedjax_pfl.engine import local, tree
from fedjax_pfl.engine.clients import Client, run_clients
from fedjax_pfl.engine.cohort import Cohort
from fedjax_pfl.engine.federation import Algorithm, Env, Federation
from fedjax_pfl.models.actor_critic import AgentState
from fedjax_pfl.models.hypernetwork import Modulator, embed_histogram, modulate, modulation_gradient
from fedjax_pfl.models.model import Variables, partition

Tree = Any


class State(NamedTuple):
    """shared: W_g. phi: the hypernetwork and its optimiser. agent: see ``Agent``; None without one. progress: of the
    last round. Rows: theta, each client's last trained model; v, embeddings and their optimisers; alpha; pending, what
    waits for the client's next state."""

    shared: Variables
    phi: tuple[Tree, Tree]
    agent: AgentState | None
    progress: jax.Array
    theta: Variables
    v: tuple[jax.Array, Tree]
    alpha: jax.Array
    pending: _strength.Pending | None


class Carry(NamedTuple):
    """A client at work: its training, the head of W_g and the one that was sent, and what the update of v needs."""

    training: local.Training
    head: Variables
    sent: Variables
    phi: Tree
    hyper_lr: jax.Array


@dataclasses.dataclass(frozen=True)
class Options:
    """FedHR (JEIT 2026): a hypernetwork modulates each client's head, a DDPG agent picks how strongly."""

    policy: str = "ddpg"
    """Who picks alpha: ddpg, fixed:ALPHA, random, or greedy-validation."""
    gain: str = "received"
    """What the reward's accuracy is compared with: received (the modulated model), shared (alpha = 0), or nothing."""
    penalty: float = 0.1
    """Weight of the deviation from the global model in the reward."""
    embedding_size: int = 32
    """Size of a client's embedding."""
    bound: float = 0.5
    """Largest scale and shift."""
    hyper_lr: float = 0.01
    """Learning rate of hypernetwork and embeddings (SGD with momentum 0.9, gradients clipped at norm 50)."""
    discount: float = 0.5
    """Of the agent's later rewards."""
    sigma: float = 0.2
    """Exploration noise, in half ranges of alpha."""
    warm_up: int = 64
    """Transitions with uniform alpha, before the agent learns."""
    agent_steps: int = 32
    """Updates of the agent in a round."""
    reward_scale: float = 10.0
    """Factor on rewards for the agent."""


def fedhr(fed: Federation, options: Options = Options()) -> Algorithm:
    """FedHR in a federation.

    Raises:
        ValueError: an unknown policy or gain, a value out of range, a head that is not one dense layer with a bias, no
            validation data for a policy that reads it.
    """
    shapes = fed.model.shapes()
    kernel = _strength.head_kernel(fed, shapes)
    modulator = Modulator(kernel.shape[0], kernel.shape[1], embedding=options.embedding_size, bound=options.bound)
    strength = _strength.make(fed, options)
    trained = optax.chain(optax.clip_by_global_norm(50.0), optax.sgd(1.0, 0.9))  # times hyper_lr, which is traced

    def descend(rate: jax.Array, parameters: Tree, gradient: Tree, optimizer: Tree) -> tuple[Tree, Tree]:
        updates, optimizer = trained.update(gradient, optimizer)
        return tree.add(parameters, tree.scale(rate, updates)), optimizer

    def init(env: Env, key: jax.Array) -> State:
        shared, slots = fed.model.init(key), env.data.slots
        v = embed_histogram(env.data.label_histogram(), options.embedding_size, jax.random.key(0))
        phi = modulator.init(jax.random.fold_in(key, 1), v[0])
        agent, pending = strength.init(jax.random.fold_in(key, 2), slots)
        zero = jnp.zeros((), jnp.result_type(float))
        return State(
            shared, (phi, trained.init(phi)), agent, zero, tree.broadcast(shared, slots),
            (v, jax.vmap(trained.init)(v)), jnp.zeros(slots, zero.dtype), pending,
        )  # fmt: skip

    def personalised(shared: Variables, phi: Tree, theta: Variables, v: jax.Array, alpha: jax.Array) -> Variables:
        """W_i: the global model with what stays at the client and the modulated head."""
        head, _ = partition(shared, fed.model.head)
        stays, _ = partition(theta, fed.stays)
        return shared | stays | modulate(head, modulator.apply(phi, v), alpha)  # type: ignore[arg-type]

    def received(env: Env, state: State, i: jax.Array) -> Variables:
        theta, v, alpha = tree.take((state.theta, state.v[0], state.alpha), i)
        return personalised(state.shared, state.phi[0], theta, v, alpha)

    def begin(client: Client, row: Any, common: Any) -> Carry:
        (shared, phi, lr, hyper_lr), (theta, (v, _), alpha) = common, row
        sent = personalised(shared, phi, theta, v, alpha)
        head, new = (partition(variables, fed.model.head)[0] for variables in (shared, sent))
        return Carry(local.begin(fed, lr, sent), head, new, phi, hyper_lr)

    def step(carry: Carry, batch: Any, t: jax.Array, key: jax.Array) -> Carry:
        return carry._replace(training=local.step(fed, carry.training, batch, key))

    def end(client: Client, carry: Carry, row: Any) -> Any:
        theta, (_, (v, optimizer), alpha) = carry.training.variables, row
        change = {name: leaf - theta[name] for name, leaf in carry.sent.items()}
        by_phi, by_v = modulation_gradient(modulator, carry.phi, v, carry.head, alpha, change)
        v = descend(carry.hyper_lr, v, by_v, optimizer)
        return (theta, v, alpha), (tree.scale(client.samples, theta), local.metrics(client, carry.training), by_phi)

    def round_(env: Env, state: State, cohort: Cohort, key: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        who, before = cohort.trains & cohort.reports, state
        state = state._replace(progress=cohort.progress.astype(state.progress.dtype))
        state = strength.choose(env, state, received, who, key)
        phi, phi_optimizer = state.phi
        common = (state.shared, phi, fed.learning_rate(env, cohort.round), env.hyper["hyper_lr"])
        rows, (sums, metrics, by_phi), reported = run_clients(
            begin, step, end, rows=(state.theta, state.v, state.alpha), common=common, data=env.data, work=fed.work(),
            key=key, who=who,
        )  # fmt: skip
        theta, v, alpha = rows
        count = jnp.maximum(reported.sum(), 1)
        moved = descend(env.hyper["hyper_lr"], phi, tree.scale(1 / count, by_phi), phi_optimizer)
        state, told = strength.learn(env, state, received, theta, who, reported, key)
        shared = mean_of_sums(sums, metrics.weight, otherwise=state.shared)
        spread = _strength.spread(alpha, reported)
        new = state._replace(shared=shared, phi=moved, theta=theta, v=v)
        return tree.where(reported.any(), new, before), local.information(metrics, reported) | spread | told

    def serve(env: Env, state: State) -> State:
        return strength.serve(env, state, received)

    def personal(env: Env, state: State, i: jax.Array) -> Variables:
        return tree.take(state.theta, i)

    def shared(env: Env, state: State) -> Variables:
        return state.shared

    sent = fed.model.count(lambda name: not fed.stays(name))
    up, down = strength.floats
    return Algorithm(
        "fedhr", init, round_, received, personal, None if fed.statistics != "average" else shared, fed.scores,
        rows=_strength.ROW_FIELDS, floats=(sent + up, sent + down + modulator.floats),
        hyper=fed.hyper(hyper_lr=options.hyper_lr, penalty=options.penalty, **strength.hyper), serve=serve,
        artifacts=lambda env, state: {"alpha": serve(env, state).alpha, "embedding": state.v[0]},
        newcomer=lambda env, state, fresh: fresh | state.shared,
    )  # fmt: skip
