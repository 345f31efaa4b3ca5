"""FedKD: Communication-Efficient Federated Learning via Knowledge Distillation.

Wu, Wu, Lyu, Huang, Xie; Nature Communications 2022; https://doi.org/10.1038/s41467-022-29763-x

    server: student s^0; every client i: teacher t_i and a d x d map W_i
    each round t, each client i of the cohort S: s_i <- s^t, then E epochs of SGD, each on its own loss,
        A = CE(t_i) + CE(s_i)
        teacher: CE(t_i) + [KL(p_s || p_t) + MSE(h_t, h_s W_i)] / A
        student and W_i: CE(s_i) + [KL(p_t || p_s) + MSE(h_t, h_s W_i)] / A
        up:   U, sigma, V of every matrix of s_i - s^t, of the smallest rank that keeps the energy T
    down: the same of the mean of what arrived, clients weighing equally;  s^{t+1} = s^t + what arrives of it
    T rises linearly from 0.95 to 0.98 over the run

Ours: teacher and student have the same architecture and start equal, W_i starts as the identity (h are the features in
front of the head); A is a weight, through which no loss is descended (else a loss above A^2 in the brackets would turn
cross-entropy into its opposite); each gradient is that of a loss in its own parameters; kernels of convolutions are
``(kh kw cin, cout)`` matrices; biases, vectors and running statistics (policy ``average``) are sent whole, as is a
matrix that its factors outgrow. Gradients of t, s and W are clipped at norm 10 each, as in public ports.

``personal`` is the teacher. ``received`` and ``shared`` are the student: the server sends nothing else. The Info's
``floats_up`` and ``floats_down`` are the floats of one participant in that round (means); the method's ``floats`` are
their upper bound. A client that was absent would have to fetch what it missed, which is not counted. A round has a
derivative wherever no rank jumps: the truncation is the only point that is not differentiable.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.aggregation import safe_divide
from fedjax_pfl.algorithms._distillation import Carry, Constants, distil, feature_size, start
from fedjax_pfl.algorithms._global import global_model
from fedjax_pfl.algorithms._lowrank import compress
from fedjax_pfl.engine import local, tree
from fedjax_pfl.engine.clients import Client, run_clients
from fedjax_pfl.engine.cohort import Cohort
from fedjax_pfl.engine.federation import Algorithm, Env, Federation
from fedjax_pfl.models.model import Variables, partition


class State(NamedTuple):
    """shared: the student s. Rows, leaves ``(slots, ...)``: teacher; W ``(slots, d, d)``; private, the student's
    running statistics that stay at their client, or None."""

    shared: Variables
    teacher: Variables
    W: jax.Array
    private: Variables | None


@dataclasses.dataclass(frozen=True)
class Options:
    """FedKD (Wu et al. 2022): a private teacher and a shared student learn from each other; updates travel as SVDs."""

    energy_first: float = 0.95
    """Share T of an update's squared singular values that is sent in the first round."""
    energy_last: float = 0.98
    """The same at the end of the run; 1 sends everything."""
    clip: float = 10.0
    """Largest norm of a gradient, of teacher, student and W each."""

    def check(self) -> None:
        """Refuse what is out of range.

        Raises:
            ValueError: naming the option.
        """
        if not (0 < self.energy_first <= 1 and 0 < self.energy_last <= 1):
            raise ValueError(
                f"fedkd: energy_first and energy_last must be in (0, 1]: {self.energy_first}, {self.energy_last}"
            )
        if not self.clip > 0:
            raise ValueError(f"fedkd: clip must be positive, found {self.clip}")


def fedkd(fed: Federation, options: Options = Options()) -> Algorithm:
    """FedKD in a federation.

    Raises:
        ValueError: an option out of range, or a model without features in front of its head.
    """
    options.check()
    fed.model.require_features("fedkd")

    def init(env: Env, key: jax.Array) -> State:
        variables = fed.model.init(key)
        private, shared = partition(variables, fed.stays)
        W = jnp.eye(feature_size(fed), dtype=jnp.result_type(float))
        teacher, W, private = tree.broadcast((variables, W, private), env.data.slots)
        return State(shared, teacher, W, private or None)

    def begin(client: Client, row: Any, common: Any) -> Carry:
        (teacher, W, private), (shared, lr, clip, energy) = row, common
        return start(fed, teacher, shared | (private or {}), W, Constants(lr, clip, energy, shared))

    def step(carry: Carry, batch: Any, t: jax.Array, key: jax.Array) -> Carry:
        return distil(fed, carry, batch, key)

    def end(client: Client, carry: Carry, row: Any) -> Any:
        private, student = partition(carry.student, fed.stays)
        sent, floats = compress(tree.subtract(student, carry.constants.received), carry.constants.energy)
        metrics = local.Metrics(client.samples, carry.loss, carry.samples)
        return (carry.teacher, carry.W, private or None), (sent, floats, metrics)

    def round_(env: Env, state: State, cohort: Cohort, key: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        first, last = env.hyper["energy_first"], env.hyper["energy_last"]
        energy = first + (last - first) * cohort.progress
        rows, (sums, floats, metrics), reported = run_clients(
            begin, step, end, rows=(state.teacher, state.W, state.private),
            common=(state.shared, fed.learning_rate(env, cohort.round), env.hyper["clip"], energy),
            data=env.data, work=fed.work(), key=key, who=cohort.trains & cohort.reports,
        )  # fmt: skip
        count = reported.sum().astype(floats.dtype)
        down, floats_down = compress(jax.tree.map(lambda leaf: safe_divide(leaf, count), sums), energy)
        student = tree.where(reported.any(), tree.add(state.shared, down), state.shared)
        sent = {"floats_up": safe_divide(floats, count), "floats_down": jnp.where(reported.any(), floats_down, 0)}
        return State(student, *rows), local.information(metrics, reported) | sent

    def personal(env: Env, state: State, i: jax.Array) -> Variables:
        return tree.take(state.teacher, i)

    delivery = global_model(fed, fed.stays)
    return Algorithm(
        "fedkd", init, round_, delivery.received, personal, delivery.shared, fed.scores,
        rows=("teacher", "W", "private"), floats=delivery.floats, hyper=fed.hyper(**dataclasses.asdict(options)),
        newcomer=delivery.newcomer, trains=(fed, fed),
    )  # fmt: skip
