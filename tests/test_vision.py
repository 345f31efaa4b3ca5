"""Parameter counts, equality with the textbook networks, and error messages of the classifiers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedjax_pfl.models.tabular import MLP
from fedjax_pfl.models.vision import FedAvgCNN, LeNet5, PflCNN


@pytest.mark.parametrize(
    ("model", "shape", "count"),
    [
        (LeNet5(10), (32, 32, 3), 62_006),
        (LeNet5(10), (28, 28, 1), 44_426),
        (FedAvgCNN(10), (28, 28, 1), 582_026),
        (FedAvgCNN(10), (32, 32, 3), 878_538),
        (FedAvgCNN(100), (32, 32, 3), 924_708),
        (PflCNN(10), (32, 32, 3), (27 * 32 + 32) + (288 * 64 + 64) + (14 * 14 * 64 * 128 + 128) + 1_290),
        (MLP(10), (28, 28, 1), 159_010),
        (MLP(3, hidden=(8, 4)), (5,), 5 * 8 + 8 + 8 * 4 + 4 + 4 * 3 + 3),
        (MLP(3, hidden=()), (5,), 18),
    ],
)
def test_parameter_counts(model, shape, count):
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((2, *shape)))["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count
    assert params["head"]["bias"].shape == (model.num_classes,)


def _textbook(params, x, activation, pool):
    act = {"relu": nn.relu, "tanh": nn.tanh}[activation]
    reduce = {"max": nn.max_pool, "mean": nn.avg_pool}[pool]
    for name in ("conv1", "conv2"):
        layer = nn.Conv(params[name]["bias"].size, (5, 5), padding="VALID")
        x = reduce(act(layer.apply({"params": params[name]}, x)), (2, 2), strides=(2, 2))
    x = x.reshape(x.shape[0], -1)
    for name in sorted(n for n in params if n.startswith("dense")):
        x = act(x @ params[name]["kernel"] + params[name]["bias"])
    return x @ params["head"]["kernel"] + params["head"]["bias"]


def _normal(shape, seed):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def _parameters(model, x, clients=()):
    """Random parameters for input x, drawn by NumPy: compiling the initialisers takes longer than the test."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
    return jax.tree.map(lambda a: _normal((*clients, *a.shape), a.size) / np.sqrt(a.size // a.shape[-1]), shapes)


@pytest.mark.parametrize(
    ("kind", "shape", "activation", "pool"),
    [
        (LeNet5, (28, 28, 1), "relu", "max"),
        (LeNet5, (16, 17, 3), "tanh", "mean"),
        (LeNet5, (16, 17, 1), "tanh", "max"),
        (FedAvgCNN, (16, 18, 3), "relu", "max"),
    ],
)
def test_stacked_clients_equal_the_textbook_network(kind, shape, activation, pool):
    model = kind(10, activation=activation, pool=pool)
    x = _normal((2, 3, *shape), 0)
    params = _parameters(model, x[0], (2,))

    def value_and_grad(apply):
        def loss(params, x):
            return jax.nn.log_softmax(apply(params, x))[:, 0].sum()

        return jax.jit(jax.vmap(jax.value_and_grad(loss)))(params, x)

    ours = value_and_grad(lambda p, x: model.apply({"params": p}, x))
    flax = value_and_grad(lambda p, x: _textbook(p, x, activation, pool))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4), ours, flax)


def _textbook_pfl(params, x):
    for name, features in (("conv1", 32), ("conv2", 64)):
        x = nn.relu(nn.Conv(features, (3, 3), padding="VALID").apply({"params": params[name]}, x))
    x = nn.max_pool(x, (2, 2), (2, 2)).reshape(x.shape[0], -1)
    x = nn.relu(x @ params["dense1"]["kernel"] + params["dense1"]["bias"])
    return x @ params["head"]["kernel"] + params["head"]["bias"]


def test_pfl_cnn_equals_the_textbook_network():
    model, x = PflCNN(10), _normal((2, 3, 9, 8, 3), 0)
    params = _parameters(model, x[0], (2,))
    got, want = (
        jax.jit(jax.vmap(jax.value_and_grad(lambda p, x, run=run: jax.nn.log_softmax(run(p, x))[:, 0].sum())))(
            params, x
        )
        for run in (lambda p, x: model.apply({"params": p}, x), _textbook_pfl)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4), got, want)


def test_pfl_cnn_drops_in_training_only_and_needs_a_key_there():
    model, x = PflCNN(10), _normal((4, 6, 6, 1), 0)
    params = {"params": _parameters(model, x)}
    run = jax.jit(lambda key: model.apply(params, x, train=True, rngs={"dropout": key}))
    one, again, other = (run(jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - other).max() > 1e-3
    undropped = PflCNN(10, rates=(0.0, 0.0)).apply(params, x, train=True, rngs={"dropout": jax.random.key(0)})
    np.testing.assert_allclose(undropped, model.apply(params, x), 1e-6)
    with pytest.raises(Exception, match="dropout"):
        model.apply(params, x, train=True)


def test_pfl_cnn_drops_the_published_shares():
    """Counted over the values that the dropouts of one training pass are given and set to zero."""
    seen = []

    def catch(run, args, kwargs, context):
        out = run(*args, **kwargs)
        if isinstance(context.module, nn.Dropout):
            seen.append(np.mean(np.asarray(out)[np.asarray(args[0]) != 0] == 0))
        return out

    model, x = PflCNN(10), _normal((16, 10, 10, 1), 0)
    params = _parameters(model, x)
    with nn.intercept_methods(catch):
        model.apply({"params": params}, x, train=True, rngs={"dropout": jax.random.key(0)})
    np.testing.assert_allclose(seen, [0.25, 0.5], atol=0.05)


def test_gradient_through_a_training_step_is_exact_in_float64():
    """A central difference confirms d(loss after one step) / d(learning rate): a second derivative of the network."""
    with jax.enable_x64(True):
        model = LeNet5(3, activation="tanh", pool="mean")
        x, y = _normal((4, 16, 16, 1), 0), jnp.arange(4) % 3
        params = _parameters(model, x)

        def loss(params):
            return -jnp.take_along_axis(jax.nn.log_softmax(model.apply({"params": params}, x)), y[:, None], 1).mean()

        @jax.jit
        def after(start, lr):
            for _ in range(2):
                start = jax.tree.map(lambda a, g: a - lr * g, start, jax.grad(loss)(start))
            return loss(start)

        exact = jax.grad(after, 1)(params, 0.1)
        difference = (after(params, 0.1 + 1e-5) - after(params, 0.1 - 1e-5)) / 2e-5
        np.testing.assert_allclose(exact, difference, rtol=1e-7)


@pytest.mark.parametrize("kind", [LeNet5, FedAvgCNN])
def test_small_images_are_refused_by_name(kind):
    with pytest.raises(ValueError, match=rf"{kind.__name__} needs images.*16 x 16.*\(1, 8, 8, 1\)"):
        kind(10).init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)))
    with pytest.raises(ValueError, match=rf"{kind.__name__} needs images.*\(1, 784\)"):
        kind(10).init(jax.random.key(0), jnp.zeros((1, 784)))
    jax.eval_shape(kind(10).init, jax.random.key(0), jnp.zeros((1, 16, 16, 1)))


def test_unknown_options_are_refused():
    with pytest.raises(ValueError, match="'relu' or 'tanh'"):
        LeNet5(10, activation="gelu").init(jax.random.key(0), jnp.zeros((1, 28, 28, 1)))
    with pytest.raises(ValueError, match="'max' or 'mean'"):
        FedAvgCNN(10, pool="min").init(jax.random.key(0), jnp.zeros((1, 28, 28, 1)))
