"""ClientData: owners, histograms, checks, and the deal to shards."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_pfl.data import clients
from fedjax_pfl.data.clients import SPLITS, ClientData, Split, client_data, shard, split_from_lists

COUNTS = st.lists(st.integers(0, 6), min_size=10, max_size=10)
QUICK = settings(max_examples=40, deadline=None)


def reference_owner(split: Split) -> np.ndarray:
    """Client after client, as the definition of a split says."""
    owner = np.full(len(split.rows), len(split.start))
    for slot, (start, count) in enumerate(zip(split.start, split.count, strict=True)):
        owner[start : start + count] = slot
    return owner


def ragged(train: list[int], seed: int = 0, classes: int = 3) -> ClientData:
    """Client data with the given training sizes, one or no sample elsewhere, and samples that nobody owns."""
    rng = np.random.default_rng(seed)
    validation, test = rng.integers(0, 2, len(train)), rng.integers(0, 3, len(train))
    total = int(sum(train) + validation.sum() + test.sum()) + 3
    order = rng.permutation(total)
    sizes = np.concatenate([train, validation, test])
    parts = np.split(order[: sizes.sum()], np.cumsum(sizes)[:-1])
    m = len(train)
    examples = {"x": np.arange(total * 2, dtype=np.float32).reshape(total, 2), "y": rng.integers(classes, size=total)}
    return client_data(examples, classes, parts[:m], parts[m : 2 * m], parts[2 * m :])


@QUICK
@given(counts=COUNTS, gap=st.integers(0, 4))
def test_owner_with_empty_clients_anywhere(counts: list[int], gap: int) -> None:
    count = np.array(counts, np.int32)
    start = (np.cumsum(count) - count + gap).astype(np.int32)
    split = Split(np.zeros(64, np.int32), start, count)
    np.testing.assert_array_equal(jax.jit(Split.owner)(split), reference_owner(split))
    moved = split._replace(start=np.where(count == 0, 0, start).astype(np.int32))  # empty slots may claim any start
    np.testing.assert_array_equal(jax.jit(Split.owner)(moved), reference_owner(split))


def test_owner_does_not_need_slots_in_order() -> None:
    split = Split(np.zeros(7, np.int32), np.array([4, 0, 2], np.int32), np.array([2, 1, 2], np.int32))
    assert split.owner().tolist() == [1, 3, 2, 2, 0, 0, 3]
    assert split.owner().dtype == jnp.int32


def test_split_without_samples_is_owned_by_nobody() -> None:
    split = split_from_lists([np.zeros(0, int)] * 3)
    assert split.owner().tolist() == [3]
    assert split.count.sum() == 0


@QUICK
@given(counts=st.lists(st.integers(1, 6), min_size=1, max_size=12), shards=st.integers(1, 6), seed=st.integers(0, 99))
def test_shards_keep_every_client(counts: list[int], shards: int, seed: int) -> None:
    data = ragged(counts, seed)
    dealt = shard(data, shards)
    slot_of = {int(i): slot for slot, i in enumerate(dealt.ids)}
    capacity = -(-len(counts) // shards)
    assert len(slot_of) == dealt.slots == shards * capacity
    for leaf in jax.tree.leaves(dealt):
        assert leaf.shape[0] % shards == 0
    for client in range(len(counts)):
        slot = slot_of[client]
        for name in SPLITS:
            before, after = (
                examples_of(data, name, client, 1, 0),
                examples_of(dealt, name, slot, shards, slot // capacity),
            )
            chex.assert_trees_all_equal(before, after)
    for i, slot in slot_of.items():
        assert i < len(counts) or all(dealt.split(name).count[slot] == 0 for name in SPLITS)
    np.testing.assert_array_equal(np.asarray(dealt.real), dealt.ids < len(counts))


def examples_of(data: ClientData, name: str, slot: int, shards: int, block: int) -> dict[str, np.ndarray]:
    """The examples of one slot, looked up within its own block."""
    one = block_of(data, shards, block)
    split, local = one.split(name), slot - block * one.slots
    return one.gather(split.rows[split.start[local] : split.start[local] + split.count[local]])


def block_of(data: ClientData, shards: int, block: int) -> ClientData:
    """What one device holds."""
    return jax.tree.map(lambda leaf: np.split(leaf, shards)[block], data).local()


@pytest.mark.parametrize("shards", [1, 2, 4, 9])
def test_histogram_is_that_of_each_client(shards: int) -> None:
    data = ragged([5, 1, 4, 2, 2, 7, 1])
    expected = np.zeros((data.slots, 3))
    for client in range(data.slots):
        np.add.at(expected[client], examples_of(data, "train", client, 1, 0)["y"], 1)
    dealt = shard(data, shards)
    found = np.asarray(jax.jit(lambda d: d.label_histogram())(dealt))
    real = dealt.ids < data.num_clients
    np.testing.assert_array_equal(found[real], expected[dealt.ids[real]])
    assert found[~real].sum() == 0
    blocks = [np.asarray(block_of(dealt, shards, block).label_histogram()) for block in range(shards)]
    np.testing.assert_array_equal(np.concatenate(blocks), found)


def test_histogram_skips_clients_without_samples() -> None:
    data = ragged([2, 1, 3])
    empty = dataclasses.replace(data, train=data.train._replace(count=np.array([2, 0, 3], np.int32)))
    assert empty.label_histogram().sum(1).tolist() == [2, 0, 3]


def test_shards_balance_work() -> None:
    counts = np.random.default_rng(0).lognormal(3, 1, 101).astype(int) + 1
    dealt = shard(ragged(counts.tolist()), 8)
    loads = dealt.train.count.reshape(8, -1).sum(1)
    assert loads.max() - loads.min() <= counts.max()
    assert loads.max() <= max(counts.max(), 1.1 * loads.mean())
    assert dealt.slots == 104
    assert (dealt.ids.reshape(8, -1) < 101).sum(1).min() >= 6


def test_one_shard_is_the_data_itself_and_bad_calls_fail() -> None:
    data = ragged([1, 2])
    assert shard(data, 1) is data
    with pytest.raises(ValueError, match="at least 1"):
        shard(data, 0)
    with pytest.raises(ValueError, match="unsharded"):
        shard(shard(data, 2), 2)
    with pytest.raises(ValueError, match="one number for each of 2 clients"):
        shard(data, 2, np.ones(3))


def test_shard_map_sees_valid_client_data() -> None:
    script = """
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from test_clients import ragged
from fedjax_pfl.data.clients import shard
data = shard(ragged([5, 1, 4, 2, 2, 7, 1]), 4)
mesh = jax.make_mesh((4,), ("clients",), axis_types=(AxisType.Auto,))
placed = jax.device_put(data, NamedSharding(mesh, P("clients")))
assert all(len({s.device for s in leaf.addressable_shards}) == 4 for leaf in jax.tree.leaves(placed))
local = jax.jit(jax.shard_map(lambda d: d.local().label_histogram(), mesh=mesh, in_specs=P("clients"),
                              out_specs=P("clients")))
np.testing.assert_array_equal(local(placed), data.label_histogram())
np.testing.assert_array_equal(jax.jit(lambda d: d.label_histogram())(placed), data.label_histogram())
"""
    here = os.path.dirname(__file__)
    path = os.pathsep.join([here, os.path.dirname(here)])
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    environment = {**os.environ, **devices, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_data_is_one_pytree_without_copies() -> None:
    x, y = np.zeros((4, 2), np.uint8), np.array([0, 1, 1, 0], np.int32)
    data = client_data({"x": x, "y": y}, 2, [np.array([0]), np.array([2, 1])])
    assert data.examples["x"] is x
    assert np.shares_memory(data.examples["y"], y)
    assert (data.slots, data.limits, data.limit("train"), data.limit("test")) == (2, (2, 0, 0), 2, 0)
    assert data.weight.tolist() == [1.0, 2.0]
    assert data.real.tolist() == [True, True]
    assert jax.tree.unflatten(jax.tree.structure(data), jax.tree.leaves(data)).num_clients == 2
    with pytest.raises(ValueError, match="unknown split 'tests'"):
        data.split("tests")


GOOD = {"x": np.zeros((4, 2), np.float32), "y": np.array([0, 1, 1, 0])}


@pytest.mark.parametrize(
    ("change", "train", "message"),
    [
        ({}, [[0], []], "client 1 has no training samples"),
        ({}, [[0], [4]], "row 4 is outside the 4 samples"),
        ({}, [[0], [-1]], "row -1 is outside"),
        ({}, [[0, 1], [1]], "sample 1 belongs to two clients"),
        ({}, [[0.5], [1.0]], "integer indices"),
        ({}, [], "no samples or no clients"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0, int)}, [[0]], "empty"),
        ({"x": np.zeros((3, 2))}, [[0]], "same number of samples"),
        ({"x": np.array([[0, 0], [0, np.nan], [0, 0], [0, 0]])}, [[0]], "sample 1 of 'x' is NaN or infinite"),
        ({"x": np.array([[0, 0], [0, 0], [np.inf, 0], [0, 0]])}, [[0]], "sample 2 of 'x' is NaN or infinite"),
        ({"x": np.array([[None], ["a"], [1], [2]], object)}, [[0]], "which is no number"),
        ({"y": np.array([0, 1, 2, 0])}, [[0]], r"label 2 of sample 2 is outside 0\.\.1"),
        ({"y": np.array([0, -1, 1, 0])}, [[0]], "label -1 of sample 1"),
        ({"y": np.zeros(4)}, [[0]], "labels must be integers"),
    ],
)
def test_bad_data_is_refused(change: dict[str, np.ndarray], train: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        client_data({**GOOD, **change}, 2, [np.array(part) if part else np.zeros(0, int) for part in train])


def test_splits_must_agree() -> None:
    one = [np.array([0])]
    with pytest.raises(ValueError, match=r"name \[1, 1, 2\] clients"):
        client_data(GOOD, 2, one, test=[np.array([1]), np.array([2])])
    with pytest.raises(ValueError, match="two clients or two splits"):
        client_data(GOOD, 2, one, test=one)
    with pytest.raises(ValueError, match="'x' and 'y'"):
        clients.check({"x": GOOD["x"]}, 2, [one])
