"""Who takes part in a round: sampling and dropout as two masks."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.data.clients import ClientData
from fedjax_pfl.engine import random


class Cohort(NamedTuple):
    """The participants of one round.

    trains: ``(slots,)`` bool, sampled clients; reports: ``(slots,)`` bool, those of them that do not drop out.
    round: int32, counted from 0; progress: float in [0, 1), ``round / rounds`` (schedules read these two).
    """

    trains: jax.Array
    reports: jax.Array
    round: jax.Array
    progress: jax.Array


@dataclasses.dataclass(frozen=True)
class Participation:
    """How cohorts are drawn: ``join_ratio`` of the clients (at least one), each dropping out with ``dropout``.

    With ``join_ratio_low`` the number of participants is uniform between the two ratios.

    Raises:
        ValueError: a ratio outside its range.
    """

    join_ratio: float = 1.0
    dropout: float = 0.0
    join_ratio_low: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.join_ratio <= 1:
            raise ValueError(f"join ratio must be in (0, 1], found {self.join_ratio}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), found {self.dropout}")
        if self.join_ratio_low is not None and not 0 < self.join_ratio_low <= self.join_ratio:
            raise ValueError(f"the low join ratio must be in (0, {self.join_ratio}], found {self.join_ratio_low}")

    def most(self, clients: int) -> int:
        """The largest number of participants of a round (static)."""
        return _share(self.join_ratio, clients)

    def draw(self, data: ClientData, key: jax.Array, round_: jax.Array, rounds: jax.Array | int) -> Cohort:
        """The cohort of a round, a pure function of (root key, round, global client ids)."""
        trains = self._sampled(data, random.stream(key, random.COHORT, round_))
        reports = trains
        if self.dropout > 0:
            keys = random.per_client(random.stream(key, random.DROPOUT, round_), data.ids)
            reports = trains & (jax.vmap(jax.random.uniform)(keys) >= self.dropout)
        progress = jnp.asarray(round_, jnp.result_type(float)) / jnp.maximum(rounds, 1)
        return Cohort(trains, reports, jnp.asarray(round_, jnp.int32), progress)

    def _sampled(self, data: ClientData, key: jax.Array) -> jax.Array:
        clients, most = data.num_clients, self.most(data.num_clients)
        least = most if self.join_ratio_low is None else _share(self.join_ratio_low, clients)
        if least == clients:
            return data.real  # no draw: the mask does not depend on the key, so neither do trip counts
        words = random.bits(random.per_client(key, data.ids))
        slots = jnp.arange(data.slots, dtype=jnp.int32)
        _, _, _, order = jax.lax.sort((~data.real, words, data.ids, slots), num_keys=3)
        number: jax.Array | int = most
        if least < most:
            number = jax.random.randint(jax.random.fold_in(key, clients), (), least, most + 1)
        return jnp.zeros(data.slots, bool).at[order].set(slots < number)


def _share(ratio: float, clients: int) -> int:
    return max(1, round(ratio * clients))


def everyone(data: ClientData, round_: int = 0, rounds: int = 1) -> Cohort:
    """The cohort in which every client trains and reports, for a federation with ``join_ratio`` 1.

    With a smaller ratio the compiled work has room for ``Participation.most`` clients: the smallest would not report.
    """
    return Participation().draw(data, jax.random.key(0), jnp.int32(round_), rounds)
