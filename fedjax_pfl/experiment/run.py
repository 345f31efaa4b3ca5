"""A run from its configuration to its folder, and the continuation of one that was cut short."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

from fedjax_pfl.engine.federation import Algorithm, Federation
from fedjax_pfl.engine.simulation import Simulation
from fedjax_pfl.engine.unseen import require_newcomer
from fedjax_pfl.experiment import folder as files
from fedjax_pfl.experiment import memory, toml
from fedjax_pfl.experiment.checkpoint import Checkpoints
from fedjax_pfl.experiment.config import Config, MachineConfig
from fedjax_pfl.experiment.console import Display, Quiet, size
from fedjax_pfl.experiment.environment import environment, float64
from fedjax_pfl.experiment.record import Recorder
from fedjax_pfl.experiment.resuming import check_partition, stored_config, with_own_partition
from fedjax_pfl.experiment.session import Outcome, Session
from fedjax_pfl.experiment.setup import Extras, build_algorithm, build_federation, completed, with_local_work


class Prepared(NamedTuple):
    """A run whose every option has been checked and nothing of which has been compiled."""

    config: Config
    fed: Federation
    extras: Extras
    algorithm: Algorithm
    simulation: Simulation


def prepare(config: Config, beside: Prepared | None = None) -> Prepared:
    """Load the data and build everything.

    beside: a run on the same data, model and machine, whose federation is shared.

    Raises:
        ValueError: an option, the data, the partition or the model cannot be used. FileNotFoundError: missing data.
    """
    config.check()
    if beside is None:
        fed, extras = build_federation(config)
    else:
        fed, extras = with_local_work(beside.fed, config), beside.extras
    config = completed(config, extras)
    algorithm = build_algorithm(config, fed)
    if extras.unseen is not None:
        require_newcomer(algorithm)
    r = config.rounds
    simulation = Simulation(fed, algorithm, rounds=r.rounds, eval_every=r.eval_every, seed=r.seed, seeds=r.seeds)
    return Prepared(config, fed, extras, algorithm, simulation)


def run_experiment(
    config: Config, out: Path | None = None, *, display: Display | None = None, command: str | None = None,
    prepared: Prepared | None = None,
) -> Outcome:  # fmt: skip
    """Run a configuration and write its folder (default: ``runs/<data>-<algorithm>-N``).

    command: what the user typed, for the summary.

    Raises:
        ValueError: as ``prepare``, or a folder that holds a run; nothing has been written then.
    """
    display = display or Quiet()
    if out is not None:
        files.refuse_existing(out)
    prepared = prepared or prepare(config)
    config = prepared.config  # complete: with the model and the partition that the data asks for
    predicted = _announce(prepared, display)
    path = files.create(out, f"{config.data.data.partition(':')[0].replace('/', '-')}-{config.algorithm}")
    display.note(f"writing to {path}")
    session = _session(prepared, path, display, predicted, command or default_command(path))
    with session.guarded():
        files.write_text(path / files.CONFIG, toml.dumps(config))
        files.write_json(path / files.ENVIRONMENT, environment())
        prepared.extras.partition.save(path / files.PARTITION)
    return session.run(None, 0)


def resume(
    path: Path, *, display: Display | None = None, command: str | None = None, prepared: Prepared | None = None
) -> Outcome:
    """Continue the run in a folder from its last sound checkpoint; the end is that of a run without a break.

    Raises:
        UserError: no run there, one that has finished, or checkpoints of another configuration.
    """
    display = display or Quiet()
    config = prepared.config if prepared else with_own_partition(stored_config(path), path)
    prepared = prepared or prepare(config)
    check_partition(path, prepared.extras.partition)
    predicted = _announce(prepared, display)
    session = _session(prepared, path, display, predicted, command or default_command(path))
    with session.guarded():
        found = session.checkpoints.restore(prepared.simulation.init(), display.warn)
        if found is None:
            display.note(f"{path} has no checkpoint yet: starting from round 0")
            session.recorder.forget()
        else:
            display.note(f"resuming {path} after round {found.round}")
            session.recorder.restore(found.round)
    return session.run(found.state, found.round) if found else session.run(None, 0)


def default_command(path: Path) -> str:
    """How to repeat a run that was not started by a command."""
    return f"fedjax-pfl run --config {path / files.CONFIG}"


def _announce(prepared: Prepared, display: Display) -> memory.Predicted:
    config, partition = prepared.config, prepared.extras.partition
    sizes = partition.sizes("train")
    models = {one.model.name: f"{one.model.name} with {one.model.count():,}" for one in prepared.simulation.trained}
    display.note(
        f"{config.algorithm} on {prepared.extras.source.name}: {len(partition)} clients with {sizes.min()} to "
        f"{sizes.max()} training samples, model {' and '.join(models.values())} parameters"
    )
    display.note(f"data from {prepared.extras.source.where}")
    if partition.unseen is not None:
        display.note(f"{len(partition.unseen)} more clients are held out")
    for text in partition.notes:
        display.note(f"partition: {text}")
    empty = int((partition.sizes("test") == 0).sum())
    if empty == len(partition):
        display.warn("no client has test samples: test accuracy is not measured (see --test-fraction)")
    elif empty:
        display.warn(f"{empty} clients have no test samples: they are left out of the means of test accuracy")
    predicted = memory.predicted_bytes(prepared.simulation)
    display.note(
        f"predicted memory: {size(predicted.total)} (data {size(predicted.data)}, state {size(predicted.state)}, "
        f"clients at work {size(predicted.chunk)})"
    )
    return predicted


def _session(prepared: Prepared, path: Path, display: Display, predicted: memory.Predicted, command: str) -> Session:
    config, partition = prepared.config, prepared.extras.partition
    seeds = list(range(config.rounds.seed, config.rounds.seed + config.rounds.seeds))
    layout = MachineConfig(devices=config.machine.devices)
    data = dataclasses.replace(config.data, partition_file=None)  # its content counts, below, and not its place
    rounds = dataclasses.replace(config.rounds, on_nonfinite="stop")  # may change when a run is resumed
    identity = {
        "configuration": toml.digest(dataclasses.replace(config, machine=layout, rounds=rounds, data=data)),
        "partition": partition.sha256,
        "precision": "float64" if float64() else "float32",
    }  # fmt: skip
    return Session(
        config, prepared.simulation, prepared.extras, path, Recorder(path, seeds, partition, prepared.algorithm.floats),
        Checkpoints(path / files.CHECKPOINTS, identity), display, predicted, command,
    )  # fmt: skip
