"""How much memory a run will need, before it is compiled, and how much it has needed."""

from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from fedjax_pfl.data.pointing import Pointing
from fedjax_pfl.engine import local, tree
from fedjax_pfl.engine.federation import Federation
from fedjax_pfl.engine.simulation import Simulation


class Predicted(NamedTuple):
    """Bytes of the client data, of the algorithm's state (all seeds), and of one chunk of clients at work."""

    data: int
    state: int
    chunk: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.data + self.state + self.chunk


def predicted_bytes(simulation: Simulation) -> Predicted:
    """An estimate from shapes alone: nothing is compiled or allocated.

    The chunk counts every intermediate of one training step of one client (its models, gradients, activations), or of
    one evaluation batch where that is more, times the clients trained at once; the compiler reuses some of it.
    """
    fed, seeds = simulation.fed, simulation.seeds
    state = jax.eval_shape(simulation.algorithm.init, simulation.env, jax.random.key(0))
    chunk = min(fed.chunk, fed.data.slots)
    trained = Counter(simulation.trained)
    step = sum(times * _step_bytes(one) for one, times in trained.items())
    work = max(step, *map(_evaluation_bytes, trained)) * chunk * seeds
    return Predicted(tree.nbytes(fed.data), tree.nbytes(state) * seeds, work)


def peak_bytes() -> tuple[int, str]:
    """The largest memory use so far and where the figure comes from: the device, or the process on a CPU."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    known = [int(peak) for peak in peaks if peak]
    if known:
        return sum(known), "device"
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process (maximum resident size)"


def _batch(fed: Federation, size: int) -> dict[str, Any]:
    batch = jax.eval_shape(lambda data, rows: data.gather(rows), fed.data, jax.ShapeDtypeStruct((size,), jnp.int32))
    return batch | {"mask": jax.ShapeDtypeStruct((size,), bool)}


def _step_bytes(fed: Federation) -> int:
    def one(variables: Any, batch: Any, lr: Any, key: Any) -> Any:
        return local.step(fed, local.begin(fed, lr, variables), batch, key)

    lr = jax.ShapeDtypeStruct((), jnp.result_type(float))
    size = min(fed.batch_size, max(fed.data.limit("train"), 1))
    return _jaxpr_bytes(one, fed.model.shapes(), _batch(fed, size), lr, jax.random.key(0))


def _evaluation_bytes(fed: Federation) -> int:
    def one(variables: Any, batch: Any) -> Any:
        return fed.model.apply(variables, fed.prepare(batch), mask=batch["mask"], key=None, train=False)[0]

    size = max((fed.evaluation_work(split).batch_size for split in ("validation", "test")), default=1)
    return _jaxpr_bytes(one, fed.model.shapes(), _batch(fed, size))


def _jaxpr_bytes(function: Any, *shapes: Any) -> int:
    closed = jax.make_jaxpr(function)(*shapes)
    inputs = sum(_nbytes(leaf) for shape in shapes for leaf in jax.tree.leaves(_without_tables(shape)))
    return inputs + sum(_nbytes(var.aval) for eqn in _equations(closed.jaxpr) for var in eqn.outvars)


def _without_tables(shapes: Any) -> Any:
    """A batch of graphs points into tables, which all clients share and which count as data."""
    if isinstance(shapes, dict) and isinstance(shapes.get("x"), Pointing):
        return shapes | {"x": shapes["x"].rows}
    return shapes


def _equations(jaxpr: Any) -> Iterator[Any]:
    """The innermost equations: those that hold others are counted by their content."""
    for eqn in jaxpr.eqns:
        inner = list(jaxprs_in_params(eqn.params))
        if not inner:
            yield eqn
        for one in inner:
            yield from _equations(one)


def _nbytes(aval: Any) -> int:
    return int(aval.size) * aval.dtype.itemsize if hasattr(aval, "size") else 0
