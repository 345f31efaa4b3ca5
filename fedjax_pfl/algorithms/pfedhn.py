"""pFedHN: Personalized Federated Learning using Hypernetworks.

Shamsian, Navon, Fetaya, Chechik; ICML 2021; https://arxiv.org/abs/2103.04628

    server: hypernetwork h(.; phi); every client i: embedding v_i (at the server)
    each round, for the clients i of the cohort, one after another:
        theta_i = h(v_i; phi)
        client: theta~_i <- E epochs of minibatch SGD from theta_i
        Delta_i = theta_i - theta~_i                                  (the paper's has the other sign, and ascends)
        (phi, v_i) <- (phi, v_i) - alpha (grad_{phi, v_i} theta_i)^T Delta_i
    alpha step: the gradient is clipped at norm 50, SGD with momentum and weight decay

``private_head`` is pFedHN-PC: the head is not generated and stays at its client. ``personal`` and ``received`` are what
the hypernetwork gives, with a private head where there is one, without local training.

Differs from the paper: a server step is one client's, as there, but a round takes the clients of its cohort in turns,
by number (the paper's round is one client: count its rounds in our turns). ``at_once`` is ours: all clients of a round
from the same phi, which descends the mean of their gradients, one step a round; it trains many clients at a time and
runs on several devices, and needs many more rounds. Embeddings have a velocity of their own, and those of clients that
do not take part do not decay. The output layers start with kernels of zero and the model's own initial values as
biases, so that the first model is that of every other method. Running statistics of normalisation layers stay at their
client under every policy: there is no averaged model that they could belong to. A newcomer is given what the
hypernetwork generates from the mean embedding.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.aggregation import weighted_mean
from fedjax_pfl.algorithms._generator import Generator, descend, pull_back, start
from fedjax_pfl.engine import local, tree
from fedjax_pfl.engine.clients import Client, run_client, run_clients, sample_order
from fedjax_pfl.engine.cohort import Cohort
from fedjax_pfl.engine.federation import Algorithm, Env, Federation
from fedjax_pfl.models.model import Variables, is_trainable, partition

Tree = Any
Info = dict[str, jax.Array]
RATES = (
    "hyper_lr",
    "hyper_momentum",
    "hyper_decay",
    "hyper_clip",
)  # no option may be called like one of the experiment


class State(NamedTuple):
    """phi: ``(parameters, velocity)`` of the hypernetwork. Rows: v, ``(embeddings, velocity)``, ``(slots, E)`` each;
    private, heads and running statistics that stay at their client, or None."""

    phi: tuple[Tree, Tree]
    v: tuple[jax.Array, jax.Array]
    private: Variables | None


@dataclasses.dataclass(frozen=True)
class Options:
    """pFedHN (Shamsian et al. 2021): a hypernetwork at the server generates every client's model."""

    private_head: bool = False
    """pFedHN-PC: heads are not generated but stay at their clients."""
    at_once: bool = False
    """All clients of a round from one hypernetwork and one step for them (ours), instead of one after another."""
    embedding_size: int = 0
    """Size of an embedding; 0 is the paper's 1 + M // 4 for M clients."""
    hyper_width: int = 100
    """Width of the hypernetwork's layers; it has about (width + 1) times the parameters of the model."""
    hyper_lr: float = 0.01
    """Learning rate alpha of hypernetwork and embeddings."""
    hyper_momentum: float = 0.9
    """Momentum of that step."""
    hyper_decay: float = 0.001
    """Weight decay of that step."""
    hyper_clip: float = 50.0
    """Largest norm of the gradient in (phi, v_i)."""

    def check(self) -> None:
        """Refuse what is out of range.

        Raises:
            ValueError: naming the option.
        """
        if self.embedding_size < 0:
            raise ValueError(
                f"pfedhn: embedding_size must be at least 1, or 0 for 1 + M // 4; found {self.embedding_size}"
            )
        if self.hyper_width < 1:
            raise ValueError(f"pfedhn: hyper_width must be at least 1, found {self.hyper_width}")
        for name in ("hyper_lr", "hyper_decay"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"pfedhn: {name} must be finite and not negative, found {getattr(self, name)}")
        if not 0 <= self.hyper_momentum < 1:
            raise ValueError(f"pfedhn: hyper_momentum must be in [0, 1), found {self.hyper_momentum}")
        if not self.hyper_clip > 0:
            raise ValueError(f"pfedhn: hyper_clip must be positive, found {self.hyper_clip}")


def pfedhn(fed: Federation, options: Options = Options()) -> Algorithm:
    """pFedHN in a federation.

    Raises:
        ValueError: an option out of range; clients in turns over several devices; a private head that is not named.
    """
    options.check()
    if fed.mesh is not None and not options.at_once:
        raise ValueError("pfedhn takes clients one after another: run it on one device, or with at_once=True")
    if options.private_head and not any(fed.model.head(name) for name in fed.model.shapes()):
        raise ValueError(f"pfedhn: private_head needs a model with a head: name that of {fed.model.name!r} (head=...)")
    size = options.embedding_size or 1 + fed.data.num_clients // 4

    def stays(name: str) -> bool:
        return fed.stays(name) or not is_trainable(name) or (options.private_head and fed.model.head(name))

    shapes = tuple((name, leaf.shape) for name, leaf in fed.model.shapes().items() if not stays(name))
    generator = Generator(shapes, options.hyper_width)
    generate: Any = generator.apply

    def init(env: Env, key: jax.Array) -> State:
        private, initial = partition(fed.model.init(key), stays)
        v = jax.random.normal(jax.random.fold_in(key, 1), (fed.data.num_clients, size), jnp.result_type(float))
        v = v[jnp.clip(env.data.ids, 0, len(v) - 1)]  # a client's embedding does not depend on where it lives
        phi = start(generator, initial, v[0], jax.random.fold_in(key, 2))
        return State((phi, tree.zeros_like(phi)), (v, jnp.zeros_like(v)), fed.initial_rows(env, private) or None)

    def begin(client: Client, row: Any, lr: jax.Array) -> local.Training:
        theta, private = row
        return local.begin(fed, lr, theta | (private or {}))

    def step(carry: local.Training, batch: Any, t: jax.Array, key: jax.Array) -> local.Training:
        return local.step(fed, carry, batch, key)

    def end(client: Client, carry: local.Training, row: Any) -> Any:
        private, theta = partition(carry.variables, stays)
        return (tree.subtract(row[0], theta), private or None), local.metrics(client, carry)

    def round_in_turns(env: Env, state: State, cohort: Cohort, key: jax.Array) -> tuple[State, Info]:
        work, who, slots = fed.work(), cohort.trains & cohort.reports, env.data.slots
        lr, order = fed.learning_rate(env, cohort.round), sample_order(env.data, work, key)

        def turn(state: State, i: jax.Array) -> tuple[State, tuple[local.Metrics, jax.Array]]:
            phi, velocity = state.phi
            (v, v_velocity), private = tree.take((state.v, state.private), i)
            (delta, private), metrics = run_client(
                begin, step, end, slot=i, row=(generate(phi, v), private), common=lr, data=env.data, work=work,
                key=key, order=order, active=who[i],
            )  # fmt: skip
            gradient = pull_back(generator, phi, v, delta)
            (phi, v), (velocity, v_velocity) = descend(env.hyper, (phi, v), gradient, (velocity, v_velocity))
            good = who[i] & tree.all_finite((phi, velocity, v, v_velocity, private, metrics))
            rows = jax.tree.map(lambda a, new: a.at[i].set(jnp.where(good, new, a[i])), (state.v, state.private),
                                ((v, v_velocity), private))  # fmt: skip
            metrics = tree.where(good, metrics, tree.zeros_like(metrics))
            return State(tree.where(good, (phi, velocity), state.phi), *rows), (metrics, good)

        queue = jnp.argsort(~who, stable=True)[: min(work.most or slots, slots)]
        state, (metrics, good) = jax.lax.scan(turn, state, queue)
        reported = jnp.zeros(slots, bool).at[queue].set(good)
        return state, local.information(jax.tree.map(lambda a: a.sum(0), metrics), reported)

    def round_at_once(env: Env, state: State, cohort: Cohort, key: jax.Array) -> tuple[State, Info]:
        (phi, velocity), (v, v_velocity) = state.phi, state.v
        (delta, private), metrics, reported = run_clients(
            begin, step, end, rows=(jax.vmap(generate, (None, 0))(phi, v), state.private),
            common=fed.learning_rate(env, cohort.round), data=env.data, work=fed.work(), key=key,
            who=cohort.trains & cohort.reports,
        )  # fmt: skip
        delta = jax.vmap(tree.where, (0, 0, None))(reported, delta, tree.zeros_like(tree.take(delta, 0)))
        by_phi, by_v = pull_back(generator, phi, v, delta)
        by_phi = tree.scale(1 / jnp.maximum(reported.sum(), 1), by_phi)
        new_phi = descend(env.hyper, phi, by_phi, velocity)
        new_v = jax.vmap(descend, (None, 0, 0, 0))(env.hyper, v, by_v, v_velocity)
        reported &= tree.all_finite((new_phi, new_v))
        phi_and_velocity = tree.where(reported.any(), new_phi, state.phi)
        new_v, private = jax.vmap(tree.where)(reported, (new_v, private), (state.v, state.private))
        return State(phi_and_velocity, new_v, private), local.information(metrics, reported)

    def received(env: Env, state: State, i: jax.Array) -> Variables:
        private = tree.take(state.private or {}, i)
        return generate(state.phi[0], state.v[0][i]) | private

    def newcomer(env: Env, state: State, fresh: Variables) -> Variables:
        mean = weighted_mean(state.v[0], env.data.real.astype(state.v[0].dtype))
        return fresh | generate(state.phi[0], mean)

    sent = fed.model.count(lambda name: not stays(name))
    return Algorithm(
        "pfedhn", init, round_at_once if options.at_once else round_in_turns, received, received, None, fed.scores,
        rows=("v", "private"), floats=(sent, sent),
        hyper=fed.hyper(**{name: getattr(options, name) for name in RATES}),
        artifacts=lambda env, state: {"embedding": state.v[0]}, newcomer=newcomer,
    )  # fmt: skip
