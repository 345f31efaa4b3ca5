"""The host loop of an experiment: rounds in compiled chunks, an evaluation and the callbacks after each."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl.engine.federation import Algorithm, Federation
from fedjax_pfl.engine.rounds import Info, State, floats_sent
from fedjax_pfl.engine.simulation import Record, Simulation


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


class Progress(NamedTuple):
    """What a callback sees between chunks of rounds: the newest record, Info of the chunk's rounds (leaves
    ``(seeds, rounds, ...)``), the state on the devices (the next rounds reuse its memory: copy what is to be kept), and
    wall seconds so far."""

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

    seed, seeds, hyper: see ``Simulation``. state, first: resume from the state after ``first`` rounds, whose arrays are
    given up. on_nonfinite: ``stop`` raises at the end of the chunk
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
    if first > simulation.rounds or (first > 0 and state is None):
        raise ValueError(f"cannot go on from round {first} of {simulation.rounds} without the state after it")
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
    fed = simulation.fed
    size = np.asarray(jax.device_get(fed.data.train.count))[simulation.slot_of_client].astype(np.int64)
    trained = info["reported"].sum((0, 1)).astype(np.int64) if info else np.zeros_like(size)
    steps = -(-size // fed.batch_size) * fed.local_epochs
    seeds = simulation.seeds
    sent = floats_sent(info, simulation.algorithm.floats) if info else {}
    up, down = (int(sent[name].sum()) // seeds if sent else 0 for name in ("floats_up", "floats_down"))
    return Result(
        state, records, info, simulation.compile_s, seconds, int((trained * steps).sum()),
        int((trained * size).sum()) * fed.local_epochs, up, down, failures,
    )  # fmt: skip
