"""DDPG: Continuous Control with Deep Reinforcement Learning.

Lillicrap, Hunt, Pritzel, Heess, Erez, Tassa, Silver, Wierstra; ICLR 2016; https://arxiv.org/abs/1509.02971

    critic Q(s, a), actor mu(s), targets Q', mu' = Q, mu; replay buffer R
    each time:  a = mu(s) + noise;  store (s, a, r, s2) in R
        draw a minibatch of R
        y = r + discount (1 - done) Q'(s2, mu'(s2))
        Q descends mean (y - Q(s, a))^2
        mu ascends mean Q(s, mu(s))
        Q' <- tau Q + (1 - tau) Q',  mu' <- tau mu + (1 - tau) mu'

Differs from the paper: many states at once; uniform actions until ``warm_up`` transitions are stored, and no learning;
the critic takes the action (scaled to -1 .. 1) in its first layer, and has no weight decay; states are scaled by their
running mean and variance instead of by batch normalisation; Gaussian noise is a choice, and may fade.

Everything is a pure function of arrays of fixed shapes and of keys that are given, so an agent lives inside a compiled
loop, under `jax.vmap` and in a checkpoint.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from fedjax_pfl.models.replay import LARGEST, Moments, Replay, observed, places

Tree = Any
CLIP = 10.0  # of a scaled state, in standard deviations


class MLP(nn.Module):
    """Dense layers with ReLU and a linear one: ``(..., S)`` -> ``(..., outputs)``, first drawn as in the paper's §7."""

    hidden: tuple[int, ...]
    outputs: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kind, fan_in = jnp.result_type(float), nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        for i, width in enumerate(self.hidden):
            x = nn.relu(nn.Dense(width, kernel_init=fan_in, param_dtype=kind, name=f"hidden{i}")(x))
        return nn.Dense(self.outputs, kernel_init=_small, param_dtype=kind, name="out")(x)


def _small(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.uniform(key, shape, dtype, -3e-3, 3e-3)


class Networks(NamedTuple):
    """What learning changes: parameters of actor, critic and their targets, and the states of two Adam optimisers."""

    actor: Tree
    critic: Tree
    target_actor: Tree
    target_critic: Tree
    actor_optimizer: Tree
    critic_optimizer: Tree


class AgentState(NamedTuple):
    """The whole agent. noise: the Ornstein-Uhlenbeck process of each row ``(rows, A)``; acts: exploring calls since
    the warm-up, int32."""

    networks: Networks
    replay: Replay
    moments: Moments
    noise: jax.Array
    acts: jax.Array


@dataclasses.dataclass(frozen=True)
class Agent:
    """A DDPG agent (Lillicrap et al. 2016) with states of ``state_size`` numbers and actions in ``low .. high``.

    Its functions take and return an `AgentState`. A float other than a bound may be a traced scalar.

    Raises:
        ValueError: a setting out of range, by name.
    """

    state_size: int
    low: tuple[float, ...] = (0.0,)
    """Smallest action, one number for each of its A parts."""
    high: tuple[float, ...] = (1.0,)
    """Largest action."""
    hidden: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers of actor and critic."""
    discount: float = 0.9
    """Of the reward one step later, 0 .. 1; 0 is a contextual bandit."""
    tau: float = 0.005
    """Share of the learned parameters in each update of the targets; the paper has 0.001."""
    actor_lr: float = 1e-4
    """Learning rate of the actor (Adam), the paper's."""
    critic_lr: float = 1e-3
    """Learning rate of the critic (Adam), the paper's."""
    batch: int = 64
    """Transitions in a minibatch, drawn with replacement."""
    capacity: int = 4096
    """Transitions kept; the oldest are overwritten."""
    warm_up: int = 128
    """Transitions before which actions are uniform and nothing is learned."""
    noise: Literal["gaussian", "ou"] = "gaussian"
    """Exploration: independent Gaussian, or an Ornstein-Uhlenbeck process for each row."""
    sigma: float = 0.2
    """Scale of the noise, in half ranges of the action."""
    theta: float = 0.15
    """Pull of the Ornstein-Uhlenbeck process to zero, per call."""
    fading: float = 1.0
    """Factor on the noise for each exploring call of ``act`` since the warm-up; 1: it never fades."""
    reward_scale: float = 1.0
    """Factor on the rewards that are learned from; learning is best where Q is of order 1."""
    normalise: bool = True
    """Scale states by the running mean and variance of those stored, clipped at 10 standard deviations."""

    def __post_init__(self) -> None:
        def require(name: str, allowed: str, good: bool) -> None:
            if not good:
                raise ValueError(f"agent: {name} must be {allowed}, found {getattr(self, name)!r}")

        for name in ("state_size", "batch", "capacity", "warm_up"):
            require(name, "an integer of at least 1", isinstance(v := getattr(self, name), int) and v >= 1)
        require("hidden", "a tuple of sizes of at least 1", all(width >= 1 for width in self.hidden))
        require("warm_up", f"at most capacity = {self.capacity}", self.warm_up <= self.capacity)
        require("noise", "'gaussian' or 'ou'", self.noise in ("gaussian", "ou"))
        finite = all(abs(edge) < LARGEST for edge in (*self.low, *self.high))
        pairs = len(self.low) == len(self.high) >= 1 and all(a < b for a, b in zip(self.low, self.high, strict=True))
        require("high", f"finite and above low = {self.low} in each of its parts", finite and pairs)
        for name, most in (("discount", 1), ("tau", 1), ("theta", 1), ("fading", 1), ("sigma", None)):
            value, top = getattr(self, name), LARGEST if most is None else most
            good = isinstance(value, jax.Array) or 0 <= value <= top
            require(name, f"in 0 .. {top:g}", good)
        for name in ("actor_lr", "critic_lr", "reward_scale"):
            value = getattr(self, name)
            require(name, "positive and finite", isinstance(value, jax.Array) or 0 < value < float("inf"))

    def init(self, key: jax.Array, rows: int = 1) -> AgentState:
        """A new agent with an empty buffer; with ``"ou"``, ``act`` will be given ``rows`` states.

        Raises:
            ValueError: fewer than 1 row.
        """
        if rows < 1:
            raise ValueError(f"agent: rows must be at least 1, found {rows}")
        keys, kind = jax.random.split(key), jnp.result_type(float)
        S, A = self.state_size, len(self.low)
        actor = self._actor.init(keys[0], jnp.zeros((1, S), kind))
        critic = self._critic.init(keys[1], jnp.zeros((1, S + A), kind))
        n, zeros, none = self.capacity, (lambda *shape: jnp.zeros(shape, kind)), jnp.zeros((), jnp.int32)
        a_opt, c_opt = optax.adam(self.actor_lr).init(actor), optax.adam(self.critic_lr).init(critic)
        state = AgentState(
            Networks(actor, critic, actor, critic, a_opt, c_opt),
            Replay(zeros(n, S), zeros(n, A), zeros(n), zeros(n, S), zeros(n), none, none, none),
            Moments(none, zeros(S), zeros(S)), zeros(rows, A), none,
        )  # fmt: skip
        return jax.tree.map(jnp.copy, state)  # leaves that share a buffer could not be donated

    def policy(self, actor: Tree, s: jax.Array) -> jax.Array:
        """mu(s): scaled states ``(N, S)`` -> actions ``(N, A)`` inside the bounds."""
        middle, half = self._bounds()
        return middle + half * jnp.tanh(jnp.asarray(self._actor.apply(actor, s)))

    def value(self, critic: Tree, s: jax.Array, a: jax.Array) -> jax.Array:
        """Q(s, a): scaled states ``(N, S)``, actions ``(N, A)`` -> ``(N,)``."""
        middle, half = self._bounds()
        return jnp.asarray(self._critic.apply(critic, jnp.concatenate([s, (a - middle) / half], -1)))[..., 0]

    def scaled(self, moments: Moments, s: jax.Array) -> jax.Array:
        """States ``(N, S)`` in standard deviations from their running mean; as they are without ``normalise``."""
        if not self.normalise:
            return s
        variance = jnp.where(moments.seen > 1, moments.squares / jnp.maximum(moments.seen, 1), 1)
        return jnp.clip((s - moments.mean) / jnp.sqrt(variance + 1e-8), -CLIP, CLIP)

    def act(
        self, state: AgentState, s: jax.Array, key: jax.Array, explore: bool = True
    ) -> tuple[jax.Array, AgentState]:
        """Actions ``(N, A)`` for states ``(N, S)``: mu(s), where ``explore`` with noise, and uniform in the warm-up.

        Raises:
            ValueError: states of another shape, or with ``"ou"`` of another number than ``init`` was told.
        """
        s = self._states("s", s, None if self.noise == "gaussian" or not explore else len(state.noise))
        a = self.policy(state.networks.actor, self.scaled(state.moments, s))
        (middle, half), low, high = self._bounds(), jnp.array(self.low, s.dtype), jnp.array(self.high, s.dtype)
        if not explore:
            return jnp.clip(a, low, high), state
        for_noise, for_uniform = jax.random.split(key)
        noise = self.sigma * jax.random.normal(for_noise, a.shape, a.dtype)
        if self.noise == "ou":
            noise = (1 - self.theta) * state.noise + noise
            state = state._replace(noise=noise.astype(state.noise.dtype))
        faded = noise * jnp.asarray(self.fading, a.dtype) ** state.acts
        uniform = middle + half * jax.random.uniform(for_uniform, a.shape, a.dtype, -1, 1)
        warm = state.replay.fill >= self.warm_up
        a = jnp.clip(jnp.where(warm, a + half * faded, uniform), low, high)
        return a, state._replace(acts=state.acts + warm)

    def store(
        self, state: AgentState, s: jax.Array, a: jax.Array, r: jax.Array, s2: jax.Array, valid: jax.Array,
        done: jax.Array | None = None,
    ) -> AgentState:  # fmt: skip
        """Append the transitions that ``valid (N,)`` marks, in order, and count their states into the moments.

        s, s2 ``(N, S)``, a ``(N, A)``, r ``(N,)``; done ``(N,)``: no reward follows (default: never). Of more than
        ``capacity`` transitions the last stay. One with a number that is not finite or beyond 1e9 is refused.

        Raises:
            ValueError: a shape that does not fit.
        """
        s, valid = self._states("s", s), jnp.asarray(valid, bool)
        s2, kind = self._states("s2", s2, len(s)), s.dtype
        done = jnp.zeros(len(s), kind) if done is None else jnp.asarray(done, kind)
        a, r = jnp.asarray(a, kind), jnp.asarray(r, kind)
        wanted = {"a": (len(s), len(self.low)), "r": (len(s),), "valid": (len(s),), "done": (len(s),)}
        for (name, shape), found in zip(wanted.items(), (a, r, valid, done), strict=True):
            if found.shape != shape:
                raise ValueError(f"agent: {name} must be {shape} for {len(s)} transitions, found {found.shape}")
        numbers = jnp.concatenate([s, s2, a, r[:, None], done[:, None]], 1)
        sound = valid & (jnp.abs(numbers) <= LARGEST).all(1)  # false for NaN
        old, total = state.replay, sound.sum(dtype=jnp.int32)
        place = places(old.head, sound, self.capacity)
        new = {"s": s, "a": a, "r": r, "s2": s2, "done": done}
        replay = old._replace(
            **{name: getattr(old, name).at[place].set(leaf, mode="drop") for name, leaf in new.items()},
            head=(old.head + total) % self.capacity,
            fill=jnp.minimum(old.fill + total, self.capacity),
            refused=old.refused + valid.sum(dtype=jnp.int32) - total,
        )
        return state._replace(replay=replay, moments=observed(state.moments, s, sound))

    def learn(self, state: AgentState, key: jax.Array, steps: int) -> tuple[AgentState, dict[str, jax.Array]]:
        """``steps`` updates, each on a minibatch drawn uniformly; nothing before ``warm_up`` transitions are stored.

        An outcome with a number that is not finite is dropped as a whole.
        The dict has scalars: means over the steps of ``critic_loss``, ``mean_q`` (of the stored actions) and
        ``actor_objective`` (mean Q(s, mu(s)) before the actor's step), NaN where nothing was learned; and ``fill``.

        Raises:
            ValueError: fewer than 1 step.
        """
        if steps < 1:
            raise ValueError(f"agent: steps must be at least 1, found {steps}")
        replay = state.replay

        def one(networks: Networks, step: jax.Array) -> tuple[Networks, dict[str, jax.Array]]:
            place = jax.random.randint(jax.random.fold_in(key, step), (self.batch,), 0, jnp.maximum(replay.fill, 1))
            s, a, r, s2, done = (field[place] for field in replay[:5])
            s, s2 = self.scaled(state.moments, s), self.scaled(state.moments, s2)
            return self.update(networks, s, a, r, s2, done)

        learned, seen = jax.lax.scan(one, state.networks, jnp.arange(steps))
        finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(learned)]).all()
        kept = (replay.fill >= self.warm_up) & finite
        networks = jax.tree.map(lambda new, old: jnp.where(kept, new, old), learned, state.networks)
        report = {name: jnp.where(kept, values.mean(), jnp.nan) for name, values in seen.items()}
        return state._replace(networks=networks), report | {"fill": replay.fill}

    def target(self, networks: Networks, r: jax.Array, s2: jax.Array, done: jax.Array) -> jax.Array:
        """y = reward_scale r + discount (1 - done) Q'(s2, mu'(s2)), ``(N,)``; s2 ``(N, S)`` is scaled."""
        after = self.value(networks.target_critic, s2, self.policy(networks.target_actor, s2))
        return self.reward_scale * r + self.discount * (1 - done) * after

    def update(
        self, networks: Networks, s: jax.Array, a: jax.Array, r: jax.Array, s2: jax.Array, done: jax.Array
    ) -> tuple[Networks, dict[str, jax.Array]]:
        """One step of critic, actor and targets, in this order, on a minibatch with scaled states ``(batch, S)``."""
        actor, critic, target_actor, target_critic, a_opt, c_opt = networks
        y = self.target(networks, r, s2, done)

        def loss(critic: Tree) -> tuple[jax.Array, jax.Array]:
            q = self.value(critic, s, a)
            return ((y - q) ** 2).mean(), q.mean()

        (critic_loss, mean_q), slope = jax.value_and_grad(loss, has_aux=True)(critic)
        change, c_opt = optax.adam(self.critic_lr).update(slope, c_opt)
        critic = optax.apply_updates(critic, change)
        cost, slope = jax.value_and_grad(lambda actor: -self.value(critic, s, self.policy(actor, s)).mean())(actor)
        change, a_opt = optax.adam(self.actor_lr).update(slope, a_opt)
        actor = optax.apply_updates(actor, change)
        targets = optax.incremental_update((actor, critic), (target_actor, target_critic), self.tau)
        report = {"critic_loss": critic_loss, "mean_q": mean_q, "actor_objective": -cost}
        return Networks(actor, critic, targets[0], targets[1], a_opt, c_opt), report

    @property
    def _actor(self) -> MLP:
        return MLP(self.hidden, len(self.low))

    @property
    def _critic(self) -> MLP:
        return MLP(self.hidden, 1)

    def _bounds(self) -> tuple[jax.Array, jax.Array]:
        low, high = jnp.asarray(self.low, jnp.result_type(float)), jnp.asarray(self.high, jnp.result_type(float))
        return (low + high) / 2, (high - low) / 2

    def _states(self, name: str, s: jax.Array, rows: int | None = None) -> jax.Array:
        s = jnp.asarray(s, jnp.result_type(float))
        if s.ndim != 2 or s.shape[1] != self.state_size or rows not in (None, len(s)):
            wanted = f"({'N' if rows is None else rows}, {self.state_size})"
            raise ValueError(f"agent: {name} must be {wanted}, found {s.shape}")
        return s
