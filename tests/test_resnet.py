"""Residual networks: parameters layer by layer, and equality with the same network made of Flax layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedjax_pfl.models.resnet import ResNet, resnet8, resnet18


def _sizes(module: nn.Module, shape: tuple[int, ...] = (32, 32, 3)) -> dict[str, int]:
    params = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, *shape)))["params"]
    return {name: sum(leaf.size for leaf in jax.tree.leaves(module)) for name, module in params.items()}


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
def test_resnet8_layer_by_layer(norm: str) -> None:
    after = {"batch": 2, "group": 2, "none": 1}[norm]  # scale and bias of the norm, or bias of the convolution
    sizes = _sizes(resnet8(10, norm=norm))
    assert sizes == {
        "stem": 9 * 3 * 16 + after * 16,
        "stage1_block1": 2 * (9 * 16 * 16 + after * 16),
        "stage2_block1": 9 * 16 * 32 + 9 * 32 * 32 + 16 * 32 + 3 * after * 32,
        "stage3_block1": 9 * 32 * 64 + 9 * 64 * 64 + 32 * 64 + 3 * after * 64,
        "head": 64 * 10 + 10,
    }
    assert sum(sizes.values()) == {2: 78_042, 1: 77_706}[after]


def test_resnet18_stages() -> None:
    sizes = _sizes(resnet18(10))
    blocks = [name for name in sizes if name.startswith("stage")]
    assert blocks == [f"stage{s}_block{b}" for s in (1, 2, 3, 4) for b in (1, 2)]
    assert sizes["stage4_block1"] == 9 * 256 * 512 + 9 * 512 * 512 + 256 * 512 + 3 * 2 * 512
    assert sizes["stage4_block2"] == 2 * (9 * 512 * 512 + 2 * 512)


def _textbook(variables: dict, x: Any, blocks: tuple[int, ...], norm: str, groups: int) -> Any:
    """Scores and running statistics in training, from Flax's own layers."""
    stats: dict = {}

    def conv_norm(path: tuple[str, ...], x: Any, strides: int = 1) -> Any:
        params, old = variables["params"], variables.get("batch_stats", {})
        for name in path:
            params, old = params[name], old.get(name, {})
        *size, _, features = params["conv"]["kernel"].shape
        conv = nn.Conv(features, tuple(size), strides, "SAME", use_bias=norm == "none")
        x = conv.apply({"params": params["conv"]}, x)
        if norm == "group":
            return nn.GroupNorm(groups).apply({"params": params["norm"]}, x)
        if norm == "batch":
            values = {"params": params["norm"], "batch_stats": old["norm"]}
            x, stats[path] = nn.BatchNorm(False, momentum=0.9).apply(values, x, mutable=["batch_stats"])
        return x

    x = nn.relu(conv_norm(("stem",), x))
    for stage, count in enumerate(blocks, start=1):
        for place in range(1, count + 1):
            name, strides = f"stage{stage}_block{place}", 2 if stage > 1 and place == 1 else 1
            y = nn.relu(conv_norm((name, "conv1"), x, strides))
            y = conv_norm((name, "conv2"), y)
            x = nn.relu(y + (conv_norm((name, "shortcut"), x, strides) if x.shape != y.shape else x))
    head = variables["params"]["head"]
    return x.mean((1, 2)) @ head["kernel"] + head["bias"], stats


@pytest.mark.parametrize(("norm", "blocks"), [("group", (1, 2)), ("batch", (2, 1)), ("none", (1, 1, 1))])
def test_network_equals_flax_layers(norm: str, blocks: tuple[int, ...]) -> None:
    """Two clients stacked, in training, with an odd height: values, statistics and gradients."""
    module = ResNet(3, blocks, width=4, norm=norm, norm_groups=2 if norm == "group" else None)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2, 3, 7, 8, 2)).astype(np.float32)
    shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros(x.shape[1:]))
    variables = jax.tree.map(
        lambda a: (rng.normal(size=(2, *a.shape)) / np.sqrt(a.size // a.shape[-1])).astype(np.float32), shapes
    )

    def ours(v: Any, x: Any) -> Any:
        return module.apply(v, x, train=True, mask=jnp.ones(3, bool), mutable=["batch_stats"])

    def flax(v: Any, x: Any) -> Any:
        return _textbook(v, x, blocks, norm, 2)

    def derivatives(run: Any) -> Any:
        def loss(params: Any, rest: Any, x: Any) -> Any:
            y, stats = run(rest | {"params": params}, x)
            return jnp.tanh(y)[:, 0].sum(), jnp.stack([leaf.sum() for leaf in jax.tree.leaves(stats)] or [0.0]).sum()

        rest = {name: value for name, value in variables.items() if name != "params"}
        return jax.jit(jax.vmap(jax.value_and_grad(loss, has_aux=True)))(variables["params"], rest, x)

    got, want = derivatives(ours), derivatives(flax)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-3, 1e-4), got, want)


def test_evaluation_reads_the_running_statistics_and_a_sample_alone() -> None:
    module = resnet8(3, width=2, norm="batch")
    x = np.random.default_rng(2).normal(size=(4, 8, 8, 1)).astype(np.float32)
    variables = jax.jit(module.init)(jax.random.key(0), x)
    run = jax.jit(module.apply)
    np.testing.assert_allclose(run(variables, x)[:1], run(variables, x[:1]), 1e-4, 1e-5)
    moved = variables | {"batch_stats": jax.tree.map(lambda a: 4 * a + 1, variables["batch_stats"])}
    assert np.abs(run(moved, x) - run(variables, x)).max() > 1e-3


def test_without_norm_every_block_starts_as_the_identity() -> None:
    module = resnet8(3, width=2, norm="none")
    params = jax.jit(module.init)(jax.random.key(0), jnp.ones((1, 8, 8, 1)))["params"]
    assert not np.any(params["stage1_block1"]["conv2"]["conv"]["kernel"])
    assert np.any(params["stage1_block1"]["conv1"]["conv"]["kernel"])
