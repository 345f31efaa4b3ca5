"""The modulator of a head: against NumPy, its gradients against finite differences, and what it must leave alone."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from fedjax_pfl.models.hypernetwork import Modulation, Modulator, embed_histogram, modulate, modulation_gradient

D, C, E, HIDDEN = 4, 3, 5, (7, 6)
MODULATOR = Modulator(D, C, E, HIDDEN, bound=0.4)
RNG = np.random.default_rng(0)


def _random(tree: Any, scale: float = 0.6) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(RNG.normal(size=leaf.shape) * scale, leaf.dtype), tree)


def _phi(modulator: Modulator = MODULATOR) -> Any:
    return modulator.init(jax.random.key(0), jnp.zeros(modulator.embedding))


def _head() -> dict[str, jax.Array]:
    kernel, bias = RNG.normal(size=(D, C)), RNG.normal(size=C)
    return {"params/head/kernel": jnp.asarray(kernel), "params/head/bias": jnp.asarray(bias)}


def _numpy_head(phi: Any, v: Any, head: Any, alpha: float, bound: float = 0.4) -> dict[str, np.ndarray]:
    """W_i written out weight by weight."""
    layers = jax.tree.map(np.asarray, phi)["params"]
    h = np.asarray(v)
    for i in range(len(HIDDEN)):
        h = np.maximum(h @ layers[f"hidden{i}"]["kernel"] + layers[f"hidden{i}"]["bias"], 0)
    out = bound * np.tanh(h @ layers["out"]["kernel"] + layers["out"]["bias"])
    kernel, bias = np.array(head["params/head/kernel"]), np.array(head["params/head/bias"])
    for c in range(C):
        for j in range(D):
            gamma, beta = out[j * C + c], out[D * C + j * C + c]
            kernel[j, c] = kernel[j, c] * (1 + alpha * gamma) + alpha * beta
        bias[c] = bias[c] * (1 + alpha * out[2 * D * C + c]) + alpha * out[2 * D * C + C + c]
    return {"params/head/kernel": kernel, "params/head/bias": bias}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_personal_heads_equal_numpy_for_each_client_of_a_vmap(alpha: float) -> None:
    phi, vs, head = _random(_phi()), jnp.asarray(RNG.normal(size=(6, E))), _head()
    alphas = alpha * jnp.linspace(0.5, 1, 6)
    run = jax.jit(jax.vmap(lambda v, alpha: modulate(head, MODULATOR.apply(phi, v), alpha)))
    got = run(vs, alphas)
    for i in range(6):
        want = _numpy_head(phi, vs[i], head, float(alphas[i]))
        for name, leaf in want.items():
            np.testing.assert_allclose(got[name][i], leaf, rtol=1e-12, atol=1e-14)
    stacked = MODULATOR.apply(phi, vs)
    assert [leaf.shape for leaf in stacked] == [(6, D, C), (6, D, C), (6, C), (6, C)]
    assert all(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves((phi, stacked, got)))


def test_a_new_modulator_leaves_every_head_as_it_is() -> None:
    phi, vs, head = _phi(), RNG.normal(size=(8, E)) * 100, _head()
    modulation = MODULATOR.apply(phi, vs)
    assert all((leaf == 0).all() for leaf in modulation)
    assert any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(phi["params"]["hidden0"]))
    got = jax.vmap(lambda m: modulate(head, m, 1.0))(modulation)
    for name, leaf in head.items():
        assert (np.asarray(got[name]) == np.asarray(leaf)).all()


def test_scales_and_shifts_stay_inside_the_bound() -> None:
    for bound in (0.4, 2.0):
        modulator = Modulator(D, C, E, HIDDEN, bound)
        modulation = modulator.apply(_random(_phi(), 5.0), RNG.normal(size=(50, E)) * 20)
        peak = max(float(np.abs(leaf).max()) for leaf in modulation)
        assert 0.99 * bound < peak <= bound * (1 + 1e-6)


def test_alpha_of_zero_is_the_global_head_bit_for_bit() -> None:
    """Also where the head has a negative zero, and where the modulation has gone wrong."""
    head = _head()
    head["params/head/kernel"] = head["params/head/kernel"].at[0].set(-0.0)
    for fill in (-0.5, 0.5, np.nan, np.inf):
        modulation = Modulation(*(jnp.full(shape, fill) for shape in ((D, C), (D, C), (C,), (C,))))
        for alpha in (0, 0.0, jnp.zeros(())):
            got = jax.jit(modulate)(head, modulation, alpha)
            assert all(np.asarray(got[n]).tobytes() == np.asarray(head[n]).tobytes() for n in head), (fill, alpha)


@pytest.mark.usefixtures("float64")
def test_alpha_has_its_derivative_at_zero_too() -> None:
    head, modulation = _head(), MODULATOR.apply(_random(_phi()), RNG.normal(size=E))
    for alpha in (0.0, 0.7):
        _, slope = jax.jvp(lambda a: modulate(head, modulation, a), (alpha,), (1.0,))
        W, b = head["params/head/kernel"], head["params/head/bias"]
        want = W * modulation.kernel_scale + modulation.kernel_shift
        np.testing.assert_allclose(slope["params/head/kernel"], want, rtol=1e-12)
        np.testing.assert_allclose(slope["params/head/bias"], b * modulation.bias_scale + modulation.bias_shift, 1e-12)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_modulation_gradient_equals_central_differences(alpha: float) -> None:
    """d/d(phi, v) of <sent head, change>, of the NumPy forward."""
    phi, v, head = _random(_phi()), jnp.asarray(RNG.normal(size=E)), _head()
    change = _random(head)
    got = modulation_gradient(MODULATOR, phi, v, head, alpha, change)
    flat, unravel = ravel_pytree((phi, v))

    def product(flat: np.ndarray) -> float:
        phi, v = unravel(jnp.asarray(flat))
        sent = _numpy_head(phi, v, head, alpha)
        return sum(float((sent[name] * np.asarray(change[name])).sum()) for name in sent)

    step, eye = 1e-6, np.eye(flat.size)
    want = [(product(flat + step * e) - product(flat - step * e)) / (2 * step) for e in eye]
    np.testing.assert_allclose(ravel_pytree(got)[0], want, rtol=1e-6, atol=1e-8)
    assert (np.abs(want).max() > 0.1) == (alpha > 0)


@pytest.mark.usefixtures("float64")
def test_descent_brings_the_sent_head_to_the_one_that_came_back() -> None:
    phi, v, head = _phi(), jnp.asarray(RNG.normal(size=E)), _head()
    aim = jax.tree.map(lambda W: 0.9 * W + 0.05, head)

    def one(carry: Any, _: Any) -> Any:
        sent = modulate(head, MODULATOR.apply(*carry), 1.0)
        change = jax.tree.map(jnp.subtract, sent, aim)
        gradient = modulation_gradient(MODULATOR, *carry, head, 1.0, change)
        return jax.tree.map(lambda a, g: a - 0.3 * g, carry, gradient), sum(
            (c**2).sum() for c in jax.tree.leaves(change)
        )

    _, gaps = jax.lax.scan(one, (phi, v), None, 300)
    assert gaps[-1] < 1e-3 * gaps[0]


@pytest.mark.usefixtures("float64")
def test_alpha_is_held_fixed_in_outer_derivatives_where_asked() -> None:
    phi, v, head = _random(_phi()), jnp.asarray(RNG.normal(size=E)), _head()
    change = _random(head)

    def update(alpha: jax.Array, fixed: bool) -> jax.Array:
        gradient = modulation_gradient(MODULATOR, phi, v, head, alpha, change, fixed_alpha=fixed)
        return jnp.sum(gradient[1])

    values, slopes = zip(*(jax.value_and_grad(update)(0.5, fixed) for fixed in (True, False)), strict=True)
    assert values[0] == values[1]
    assert slopes[0] == 0
    np.testing.assert_allclose(slopes[1], values[1] / 0.5, rtol=1e-10)  # the pull-back is linear in alpha


def test_gradient_vmapped_over_clients_is_that_of_each() -> None:
    phi, vs, head = _random(_phi()), jnp.asarray(RNG.normal(size=(3, E)), jnp.float32), _head()
    changes = jax.tree.map(lambda W: jnp.asarray(RNG.normal(size=(3, *W.shape)), W.dtype), head)
    alphas = jnp.array([0.0, 0.4, 1.0])
    run = lambda v, a, c: modulation_gradient(MODULATOR, phi, v, head, a, c)  # noqa: E731
    stacked = jax.jit(jax.vmap(run))(vs, alphas, changes)
    for i in range(3):
        alone = run(vs[i], alphas[i], jax.tree.map(lambda a, i=i: a[i], changes))
        for a, b in zip(jax.tree.leaves(stacked), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hidden", [(), (9,), (100, 100)])
def test_parameters_are_counted_by_the_formula(hidden: tuple[int, ...]) -> None:
    modulator = Modulator(84, 10, 32, hidden)
    shapes = jax.eval_shape(modulator.init, jax.random.key(0), jnp.zeros(32))
    widths = (32, *hidden, 2 * (84 * 10 + 10))
    want = sum((a + 1) * b for a, b in itertools.pairwise(widths))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == want
    assert modulator.floats == 1700
    if hidden == (100, 100):
        assert want == 3300 + 10100 + 101 * 1700


def test_embeddings_depend_on_proportions_only_and_have_one_scale() -> None:
    key, counts = jax.random.key(3), RNG.integers(0, 50, (40, 10))
    v = embed_histogram(counts, 64, key)
    assert v.shape == (40, 64)
    assert v.dtype == jnp.float32
    np.testing.assert_allclose(embed_histogram(7 * counts, 64, key), v, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(embed_histogram(counts / counts.sum(1, keepdims=True), 64, key), v, 1e-5, 1e-6)
    np.testing.assert_allclose(embed_histogram(counts[3], 64, key), v[3], rtol=1e-5, atol=1e-6)
    projection = embed_histogram(np.eye(10), 4000, key)  # one class each: the rows of the projection
    assert abs(float(projection.mean())) < 0.02
    assert abs(float(projection.std()) - 1) < 0.02
    one, every = embed_histogram(np.eye(10)[:1] * 9, 4000, key), embed_histogram(np.ones(10), 4000, key)
    assert abs(float(one.std() / every.std()) - 1) < 0.05
    p = counts / np.linalg.norm(counts, axis=1, keepdims=True)
    np.testing.assert_allclose(embed_histogram(counts, 4000, key), p @ np.asarray(projection), rtol=1e-3, atol=1e-4)


def test_a_client_without_labels_is_embedded_as_zeros_with_a_finite_gradient() -> None:
    counts = jnp.array([[0.0, 0, 0], [1, 2, 3]])
    v = embed_histogram(counts, 8, jax.random.key(0))
    assert (v[0] == 0).all()
    assert (v[1] != 0).all()
    slope = jax.grad(lambda counts: embed_histogram(counts, 8, jax.random.key(0)).sum())(counts)
    assert np.isfinite(slope).all()


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    phi, head = _phi(), _head()
    modulation = MODULATOR.apply(phi, jnp.zeros(E))
    kernel = {"params/head/kernel": head["params/head/kernel"]}
    other = Modulator(D + 1, C, E).init_with_output(jax.random.key(0), jnp.zeros(E))[0]
    cases = {
        r"embeddings must be \(..., 5\), found \(4,\)": lambda: MODULATOR.apply(phi, jnp.zeros(4)),
        "sizes must be at least 1": lambda: Modulator(D, 0, E).init(jax.random.key(0), jnp.zeros(E)),
        "bound must be positive": lambda: Modulator(D, C, E, bound=0.0).init(jax.random.key(0), jnp.zeros(E)),
        "one kernel .* and one bias": lambda: modulate(kernel, modulation, 1.0),
        "one kernel": lambda: modulate(head | {"params/head/extra": jnp.zeros(3)}, modulation, 1.0),
        "make the Modulator of its size": lambda: modulate(head, other, 1.0),
        "is not one of the head": lambda: modulation_gradient(MODULATOR, phi, jnp.zeros(E), head, 1.0, kernel),
        "counts .* and size >= 1": lambda: embed_histogram(np.ones(3), 0, jax.random.key(0)),
        r"found \(\)": lambda: embed_histogram(np.float32(3), 2, jax.random.key(0)),
    }
    for message, call in cases.items():
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
