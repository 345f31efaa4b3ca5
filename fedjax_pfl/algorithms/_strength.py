"""How FedHR's strength alpha is chosen: by an agent that learns from what clients see, or by one of the controls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.aggregation import safe_norm
from fedjax_pfl.algorithms import _policy
from fedjax_pfl.engine import random, tree
from fedjax_pfl.engine.clients import measure
from fedjax_pfl.engine.federation import Env, Federation
from fedjax_pfl.engine.local import masked_mean
from fedjax_pfl.engine.sharding import COMMON, ROWS, data_spec
from fedjax_pfl.evaluation import state_spec
from fedjax_pfl.models.actor_critic import Agent
from fedjax_pfl.models.model import Variables, is_trainable, partition

Received = Callable[[Env, Any, jax.Array], Variables]
GRID = np.linspace(1.0, 0.0, 11)  # the strongest first, so that it wins where all are equal: 0 would never be left
GAINS = ("received", "shared", "nothing", "start")
METRICS = ("accuracy", "loss")
ROW_FIELDS = ("theta", "v", "alpha", "pending", "heads")  # of FedHR's State: one row a client


class Pending(NamedTuple):
    """A transition that waits for the client's next state: s ``(slots, 5)``, a, r and valid ``(slots,)``."""

    s: jax.Array
    a: jax.Array
    r: jax.Array
    valid: jax.Array


class Strength(NamedTuple):
    """One policy, as functions of FedHR's State.

    init: ``(key, slots) -> (agent or None, pending or None)``. choose: sets ``alpha`` of those in ``who`` before they
    train; learn: takes up what came of it, and gives diagnostics; serve: sets ``alpha`` of all, without exploring.
    floats: what a participant sends and receives for it. hyper: numeric hyper-parameters.
    """

    init: Callable[..., tuple[Any, Pending | None]]
    choose: Callable[..., Any]
    learn: Callable[..., tuple[Any, dict[str, jax.Array]]]
    serve: Callable[..., Any]
    floats: tuple[int, int] = (0, 0)
    hyper: Mapping[str, float] = {}


def make(fed: Federation, options: Any) -> Strength:
    """The policy that the options name.

    Raises:
        ValueError: an unknown policy or gain, a strength outside 0..1, no validation data where they are read.
    """
    name, _, number = options.policy.partition(":")
    for option, low in (("hyper_lr", 0), ("penalty", 0), ("embedding_size", 1), ("bound", 1e-6)):
        value = getattr(options, option)
        if not low <= value < float("inf"):
            raise ValueError(f"fedhr: {option} must be finite and at least {low:g}, found {value}")
    allowed: dict[str, tuple[str, ...]] = {"gain": GAINS, "gain_metric": METRICS}
    for option, names in allowed.items():
        if getattr(options, option) not in names:
            raise ValueError(f"fedhr: {option} must be one of {', '.join(names)}, found {getattr(options, option)!r}")
    if name == "fixed":
        return _fixed(_policy.fixed_number("fedhr", "alpha", number))
    if number or name not in ("ddpg", "random", "greedy-validation"):
        known = "ddpg, fixed:ALPHA, random or greedy-validation"
        raise ValueError(f"fedhr: policy must be {known}, found {options.policy!r}")
    if name == "random":
        return _random()
    fed.require_validation(f"fedhr with policy {name}")
    return _greedy(fed) if name == "greedy-validation" else _ddpg(fed, options)


def _nothing(key: jax.Array, slots: int) -> tuple[None, None]:
    return None, None


def _no_lesson(env: Env, state: Any, *rest: Any) -> tuple[Any, dict[str, jax.Array]]:
    return state, {}


def _fixed(alpha: float) -> Strength:
    def serve(env: Env, state: Any, received: Received) -> Any:
        return state._replace(alpha=jnp.full_like(state.alpha, env.hyper["alpha"]))

    def choose(env: Env, state: Any, received: Received, who: jax.Array, key: jax.Array) -> Any:
        return serve(env, state, received)

    return Strength(_nothing, choose, _no_lesson, serve, hyper={"alpha": alpha})


def _random() -> Strength:
    def choose(env: Env, state: Any, received: Received, who: jax.Array, key: jax.Array) -> Any:
        keys = random.per_client(random.stream(key, random.EXPLORE), env.data.ids)
        drawn = jax.vmap(lambda one: jax.random.uniform(one, (), state.alpha.dtype))(keys)
        return state._replace(alpha=jnp.where(who, drawn, state.alpha))

    return Strength(_nothing, choose, _no_lesson, lambda env, state, received: state)


def _greedy(fed: Federation) -> Strength:
    def best(env: Env, state: Any, received: Received, who: jax.Array | None) -> jax.Array:
        def deliver(common: Any, slot: jax.Array) -> Any:
            env, state = common
            at = lambda alpha: received(env, state._replace(alpha=jnp.full_like(state.alpha, alpha)), slot)  # noqa: E731
            return env, jax.vmap(at)(GRID)

        def stat(delivered: Any, batch: Any) -> jax.Array:
            scores = jax.vmap(lambda variables: fed.scores(delivered[0], variables, batch))(delivered[1])
            losses = jax.vmap(lambda one: fed.loss(one, batch["y"]))(scores)
            return jnp.where(batch["mask"], losses, 0).sum(-1)

        losses = jnp.nan_to_num(_measured(fed, env, state, stat, deliver, who), nan=jnp.inf)
        found = jnp.asarray(GRID)[losses.argmin(-1)].astype(state.alpha.dtype)
        return jnp.where(env.data.validation.count > 0, found, state.alpha)

    def choose(env: Env, state: Any, received: Received, who: jax.Array, key: jax.Array) -> Any:
        return state._replace(alpha=jnp.where(who, best(env, state, received, who), state.alpha))

    def serve(env: Env, state: Any, received: Received) -> Any:
        return state._replace(alpha=best(env, state, received, None))

    return Strength(_nothing, choose, _no_lesson, serve)


def _ddpg(fed: Federation, options: Any) -> Strength:
    agent = Agent(
        5, discount=options.discount, sigma=options.sigma, warm_up=options.warm_up, reward_scale=options.reward_scale,
        tau=0.05, actor_lr=1e-3, critic_lr=3e-3,  # there are rounds x clients transitions only: faster than the paper's
    )  # fmt: skip

    def init(key: jax.Array, slots: int) -> tuple[Any, Pending]:
        kind = jnp.result_type(float)
        s, a, r = (jnp.zeros((slots, *shape), kind) for shape in ((5,), (), ()))
        pending = Pending(s, a, r, jnp.zeros(slots, bool))
        return agent.init(key), pending

    def choose(env: Env, state: Any, received: Received, who: jax.Array, key: jax.Array) -> Any:
        s, old, order = client_states(fed, env, state, who), state.pending, env.data.by_client
        waiting = tree.take(old._replace(valid=old.valid & who), order)
        memory = agent.store(state.agent, waiting.s, waiting.a[:, None], waiting.r, s[order], waiting.valid)
        a, memory = agent.act(memory, s[order], random.stream(key, random.EXPLORE))
        alpha = jnp.where(who, state.alpha.at[order].set(a[:, 0].astype(state.alpha.dtype)), state.alpha)
        seen = who & (env.data.validation.count > 0)
        new = Pending(s, alpha, jnp.zeros_like(alpha), seen)
        return state._replace(agent=memory, alpha=alpha, pending=jax.vmap(tree.where)(who, new, old))

    def learn(
        env: Env, state: Any, received: Received, theta: Variables, who: jax.Array, reported: jax.Array, key: jax.Array
    ) -> tuple[Any, dict[str, jax.Array]]:
        r = rewards(fed, options, env, state, received, theta, reported)
        old = state.pending
        pending = old._replace(r=jnp.where(reported, r, old.r), valid=old.valid & (reported | ~who))
        memory, told = agent.learn(state.agent, random.stream(key, random.LEARN), options.agent_steps)
        mean = jnp.where(reported, r, 0).sum() / jnp.maximum(reported.sum(), 1)
        told = {"critic_loss": told["critic_loss"], "buffer": told["fill"].astype(mean.dtype), "reward": mean}
        return state._replace(agent=memory, pending=pending), told

    def serve(env: Env, state: Any, received: Received) -> Any:
        s, order = client_states(fed, env, state, None), env.data.by_client
        a, _ = agent.act(state.agent, s[order], jax.random.key(0), explore=False)
        return state._replace(alpha=state.alpha.at[order].set(a[:, 0].astype(state.alpha.dtype)))

    return Strength(init, choose, learn, serve, (6, 1))


def client_states(fed: Federation, env: Env, state: Any, who: jax.Array | None) -> jax.Array:
    """What the agent sees of each client: ``(slots, 5)``.

    KL of the predictions of its last model from the global one's, Euclidean and cosine distance of the two, accuracy of
    its last model, progress. KL and accuracy are on validation samples, 0 without any.
    """

    def deliver(common: Any, slot: jax.Array) -> Any:
        env, state = common
        return env, tree.take(state.theta, slot), _unmodulated(fed, state, slot)

    def stat(delivered: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        env, local, shared = delivered
        log_p, log_q = (jax.nn.log_softmax(fed.scores(env, variables, batch)) for variables in (local, shared))
        kl = (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
        right = (log_p.argmax(-1) == batch["y"]) & batch["mask"]
        return jnp.where(batch["mask"], kl, 0).sum(), right.sum().astype(kl.dtype)

    kl, right = _measured(fed, env, state, stat, deliver, who)
    count = jnp.maximum(env.data.validation.count, 1)
    euclid, cosine = _distances(state.theta, state.shared)
    progress = jnp.full_like(kl, state.progress)
    return jnp.stack([kl / count, euclid, cosine, right / count, progress], -1)


def _unmodulated(fed: Federation, state: Any, slot: jax.Array) -> Variables:
    """What a client would be sent at alpha = 0: the global model with what stays at the client."""
    return state.shared | partition(tree.take(state.theta, slot), fed.stays)[0]


def rewards(
    fed: Federation, options: Any, env: Env, state: Any, received: Received, theta: Variables, who: jax.Array
) -> jax.Array:
    """Gain on validation samples by the round, minus ``penalty`` times the relative deviation of the trained model.

    state: before the round, with this round's alpha; theta: the models after it.
    """

    def deliver(common: Any, slot: jax.Array) -> Any:
        env, (state, theta) = common
        sent = received(env, state, slot)
        after = sent if options.gain == "start" else tree.take(theta, slot)
        return env, after, sent if options.gain == "received" else _unmodulated(fed, state, slot)

    def quality(env: Env, variables: Variables, batch: Any) -> jax.Array:
        scores = fed.scores(env, variables, batch)
        right = scores.argmax(-1) == batch["y"]
        return right.astype(scores.dtype) if options.gain_metric == "accuracy" else -fed.loss(scores, batch["y"])

    def stat(delivered: Any, batch: Any) -> jax.Array:
        env, after, before = delivered
        change = quality(env, after, batch) - (0 if options.gain == "nothing" else quality(env, before, batch))
        return jnp.where(batch["mask"], change, 0).sum()

    gained = _measured(fed, env, (state, theta), stat, deliver, who) / jnp.maximum(env.data.validation.count, 1)
    euclid, _ = _distances(theta, state.shared)
    scale = safe_norm(_flat(partition(state.shared, is_trainable)[0]))
    return gained - env.hyper["penalty"] * euclid / scale


def spread(alpha: jax.Array, head: Variables, heads: Variables, reported: jax.Array) -> dict[str, jax.Array]:
    """Of a round: mean and deviation of the strengths, and the mean norm of W_i - W_g over that of W_g, of the head."""
    mean = masked_mean(alpha, reported)
    change = tree.subtract(heads, head)
    moved = jnp.sqrt(sum((leaf**2).reshape(len(leaf), -1).sum(1) for leaf in change.values()))
    scale = jnp.maximum(safe_norm(_flat(head)), 1e-12)
    return {
        "alpha": mean, "alpha_std": jnp.sqrt(masked_mean((alpha - mean) ** 2, reported)),
        "modulation": masked_mean(moved, reported) / scale,
    }  # fmt: skip


def _flat(variables: Variables) -> jax.Array:
    return jnp.concatenate([jnp.ravel(leaf) for leaf in variables.values()])


def head_kernel(fed: Federation, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> jax.ShapeDtypeStruct:
    """The kernel ``(d, C)`` of the head.

    Raises:
        ValueError: the head is not one dense layer with a bias.
    """
    head = {name: leaf for name, leaf in shapes.items() if fed.model.head(name) and not fed.stays(name)}
    by_rank = {len(leaf.shape): leaf for leaf in head.values()}
    if len(head) != 2 or set(by_rank) != {1, 2}:
        found = ", ".join(f"{name} {leaf.shape}" for name, leaf in head.items()) or "none that clients share"
        raise ValueError(f"fedhr modulates one dense layer with a bias, the head of {fed.model.name!r} is: {found}")
    return by_rank[2]


def _distances(theta: Variables, shared: Variables) -> tuple[jax.Array, jax.Array]:
    """Euclidean and cosine distance of each row's parameters from the global ones: ``(slots,)`` each."""
    leaves = zip(_parameters(theta), _parameters(shared), strict=True)
    pairs = [(a.reshape(len(a), -1), b.reshape(1, -1)) for a, b in leaves]

    def total(product: Callable[..., jax.Array]) -> jax.Array:
        return sum((product(a, b).sum(1) for a, b in pairs), start=jnp.zeros(()))

    scale = jnp.sqrt(total(lambda a, b: a * a) * total(lambda a, b: b * b) + 1e-24)
    return jnp.sqrt(total(lambda a, b: (a - b) ** 2) + 1e-24), 1 - total(lambda a, b: a * b) / scale


def _parameters(variables: Variables) -> list[jax.Array]:
    return list(partition(variables, is_trainable)[0].values())


def _measured(fed: Federation, env: Env, state: Any, stat: Any, deliver: Any, who: jax.Array | None) -> Any:
    """``measure`` on the validation samples, of what depends on the state (a State, or one beside rows)."""
    whole = state if hasattr(state, "_fields") else state[0]
    spec = state_spec(ROW_FIELDS, whole)
    spec = spec if whole is state else (spec, ROWS)
    return measure(
        stat, deliver, common=(env, state), data=env.data, work=fed.evaluation_work("validation"), who=who,
        common_spec=(Env(data_spec(env.data), COMMON), spec),  # type: ignore[arg-type]
    )  # fmt: skip
