"""Rounds as a loop inside one compiled program, and the host loop around it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_pfl import evaluation
from fedjax_pfl.engine import random
from fedjax_pfl.engine.cohort import Cohort
from fedjax_pfl.engine.federation import Algorithm, Env, Federation
from fedjax_pfl.engine.sharding import COMMON, constrain
from fedjax_pfl.evaluation import Scores, state_spec

State = Any
Info = dict[str, Any]


class NonFiniteError(ArithmeticError):
    """A client's update was not finite; the state before it is kept. ``failures``: (seed, round, client) triples."""

    def __init__(self, failures: Sequence[tuple[int, int, int]]) -> None:
        self.failures = list(failures)
        seed, round_, client = self.failures[0]
        super().__init__(
            f"the update of client {client} in round {round_} is not finite (seed number {seed}; {len(self.failures)} "
            "such updates in these rounds); the client kept its last model. Lower the learning rate, or count such "
            "updates and go on with on_nonfinite='continue'"
        )


def one_round(
    fed: Federation, algorithm: Algorithm, env: Env, state: State, key: jax.Array, round_: Any, rounds: Any
) -> tuple[State, Info]:
    """Round number ``round_`` of ``rounds`` from the root key: cohort, local work, aggregation. Pure, traceable.

    The Info gains ``trains`` (sampled) and ``failed`` (worked, but not to a finite result), ``(slots,)`` bool.
    """
    cohort: Cohort = fed.participation.draw(env.data, key, round_, rounds)
    new, info = algorithm.round(env, state, cohort, random.stream(key, random.ROUND, round_))
    failed = cohort.trains & cohort.reports & ~info["reported"]
    return new, info | {"trains": cohort.trains, "failed": failed}


def rollout(
    fed: Federation, algorithm: Algorithm, env: Env, state: State, key: jax.Array, rounds: int, first: int = 0
) -> tuple[State, Info]:
    """``rounds`` rounds as a static scan: with ``fed.differentiable`` a gradient flows through all of them.

    Returns the state and the Info stacked over rounds.
    """
    numbers = jnp.arange(first, first + rounds, dtype=jnp.int32)
    return jax.lax.scan(lambda s, r: one_round(fed, algorithm, env, s, key, r, first + rounds), state, numbers)


class Record(NamedTuple):
    """One evaluation: after how many rounds, and ``split -> kind -> Scores`` with leaves ``(seeds, clients)``."""

    round: int
    scores: dict[str, dict[str, Scores]]


class Progress(NamedTuple):
    """What a callback sees between chunks of rounds: the newest record, Info of the chunk's rounds (leaves
    ``(seeds, rounds, ...)``), the state on the devices, and wall seconds so far."""

    round: int
    rounds: int
    record: Record
    info: Info
    state: State
    seconds: float


@dataclasses.dataclass
class Result:
    """What ``simulate`` returns.

    state: the last state (leaves with a leading seed axis where seeds > 1). records: all evaluations.
    info: per-round diagnostics, leaves ``(seeds, rounds, ...)``. compile_s, run_s: seconds spent.
    client_steps, samples: local steps and samples trained on, all seeds. floats_up, floats_down: integers, one seed's
    mean. failures: (seed, round, client) of updates that were not finite.
    """

    state: State
    records: list[Record]
    info: Info
    compile_s: float
    run_s: float
    client_steps: int
    samples: int
    floats_up: int
    floats_down: int
    failures: list[tuple[int, int, int]]


class Simulation:
    """The compiled programs of one experiment: ``init``, ``advance`` (up to ``eval_every`` rounds), ``evaluate``.

    seeds: runs at once under ``vmap``, with root keys ``seed, seed + 1, ...``. hyper: replaces numeric
    hyper-parameters by name; a value of shape ``(seeds,)`` gives each run its own.

    Raises:
        ValueError: rounds, eval_every or seeds below 1; an unknown hyper-parameter.
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
            spec = state_spec(self.algorithm, new)
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
        if name in ("evaluate", "artifacts"):
            return everywhere
        state = jax.eval_shape(self._init, self.env, jax.random.key(0))
        lead = (None,) if self.seeds > 1 else ()
        spec = [NamedSharding(mesh, P(*lead, *s)) for s in state_spec(self.algorithm, state)]
        state = type(state)(*(None if a is None else s for a, s in zip(state, spec, strict=True)))
        return state if name == "init" else (state, everywhere)

    def init(self) -> State:
        """The state before the first round."""
        if self.fed.mesh is not None:  # compiled whole, so that no device ever holds all clients' rows
            return self._call("init", self._init, (0,), self.env, self.key)
        began = time.perf_counter()  # op by op: methods that share a model then compile its initialisers once
        state = self._over_seeds(self._init, (0,))(self.env, self.key)
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

    def memory(self) -> dict[str, int]:
        """Bytes of the compiled round program by the compiler's own account: arguments, output, temporaries."""
        stats = self._compiled["advance"].memory_analysis()
        return {
            "arguments": int(stats.argument_size_in_bytes),
            "outputs": int(stats.output_size_in_bytes),
            "temporaries": int(stats.temp_size_in_bytes),
        }


# Called after every evaluation, the one before the first round included (its Info is empty); True ends the run.
Callback = Callable[[Progress], bool | None]


def simulate(
    fed: Federation,
    algorithm: Algorithm,
    *,
    rounds: int,
    eval_every: int = 5,
    seed: int = 0,
    seeds: int = 1,
    hyper: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    on_nonfinite: str = "stop",
    state: State = None,
    first: int = 0,
) -> Result:
    """Run an experiment: rounds in compiled chunks of ``eval_every``, an evaluation and the callbacks after each.

    state, first: resume from the state after ``first`` rounds. on_nonfinite: ``stop`` raises at the end of the chunk
    in which a client's update was not finite, after the callbacks; ``continue`` counts such updates.

    Raises:
        ValueError: an option out of range. NonFiniteError: see ``on_nonfinite``.
    """
    if on_nonfinite not in ("stop", "continue"):
        raise ValueError(f"on_nonfinite must be 'stop' or 'continue', found {on_nonfinite!r}")
    simulation = Simulation(fed, algorithm, rounds=rounds, eval_every=eval_every, seed=seed, seeds=seeds, hyper=hyper)
    return run(simulation, callbacks=callbacks, on_nonfinite=on_nonfinite, state=state, first=first)


def run(
    simulation: Simulation, *, callbacks: Sequence[Callback] = (), on_nonfinite: str = "stop", state: State = None,
    first: int = 0,
) -> Result:  # fmt: skip
    """The host loop of ``simulate`` on programs that may be compiled already."""
    state = simulation.init() if state is None else state
    began = time.perf_counter()
    compiled = simulation.compile_s
    records: list[Record] = []
    infos: list[Info] = []
    failures: list[tuple[int, int, int]] = []

    def seconds() -> float:
        return time.perf_counter() - began - (simulation.compile_s - compiled)

    def evaluate(info: Info) -> bool:
        records.append(simulation.evaluate(state, done))
        progress = Progress(done, simulation.rounds, records[-1], info, state, seconds())
        return any([callback(progress) for callback in callbacks])  # noqa: C419 (a list: all are called)

    done = first
    stop = first == 0 and evaluate({})
    while done < simulation.rounds and not stop:
        count = min(simulation.length - done % simulation.length, simulation.rounds - done)
        state, info = simulation.advance(state, done, count)
        failed = [(int(s), done + int(r), int(c)) for s, r, c in np.argwhere(info["failed"])]
        failures += failed
        done += count
        infos.append(info)
        stop = evaluate(info)
        if failed and on_nonfinite == "stop":
            raise NonFiniteError(failed)
    info = {name: np.concatenate([one[name] for one in infos], axis=1) for name in infos[0]} if infos else {}
    return _result(simulation, state, records, info, seconds(), failures)


def _result(
    simulation: Simulation, state: State, records: list[Record], info: Info, seconds: float,
    failures: list[tuple[int, int, int]],
) -> Result:  # fmt: skip
    fed, (up, down) = simulation.fed, simulation.algorithm.floats
    size = np.asarray(jax.device_get(fed.data.train.count))[simulation.slot_of_client].astype(np.int64)
    trained = info["reported"].sum((0, 1)).astype(np.int64) if info else np.zeros_like(size)
    steps = -(-size // fed.batch_size) * fed.local_epochs
    seeds = simulation.seeds
    received = int(info["trains"].sum()) if info else 0
    return Result(
        state, records, info, simulation.compile_s, seconds, int((trained * steps).sum()),
        int((trained * size).sum()) * fed.local_epochs, int(trained.sum()) * up // seeds, received * down // seeds,
        failures,
    )  # fmt: skip
