"""GCFL: Federated Graph Classification over Non-IID Graphs.

Xie, Ma, Xiong, Yang; NeurIPS 2021; https://arxiv.org/abs/2106.13423

    one cluster of all clients
    each round t = 1, 2, ..., every client i of the cohort:  Delta_i = (E epochs of descent from W_i) - W_i
        every cluster c:  Delta_c = sum_{i in c} n_i Delta_i / sum_{i in c} n_i;   W_i <- W_i + Delta_c  for i in c
        if t > first_split, |c| > 2,  ||Delta_c|| < epsilon1  and  max_{i in c} ||Delta_i|| > epsilon2:
            split c by the minimum cut of the graph with weights cos(Delta_i, Delta_j) + 1
    every client: of the models that it had when its cluster split, and the last, the best on its validation samples

``received`` is the cluster's model with the client's private part, ``personal`` the choice on validation samples.

A round averages first and splits then. Differs from the paper: only those who report are averaged and split; absent
members stay with the part that holds the cluster's first reporter. Of equally good models the last one is taken, and of
those kept at splits the first. Ours: any model may be used, of which everything is shared that the model does not
declare private: of graphs the convolutions alone where clients hold different data sets, the whole network on one set.
The released code measures ||Delta_c|| of the plain mean over a cluster, though it moves by the weighted one, which is
measured here. It keeps each client's Adam from round to round, with the weight decay in its gradient: so does a
federation that keeps optimisers. One that starts anew makes longer updates, and splits at another epsilon1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.aggregation import EXACT, gram, mix, safe_divide, weighted_mean
from fedjax_pfl.algorithms._fusion import cosines, in_order, shares
from fedjax_pfl.engine import local, tree
from fedjax_pfl.engine.clients import Client, run_clients
from fedjax_pfl.engine.cohort import Cohort
from fedjax_pfl.engine.federation import Algorithm, Env, Federation
from fedjax_pfl.engine.local import masked_mean
from fedjax_pfl.evaluation import measured_scores
from fedjax_pfl.models.model import Variables, partition
from fedjax_pfl.numerics import min_cut

Tree = Any
# (series, Delta's Gram matrix, who is in the same cluster and reported) -> (weights, whether clusters may split now)
Weigh = Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class State(NamedTuple):
    """Every field has one row a client.

    W: what is shared, the same for all members of a cluster; private: what is not, or None; cluster: its number, int32.
    best, best_accuracy: the best model so far of those that the client had when its cluster split, and its validation
    accuracy, -1 for none. series: what GCFL+ remembers, else None. optimizer: the client's, where it is kept, else
    None. chosen: while ``personal`` is being asked, whether the best one is better than the last, else None.
    """

    W: Variables
    private: Variables | None
    cluster: jax.Array
    best: Variables
    best_accuracy: jax.Array
    series: Tree = None
    optimizer: Tree = None
    chosen: jax.Array | None = None


class Memory(NamedTuple):
    """What clusters are split by besides the last round (GCFL+). init: ``slots -> series``; record: ``(series, norms,
    reported) -> series``; weigh: ``(series, gram, same) -> (weights, ready)``, of matrices ``(slots, slots)``; same
    marks pairs of one cluster that both reported; clear: ``series -> series``; gradients: whether the norms are those
    of the round's last gradients, or of its updates."""

    init: Callable[[int], Tree]
    record: Callable[[Tree, jax.Array, jax.Array], Tree]
    weigh: Weigh
    clear: Callable[[Tree], Tree]
    gradients: bool = False


@dataclasses.dataclass(frozen=True)
class Options:
    """GCFL (Xie et al. 2021): clusters of clients, split where their updates disagree."""

    epsilon1: float = 0.01
    """A cluster may split whose mean update is shorter (0.01 for several data sets, 0.05 for one)."""
    epsilon2: float = 0.1
    """A cluster may split whose longest update is longer."""
    first_split: int = 20
    """Rounds without splits at the start."""


def gcfl(fed: Federation, options: Options = Options()) -> Algorithm:
    """GCFL in a federation.

    Raises:
        ValueError: an option out of range, no validation data.
    """
    return clustered(fed, "gcfl", options, Memory(lambda slots: None, lambda s, *_: s, _by_cosine, lambda s: s))


def clustered(fed: Federation, name: str, options: Options, memory: Memory) -> Algorithm:
    """GCFL with a memory by which clusters are split.

    Raises:
        ValueError: an option out of range, no validation data.
    """
    for option in ("epsilon1", "epsilon2", "first_split"):
        if not 0 <= getattr(options, option) < float("inf"):
            raise ValueError(f"{name}: {option} must be finite and not negative, found {getattr(options, option)}")
    fed.require_validation(name)

    def init(env: Env, key: jax.Array) -> State:
        rows, slots = fed.initial_rows(env, fed.model.init(key)), env.data.slots
        private, W = partition(rows, fed.stays)
        worst = jnp.full(slots, -1, jnp.result_type(float))
        optimizer = local.first_optimizers(fed, env, rows)
        return State(W, private or None, jnp.zeros(slots, jnp.int32), rows, worst, memory.init(slots), optimizer)

    def begin(client: Client, row: Any, lr: jax.Array) -> Any:
        W, private, optimizer, last = row
        return local.begin(fed, lr, W | (private or {}), optimizer=optimizer), last

    def step(carry: Any, batch: Any, t: jax.Array, key: jax.Array) -> Any:
        if not memory.gradients:
            return local.step(fed, carry[0], batch, key), None
        training, gradient = local.step_with_gradient(fed, carry[0], batch, key)
        shared = jax.lax.stop_gradient({name: leaf for name, leaf in gradient.items() if not fed.stays(name)})
        return training, jnp.sqrt(tree.dot(shared, shared))

    def end(client: Client, carry: Any, row: Any) -> Any:
        private, W = partition(carry[0].variables, fed.stays)
        delta, optimizer = tree.subtract(W, row[0]), local.kept_optimizer(fed, carry[0])
        return (delta, private or None, optimizer, carry[1]), local.metrics(client, carry[0])

    def round_(env: Env, state: State, cohort: Cohort, key: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        last = jnp.zeros(env.data.slots, jnp.result_type(float)) if memory.gradients else None
        (rows, private, optimizer, last), metrics, reported = run_clients(
            begin, step, end, rows=(state.W, state.private, state.optimizer, last), data=env.data, work=fed.work(),
            common=fed.learning_rate(env, cohort.round), key=key, who=cohort.trains & cohort.reports,
        )  # fmt: skip
        delta = jax.vmap(tree.where, (0, 0, 0))(reported, rows, tree.zeros_like(rows))
        same = (state.cluster[:, None] == state.cluster) & reported
        n = shares(same, env.data.weight)
        W = tree.add(state.W, mix(n, delta, fed.mesh))
        state = state._replace(W=W, private=private, optimizer=optimizer)
        state, told = split(env, state, gram(delta, delta, fed.mesh), last, n, same, reported, cohort.round)
        return state, local.information(metrics, reported) | told

    def on_validation(env: Env, state: State, who: jax.Array | None = None) -> jax.Array:
        return measured_scores(fed, fed.scores, State._fields, env, state, _last, "validation", who).accuracy

    def split(
        env: Env, state: State, products: jax.Array, gradients: jax.Array | None, n: jax.Array, same: jax.Array,
        reported: jax.Array, t: jax.Array,
    ) -> tuple[State, dict[str, jax.Array]]:  # fmt: skip
        """Split the clusters that have come to rest while their members have not."""
        # Clusters are choices: no gradient flows through them. A huge product, 0 times, must not spoil other clusters.
        products = jnp.nan_to_num(jax.lax.stop_gradient(products))
        norms = jnp.sqrt(jnp.maximum(jnp.diagonal(products), 0))
        mean = jnp.sqrt(jnp.maximum((jnp.matmul(n, products, precision=EXACT) * n).sum(1), 0))
        series = memory.record(state.series, norms if gradients is None else gradients, reported)
        weights, ready = memory.weigh(series, products, same & reported[:, None])
        epsilon1, epsilon2 = (env.hyper[name] for name in ("epsilon1", "epsilon2"))
        rest = (mean < epsilon1) & (jnp.where(same, norms, 0).max(1) > epsilon2) & (same.sum(1) > 2)
        splits = rest & (t >= options.first_split) & ready & env.data.real
        accuracy = on_validation(env, state, splits)
        better = splits & (accuracy > state.best_accuracy)
        last = state.W | (state.private or {})
        order = env.data.by_client
        own = cut_all(state.cluster[order], splits[order], in_order(weights, order), reported[order])
        cluster = state.cluster.at[order].set(own)
        new = state._replace(
            cluster=cluster, best=jax.vmap(tree.where)(better, last, state.best),
            best_accuracy=jnp.where(better, accuracy, state.best_accuracy),
            series=tree.where(splits.any(), memory.clear(series), series),
        )  # fmt: skip
        sizes = jnp.where(env.data.real, ((cluster[:, None] == cluster) & env.data.real).sum(1), 0)
        clusters = safe_divide(env.data.real, sizes.astype(mean.dtype)).sum()
        lengths = {"mean_update": masked_mean(mean, reported), "update": masked_mean(norms, reported)}
        told = {name: jnp.where(reported.any(), value, jnp.nan) for name, value in lengths.items()}
        return new, told | {"clusters": clusters}

    def serve(env: Env, state: State) -> State:
        return state._replace(chosen=state.best_accuracy > on_validation(env, state))

    def personal(env: Env, state: State, i: jax.Array) -> Variables:
        last = _last(env, state, i)
        return last if state.chosen is None else tree.where(state.chosen[i], tree.take(state.best, i), last)

    sent = fed.model.count(lambda name: not fed.stays(name))
    return Algorithm(
        name, init, round_, _last, personal, None, fed.scores, rows=State._fields, floats=(sent, sent),
        hyper=fed.hyper(epsilon1=options.epsilon1, epsilon2=options.epsilon2), serve=serve, keeps_optimizer=True,
        artifacts=lambda env, state: {"cluster": state.cluster},
        newcomer=lambda env, state, fresh: fresh | weighted_mean(state.W, env.data.weight),
    )  # fmt: skip


def cut_all(cluster: jax.Array, splits: jax.Array, weights: jax.Array, reported: jax.Array) -> jax.Array:
    """New numbers of clusters ``(M,)``: those with members in ``splits`` are cut in two, in order of their number."""

    def one(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        cluster, left = carry
        number = jnp.where(left, cluster, len(cluster)).min()
        side, _ = min_cut(weights, (cluster == number) & reported)
        return jnp.where(side, cluster.max() + 1, cluster), left & (cluster != number)

    return jax.lax.while_loop(lambda carry: carry[1].any(), one, (cluster, splits))[0]


def _last(env: Env, state: State, i: jax.Array) -> Variables:
    return tree.take(state.W, i) | (tree.take(state.private, i) if state.private else {})


def _by_cosine(series: Tree, products: jax.Array, same: jax.Array) -> tuple[jax.Array, jax.Array]:
    return cosines(products) + 1, jnp.array(True)
