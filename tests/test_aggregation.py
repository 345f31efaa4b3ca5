"""Means and mixing matrices over stacked clients against NumPy, and what happens at weight zero."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import assert_close

from fedjax_pfl.aggregation import cosine_matrix, gram, mean_of_sums, mix, safe_divide, safe_norm, weighted_mean

pytestmark = pytest.mark.usefixtures("float64")
M = 4


def stack(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"a": rng.normal(size=(M, 3, 2)), "b": [rng.normal(size=M)]}


def flat(tree: dict[str, Any]) -> np.ndarray:
    return np.concatenate([tree["a"].reshape(M, -1), tree["b"][0][:, None]], 1)


def slope(function: Any, x: jax.Array, h: float = 1e-6) -> np.ndarray:
    """Central differences of a scalar function of a vector."""
    return np.array([(function(x + h * e) - function(x - h * e)) / (2 * h) for e in jnp.eye(len(x))])


def test_weighted_mean_equals_numpy_in_value_and_gradient() -> None:
    weights, data = jnp.array([0.0, 1.0, 2.5, 4.0]), stack()
    mean = weighted_mean(data, weights)
    assert_close(mean["a"], np.average(data["a"], axis=0, weights=weights), 1e-12)
    assert_close(mean["b"][0], np.average(data["b"][0], weights=weights), 1e-12)
    value = lambda w: (weighted_mean(data, w)["a"] ** 2).sum()  # noqa: E731
    np.testing.assert_allclose(jax.grad(value)(weights), slope(value, weights), 1e-6)
    by_data = jax.grad(lambda d: weighted_mean(d, weights)["b"][0])(jax.tree.map(jnp.asarray, data))
    np.testing.assert_allclose(by_data["b"][0], weights / weights.sum(), 1e-12)


def test_weighted_mean_of_nobody_is_zero_with_finite_gradient() -> None:
    value = lambda w, d: sum(leaf.sum() for leaf in jax.tree.leaves(weighted_mean(d, w)))  # noqa: E731
    nothing, data = jnp.zeros(M), jax.tree.map(jnp.asarray, stack())
    assert value(nothing, data) == 0
    for gradient in jax.grad(value, (0, 1))(nothing, data):
        for leaf in jax.tree.leaves(gradient):
            np.testing.assert_array_equal(leaf, 0)


def test_mean_of_sums_keeps_the_old_where_nobody_contributed() -> None:
    sums, old = {"a": jnp.array([2.0, 6.0])}, {"a": jnp.array([7.0, 8.0])}
    np.testing.assert_allclose(mean_of_sums(sums, jnp.asarray(4.0), old)["a"], [0.5, 1.5])
    nobody = jax.tree.map(jnp.zeros_like, sums)
    np.testing.assert_array_equal(mean_of_sums(nobody, jnp.asarray(0.0), old)["a"], old["a"])
    value = lambda s, t, o: mean_of_sums(s, t, o)["a"].sum()  # noqa: E731
    by_sums, by_total, by_old = jax.grad(value, (0, 1, 2))(nobody, jnp.asarray(0.0), old)
    np.testing.assert_array_equal(by_sums["a"], 0)
    assert by_total == 0
    np.testing.assert_array_equal(by_old["a"], 1)
    by_sums, by_total, by_old = jax.grad(value, (0, 1, 2))(sums, jnp.asarray(4.0), old)
    np.testing.assert_allclose(by_sums["a"], 1 / 4)
    np.testing.assert_allclose(by_total, -8 / 16)
    np.testing.assert_array_equal(by_old["a"], 0)
    assert mean_of_sums(sums, jnp.asarray(4.0), {"a": jnp.ones(2, jnp.float32)})["a"].dtype == jnp.float32


def test_safe_divide() -> None:
    np.testing.assert_array_equal(safe_divide(jnp.array([3.0, 3.0, 0.0]), jnp.array([2.0, 0.0, 0.0])), [1.5, 0, 0])
    gradient = jax.grad(lambda n, d: safe_divide(n, d).sum(), (0, 1))(jnp.array([3.0, 3.0]), jnp.array([2.0, 0.0]))
    np.testing.assert_allclose(gradient, [[0.5, 0], [-0.75, 0]])


def test_mix_equals_numpy() -> None:
    data, weights = stack(), np.random.default_rng(1).normal(size=(3, M))
    mixed = mix(jnp.asarray(weights), data)
    assert_close(mixed["a"], np.einsum("kj,jab->kab", weights, data["a"]), 1e-12)
    assert_close(mixed["b"][0], weights @ data["b"][0], 1e-12)
    gradient = jax.grad(lambda w: (mix(w, data)["a"] ** 2).sum())(jnp.asarray(weights))
    np.testing.assert_allclose(gradient, 2 * np.einsum("kab,jab->kj", mixed["a"], data["a"]), 1e-12)


def test_gram_equals_numpy() -> None:
    a, b = stack(0), stack(1)
    np.testing.assert_allclose(gram(a, b), flat(a) @ flat(b).T, 1e-12)
    gradient = jax.grad(lambda x: gram(x, b)[1, 2])(jax.tree.map(jnp.asarray, a))
    expected = np.zeros((M, 7))
    expected[1] = flat(b)[2]
    np.testing.assert_allclose(flat(jax.tree.map(np.asarray, gradient)), expected, 1e-12)


def test_cosine_matrix_equals_numpy_and_a_zero_row_is_harmless() -> None:
    rows = flat(stack())
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(cosine_matrix(jnp.asarray(rows)), unit @ unit.T, 1e-12)
    rows[2] = 0
    cosine = np.asarray(cosine_matrix(jnp.asarray(rows)))
    np.testing.assert_array_equal(cosine[2], 0)
    np.testing.assert_array_equal(cosine[:, 2], 0)
    assert np.isfinite(jax.grad(lambda r: cosine_matrix(r).sum())(jnp.asarray(rows))).all()


def test_safe_norm_equals_numpy_and_has_a_gradient_at_zero() -> None:
    x = np.random.default_rng(0).normal(size=(3, 5))
    np.testing.assert_allclose(safe_norm(jnp.asarray(x), axis=1), np.linalg.norm(x, axis=1), 1e-12)
    np.testing.assert_allclose(safe_norm(jnp.asarray(x)), np.linalg.norm(x), 1e-12)
    np.testing.assert_allclose(jax.grad(safe_norm)(jnp.asarray(x[0])), x[0] / np.linalg.norm(x[0]), 1e-12)
    assert safe_norm(jnp.zeros(3)) <= 1e-12
    np.testing.assert_array_equal(jax.grad(safe_norm)(jnp.zeros(3)), 0)


def test_models_are_mixed_in_full_precision_on_every_backend() -> None:
    """Accelerators round the factors of a product by default: a client that takes only its own model would change."""
    weights, stack = jnp.eye(3), {"w": jnp.ones((3, 4))}
    for mixed in (
        jax.make_jaxpr(mix)(weights, stack),
        jax.make_jaxpr(lambda w, s: jax.vjp(lambda w: mix(w, s), w)[1](s))(weights, stack),
        jax.make_jaxpr(weighted_mean)(stack, jnp.ones(3)),
        jax.make_jaxpr(gram)(stack, stack),
    ):
        products = str(mixed).count("dot_general")
        assert products
        assert str(mixed).count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == products
