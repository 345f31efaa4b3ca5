"""FedGCF: Enhancing Federated Graph Learning via Adaptive Fusion of Structural and Node Characteristics.

Gao, Liu, Xu, Wang, Huang; 2024; https://arxiv.org/abs/2412.18845

    every client i: a model omega_t on its raw graphs and omega_s on structural encodings, with cores of one shape
    each round, every client i of the cohort:
        the cores of omega_t,i and omega_s,i <- the core that i received;  E epochs of minibatch descent on both
    server: C_1..C_K <- k-means of the structural models;  omega_S,k <- sum_{C_k} n_i omega_s,i / sum_{C_k} n_i   (Eq 4)
        d_ij <- distance of omega_t,i and omega_t,j;  all shortest paths;  P_C <- the clients on the P longest of them
        omega_N <- sum_{P_C} n_i omega_t,i / sum_{P_C} n_i
        a bandit picks the ratio;  i in C_k receives  ratio omega_S,k + (1 - ratio) omega_N

``personal`` is omega_t,i after training, ``received`` the fused core with the client's input and readout. Ratio 1 is
structure alone, ratio 0 nodes alone.

Ours, where the public text is silent: models are compared by their cores relative to the core that they started from
(``similarity``); distances are 1 - s + epsilon with the cosines s scaled to 0..1, since by a metric distance the
longest shortest path is one edge (``distance``); the arms are five ratios, and their reward clip(1/2 + gain / 0.1, 0,
1), where gain is that of the mean validation accuracy of the models that clients receive next over that of the round
before, and 1/2 in the first round; ``oracle`` tries all arms on validation samples. Clusters, paths and arms are
choices: no gradient flows through them. Clients that do not report keep the core that they have.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.aggregation import gram, mix, safe_divide, weighted_mean
from fedjax_pfl.algorithms import _fusion
from fedjax_pfl.engine import local, random, tree
from fedjax_pfl.engine.clients import Client, run_clients
from fedjax_pfl.engine.cohort import Cohort
from fedjax_pfl.engine.federation import Algorithm, Env, Federation
from fedjax_pfl.evaluation import measured_scores
from fedjax_pfl.models.graph_family import is_core
from fedjax_pfl.models.model import Variables, partition
from fedjax_pfl.numerics import BanditState, kmeans_gram, on_longest_paths

ROW_FIELDS = ("core", "node", "structure", "cluster", "distance", "optimizers")


class State(NamedTuple):
    """bandit: of the ratio, or None where it is fixed. accuracy: mean validation accuracy of the received models, -1
    before it is measured. paths: ends of the longest paths ``(P, 2)`` int32, numbers of clients, -1 for none. Rows:
    core, what each client receives; node, omega_t; structure, the private part of omega_s; of the last round in which
    anybody reported: cluster ``(slots,)`` int32, -1 for who did not; distance ``(slots, slots)``, -1 where one of the
    two did not, and with itself; optimizers, of omega_t and omega_s, both None where they start anew every round."""

    bandit: BanditState | None
    accuracy: jax.Array
    paths: jax.Array
    core: Variables
    node: Variables
    structure: Variables
    cluster: jax.Array
    distance: jax.Array
    optimizers: tuple[Any, Any] = (None, None)


@dataclasses.dataclass(frozen=True)
class Options:
    """FedGCF (Gao et al. 2024): fused structural and node models of graphs, with a bandit for their ratio."""

    clusters: int = 3
    """Clusters K of clients by their structural models."""
    paths: int = 1
    """Longest shortest paths P between clients by their node models."""
    similarity: str = "update"
    """What is compared: update (relative to the core that was received) or parameters."""
    distance: str = "minmax"
    """Of two node models: minmax (1 minus the scaled cosine, plus epsilon), one_minus_cosine or euclidean."""
    epsilon: float = 0.01
    """Least distance (minmax)."""
    policy: str = "ucb"
    """Who picks the ratio: ucb, discounted, fixed:RATIO, random, or oracle (tries all on validation samples)."""
    exploration: float = 0.5
    """Constant c of ucb and discounted."""
    fading: float = 0.95
    """Discount of the bandit's past rewards (discounted)."""


def fedgcf(fed: Federation, options: Options = Options()) -> Algorithm:
    """FedGCF in a federation of graphs.

    Raises:
        ValueError: an option out of range, a model that is no graph model, no validation data where a policy reads it.
    """
    _fusion.check(options)
    policy = _fusion.policy(options.policy, options.exploration, options.fading)
    twin = fed.with_related("structure", "fedgcf")
    if policy.measures:
        fed.require_validation(f"fedgcf with policy {options.policy}")

    def init(env: Env, key: jax.Array) -> State:
        slots = env.data.slots
        node = fed.initial_rows(env, fed.model.init(key))
        structure = twin.initial_rows(env, twin.model.init(jax.random.fold_in(key, 1)))
        core, own = partition(node, is_core)[0], partition(structure, is_core)[1]
        nowhere, kind = jnp.full(slots, -1, jnp.int32), jnp.result_type(float)
        return State(
            None if policy.bandit is None else policy.bandit.init(len(_fusion.RATIOS)), jnp.full((), -1, kind),
            jnp.full((options.paths, 2), -1, jnp.int32), core, node, own, nowhere,
            jnp.full((slots, slots), -1, kind),
            (local.first_optimizers(fed, env, node), local.first_optimizers(twin, env, structure)),
        )  # fmt: skip

    def begin(client: Client, row: Any, lr: jax.Array) -> tuple[local.Training, local.Training]:
        core, node, structure, (of_node, of_structure) = row
        omega_t = local.begin(fed, lr, node | core, optimizer=of_node)
        return omega_t, local.begin(twin, lr, structure | core, optimizer=of_structure)

    def step(carry: Any, batch: Any, t: jax.Array, key: jax.Array) -> tuple[local.Training, local.Training]:
        return local.step(fed, carry[0], batch, key), local.step(twin, carry[1], batch, jax.random.fold_in(key, 1))

    def end(client: Client, carry: Any, row: Any) -> Any:
        node, (core, structure) = carry[0].variables, partition(carry[1].variables, is_core)
        optimizers = local.kept_optimizer(fed, carry[0]), local.kept_optimizer(twin, carry[1])
        return (core, node, structure, optimizers), (local.metrics(client, carry[0]), local.metrics(client, carry[1]))

    def round_(env: Env, state: State, cohort: Cohort, key: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        rows, (of_node, of_structure), reported = run_clients(
            begin, step, end, rows=(state.core, state.node, state.structure, state.optimizers), data=env.data,
            work=fed.work(), key=key, common=fed.learning_rate(env, cohort.round), who=cohort.trains & cohort.reports,
        )  # fmt: skip
        omega_s, node, structure, optimizers = rows
        new = state._replace(node=node, structure=structure, optimizers=optimizers)
        new, told = fused(env, new, omega_s, partition(node, is_core)[0], reported, key)
        info = {"loss_structure": local.information(of_structure, reported)["loss"]}
        return tree.where(reported.any(), new, state), local.information(of_node, reported) | info | told

    def fused(
        env: Env, state: State, omega_s: Variables, omega_t: Variables, reported: jax.Array, key: jax.Array
    ) -> tuple[State, dict[str, jax.Array]]:
        """What the server does: clusters, paths, ratio, and the cores that clients receive next."""
        n, order = jnp.where(reported, env.data.weight, 0), env.data.by_client
        real = reported[order]
        products = _fusion.centred(compared(env, state, omega_s), real)
        own, _ = kmeans_gram(products, options.clusters, random.stream(key, random.EXPLORE), real=real)
        cluster = jnp.full_like(state.cluster, -1).at[order].set(jnp.where(real, own, -1))
        omega_S = mix(_fusion.shares(cluster[:, None] == cluster, n), omega_s, fed.mesh)  # Eq 4
        d = _fusion.distances(compared(env, state, omega_t), options.distance, real, options.epsilon)
        on = on_longest_paths(d, options.paths, real)
        omega_N = weighted_mean(omega_t, n.at[order].multiply(on.mask))

        state = state._replace(
            paths=on.pairs, cluster=cluster,
            distance=state.distance.at[order[:, None], order].set(_fusion.stored(d)),
        )  # fmt: skip

        def with_ratio(ratio: jax.Array) -> State:
            mixed = jax.tree.map(lambda s, t: (ratio * s + (1 - ratio) * t).astype(s.dtype), omega_S, omega_N)
            return state._replace(core=jax.vmap(tree.where)(reported, mixed, state.core))

        told = {f"cluster{k + 1}": (own == k).sum() for k in range(options.clusters)}
        told |= {"on_paths": on.mask.sum(), "path_hops": on.hops.sum() / jnp.maximum((on.hops > 0).sum(), 1)}
        of_state, key = partial(accuracy, env), random.stream(key, random.LEARN)
        new, picked = _fusion.with_picked_ratio(policy, state, env, with_ratio, of_state, key)
        told |= picked
        return new, {name: jnp.where(real.any(), value, jnp.nan).astype(d.dtype) for name, value in told.items()}

    def compared(env: Env, state: State, omega: Variables) -> jax.Array:
        """Inner products of what clients are compared by, ``(clients, clients)``."""
        vectors = tree.subtract(omega, state.core) if options.similarity == "update" else omega
        products = jnp.nan_to_num(jax.lax.stop_gradient(gram(vectors, vectors, fed.mesh)))  # huge ones overflow
        return _fusion.in_order(products, env.data.by_client)

    def accuracy(env: Env, state: State) -> jax.Array:
        """Mean over clients of the validation accuracy of what they receive."""
        state = jax.lax.stop_gradient(state)
        each = measured_scores(fed, fed.scores, ROW_FIELDS, env, state, received, "validation").accuracy
        return safe_divide(jnp.where(jnp.isnan(each), 0, each).sum(), (~jnp.isnan(each)).sum().astype(each.dtype))

    def received(env: Env, state: State, i: jax.Array) -> Variables:
        return tree.take(state.node, i) | tree.take(state.core, i)

    def personal(env: Env, state: State, i: jax.Array) -> Variables:
        return tree.take(state.node, i)

    core = fed.model.count(is_core)
    sent = len(_fusion.RATIOS) if policy.oracle else 1  # cores a client receives, and accuracies that it tells of them
    return Algorithm(
        "fedgcf", init, round_, received, personal, None, fed.scores, rows=ROW_FIELDS,
        floats=(2 * core + policy.measures * sent, sent * core),
        hyper=fed.hyper(**policy.hyper), trains=(fed, twin), keeps_optimizer=True,
        artifacts=lambda env, state: {
            "topology": _fusion.edges(state.distance), "cluster": state.cluster, "path_ends": state.paths,
        },
        newcomer=lambda env, state, fresh: fresh | weighted_mean(state.core, env.data.weight),
    )  # fmt: skip
