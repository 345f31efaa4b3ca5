"""Clients over devices: nobody ever holds the whole stack, by the compiled programs' own account of memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from common import FEATURES, Case, Net, build, tiny_data

import fedjax_pfl as fp
from fedjax_pfl.data.clients import shard
from fedjax_pfl.engine import tree
from fedjax_pfl.engine.sharding import ROWS, client_mesh, place
from fedjax_pfl.engine.simulation import Simulation

DEVICES = 8


def wide_simulation(case: Case, seeds: int = 1) -> tuple[Simulation, int]:
    """Forty-five clients of a wide model on eight devices, and the bytes of all their models."""
    mesh = client_mesh(DEVICES)
    data = place(shard(tiny_data((3,) * 45), DEVICES), mesh, ROWS)
    model = fp.flax_model(Net(hidden=4001), np.zeros((1, FEATURES)))
    fed = fp.Federation(model, data, batch_size=3, client_chunk=1, mesh=mesh)
    return Simulation(fed, build(case, fed), rounds=2, eval_every=2, seeds=seeds), 45 * tree.nbytes(model.shapes())


@pytest.mark.parametrize(
    "case", [Case("fedper"), Case("fedapa"), Case("fedapa", {"centring": "cosine"}), Case("fixed_mixing")],
    ids=lambda case: case.id,
)  # fmt: skip
def test_no_program_needs_a_device_that_holds_all_clients(case: Case) -> None:
    simulation, stack = wide_simulation(case)
    state = simulation.init()
    simulation.advance(state, 0, 2)
    simulation.evaluate(simulation.init(), 0)
    for name, program in simulation._compiled.items():
        memory = program.memory_analysis()
        held = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
        assert held - memory.alias_size_in_bytes < stack, f"{name} holds {held / stack:.2f} of the stack on one device"
        assert memory.temp_size_in_bytes < 0.75 * stack, f"{name}: {memory.temp_size_in_bytes / stack:.2f}"


def test_the_check_above_can_fail() -> None:
    """A mixture without a layout gathers the stack: the compiler's account shows it."""
    mesh = client_mesh(DEVICES)
    stack = place(np.ones((48, 4001), np.float32), mesh, ROWS)
    weights = place(np.eye(48, dtype=np.float32), mesh, ROWS)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    gathered = jax.jit(lambda w, s: w @ s, out_shardings=everywhere).lower(weights, stack).compile()
    memory = gathered.memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes > stack.nbytes


def test_seeds_and_devices_together() -> None:
    simulation, _ = wide_simulation(Case("fedapa"), seeds=2)
    state, info = simulation.advance(simulation.init(), 0, 2)
    assert info["loss"].shape == (2, 2)
    assert len(state.theta["params/dense1/kernel"].sharding.device_set) == DEVICES
    assert state.A.shape == (2, 48, 48)
    assert simulation.evaluate(state, 2).scores["test"]["received"].accuracy.shape == (2, 45)


def test_too_many_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="devices must be 1 to 8"):
        client_mesh(9)


def test_a_cpu_becomes_as_many_devices_as_it_has_cores() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    script = f"from fedjax_pfl.engine.sharding import client_mesh; client_mesh({cores + 1})"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    root = str(Path(fp.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment | {"PYTHONPATH": root}, capture_output=True, text=True
    )
    assert f"devices must be 1 to {cores} here, found {cores + 1}; to try more" in done.stderr
