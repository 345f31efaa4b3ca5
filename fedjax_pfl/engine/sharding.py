"""Clients over devices: one mesh axis, ``clients``, along which client rows and client data are split."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_pfl.data.clients import ClientData

AXIS = "clients"
ROWS = P(AXIS)
COMMON = P()


def client_mesh(devices: int) -> Mesh | None:
    """A mesh of so many devices along ``clients``; None for one device.

    Where JAX has not started yet, a CPU becomes so many devices, at most one a core.

    Raises:
        ValueError: fewer devices are there.
    """
    divide_cpu(devices)
    found = jax.device_count()
    if devices < 1 or devices > found:
        raise ValueError(
            f"devices must be 1 to {found} here, found {devices}; to try more on a CPU than it has cores, or after JAX "
            f"has started, start Python with XLA_FLAGS=--xla_force_host_platform_device_count={max(devices, 2)}"
        )
    if devices == 1:
        return None
    return jax.make_mesh((devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def divide_cpu(devices: int) -> None:
    """Let JAX, where it has not started yet and nobody has said how many, see the CPU as so many devices."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    told = "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    told = told or jax.config.values["jax_num_cpu_devices"] > 0
    if devices > 1 and not told:
        with contextlib.suppress(RuntimeError):  # it has started
            jax.config.update("jax_num_cpu_devices", min(devices, cores))


def data_spec(data: ClientData) -> ClientData:
    """How client data is split over devices: everything along ``clients``, except the tables that samples share."""
    return dataclasses.replace(data, examples=ROWS, train=ROWS, validation=ROWS, test=ROWS, ids=ROWS, tables=COMMON)  # type: ignore[arg-type]


def place_data(data: ClientData, mesh: Mesh | None) -> ClientData:
    """Host-side client data, dealt to as many blocks as the mesh has devices, on the devices."""
    own = place(dataclasses.replace(data, tables={}), mesh, ROWS)
    return dataclasses.replace(own, tables=place(data.tables, mesh, COMMON))


def place(tree: Any, mesh: Mesh | None, spec: P) -> Any:
    """Host arrays on the devices, split as ``spec`` says; every process holds the whole host array.

    One CPU device shares the memory of arrays that are aligned (see ``data/memory.py``): they must not change any more.
    """
    if mesh is None:
        return jax.device_put(tree)
    sharding = NamedSharding(mesh, spec)

    def leaf(value: Any) -> jax.Array:
        value = np.asarray(value)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return jax.tree.map(leaf, tree)


def constrain(tree: Any, mesh: Mesh | None, spec: P) -> Any:
    """Ask the compiler for a layout inside a compiled function (nothing on one device)."""
    if mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, spec))


def per_shard(run: Callable[..., Any], mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """``run`` on every shard's own part; on one device ``run`` itself."""
    if mesh is None:
        return run
    return jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
