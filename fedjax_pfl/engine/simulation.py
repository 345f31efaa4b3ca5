"""The compiled programs of one experiment: rounds are a loop inside one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_pfl import evaluation
from fedjax_pfl.data.clients import ClientData
from fedjax_pfl.engine import random, unseen
from fedjax_pfl.engine.federation import Algorithm, Env, Federation
from fedjax_pfl.engine.rounds import Info, State, one_round
from fedjax_pfl.engine.sharding import COMMON, constrain
from fedjax_pfl.evaluation import Scores, state_spec


class Record(NamedTuple):
    """One evaluation: after how many rounds, and ``split -> kind -> Scores`` with leaves ``(seeds, clients)``."""

    round: int
    scores: dict[str, dict[str, Scores]]


class Simulation:
    """The compiled programs of one experiment: ``init``, ``advance`` (up to ``eval_every`` rounds), ``evaluate``.

    seeds: runs at once under ``vmap``, with root keys ``seed, seed + 1, ...`` (see ``Federation.seeds_at_once``).
    hyper: replaces numeric hyper-parameters by name; a value of shape ``(seeds,)`` gives each run its own.

    Raises:
        ValueError: rounds, eval_every or seeds below 1; a hyper-parameter that is unknown or of another shape;
            a model that does not fit the classes; optimisers that the algorithm cannot keep.
    """

    def __init__(
        self, fed: Federation, algorithm: Algorithm, *, rounds: int, eval_every: int = 5, seed: int = 0,
        seeds: int = 1, hyper: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        for name, value in (("rounds", rounds), ("eval every", eval_every), ("seeds", seeds)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, found {value}")
        unknown = set(hyper or {}) - set(algorithm.hyper)
        if unknown:
            raise ValueError(f"{algorithm.name} has no hyper-parameter {min(unknown)!r}: {sorted(algorithm.hyper)}")
        for name, value in (hyper or {}).items():
            if np.shape(value) not in ((), (seeds,)):
                raise ValueError(f"{name} needs one value or {seeds} (one a seed), found shape {np.shape(value)}")
        if seeds == 1:
            hyper = {name: np.reshape(value, ()) for name, value in (hyper or {}).items()}
        fed.check_optimizers(algorithm)
        fed.check_scores()
        self.fed, self.algorithm, self.rounds, self.seeds = fed, algorithm, rounds, seeds
        self.length = min(eval_every, rounds)
        self.env = fed.env(dict(algorithm.hyper) | dict(hyper or {}))
        keys = [jax.random.key(seed + s) for s in range(seeds)]
        self.key = jnp.stack(keys) if seeds > 1 else keys[0]
        self.traces = 0
        self.compile_s = 0.0
        self._compiled: dict[str, Any] = {}
        order = np.argsort(np.asarray(jax.device_get(fed.data.ids)))
        self.slot_of_client = order[: fed.data.num_clients]

    # The programs, for one seed.

    def _init(self, env: Env, key: jax.Array) -> State:
        return self.algorithm.init(env, random.stream(key, random.INITIAL_MODEL))

    def _advance(self, env: Env, state: State, key: jax.Array, first: Any, count: Any) -> tuple[State, Info]:
        self.traces += 1

        def body(k: Any, carry: tuple[State, Info]) -> tuple[State, Info]:
            state, info = carry
            new, one = one_round(self.fed, self.algorithm, env, state, key, first + k, self.rounds)
            spec = state_spec(self.algorithm.rows, new)
            new = type(new)(*(constrain(a, self.fed.mesh, s) for a, s in zip(new, spec, strict=True)))
            return new, jax.tree.map(lambda all_, a: all_.at[k].set(a), info, one)

        shape = jax.eval_shape(
            lambda: one_round(self.fed, self.algorithm, env, state, key, jnp.int32(0), self.rounds)[1]
        )
        info = jax.tree.map(lambda leaf: jnp.zeros((self.length, *leaf.shape), leaf.dtype), shape)
        return jax.lax.fori_loop(0, count, body, (state, info))

    def _evaluate(self, env: Env, state: State) -> Any:
        return evaluation.evaluate(self.fed, self.algorithm, env, state)

    # Compiling and calling them.

    def _call(self, name: str, function: Callable[..., Any], axes: tuple[Any, ...], *args: Any) -> Any:
        if name not in self._compiled:
            began = time.perf_counter()
            mapped = self._over_seeds(function, axes)
            donate = (1,) if name == "advance" else ()
            jitted = jax.jit(mapped, donate_argnums=donate, out_shardings=self._out(name))
            self._compiled[name] = jitted.lower(*args).compile()
            self.compile_s += time.perf_counter() - began
        return self._compiled[name](*args)

    def _over_seeds(self, function: Callable[..., Any], axes: tuple[Any, ...]) -> Callable[..., Any]:
        if self.seeds == 1:
            return function
        hyper = {n: 0 if jnp.ndim(v) else None for n, v in self.env.hyper.items()}
        return jax.vmap(function, in_axes=(Env(None, hyper), *axes))  # type: ignore[arg-type]

    def _out(self, name: str) -> Any:
        mesh = self.fed.mesh
        if mesh is None:
            return None
        everywhere = NamedSharding(mesh, COMMON)
        if name in ("evaluate", "artifacts") or name.startswith("unseen"):
            return everywhere
        state = jax.eval_shape(self._init, self.env, jax.random.key(0))
        lead = (None,) if self.seeds > 1 else ()
        spec = [NamedSharding(mesh, P(*lead, *s)) for s in state_spec(self.algorithm.rows, state)]
        state = type(state)(*(None if a is None else s for a, s in zip(state, spec, strict=True)))
        return state if name == "init" else (state, everywhere)

    def init(self) -> State:
        """The state before the first round."""
        if self.fed.mesh is not None:  # compiled whole, so that no device ever holds all clients' rows
            return self._call("init", self._init, (0,), self.env, self.key)
        began = time.perf_counter()  # op by op: methods that share a model then compile its initialisers once
        state = _distinct(self._over_seeds(self._init, (0,))(self.env, self.key))
        self.compile_s += time.perf_counter() - began
        return state

    def advance(self, state: State, first: int, count: int) -> tuple[State, Info]:
        """``count`` rounds (at most ``eval_every``) from round ``first`` on; the given state is given up."""
        args = (self.env, state, self.key, jnp.int32(first), jnp.int32(count))
        state, info = self._call("advance", self._advance, (0, 0, None, None), *args)
        lead = 1 if self.seeds > 1 else 0
        info = jax.tree.map(lambda a: np.asarray(a) if lead else np.asarray(a)[None], jax.device_get(info))
        by_client = {n: a[:, :count] for n, a in info.items()}
        for name, value in by_client.items():
            if value.ndim > 2 and value.shape[2] == self.fed.data.slots:
                by_client[name] = value[:, :, self.slot_of_client]
        return state, by_client

    def evaluate(self, state: State, round_: int) -> Record:
        """All declared models of all clients, in the order of client ids."""
        scores = jax.device_get(self._call("evaluate", self._evaluate, (0,), self.env, state))
        lead = (lambda a: a) if self.seeds > 1 else (lambda a: a[None])
        return Record(round_, jax.tree.map(lambda a: lead(np.asarray(a))[:, self.slot_of_client], scores))

    def unseen(self, state: State, data: ClientData, steps: int) -> dict[str, dict[str, Scores]]:
        """Clients that never trained, on a state: see ``engine.unseen.adapt``; leaves ``(seeds, clients)``."""

        def adapt(env: Env, data: ClientData, state: State, key: jax.Array) -> Any:
            return unseen.adapt(self.fed, self.algorithm, env, state, data, key, steps)

        static = (steps, data.num_clients, data.limits, *(leaf.shape for leaf in jax.tree.leaves(data)))
        scores = jax.device_get(self._call(f"unseen {static}", adapt, (None, 0, 0), self.env, data, state, self.key))
        order = np.argsort(np.asarray(jax.device_get(data.ids)))[: data.num_clients]
        return jax.tree.map(lambda a: (a if self.seeds > 1 else a[None])[:, order], scores)

    def artifacts(self, state: State) -> dict[str, np.ndarray]:
        """What the algorithm shows of a state: leaves ``(seeds, ...)``, clients in the order of their ids."""
        function = self.algorithm.artifacts
        if not jax.eval_shape(function, self.env, jax.eval_shape(self._init, self.env, jax.random.key(0))):
            return {}
        found = jax.device_get(self._call("artifacts", function, (0,), self.env, state))
        return {name: self._by_client(a if self.seeds > 1 else a[None]) for name, a in found.items()}

    def _by_client(self, value: np.ndarray) -> np.ndarray:
        for axis in range(1, value.ndim):
            if value.shape[axis] == self.fed.data.slots:
                value = value.take(self.slot_of_client, axis)
        return value

    @property
    def trained(self) -> tuple[Federation, ...]:
        """Federations with the models that a client trains side by side."""
        return self.algorithm.trains or (self.fed,)

    def memory(self) -> dict[str, int]:
        """Bytes of the compiled round program by the compiler's own account: arguments, output, temporaries.

        Raises:
            KeyError: before the first ``advance``, which compiles it.
        """
        stats = self._compiled["advance"].memory_analysis()
        return {
            "arguments": int(stats.argument_size_in_bytes),
            "outputs": int(stats.output_size_in_bytes),
            "temporaries": int(stats.temp_size_in_bytes),
        }


def _distinct(state: State) -> State:
    """The same state with a copy of each array that occurs in it before: an array can be given up only once."""
    leaves, structure = jax.tree.flatten(state)
    first = {id(leaf): place for place, leaf in reversed(list(enumerate(leaves)))}
    own = [leaf if first[id(leaf)] == place else jnp.copy(leaf) for place, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, own)
