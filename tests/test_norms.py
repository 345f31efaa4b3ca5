"""Batch norm over real samples and group norm, against their Flax counterparts and by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedjax_pfl.models.norms import BatchNorm, GroupNorm

RNG = np.random.default_rng(0)
SHAPES = [(6, 5), (6, 4, 3, 5), (6, 7, 5)]


def _variables(*stack: int) -> dict[str, Any]:
    scale, bias, mean, var = (RNG.normal(size=(*stack, 5)).astype(np.float32) for _ in range(4))
    return {"params": {"scale": scale, "bias": bias}, "batch_stats": {"mean": mean, "var": var**2}}


def _train(module: nn.Module, variables: Any, x: Any, **options: Any) -> Any:
    """Output, new statistics, and the gradient with respect to parameters and input."""

    def run(params: Any, x: Any) -> Any:
        y, new = module.apply(variables | {"params": params}, x, False, mutable=["batch_stats"], **options)
        return jnp.tanh(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum(), (y, new["batch_stats"])

    (_, (y, stats)), gradient = jax.value_and_grad(run, (0, 1), has_aux=True)(variables["params"], x)
    return y, stats, gradient


def _close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, tolerance, tolerance)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("masked", [False, True])
def test_batch_norm_equals_flax_where_every_sample_is_real(shape: tuple, masked: bool) -> None:
    ours, flax = BatchNorm(momentum=0.8, epsilon=1e-3), nn.BatchNorm(momentum=0.8, epsilon=1e-3)
    x = RNG.normal(size=shape).astype(np.float32)
    variables = _variables()
    mask = {"mask": np.ones(shape[0], bool)} if masked else {}
    _close(_train(ours, variables, x, **mask), _train(flax, variables, x))
    _close(ours.apply(variables, x, True, **mask), flax.apply(variables, x, True), 1e-7)
    new = ours.init(jax.random.key(0), x, True)
    assert jax.tree.structure(new) == jax.tree.structure(flax.init(jax.random.key(0), x, True))


@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm_of_a_padded_batch_is_that_of_its_real_samples(shape: tuple) -> None:
    """Three clients stacked, with 4, 1 and 6 real samples of 6; padding is huge."""
    counts, variables = (4, 1, 6), _variables(3)
    x = RNG.normal(size=(3, *shape)).astype(np.float32)
    mask = np.arange(6) < np.array(counts)[:, None]
    x = np.where(mask.reshape(3, 6, *(1,) * (len(shape) - 1)), x, 1e4)
    run = lambda v, x, m: BatchNorm().apply(v, x, False, mask=m, mutable=["batch_stats"])  # noqa: E731
    y, new = jax.jit(jax.vmap(run))(variables, x, mask)
    for i, count in enumerate(counts):
        real, mine = x[i, :count].astype(float), jax.tree.map(lambda a, i=i: a[i], variables)
        axes = tuple(range(real.ndim - 1))
        mean, var = real.mean(axes), real.var(axes)  # the biased variance
        want = (real - mean) / np.sqrt(var + 1e-5) * mine["params"]["scale"] + mine["params"]["bias"]
        np.testing.assert_allclose(y[i, :count], want, 2e-4, 2e-4)
        for name, batch in (("mean", mean), ("var", var)):
            want = 0.9 * mine["batch_stats"][name] + 0.1 * batch
            np.testing.assert_allclose(new["batch_stats"][name][i], want, 1e-5, 1e-6)


@pytest.mark.parametrize("real", [0, 1])
def test_batch_norm_with_one_or_no_real_sample_is_finite(real: int) -> None:
    x, variables = RNG.normal(size=(4, 5)).astype(np.float32), _variables()
    y, stats, gradient = jax.jit(lambda m: _train(BatchNorm(), variables, x, mask=m))(np.arange(4) < real)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((y, stats, gradient)))
    for name, old in variables["batch_stats"].items():
        assert np.array_equal(stats[name], old) == (real == 0)


def test_batch_norm_is_exact_far_from_zero() -> None:
    x = (1000 + RNG.normal(size=(64, 5))).astype(np.float32)
    _, new = BatchNorm(momentum=0.0).apply(_variables(), x, False, mask=np.ones(64, bool), mutable=["batch_stats"])
    np.testing.assert_allclose(new["batch_stats"]["var"], x.astype(float).var(0), 1e-4)


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_group_norm_by_hand_and_each_sample_by_itself(groups: int) -> None:
    x = RNG.normal(size=(3, 4, 4, 4, 6)).astype(np.float32)  # three clients
    scale, bias = RNG.normal(size=(2, 3, 6)).astype(np.float32)
    run = jax.jit(jax.vmap(lambda s, b, x: GroupNorm(groups).apply({"params": {"scale": s, "bias": b}}, x)))
    y = run(scale, bias, x)
    split = x.astype(float).reshape(3, 4, 16, groups, 6 // groups)
    mean, var = split.mean((2, 4), keepdims=True), split.var((2, 4), keepdims=True)
    want = ((split - mean) / np.sqrt(var + 1e-6)).reshape(x.shape)
    want = want * scale[:, None, None, None] + bias[:, None, None, None]
    np.testing.assert_allclose(y, want, 1e-4, 1e-5)
    x[:, 2:] = 1e6
    np.testing.assert_array_equal(run(scale, bias, x)[:, :2], y[:, :2])


def test_constant_features_have_a_finite_gradient() -> None:
    x = np.ones((2, 3, 3, 4), np.float32)
    params = GroupNorm(2).init(jax.random.key(0), x)
    gradient = jax.grad(lambda p, x: (GroupNorm(2).apply(p, x) ** 2).sum(), (0, 1))(params, x)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_errors_name_the_shapes() -> None:
    with pytest.raises(ValueError, match="6 channels cannot form 4 equal groups: groups must be one of 1, 2, 3, 6"):
        GroupNorm(4).init(jax.random.key(0), jnp.ones((1, 2, 2, 6)))
    with pytest.raises(ValueError, match=r"mask \(3,\) does not mark the samples of \(4, 5\)"):
        BatchNorm().apply(_variables(), jnp.ones((4, 5)), False, mask=jnp.ones(3, bool), mutable=["batch_stats"])
