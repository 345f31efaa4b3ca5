"""The LSTM layer against Flax's cells, and the classifiers of windows and of symbols."""

from __future__ import annotations

import lzma
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedjax_pfl.models.recurrent import LSTM, lstm
from fedjax_pfl.models.sequence import HARCNN, CharLSTM

RNG = np.random.default_rng(0)
GATES = "ifgo"


def _normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape) / np.sqrt(shape[-2] if len(shape) > 1 else 1)


def _lstm_parameters(features: int, units: int, *stack: int) -> dict[str, np.ndarray]:
    return {
        "input_kernel": _normal(*stack, features, 4 * units),
        "recurrent_kernel": _normal(*stack, units, 4 * units),
        "bias": _normal(*stack, 4 * units),
    }


def _as_flax(params: Any) -> Any:
    """The same weights under the names of a Flax cell; traceable, so that gradients come back under ours."""
    split = {name: jnp.split(value, 4, -1) for name, value in params.items()}
    cell = {f"i{g}": {"kernel": split["input_kernel"][n]} for n, g in enumerate(GATES)}
    return cell | {
        f"h{g}": {"kernel": split["recurrent_kernel"][n], "bias": split["bias"][n]} for n, g in enumerate(GATES)
    }


def _ours(params: Any, x: Any) -> Any:
    return LSTM(params["recurrent_kernel"].shape[0], param_dtype=x.dtype).apply({"params": params}, x)


def _flax(params: Any, x: Any) -> Any:
    cell = nn.OptimizedLSTMCell(params["recurrent_kernel"].shape[0], param_dtype=x.dtype)
    return nn.RNN(cell).apply({"params": {"cell": _as_flax(params)}}, x)


def _derivatives(run: Any) -> Any:
    """Hidden states, gradient, and the gradient of the gradient's squared norm."""

    def loss(params: Any, x: Any) -> Any:
        y = run(params, x)
        return (jnp.tanh(y) * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum(), y

    def norm(params: Any, x: Any) -> Any:
        gradient, y = jax.grad(loss, (0, 1), has_aux=True)(params, x)
        return sum((g**2).sum() for g in jax.tree.leaves(gradient)), (gradient, y)

    return jax.grad(norm, (0, 1), has_aux=True)


def test_lstm_equals_flax_stacked_to_the_second_derivative(float64: None) -> None:
    params, x = _lstm_parameters(3, 4, 2), _normal(2, 3, 5, 3)
    got, want = (jax.jit(jax.vmap(_derivatives(run)))(params, x) for run in (_ours, _flax))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-9, 1e-11), got, want)


def test_lstm_forward_mode_is_the_difference_quotient(float64: None) -> None:
    x, kernel, dx, dkernel = _normal(4, 2, 12), _normal(3, 12), _normal(4, 2, 12), _normal(3, 12)
    _, got = jax.jit(lambda: jax.jvp(lstm, (x, kernel), (dx, dkernel)))()
    step = 1e-5
    want = (lstm(x + step * dx, kernel + step * dkernel) - lstm(x - step * dx, kernel - step * dkernel)) / (2 * step)
    np.testing.assert_allclose(got, want, 1e-7, 1e-9)


def test_lstm_starts_with_open_forget_gates_and_one_glorot_matrix() -> None:
    params = jax.jit(LSTM(32).init)(jax.random.key(0), jnp.ones((1, 2, 8)))["params"]
    assert {name: value.shape for name, value in params.items()} == {
        "input_kernel": (8, 128), "recurrent_kernel": (32, 128), "bias": (128,)
    }  # fmt: skip
    np.testing.assert_array_equal(params["bias"], np.repeat([0.0, 1.0, 0.0, 0.0], 32))
    both = np.concatenate([params["input_kernel"], params["recurrent_kernel"]])
    limit = np.sqrt(6 / (40 + 128))
    assert 0.98 * limit < np.abs(both).max() <= limit
    np.testing.assert_allclose(both.std(), limit / np.sqrt(3), 0.05)


def test_char_lstm_by_hand() -> None:
    """Two layers written out step by step in NumPy, on a batch of symbols."""
    model, x = CharLSTM(4, vocabulary=7, embedding=3, hidden=(5, 2)), RNG.integers(0, 7, (2, 6))
    params = {"embed": {"embedding": _normal(7, 3)}, "head": {"kernel": _normal(2, 4), "bias": _normal(4)}}
    params |= {"lstm1": _lstm_parameters(3, 5), "lstm2": _lstm_parameters(5, 2)}
    states = params["embed"]["embedding"][x]
    for layer in ("lstm1", "lstm2"):
        p, out = params[layer], []
        hidden = cell = np.zeros((2, p["recurrent_kernel"].shape[0]))
        for t in range(6):
            before = states[:, t] @ p["input_kernel"] + hidden @ p["recurrent_kernel"] + p["bias"]
            i, f, g, o = np.split(before, 4, -1)
            i, f, o = (1 / (1 + np.exp(-gate)) for gate in (i, f, o))
            cell = f * cell + i * np.tanh(g)
            hidden = o * np.tanh(cell)
            out.append(hidden)
        states = np.stack(out, 1)
    want = states[:, -1] @ params["head"]["kernel"] + params["head"]["bias"]
    single = jax.tree.map(lambda a: a.astype(np.float32), params)
    run = jax.jit(lambda x: model.apply({"params": single}, x))
    np.testing.assert_allclose(run(x), want, 1e-4, 1e-5)
    assert np.isnan(run(np.where(x == x[1, 5], 7, x))[1]).all()  # outside the vocabulary


def _sizes(module: nn.Module, x: Any) -> dict[str, int]:
    params = jax.eval_shape(module.init, jax.random.key(0), x)["params"]
    return {name: sum(leaf.size for leaf in jax.tree.leaves(layer)) for name, layer in params.items()}


def test_parameters_layer_by_layer() -> None:
    assert _sizes(CharLSTM(80), jnp.zeros((1, 80), int)) == {
        "embed": 640, "lstm1": 271_360, "lstm2": 525_312, "head": 20_560
    }  # fmt: skip
    assert _sizes(HARCNN(6), jnp.zeros((1, 128, 9))) == {
        "conv1": 9 * 9 * 32 + 32,
        "conv2": 9 * 32 * 64 + 64,
        "dense1": (64 * 26) * 1024 + 1024,
        "dense2": 1024 * 512 + 512,
        "head": 512 * 6 + 6,
    }


def _textbook_har(params: Any, x: Any) -> Any:
    for name, features in (("conv1", 32), ("conv2", 64)):
        x = nn.relu(nn.Conv(features, (9,), padding="VALID").apply({"params": params[name]}, x))
        x = nn.max_pool(x, (2,), (2,))
    x = x.reshape(x.shape[0], -1)
    for name in ("dense1", "dense2"):
        x = nn.relu(x @ params[name]["kernel"] + params[name]["bias"])
    return x @ params["head"]["kernel"] + params["head"]["bias"]


def test_harcnn_equals_flax_layers_stacked() -> None:
    model, x = HARCNN(6, hidden=(12, 8)), RNG.normal(size=(2, 3, 45, 4)).astype(np.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros(x.shape[1:]))["params"]
    params = jax.tree.map(
        lambda a: (RNG.normal(size=(2, *a.shape)) / np.sqrt(a.size // a.shape[-1])).astype(np.float32), shapes
    )
    got, want = (
        jax.jit(jax.vmap(jax.value_and_grad(lambda p, x, run=run: jax.nn.log_softmax(run(p, x))[:, 0].sum())))(
            params, x
        )
        for run in (lambda p, x: model.apply({"params": p}, x), _textbook_har)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-3, 2e-5), got, want)


def test_harcnn_learns_real_windows() -> None:
    """A few steps on windows of one subject bring the loss well below that of a guess."""
    folder = Path(os.environ.get("FEDJAX_PFL_DATA", "")) / "uci_har"
    if not (folder / "windows.npz").exists():
        pytest.skip("FEDJAX_PFL_DATA names no folder with uci_har")
    with np.load(folder / "windows.npz") as windows, lzma.open(folder / "signals.npy.xz") as signals:
        start, step, labels = windows["start"][:90], np.float32(windows["step"]), windows["label"][:90]
        x = np.load(signals)[:, start[:, None] + np.arange(128)].transpose(1, 2, 0) * step
    y = np.unique(labels, return_inverse=True)[1]
    assert len(set(y)) > 1
    model = HARCNN(6, hidden=(16,))

    def loss(params: Any) -> Any:
        scores = jax.nn.log_softmax(model.apply(params, x))
        return -jnp.take_along_axis(scores, y[:, None], 1).mean()

    advance = jax.jit(lambda p: jax.tree.map(lambda a, g: a - 0.05 * g, p, jax.grad(loss)(p)))
    params = jax.jit(model.init)(jax.random.key(0), x)
    for _ in range(8):
        params = advance(params)
    assert loss(params) < 0.7 * np.log(6)
