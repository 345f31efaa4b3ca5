"""Samples that point into a shared table: the reader, tokens as model inputs, chunks and devices."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import assert_close

import fedjax_pfl as fp
from fedjax_pfl.data.clients import ClientData, client_data, shard
from fedjax_pfl.data.windows import Windows
from fedjax_pfl.engine.sharding import client_mesh, place_data

LENGTH, SYMBOLS = 5, 7


class Net(nn.Module):
    """Embedding, mean over the window, head."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kind = jnp.result_type(float)
        z = nn.Embed(SYMBOLS, 4, name="embed", param_dtype=kind)(x).mean(1)
        return nn.Dense(SYMBOLS, name="head", param_dtype=kind)(nn.tanh(z))


def text() -> np.ndarray:
    return np.random.default_rng(0).integers(0, SYMBOLS, 150).astype(np.uint8)


def pointed(table: np.ndarray) -> ClientData:
    starts = np.arange(len(table) - LENGTH, dtype=np.int32)
    train = np.split(np.arange(100), [17, 40, 43])
    examples = {"x": starts, "y": table[LENGTH:].astype(np.int32)}
    test = np.split(np.arange(100, 120), 4)
    return client_data(examples, SYMBOLS, train, test=test, tables={"text": table}, reader=Windows(LENGTH))


def run(data: ClientData, devices: int = 1, **options: object) -> dict[str, object]:
    mesh = client_mesh(devices)
    model = fp.flax_model(Net(), np.zeros((1, LENGTH), np.int32))
    fed = fp.Federation(model, place_data(shard(data, devices), mesh), mesh=mesh, batch_size=4, lr=0.5, **options)
    result = fp.simulate(fed, fp.build("fedper", fed), rounds=3)
    return result.records[-1].scores["test"]


def test_a_window_is_the_symbols_from_its_start() -> None:
    table = text()
    x = pointed(table).gather(np.array([[0, 3], [7, 99]]))["x"]
    assert x.dtype == jnp.int32
    np.testing.assert_array_equal(x[1, 0], table[7 : 7 + LENGTH])
    assert x.shape == (2, 2, LENGTH)


@pytest.mark.parametrize(("devices", "options"), [(1, {}), (1, {"client_chunk": 3}), (3, {})])
def test_windows_train_as_their_copies(float64: None, devices: int, options: dict[str, int]) -> None:
    table = text()
    data = pointed(table)
    copies = np.lib.stride_tricks.sliding_window_view(table, LENGTH)[:-1].astype(np.int32)
    plain = dataclasses.replace(data, examples=data.examples | {"x": copies}, tables={}, reader=None)
    assert_close(run(plain), run(data, devices, **options))


def test_tokens_refuse_a_shift() -> None:
    model = fp.flax_model(Net(), np.zeros((1, LENGTH), np.int32))
    with pytest.raises(ValueError, match="have no shift and scale"):
        fp.Federation(model, jax.tree.map(jnp.asarray, pointed(text())), scale=255.0)
