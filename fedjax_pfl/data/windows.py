"""Samples that are windows of one long array, which is stored once however much the windows overlap."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

Array = Any


@dataclasses.dataclass(frozen=True)
class Windows:
    """Reader of ``length`` neighbouring tokens of the table ``text``: starts ``(...)`` -> ``(..., length)`` int32.

    Sources point at the start of a window in ``x``; a window must not reach beyond the table.
    """

    length: int

    def __call__(self, x: Array, tables: Mapping[str, Array]) -> Array:
        return jnp.asarray(tables["text"])[x[..., None] + np.arange(self.length, dtype=np.int32)].astype(jnp.int32)
