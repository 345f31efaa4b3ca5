"""Normalisation layers for clients that are stacked and batches that are padded; variables named as in `flax.linen`.

`flax.linen.BatchNorm` takes a mask, and its statistics of the real samples are right under `jax.vmap`, but a batch
without a real sample makes its running statistics NaN: clients that have run out of batches would lose their model.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn


class BatchNorm(nn.BatchNorm):
    """`flax.linen.BatchNorm` over real samples only: `(B, ..., C)` -> the same shape.

    Variables `scale`, `bias`, and `mean`, `var` in `batch_stats`, `(C,)` each.  In training the statistics are those
    of the samples that `mask (B,)` marks (None for all), over space too; the variance is biased, in the running
    statistics as well.  A batch without a real sample leaves the running statistics as they are.
    Ioffe and Szegedy, "Batch normalization", ICML 2015.
    """

    momentum: float = 0.9
    use_fast_variance: bool = False  # E[x^2] - E[x]^2 cancels for features far from zero

    def __call__(  # type: ignore[override]
        self, x: jax.Array, use_running_average: bool | None = None, *, mask: jax.Array | None = None
    ) -> jax.Array:
        running = nn.merge_param("use_running_average", self.use_running_average, use_running_average)
        if running or mask is None:
            return super().__call__(x, running)
        if mask.shape != x.shape[:1]:
            raise ValueError(f"BatchNorm {self.name}: mask {mask.shape} does not mark the samples of {x.shape}")
        before = dict(self.variables.get("batch_stats", {}))
        real = mask.any()
        every = (mask | ~real).reshape(-1, *(1,) * (x.ndim - 1))
        y = super().__call__(x, False, mask=every)
        for name, old in before.items():
            self.put_variable("batch_stats", name, jnp.where(real, self.get_variable("batch_stats", name), old))
        return y


class GroupNorm(nn.GroupNorm):
    """`flax.linen.GroupNorm`: `(B, ..., C)` -> the same shape; parameters `scale` and `bias` `(C,)`.

    Mean and variance are those of one sample's group of channels, over space: no other sample enters, so padding needs
    no mask.  Wu and He, "Group normalization", ECCV 2018.
    """

    use_fast_variance: bool = False

    def __call__(self, x: jax.Array) -> jax.Array:  # type: ignore[override]
        check_groups(x.shape[-1], self.num_groups)
        return super().__call__(x)


def check_groups(channels: int, groups: int | None) -> None:
    """Refuse a number of groups that does not divide the channels.

    Raises:
        ValueError: it does not; the message gives those that do.
    """
    if groups is None or groups < 1 or channels % groups:
        fit = ", ".join(str(n) for n in range(1, channels + 1) if channels % n == 0)
        raise ValueError(f"{channels} channels cannot form {groups} equal groups: groups must be one of {fit}")
