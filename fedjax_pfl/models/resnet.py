"""Residual networks for small images `(B, H, W, C)`: 3x3 stem, no pooling after it, basic blocks.

He et al., "Deep residual learning for image recognition", CVPR 2016 (https://arxiv.org/abs/1512.03385).  Federated
learning commonly has group norm in place of batch norm (Hsieh et al., "The non-IID data quagmire of decentralized
machine learning", ICML 2020).  Padding is SAME: at stride 2 it pads the far edges only, where PyTorch's padding of 1
pads both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
from flax import linen as nn

from fedjax_pfl.models.layers import Conv, Dense
from fedjax_pfl.models.norms import BatchNorm, GroupNorm, check_groups

Norm = Literal["group", "batch", "none"]

_GROUPS = 2


class ResNet(nn.Module):
    """A residual network of basic blocks: `(B, H, W, C)` -> `(B, num_classes)`.

    With batch norm on 32x32x3 and 10 classes, `resnet18` has 11,173,962 parameters and `resnet8` 78,042.

    Attributes:
      blocks: basic blocks of each stage; each stage after the first halves height and width.
      width: channels of the stem and the first stage; every stage after it has twice as many as the one before.
      norm: after every convolution: "group", "batch" (running statistics with momentum 0.9), or "none"; without norm,
        convolutions have a bias, and the last of each block starts at zero.
      norm_groups: groups of a group norm (None: two).
    """

    num_classes: int
    blocks: Sequence[int] = (2, 2, 2, 2)
    width: int = 64
    norm: Norm = "group"
    norm_groups: int | None = None

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        self._check(x.shape)
        options: dict[str, Any] = {"norm": self.norm, "groups": self.norm_groups or _GROUPS}
        x = nn.relu(_ConvNorm(self.width, name="stem", **options)(x, train, mask))
        for stage, count in enumerate(self.blocks):
            for place in range(count):
                strides = 2 if stage > 0 and place == 0 else 1
                block = _Block(self.width << stage, strides, name=f"stage{stage + 1}_block{place + 1}", **options)
                x = block(x, train, mask)
        return Dense(self.num_classes, name="head")(x.mean((1, 2)))

    def _check(self, shape: tuple[int, ...]) -> None:
        if self.norm not in ("group", "batch", "none"):
            raise ValueError(f"ResNet: norm must be 'group', 'batch' or 'none', got {self.norm!r}")
        if self.width < 1:
            raise ValueError(f"ResNet: width must be at least 1, got {self.width}")
        if self.norm == "group":
            check_groups(self.width, self.norm_groups or _GROUPS)
        elif self.norm_groups is not None:
            raise ValueError(f"ResNet: norm_groups is an option of norm 'group' only, and norm is {self.norm!r}")
        smallest = 2 ** (len(self.blocks) - 1)
        if len(shape) != 4 or min(shape[1:3]) < smallest:
            raise ValueError(
                f"a ResNet of {len(self.blocks)} stages needs images (batch, height, width, channels) of at least "
                f"{smallest} x {smallest} pixels, got an input of shape {shape}"
            )


class _ConvNorm(nn.Module):
    """SAME convolution and norm: `(B, H, W, C)` -> `(B, ceil(H / s), ceil(W / s), features)`."""

    features: int
    size: int = 3
    strides: int = 1
    norm: Norm = "group"
    groups: int = _GROUPS
    kernel_init: Any = nn.initializers.he_normal()

    @nn.compact
    def __call__(self, x: jax.Array, train: bool, mask: jax.Array | None) -> jax.Array:
        window, bias = (self.size, self.size), self.norm == "none"
        conv = Conv(self.features, window, self.strides, "SAME", bias, kernel_init=self.kernel_init, name="conv")
        x = conv(x)
        if self.norm == "batch":
            return BatchNorm(name="norm")(x, not train, mask=mask)
        return GroupNorm(self.groups, name="norm")(x) if self.norm == "group" else x


class _Block(nn.Module):
    """Basic block: two 3x3 convolutions beside the identity, or a 1x1 projection where the shape changes."""

    features: int
    strides: int = 1
    norm: Norm = "group"
    groups: int = _GROUPS

    @nn.compact
    def __call__(self, x: jax.Array, train: bool, mask: jax.Array | None) -> jax.Array:
        options: dict[str, Any] = {"norm": self.norm, "groups": self.groups}
        y = nn.relu(_ConvNorm(self.features, strides=self.strides, name="conv1", **options)(x, train, mask))
        # Without a norm every block would double the variance; its branch starts at zero instead (as in Fixup).
        start = nn.initializers.zeros_init() if self.norm == "none" else nn.initializers.he_normal()
        y = _ConvNorm(self.features, kernel_init=start, name="conv2", **options)(y, train, mask)
        if x.shape != y.shape:
            x = _ConvNorm(self.features, 1, self.strides, name="shortcut", **options)(x, train, mask)
        return nn.relu(x + y)


def resnet8(num_classes: int, **options: Any) -> ResNet:
    """ResNet-8: one block in each of three stages, 16, 32 and 64 channels; options as of `ResNet`."""
    return ResNet(num_classes, (1, 1, 1), **({"width": 16} | options))


def resnet18(num_classes: int, **options: Any) -> ResNet:
    """ResNet-18 for CIFAR: two blocks in each of four stages, 64 to 512 channels; options as of `ResNet`."""
    return ResNet(num_classes, (2, 2, 2, 2), **options)
