"""What batches of rows have in common that point into tables, and stand where a model expects an array."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


class Pointing:
    """A batch with ``rows (B, columns)`` into tables: shape and type are those of the rows."""

    rows: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rows."""
        return jnp.shape(self.rows)

    @property
    def dtype(self) -> Any:
        """The type of the rows."""
        return self.rows.dtype
