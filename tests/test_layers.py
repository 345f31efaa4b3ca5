"""The stackable layers against their Flax counterparts: values, first and second derivatives, under vmap."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedjax_pfl.models.layers import (
    Conv,
    Dense,
    avg_pool,
    conv_implementation,
    max_pool,
    use_conv_implementation,
)

CASES = [  # input (batch, *spatial, channels), kernel, strides, padding, features
    ((2, 12, 12, 1), (5, 5), 1, "VALID", 8),
    ((2, 9, 11, 3), (3, 4), 1, "SAME", 5),
    ((2, 11, 13, 2), (3, 5), (2, 3), "VALID", 4),
    ((2, 10, 7, 4), (4, 2), (3, 2), "SAME", 3),
    ((2, 5, 5, 3), (5, 5), 1, "VALID", 2),
    ((2, 6, 6, 16), (1, 1), 2, "SAME", 16),
    ((2, 8, 8, 3), (3, 3), 1, "SAME", 16),  # stem, stage and projection of residual networks
    ((2, 9, 8, 16), (3, 3), 2, "SAME", 32),
    ((2, 8, 8, 16), (1, 1), 2, "SAME", 32),
    ((2, 4, 4, 128), (3, 3), 2, "SAME", 256),
    ((2, 2, 2, 512), (3, 3), 1, "SAME", 512),
    ((3, 17, 2), (4,), 1, "VALID", 6),
    ((2, 24, 9), (9,), 1, "VALID", 32),
    ((3, 20, 3), (5,), 3, "SAME", 4),
]


def _derivatives(module, params, x, weights):
    """Output, gradient, and the gradient of the gradient's squared norm, with respect to parameters and input."""

    def loss(params, x):
        return (jnp.tanh(module.apply(params, x)) * weights).sum()

    def norm(params, x):
        return sum((g**2).sum() for g in jax.tree.leaves(jax.grad(loss, (0, 1))(params, x)))

    return module.apply(params, x), jax.grad(loss, (0, 1))(params, x), jax.grad(norm, (0, 1))(params, x)


def _normal(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def _parameters(module, *shape):
    """Random parameters of the module for one input shape, drawn by NumPy: compiling the initialisers takes longer."""
    shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros(shape))
    return jax.tree.map(lambda a: _normal(a.shape, a.size) / np.sqrt(a.size // a.shape[-1]), shapes)


def _stack(module, shape, clients=3):
    """Parameters, inputs and output weights of several clients: all different."""
    one = _parameters(module, *shape)
    params = jax.tree.map(lambda a: a + 0.1 * _normal((clients, *a.shape), 1), one)
    x = _normal((clients, *shape), 2)
    out = jax.eval_shape(jax.vmap(module.apply), params, x).shape
    return params, x, _normal(out, 3)


def _close(got, want, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = max(1.0, float(np.abs(b).max()))
        np.testing.assert_allclose(a / scale, b / scale, atol=tolerance)


@pytest.mark.parametrize(
    ("shape", "kernel", "strides", "padding", "features", "implementation"),
    [(*case, "matmul") for case in CASES] + [(*CASES[3], "lax"), (*CASES[-1], "lax")],
)
def test_conv_equals_flax(shape, kernel, strides, padding, features, implementation):
    ours = Conv(features, kernel, strides, padding, implementation=implementation)
    flax = nn.Conv(features, kernel, strides, padding)
    args = _stack(flax, shape)
    got, want = (jax.jit(jax.vmap(functools.partial(_derivatives, m)))(*args) for m in (ours, flax))
    _close(got, want, 1e-5 if features < 256 else 5e-5)  # sums of thousands of terms


@pytest.mark.parametrize("use_bias", [True, False])
def test_conv_has_the_parameters_of_flax(use_bias):
    x, key = jnp.ones((1, 8, 8, 3)), jax.random.key(3)
    ours = Conv(4, (3, 5), use_bias=use_bias).init(key, x)
    flax = nn.Conv(4, (3, 5), use_bias=use_bias).init(key, x)
    assert jax.tree.structure(ours) == jax.tree.structure(flax)
    jax.tree.map(np.testing.assert_array_equal, ours, flax)


def test_conv_in_float64_and_bfloat16():
    with jax.enable_x64(True):
        ours = Conv(4, (3, 3), param_dtype=jnp.float64)
        flax = nn.Conv(4, (3, 3), padding="VALID", param_dtype=jnp.float64)
        x = jnp.asarray(_normal((2, 8, 8, 2)), jnp.float64)
        params = jax.tree.map(lambda a: a.astype(jnp.float64), _parameters(flax, *x.shape))
        assert ours.apply(params, x).dtype == jnp.float64
        got, want = (jax.jit(functools.partial(_derivatives, m))(params, x, 1.0) for m in (ours, flax))
        _close(got, want, 1e-13)
    x = jnp.ones((1, 5, 5, 1))
    y, _ = jax.eval_shape(Conv(4, (3, 3), dtype=jnp.bfloat16).init_with_output, jax.random.key(1), x)
    assert y.dtype == jnp.bfloat16


@pytest.mark.parametrize("batch", [4, 40])
def test_dense_equals_flax(batch):
    flax = nn.Dense(70)
    args = _stack(flax, (batch, 60))
    got, want = (jax.jit(jax.vmap(functools.partial(_derivatives, m)))(*args) for m in (Dense(70), flax))
    _close(got, want)


def test_forward_mode_through_every_layer():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Dense(80)(max_pool(Conv(4, (3, 3))(x), (2, 2)).reshape(x.shape[0], -1))

    x = _normal((2, 12, 12, 2))
    params = _parameters(Net(), *x.shape)

    def loss(params):
        return jnp.tanh(Net().apply(params, x)).sum()

    v = jax.tree.map(lambda a: _normal(a.shape, 4), params)

    def inner(params):
        return sum(map(jnp.vdot, jax.tree.leaves(jax.grad(loss)(params)), jax.tree.leaves(v)))

    forward = jax.jit(lambda params: jax.jvp(jax.grad(loss), (params,), (v,))[1])(params)
    _close(forward, jax.jit(jax.grad(inner))(params))


@pytest.mark.parametrize(("shape", "window"), [((2, 8, 8, 3), (2, 2)), ((2, 9, 11, 2), (2, 3)), ((2, 13, 4), (3,))])
@pytest.mark.parametrize("ties", [False, True])
def test_pooling_equals_flax(shape, window, ties):
    x = _normal((3, *shape))
    x = jnp.round(x) if ties else x
    for ours, flax in ((max_pool, nn.max_pool), (avg_pool, nn.avg_pool)):

        def one(pool, x, **strides):
            y, pull = jax.vjp(lambda x: pool(x, window, **strides), x)
            return y, pull(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))[0]

        got = jax.jit(jax.vmap(functools.partial(one, ours)))(x)
        _close(got, jax.jit(jax.vmap(functools.partial(one, flax, strides=window)))(x))


def test_max_pool_keeps_nan():
    x = jnp.zeros((4, 2, 2, 1)).reshape(4, 4).at[jnp.arange(4), jnp.arange(4)].set(jnp.nan).reshape(4, 2, 2, 1)
    assert jnp.isnan(max_pool(x, (2, 2))).all()


def test_implementation_switch():
    assert conv_implementation() == "matmul"
    with use_conv_implementation("lax"):
        assert conv_implementation() == "lax"
        jaxpr = jax.make_jaxpr(Conv(2, (3, 3)).init_with_output)(jax.random.key(0), jnp.ones((1, 4, 4, 1)))
        assert "conv_general_dilated" in str(jaxpr)
    assert conv_implementation() == "matmul"
    with pytest.raises(ValueError, match="'matmul' or 'lax'"), use_conv_implementation("fft"):
        pass


def test_errors_name_the_shape():
    key = jax.random.key(0)
    with pytest.raises(ValueError, match=r"does not fit|do not fit.*\(1, 8, 1\)"):
        Conv(2, (3, 3)).init(key, jnp.ones((1, 8, 1)))
    with pytest.raises(ValueError, match=r"\(1, 2, 8, 1\) is smaller than the kernel \(3, 3\)"):
        Conv(2, (3, 3)).init(key, jnp.ones((1, 2, 8, 1)))
    with pytest.raises(ValueError, match="padding must be 'VALID' or 'SAME'"):
        Conv(2, (3, 3), padding="CAUSAL").init(key, jnp.ones((1, 8, 8, 1)))
    with pytest.raises(ValueError, match=r"window \(4, 4\) is larger than the input \(1, 3, 8, 1\)"):
        max_pool(jnp.ones((1, 3, 8, 1)), (4, 4))
