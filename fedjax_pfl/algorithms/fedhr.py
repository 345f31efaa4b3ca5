"""FedHR: personalized federated learning by hypernetwork modulation and reinforcement learning.

Journal of Electronics and Information Technology, 2026; https://doi.org/10.11999/JEIT260222 (the abstract is public)

    server: global model W_g (body and head), hypernetwork h(.; phi), client embeddings v_i, agent mu(.)
    each round t, every client i of the cohort S:
        gamma_i, beta_i = h(v_i; phi)                                scale and shift of the head
        s_i = (KL(local || global), ||w_i - W_g||, cosine distance, local accuracy, t / T)
        alpha_i = mu(s_i) in [0, 1]                                  strength of the modulation
        W_i = W_g with head  W (1 + alpha_i gamma_i) + alpha_i beta_i
        w_i <- E epochs of minibatch SGD from W_i
        r_i = accuracy(W_i) - accuracy(W_g) - penalty ||w_i - W_g|| / ||W_g||
    W_g <- sum_{i in S} n_i w_i / sum_{i in S} n_i
    (phi, v_i) descend the pull-back of (W_i - w_i) through the head of W_i
    mu learns by DDPG from (s_i, alpha_i, r_i, s_i')

Ours, where the abstract is silent: the form of the modulation, its bound and its zero start; embeddings from label
proportions (which the server then sees); the update of phi and v with alpha held fixed; KL, accuracies and rewards on
validation samples; one agent for all clients; s_i' is the client's state when it next takes part. ``personal`` is the
model after local training, ``received`` the modulated one, ``shared`` has alpha = 0. The reward's gain is that of the
start W_i over the global model; after training, ``received`` and others compare w_i, but there a worse start gains more
and the agent turns the modulation off. Under ``fixed:0`` the global model
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
from fedjax_pfl.algorithms._distillation import clipped
from fedjax_pfl.engine import local, tree
from fedjax_pfl.engine.clients import Client, run_clients
from fedjax_pfl.engine.cohort import Cohort
from fedjax_pfl.engine.federation import Algorithm, Env, Federation
from fedjax_pfl.models.actor_critic import AgentState
from fedjax_pfl.models.hypernetwork import Modulator, embed_histogram, modulate, modulation_gradient, personal_heads
from fedjax_pfl.models.model import Variables, partition

Tree = Any


class State(NamedTuple):
    """shared: W_g. phi: the hypernetwork and its optimiser. agent: see ``Agent``; None without one. progress: of the
    last round. Rows: theta, each client's last trained model; v, embeddings and their optimisers; alpha; pending, what
    waits for the client's next state; heads, the modulated ones while ``received`` is being asked, else None."""

    shared: Variables
    phi: tuple[Tree, Tree]
    agent: AgentState | None
    progress: jax.Array
    theta: Variables
    v: tuple[jax.Array, Tree]
    alpha: jax.Array
    pending: _strength.Pending | None
    heads: Variables | None = None


class Row(NamedTuple):
    """What a client works with: its last model, and the head that it is sent."""

    theta: Variables
    head: Variables


@dataclasses.dataclass(frozen=True)
class Options:
    """FedHR (JEIT 2026): a hypernetwork modulates each client's head, a DDPG agent picks how strongly."""

    policy: str = "ddpg"
    """Who picks alpha: ddpg, fixed:ALPHA, random, or greedy-validation."""
    gain: str = "start"
    """The reward's gain in accuracy. start: of the received model over the shared one (alpha = 0); of the trained model
    over the received one (received), the shared one (shared), or nothing."""
    gain_metric: str = "accuracy"
    """What gains are measured by: accuracy or loss (less of it is better)."""
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
    trained = optax.sgd(1.0, 0.9)  # times hyper_lr, which is traced

    def descend(rate: jax.Array, parameters: Tree, gradient: Tree, optimizer: Tree) -> tuple[Tree, Tree]:
        updates, optimizer = trained.update(clipped(gradient, 50.0), optimizer)
        return tree.add(parameters, tree.scale(rate, updates)), optimizer

    def init(env: Env, key: jax.Array) -> State:
        shared, slots = fed.model.init(key), env.data.slots
        v = embed_histogram(env.data.label_histogram(), options.embedding_size, jax.random.key(0))
        phi = modulator.init(jax.random.fold_in(key, 1), v[0])
        agent, pending = strength.init(jax.random.fold_in(key, 2), slots)
        zero = jnp.zeros((), jnp.result_type(float))
        return State(
            shared, (phi, trained.init(phi)), agent, zero, fed.initial_rows(env, shared),
            (v, jax.vmap(trained.init)(v)), jnp.zeros(slots, zero.dtype), pending,
        )  # fmt: skip

    def global_head(state: State) -> Variables:
        return partition(state.shared, fed.model.head)[0]

    def heads_of(state: State) -> Variables:
        return personal_heads(modulator, state.phi[0], state.v[0], global_head(state), state.alpha)

    def merged(shared: Variables, row: Row) -> Variables:
        """W_i: the global model with what stays at the client and the modulated head."""
        return shared | partition(row.theta, fed.stays)[0] | row.head

    def received(env: Env, state: State, i: jax.Array) -> Variables:
        theta, v, alpha = tree.take((state.theta, state.v[0], state.alpha), i)
        if state.heads:
            return merged(state.shared, Row(theta, tree.take(state.heads, i)))
        modulation: Any = modulator.apply(state.phi[0], v)
        return merged(state.shared, Row(theta, modulate(global_head(state), modulation, alpha)))

    def begin(client: Client, row: Row, common: Any) -> local.Training:
        shared, lr = common
        return local.begin(fed, lr, merged(shared, row))

    def step(carry: local.Training, batch: Any, t: jax.Array, key: jax.Array) -> local.Training:
        return local.step(fed, carry, batch, key)

    def end(client: Client, carry: local.Training, row: Row) -> Any:
        theta = carry.variables
        return row._replace(theta=theta), (tree.scale(client.samples, theta), local.metrics(client, carry))

    def descended(env: Env, state: State, heads: Variables, theta: Variables, reported: jax.Array) -> State:
        """A step of (phi, v_i) along the pull-back of what was sent minus what came back; of phi, the clients' mean."""
        change = tree.subtract(heads, {name: theta[name] for name in heads})
        change = jax.vmap(tree.where)(reported, change, tree.zeros_like(change))
        (phi, phi_optimizer), (v, v_optimizer) = state.phi, state.v
        by_phi, by_v = modulation_gradient(modulator, phi, v, global_head(state), state.alpha, change)
        by_phi = tree.scale(1 / jnp.maximum(reported.sum(), 1), by_phi)
        rate = env.hyper["hyper_lr"]
        new = jax.vmap(descend, (None, 0, 0, 0))(rate, v, by_v, v_optimizer)
        return state._replace(
            phi=descend(rate, phi, by_phi, phi_optimizer), v=jax.vmap(tree.where)(reported, new, (v, v_optimizer))
        )

    def round_(env: Env, state: State, cohort: Cohort, key: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        who, before = cohort.trains & cohort.reports, state
        state = state._replace(progress=cohort.progress.astype(state.progress.dtype))
        state = strength.choose(env, state, received, who, key)
        rows, (sums, metrics), reported = run_clients(
            begin, step, end, rows=Row(state.theta, heads_of(state)), data=env.data, work=fed.work(), key=key,
            common=(state.shared, fed.learning_rate(env, cohort.round)), who=who,
        )  # fmt: skip
        diagnostics = _strength.spread(state.alpha, global_head(state), rows.head, reported)
        state, told = strength.learn(env, state._replace(heads=rows.head), received, rows.theta, who, reported, key)
        state = descended(env, state, rows.head, rows.theta, reported)
        shared = mean_of_sums(sums, metrics.weight, otherwise=state.shared)
        new = state._replace(shared=shared, theta=rows.theta, heads=None)
        return tree.where(reported.any(), new, before), local.information(metrics, reported) | diagnostics | told

    def serve(env: Env, state: State) -> State:
        state = strength.serve(env, state, received)
        return state._replace(heads=heads_of(state))

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
        newcomer=lambda env, state, fresh: fresh | partition(state.shared, fed.stays)[1],
    )  # fmt: skip
