"""Samples that are rows of a table which they share, such as the nodes of one graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

Array = Any


@dataclasses.dataclass(frozen=True)
class Rows:
    """Reader of rows of a table ``(N, ...)``: row numbers ``(...)`` -> ``(..., ...)`` of the table's own dtype."""

    table: str

    def __call__(self, x: Array, tables: Mapping[str, Array]) -> Array:
        return jnp.asarray(tables[self.table])[x]
