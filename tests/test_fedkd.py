"""FedKD: the compression by itself, what it costs, and a round against slow NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import CLASSES, assert_close, federation

import fedjax_pfl as fp
from fedjax_pfl.algorithms._lowrank import compress, truncate
from fedjax_pfl.engine.rounds import floats_sent

SHAPES = ((9, 4), (4, 9), (6, 6), (30, 2), (1, 5))


def decaying(shape: tuple[int, int], seed: int = 0, ratio: float = 0.5) -> np.ndarray:
    """A matrix with singular values 1, ratio, ratio^2, ..."""
    rng = np.random.default_rng(seed)
    U, _, Vt = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
    return (U * ratio ** np.arange(min(shape))) @ Vt


def by_svd(matrix: np.ndarray, energy: float) -> tuple[np.ndarray, int]:
    """The truncated SVD and its floats, one singular value after another."""
    U, s, Vt = np.linalg.svd(matrix, full_matrices=False)
    rank = 0
    while rank < len(s) and (s[:rank] ** 2).sum() < energy * (s**2).sum():
        rank += 1
    m, n = matrix.shape
    cost = rank * (m + n + 1)
    return (matrix, m * n) if cost >= m * n else ((U[:, :rank] * s[:rank]) @ Vt[:rank], cost)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("energy", [0.3, 0.8, 0.95, 0.98])
def test_truncation_is_that_of_the_svd_and_keeps_the_energy(shape: tuple[int, int], energy: float, float64) -> None:
    matrix = decaying(shape, ratio=0.3)
    got, floats = truncate(jnp.asarray(matrix), energy)
    expected, cost = by_svd(matrix, energy)
    np.testing.assert_allclose(got, expected, 0, 1e-12)
    assert floats == cost
    assert np.linalg.norm(got - matrix) <= np.sqrt(1 - energy) * np.linalg.norm(matrix) + 1e-12


def test_something_is_saved_and_a_matrix_that_its_factors_outgrow_is_exact(float64) -> None:
    large = decaying((40, 30), ratio=0.3)
    got, floats = truncate(jnp.asarray(large), 0.95)
    assert floats == 2 * 71
    assert np.abs(got - large).max() > 1e-3
    flat = decaying((40, 30), ratio=1.0)
    got, floats = truncate(jnp.asarray(flat), 0.95)
    assert floats == 1200
    np.testing.assert_array_equal(got, flat)


@pytest.mark.parametrize("shape", SHAPES)
def test_full_energy_is_no_compression(shape: tuple[int, int]) -> None:
    matrix = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    got, floats = truncate(jnp.asarray(matrix), 1.0)
    np.testing.assert_array_equal(got, matrix)
    assert floats == matrix.size


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_tiny_huge_and_no_updates(scale: float) -> None:
    matrix = (decaying((40, 30), ratio=0.3) * scale).astype(np.float32)
    got, floats = truncate(jnp.asarray(matrix), 0.95)
    assert floats == (2 * 71 if scale else 0)
    assert np.linalg.norm(got / (scale or 1) - matrix / (scale or 1)) <= np.sqrt(0.05) * 1.05


def test_kernels_are_matrices_and_vectors_are_sent_whole(float64) -> None:
    update = {
        "conv": jnp.asarray(decaying((5 * 5 * 3, 16), ratio=0.2).reshape(5, 5, 3, 16)),
        "bias": jnp.arange(16.0),
        "dense": jnp.asarray(decaying((20, 10), 1, 0.2)),
    }
    got, floats = compress(update, 0.97)
    expected, cost = by_svd(np.asarray(update["conv"]).reshape(75, 16), 0.97)
    np.testing.assert_allclose(got["conv"].reshape(75, 16), expected, 0, 1e-12)
    assert floats == cost + 16 + by_svd(np.asarray(update["dense"]), 0.97)[1]
    np.testing.assert_array_equal(got["bias"], update["bias"])


@pytest.mark.parametrize("shape", [(12, 7), (7, 12)])
@pytest.mark.parametrize("rank", [3, 7])
def test_the_derivative_at_a_fixed_rank_also_with_equal_singular_values(shape, rank, float64) -> None:
    U, _, Vt = np.linalg.svd(np.random.default_rng(2).normal(size=shape), full_matrices=False)
    s = np.where(np.arange(7) < rank, [1.0, 1.0, 0.4, 0.1, 0.1, 0.03, 0.01], 0.0)  # some equal, perhaps zeros
    matrix, change = jnp.asarray((U * s) @ Vt), np.random.default_rng(3).normal(size=shape)
    value = lambda x: truncate(x, 0.9)[0]  # noqa: E731
    assert truncate(matrix, 0.9)[1] == 2 * 20
    exact = jax.jvp(value, (matrix,), (jnp.asarray(change),))[1]
    h = 1e-5
    numeric = (by_svd(matrix + h * change, 0.9)[0] - by_svd(matrix - h * change, 0.9)[0]) / (2 * h)
    np.testing.assert_allclose(exact, numeric, 1e-6, 1e-7)
    weight = jnp.asarray(np.random.default_rng(4).normal(size=shape))
    backward = jax.grad(lambda x: (value(x) * weight).sum())(matrix)
    np.testing.assert_allclose((backward * change).sum(), (exact * weight).sum(), 1e-10)


def test_what_is_sent_depends_on_the_round_and_is_counted(float64) -> None:
    fed = federation(participation=fp.Participation(0.8, 0.2))
    options = {"energy_first": 0.5, "energy_last": 1.0}
    algorithm = fp.build("fedkd", fed, **options)
    result = fp.simulate(fed, algorithm, rounds=6, eval_every=6, seed=1)
    whole = 6 * 4 + 4 + 4 * CLASSES + CLASSES
    assert algorithm.floats == (whole, whole)
    up, down = result.info["floats_up"][0], result.info["floats_down"][0]
    assert (up <= whole).all()
    assert (down <= whole).all()
    assert up[0] < up[-1]
    reported, trained = (result.info[name][0].sum(1) for name in ("reported", "trains"))
    assert result.floats_up == sum(round(a * n) for a, n in zip(up, reported, strict=True))
    assert result.floats_down == sum(round(a * n) for a, n in zip(down, trained, strict=True))
    assert 0 < result.floats_up < whole * reported.sum()


def test_floats_of_methods_that_do_not_count() -> None:
    info = {"reported": np.array([[[True, False, True]]]), "trains": np.array([[[True, True, True]]])}
    sent = floats_sent(info, (10, 3 * 10**9))
    assert (sent["floats_up"].tolist(), sent["floats_down"].tolist()) == ([[20]], [[9 * 10**9]])


def test_teacher_student_and_newcomer(float64) -> None:
    fed = federation()
    algorithm = fp.build("fedkd", fed)
    env = fed.env(algorithm.hyper)
    state = algorithm.init(env, jax.random.key(0))
    state, _ = jax.jit(algorithm.round)(env, state, fp.everyone(env.data), jax.random.key(1))
    teacher = algorithm.personal(env, state, 1)
    assert_close(teacher, {name: leaf[1] for name, leaf in state.teacher.items()})
    assert_close(algorithm.received(env, state, 1), state.shared)
    assert_close(algorithm.newcomer(env, state, fed.model.init(jax.random.key(9))), state.shared)
    assert any(np.abs(teacher[name] - state.shared[name]).max() > 1e-3 for name in teacher)


@pytest.mark.parametrize(
    ("option", "value"), [("energy_first", 0.0), ("energy_last", 1.1), ("energy_last", np.nan), ("clip", 0.0)]
)
def test_options_out_of_range_are_refused(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=option):
        fp.build("fedkd", federation(), **{option: value})


def test_a_model_without_features_is_refused() -> None:
    fed = federation()
    model = fp.function_model(lambda key: {"w": jnp.zeros((6, 3))}, lambda p, x: x @ p["w"])
    with pytest.raises(ValueError, match="fedkd needs the features"):
        fp.build("fedkd", fed.replace(model=model))
