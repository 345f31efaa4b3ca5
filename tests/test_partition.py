"""Partitioners: every sample in one place, minimums, determinism, and what each method promises."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedjax_pfl.data import PARTITIONS, Partition, PartitionConfig, make_partition, to_client_data
from fedjax_pfl.data.clients import SPLITS
from fedjax_pfl.data.dealing import apportion, level
from fedjax_pfl.data.sources import Source, load

QUICK = settings(max_examples=40, deadline=None)
LABELS = np.random.default_rng(7).integers(10, size=2000).astype(np.int32)


def pooled(partition: Partition, splits: tuple[str, ...] = SPLITS) -> list[np.ndarray]:
    """All samples of each client."""
    return [np.concatenate(parts) for parts in zip(*(partition.rows(split) for split in splits), strict=True)]


def sizes(partition: Partition) -> np.ndarray:
    return np.array([len(part) for part in pooled(partition)])


def source(samples: int = 600, test: int = 200) -> Source:
    """Features that name their sample, natural clients of unequal size, an official test set at the end."""
    rng = np.random.default_rng(3)
    y = rng.integers(5, size=samples + test).astype(np.int32)
    client = rng.choice(12, size=samples + test, p=np.arange(1, 13) / 78)
    x = np.arange(samples + test, dtype=np.float32)[:, None]
    return Source("made", x, y, 5, client=client, official_test=np.arange(samples + test) >= samples)


@QUICK
@given(
    method=st.sampled_from(["iid", "dirichlet", "pathological"]),
    clients=st.integers(1, 30),
    classes=st.integers(1, 6),
    alpha=st.sampled_from([1e-3, 0.1, 1.0, 1e4]),
    balance=st.booleans(),
    minimum=st.integers(1, 5),
    fractions=st.sampled_from([(0.25, 0.1), (0.5, 0.0), (0.0, 0.3), (0.0, 0.0), (0.9, 0.05)]),
    seed=st.integers(0, 1000),
)
def test_each_sample_is_in_one_place(
    method: str, clients: int, classes: int, alpha: float, balance: bool, minimum: int, fractions: tuple[float, float],
    seed: int,
) -> None:  # fmt: skip
    labels = np.random.default_rng(seed).integers(classes, size=clients * 8)
    k = min(2, len(np.unique(labels)))
    minimum = min(minimum, k) if method == "pathological" else minimum  # what two classes can surely meet
    own = {"alpha": alpha, "classes_per_client": k, "balance": balance}
    own = {name: value for name, value in own.items() if name in PARTITIONS[method].options}
    config = PartitionConfig(
        method, clients, min_samples=minimum, test_fraction=fractions[0], validation_fraction=fractions[1],
        seed=seed, **own,
    )  # fmt: skip
    partition = make_partition(labels, config)
    rows = np.concatenate(pooled(partition))
    assert len(np.unique(rows)) == len(rows)
    assert rows.min() >= 0
    assert rows.max() < len(labels)
    unheld = method == "pathological" and clients * k < len(np.unique(labels))
    if not (unheld or (method == "pathological" and balance)):
        assert len(rows) == len(labels)
    assert partition.achieved_minimum == sizes(partition).min() >= minimum
    assert partition.sizes("train").min() >= 1
    if fractions[0] > 0:
        assert ((partition.sizes("test") >= 1) == (sizes(partition) >= 2)).all()
    else:
        assert partition.sizes("test").sum() == 0
    if fractions[1] == 0:
        assert partition.sizes("validation").sum() == 0
    if method == "iid" or balance:
        assert np.ptp(sizes(partition)) <= 1
    if method == "pathological":
        assert all(len(np.unique(labels[part])) == k for part in pooled(partition))
    again = make_partition(labels, config)
    assert again.sha256 == partition.sha256


@pytest.mark.parametrize("method", ["iid", "dirichlet", "pathological"])
def test_seed_alone_decides(method: str) -> None:
    config = PartitionConfig(method, seed=4)
    np.random.seed(1)  # noqa: NPY002, global state must not matter
    first = make_partition(LABELS, config)
    np.random.seed(2)  # noqa: NPY002
    assert make_partition(LABELS.astype(np.int64), config).sha256 == first.sha256
    assert make_partition(LABELS, dataclasses.replace(config, seed=5)).sha256 != first.sha256


def test_partition_is_the_same_in_another_process() -> None:
    script = (
        "import numpy as np; from fedjax_pfl.data import *; y = np.arange(3000) % 7;"
        "print(*(make_partition(y, PartitionConfig(m, 13)).sha256 for m in ('iid', 'dirichlet', 'pathological')))"
    )
    root = str(Path(__file__).parent.parent)
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    y = np.arange(3000) % 7
    methods = ("iid", "dirichlet", "pathological")
    found = done.stdout.split()
    assert found == [make_partition(y, PartitionConfig(m, 13)).sha256 for m in methods]
    assert [digest[:12] for digest in found] == ["c690ce89beae", "7b07f76c8360", "02519d8e3d9e"]  # of recorded runs


def test_hash_is_of_the_index_sets_and_stable() -> None:
    rows = tuple(np.array(part) for part in ([0, 2], [3]))
    empty = (np.zeros(0, np.int64),) * 2
    partition = Partition(PartitionConfig(), 5, rows, empty, (np.array([1]), np.array([4])))
    narrow = dataclasses.replace(partition, train=tuple(part.astype(np.int32) for part in rows))
    swapped = dataclasses.replace(partition, test=(np.array([4]), np.array([1])))
    assert partition.sha256 == narrow.sha256 != swapped.sha256
    written = struct.pack("<13q", 5, 2, 2, 1, 0, 2, 3, 0, 0, 1, 1, 1, 4)
    assert partition.sha256 == hashlib.sha256(written).hexdigest()


def test_large_alpha_is_the_global_histogram() -> None:
    labels = np.repeat(np.arange(4), [400, 200, 800, 600])
    partition = make_partition(labels, PartitionConfig("dirichlet", 10, alpha=1e7))
    counts = np.sum([partition.counts(labels, split) for split in SPLITS], axis=0)
    assert np.abs(counts - np.array([40, 20, 80, 60])).max() <= 1
    assert not partition.notes


@pytest.mark.parametrize(("alpha", "balance"), [(1e-3, False), (1e-3, True), (1e-300, False)])
def test_small_alpha_is_about_one_client_per_class(alpha: float, balance: bool) -> None:
    for seed in range(5):
        partition = make_partition(LABELS, PartitionConfig("dirichlet", 20, alpha=alpha, balance=balance, seed=seed))
        counts = np.sum([partition.counts(LABELS, split) for split in SPLITS], axis=0)
        if balance:
            assert np.ptp(counts.sum(1)) <= 1
            assert (counts.max(1) / counts.sum(1)).mean() > 0.85
        else:
            assert (counts.max(0) / counts.sum(0)).mean() > 0.9


def test_skew_falls_with_alpha() -> None:
    def skew(alpha: float) -> float:
        counts = make_partition(LABELS, PartitionConfig("dirichlet", 20, alpha=alpha)).counts(LABELS)
        return float((counts.max(1) / counts.sum(1)).mean())

    assert skew(0.01) > skew(0.3) > skew(3.0) > skew(100.0)


@pytest.mark.parametrize(("minimum", "balance"), [(1, False), (2, False), (60, False), (2, True)])
def test_dirichlet_ends_for_many_skewed_clients(minimum: int, balance: bool) -> None:
    labels = np.arange(60_000) % 10
    begin = time.perf_counter()
    partition = make_partition(
        labels, PartitionConfig("dirichlet", 1000, alpha=0.05, balance=balance, min_samples=minimum)
    )
    assert time.perf_counter() - begin < 5
    assert partition.achieved_minimum >= minimum
    assert sizes(partition).sum() == 60_000
    assert any("moved" in note for note in partition.notes)


@QUICK
@given(st.lists(st.lists(st.integers(0, 20), min_size=3, max_size=3), min_size=1, max_size=9), st.integers(0, 10))
def test_levelling_keeps_totals(rows: list[list[int]], low: int) -> None:
    counts = np.array(rows)
    assume(counts.sum() >= low * len(counts))
    done, moved = level(counts, low, counts.sum())
    np.testing.assert_array_equal(done.sum(0), counts.sum(0))
    assert done.min() >= 0
    assert done.sum(1).min() >= low
    lack = np.maximum(low - counts.sum(1), 0).sum()
    assert moved == lack  # nothing moves that need not
    equal, _ = level(counts, counts.sum() // len(counts), -(-counts.sum() // len(counts)))
    np.testing.assert_array_equal(equal.sum(0), counts.sum(0))
    assert np.ptp(equal.sum(1)) <= 1


@QUICK
@given(st.integers(1, 40), st.integers(0, 500), st.integers(0, 99))
def test_apportioned_numbers_are_near_their_shares(clients: int, total: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(clients, 0.5), size=2)
    whole = apportion(np.array([total, 7]), shares, rng)
    assert whole.sum(1).tolist() == [total, 7]
    assert np.abs(whole - np.array([[total], [7]]) * shares).max() <= 1 + 1e-6


@pytest.mark.parametrize("k", [1, 2, 5, 10])
def test_pathological_classes_are_held_in_proportion(k: int) -> None:
    partition = make_partition(LABELS, PartitionConfig("pathological", 40, classes_per_client=k, balance=True))
    counts = np.sum([partition.counts(LABELS, split) for split in SPLITS], axis=0)
    assert ((counts > 0).sum(1) == k).all()
    if k < 10:
        assert np.abs((counts > 0).sum(0) - 40 * k * np.bincount(LABELS) / len(LABELS)).max() <= 1.5
    assert counts.sum() >= (0.85 if k == 1 else 0.98) * len(LABELS)
    assert np.median(counts[counts > 0]) >= 0.7 * len(LABELS) / (40 * k)  # a held class is more than a token


def test_pathological_without_balance_has_unequal_clients_and_all_samples() -> None:
    partition = make_partition(LABELS, PartitionConfig("pathological", 40, min_samples=10))
    assert sizes(partition).sum() == len(LABELS)
    assert 10 <= sizes(partition).min() < sizes(partition).max() / 3


def test_pathological_with_few_places_says_what_is_left_out() -> None:
    partition = make_partition(LABELS, PartitionConfig("pathological", 3))
    assert any("belong to no client" in note for note in partition.notes)
    assert any("left out" in note for note in partition.notes)


def test_natural_clients_are_the_given_ones() -> None:
    data = source()
    everyone = make_partition(data, PartitionConfig("natural", None))
    assert [set(data.client[part]) for part in pooled(everyone)] == [{i} for i in range(12)]
    some = make_partition(data, PartitionConfig("natural", 5, seed=1))
    chosen = [int(data.client[part[0]]) for part in pooled(some)]
    assert len(set(chosen)) == 5
    assert chosen == sorted(chosen)
    other = make_partition(data, PartitionConfig("natural", 5, seed=2))
    assert [int(data.client[part[0]]) for part in pooled(other)] != chosen
    few = make_partition(data, PartitionConfig("natural", None, min_samples=60))
    assert few.achieved_minimum >= 60
    assert "clients with fewer than 60" in few.notes[0]


def test_natural_clients_may_have_names() -> None:
    data = dataclasses.replace(source(), client=np.array(["anna", "bert"])[np.arange(800) % 2])
    assert sizes(make_partition(data, PartitionConfig("natural", None))).tolist() == [400, 400]


def test_known_groups_reach_the_partition() -> None:
    data = load("synthetic:clients=8,groups=4,samples=20")
    assert make_partition(data, PartitionConfig("natural", None)).groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert make_partition(data, PartitionConfig("iid", 4)).groups is None


def test_splits_are_stratified() -> None:
    partition = make_partition(LABELS, PartitionConfig("iid", 5))
    whole = np.sum([partition.counts(LABELS, split) for split in SPLITS], axis=0)
    assert np.abs(partition.counts(LABELS, "test") - 0.25 * whole).max() <= 2
    assert np.abs(partition.counts(LABELS, "validation") - 0.1 * whole).max() <= 2
    np.testing.assert_allclose(partition.sizes("test") / sizes(partition), 0.25, atol=0.01)


def test_tiny_clients_train_first() -> None:
    labels = np.zeros(1 + 2 + 3 + 4, np.int64)
    data = Source(
        "tiny", np.zeros((10, 1), np.float32), labels.astype(np.int32), 1, np.repeat(np.arange(4), [1, 2, 3, 4])
    )
    partition = make_partition(data, PartitionConfig("natural", None, min_samples=1, validation_fraction=0.2))
    assert [partition.sizes(split).tolist() for split in SPLITS] == [[1, 1, 2, 2], [0, 0, 0, 1], [0, 1, 1, 1]]
    assert to_client_data(data, partition).test.count.tolist() == [0, 1, 1, 1]  # no test samples is allowed


def test_official_test_samples_stay_test_samples() -> None:
    data = source()
    partition = make_partition(data, PartitionConfig("dirichlet", 6, alpha=0.5, test="official"))
    fit = np.concatenate(pooled(partition, ("train", "validation")))
    test = np.concatenate(partition.test)
    assert sorted(fit) == list(range(600))
    assert sorted(test) == list(range(600, 800))
    counts = partition.counts(data.y, "train") + partition.counts(data.y, "validation")
    expected = counts / counts.sum(0) * np.bincount(data.y[600:])
    assert np.abs(partition.counts(data.y, "test") - expected).max() <= 1
    local = make_partition(data, PartitionConfig("dirichlet", 6, alpha=0.5))
    assert sizes(local).sum() == 800


def test_official_samples_of_absent_classes_are_left_out() -> None:
    partition = make_partition(source(), PartitionConfig("pathological", 2, classes_per_client=1, test="official"))
    assert any("official test samples" in note for note in partition.notes)
    assert partition.achieved_minimum == min(len(part) for part in pooled(partition, ("train", "validation")))


def test_client_data_shares_the_features() -> None:
    data = source()
    partition = make_partition(data, PartitionConfig("dirichlet", 6))
    held = to_client_data(data, partition)
    assert held.examples["x"] is data.x
    assert held.num_classes == 5
    assert held.num_clients == 6
    np.testing.assert_array_equal(np.asarray(held.label_histogram()), partition.counts(data.y, "train", 5))
    with pytest.raises(ValueError, match="partition is of 800 samples"):
        to_client_data(source(500), partition)


def test_table_has_one_row_a_client() -> None:
    partition = make_partition(LABELS, PartitionConfig("pathological", 4))
    table = partition.table(LABELS)
    assert [row["client"] for row in table] == [0, 1, 2, 3]
    assert all(len(row["classes"]) == 2 for row in table)
    assert [row["train"] + row["validation"] + row["test"] for row in table] == sizes(partition).tolist()
    with pytest.raises(ValueError, match="of 2000 samples, found 10 labels"):
        partition.counts(LABELS[:10])


def test_saved_partition_comes_back(tmp_path: Path) -> None:
    data = load("synthetic:clients=5")
    partition = make_partition(data, PartitionConfig("natural", None, seed=3))
    partition.save(tmp_path / "partition.npz")
    back = Partition.load(tmp_path / "partition.npz", data.y)
    assert (back.sha256, back.config, back.notes) == (partition.sha256, partition.config, partition.notes)
    np.testing.assert_array_equal(back.groups, partition.groups)
    assert [path.name for path in tmp_path.iterdir()] == ["partition.npz"]
    with pytest.raises(ValueError, match="belongs to other data"):
        Partition.load(tmp_path / "partition.npz", np.zeros(1, int))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_rows": np.array([0, 1, 2, 2])}, "two clients or two splits"),
        ({"train_rows": np.array([0, 1, 2, 99])}, "outside the 8 samples"),
        ({"sha256": np.array("0" * 64)}, "damaged or edited"),
        ({"train_sizes": np.array([5, -1])}, "sizes and rows disagree"),
        ({"train_rows": np.array([{}, 1, 2, 3], object)}, "object arrays are pickles"),
        ({"config": np.array("{}x")}, "not a partition file or damaged"),
        ({"config": np.array('{"method": "iid", "colour": 1}')}, "not a partition file or damaged"),
        ({"samples": np.array("many")}, "not a partition file or damaged"),
        ({"sha256": None}, "not a partition file or damaged"),
    ],
)
def test_damaged_partitions_are_refused(tmp_path: Path, change: dict[str, np.ndarray | None], message: str) -> None:
    path = tmp_path / "partition.npz"
    config = PartitionConfig("iid", 2, test_fraction=0.5, validation_fraction=0.0)
    make_partition(np.zeros(8, int), config).save(path)
    arrays = {**np.load(path), **change}
    np.savez(path, allow_pickle=True, **{name: leaf for name, leaf in arrays.items() if leaf is not None})
    with pytest.raises(ValueError, match=message):
        Partition.load(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="not a readable npz file"):
        Partition.load(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "dirichlett"}, "Did you mean 'dirichlet'"),
        ({"clients": 2001}, "2001 clients need as many samples, found 2000: ask for fewer"),
        ({"clients": 0}, "clients must be at least 1"),
        ({"min_samples": 101}, "the largest minimum that can be met is 100"),
        ({"min_samples": 0}, "min_samples must be at least 1"),
        ({"alpha": 0.0}, "alpha must be positive"),
        ({"alpha": -1.0}, "alpha must be positive"),
        ({"alpha": float("nan")}, "alpha must be positive"),
        ({"alpha": float("inf")}, "alpha must be positive"),
        ({"test_fraction": 1.0}, "test_fraction must lie in"),
        ({"validation_fraction": -0.1}, "validation_fraction must lie in"),
        ({"test_fraction": 0.6, "validation_fraction": 0.4}, "leave nothing to train on"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"method": "natural"}, "no clients of its own"),
        ({"test": "official"}, "official test set"),
        ({"test": "oficial"}, "Did you mean 'official'"),
        ({"method": "pathological", "classes_per_client": 11}, "11 classes per client, but only 10 classes"),
        ({"method": "pathological", "classes_per_client": 0}, "classes_per_client must be at least 1"),
        ({"method": "pathological", "clients": 1900, "min_samples": 1}, "3800 places, the classes have only 2000"),
        ({"method": "pathological", "classes_per_client": 1, "min_samples": 98}, "no client size above"),
    ],
)
def test_impossible_partitions_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_partition(LABELS, PartitionConfig(**options))  # type: ignore[arg-type]


def test_pathological_names_the_largest_minimum() -> None:
    config = PartitionConfig("pathological", 20, classes_per_client=1, balance=True)
    largest = make_partition(LABELS, config).achieved_minimum
    assert (
        make_partition(LABELS, dataclasses.replace(config, balance=False, min_samples=largest)).achieved_minimum
        == largest
    )
    with pytest.raises(ValueError, match=f"no client size above {largest} "):
        make_partition(LABELS, dataclasses.replace(config, min_samples=largest + 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": 13}, r"12 of 12 clients .* ask for at most 12 clients, or leave clients out to take all"),
        ({"clients": 12, "min_samples": 50}, "lower min_samples to"),
        ({"clients": None, "min_samples": 5000}, "lower min_samples to"),
    ],
)
def test_impossible_natural_partitions_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_partition(source(), PartitionConfig("natural", **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("labels", [np.zeros(0, int), np.zeros((3, 2), int), np.zeros(3), np.array([0, -1])])
def test_bad_labels_are_refused(labels: np.ndarray) -> None:
    with pytest.raises(ValueError, match="1-d array of integers"):
        make_partition(labels, PartitionConfig("iid", 1))


def test_registry_names_options_that_exist() -> None:
    fields = {field.name for field in dataclasses.fields(PartitionConfig)}
    for name, entry in PARTITIONS.items():
        assert name == entry.name
        assert entry.description
        assert set(entry.options) <= fields


def test_an_option_of_another_method_is_refused() -> None:
    with pytest.raises(
        ValueError, match="alpha belongs to dirichlet, skewed_chunks_of_dataset; partition 'iid' does not read it"
    ):
        make_partition(LABELS, PartitionConfig("iid", alpha=0.5))
