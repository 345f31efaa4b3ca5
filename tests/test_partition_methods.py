"""What each further partition promises: client-wise Dirichlet, shards, sizes, groups, data sets, shifts, held out."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_pfl.data import Partition, PartitionConfig, Source, make_partition, to_client_data
from fedjax_pfl.data.clients import SPLITS
from fedjax_pfl.data.splits import ordered_parts

QUICK = settings(max_examples=40, deadline=None)
LABELS = np.random.default_rng(7).integers(10, size=2000).astype(np.int32)


def pooled(partition: Partition) -> list[np.ndarray]:
    """All samples of each client."""
    return [np.concatenate(parts) for parts in zip(*(partition.rows(split) for split in SPLITS), strict=True)]


def sizes(partition: Partition) -> np.ndarray:
    return np.array([len(part) for part in pooled(partition)])


def histograms(partition: Partition, labels: np.ndarray = LABELS) -> np.ndarray:
    return np.sum([partition.counts(labels, split, 10) for split in SPLITS], axis=0)


def datasets() -> Source:
    """Three data sets of different size, two classes each."""
    dataset = np.repeat(np.arange(3), [30, 60, 90]).astype(np.int32)
    y = (np.arange(180) % 2).astype(np.int32)
    return Source("mix", np.zeros((180, 1), np.uint8), y, 2, dataset=dataset, datasets=("A", "B", "C"))


@QUICK
@given(
    config=st.sampled_from(
        [
            PartitionConfig("dirichlet", dirichlet_by="client"),
            PartitionConfig("shards"),
            PartitionConfig("quantity", size_skew=2.0),
            PartitionConfig("quantity", sizes="powerlaw", size_skew=1.5),
            PartitionConfig("label_groups", groups=2),
            PartitionConfig("feature_shift", groups=2),
        ]
    ),
    clients=st.integers(2, 30),
    minimum=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_each_sample_is_in_one_place(config: PartitionConfig, clients: int, minimum: int, seed: int) -> None:
    labels = np.random.default_rng(seed).integers(4, size=300)
    config = dataclasses.replace(config, clients=clients, min_samples=minimum, seed=seed)
    partition = make_partition(labels, config)
    assert sorted(np.concatenate(pooled(partition)).tolist()) == list(range(300))
    assert sizes(partition).min() >= minimum
    assert partition.sizes("train").min() >= 1
    assert partition.sha256 == make_partition(labels, config).sha256
    assert partition.sha256 != make_partition(labels, dataclasses.replace(config, seed=seed + 1)).sha256


def test_client_wise_dirichlet_goes_from_one_class_to_the_global_histogram() -> None:
    even = histograms(make_partition(LABELS, PartitionConfig("dirichlet", 10, alpha=1e6, dirichlet_by="client")))
    share = np.bincount(LABELS) / len(LABELS)
    assert np.abs(even / even.sum(1, keepdims=True) - share).max() < 0.05
    skewed = make_partition(LABELS, PartitionConfig("dirichlet", 5, alpha=1e-4, dirichlet_by="client"))
    assert np.ptp(sizes(skewed)) <= 1  # 400 samples each, of classes with about 200: two classes, and what is left
    assert (histograms(skewed) > 0).sum(1).max() <= 4


def test_shards_hold_few_labels() -> None:
    partition = make_partition(np.repeat(np.arange(10), 200), PartitionConfig("shards", 50, shards_per_client=2))
    assert set(sizes(partition)) == {40}
    held = (histograms(partition, np.repeat(np.arange(10), 200)) > 0).sum(1)
    assert held.max() == 2
    assert (held == 1).any()  # two shards of one class: what tells shards from the pathological partition


@pytest.mark.parametrize("kind", ["lognormal", "powerlaw"])
def test_quantities_follow_their_distribution(kind: str) -> None:
    labels = np.zeros(1_000_000, np.int64)
    found = np.sort(sizes(make_partition(labels, PartitionConfig("quantity", 1000, sizes=kind, size_skew=1.2))))[::-1]
    assert found.sum() == len(labels)
    if kind == "powerlaw":
        slope = np.polyfit(np.log(np.arange(1, 301)), np.log(found[:300]), 1)[0]
        assert slope == pytest.approx(-1.2, abs=0.02)
    else:
        assert np.log(found - 1.9).std() == pytest.approx(1.2, rel=0.1)
    equal = sizes(make_partition(labels, PartitionConfig("quantity", 7, sizes=kind, size_skew=0.0)))
    assert np.ptp(equal) <= 1


def test_label_groups_are_known_clusters() -> None:
    partition = make_partition(LABELS, PartitionConfig("label_groups", 8, groups=4))
    assert partition.groups is not None
    assert partition.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    has = histograms(partition) > 0
    for i in range(8):
        for j in range(8):
            same = partition.groups[i] == partition.groups[j]
            assert (has[i] == has[j]).all() if same else not (has[i] & has[j]).any()


def test_data_sets_are_not_mixed() -> None:
    source = datasets()
    one = make_partition(source, PartitionConfig("dataset_per_client"))
    assert sizes(one).tolist() == [30, 60, 90]
    several = make_partition(source, PartitionConfig("chunks_of_dataset", clients_per_dataset=3))
    assert sizes(several).tolist() == [10] * 3 + [20] * 3 + [30] * 3
    assert several.groups is not None
    assert several.groups.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert source.dataset is not None
    for part, group in zip(pooled(several), several.groups, strict=True):
        assert set(source.dataset[part]) == {group}
    skewed = make_partition(source, PartitionConfig("skewed_chunks_of_dataset", alpha=1e-4, min_samples=1))
    counts = np.sum([skewed.counts(source.y, split) for split in SPLITS], axis=0)
    assert counts.reshape(3, 2, 2).sum((1, 2)).tolist() == [30, 60, 90]
    assert (counts.min(1) <= 1).sum() >= 4  # nearly each class has one owner
    with pytest.raises(ValueError, match="would mix the 3 data sets of mix: use natural, dataset_per_client"):
        make_partition(source, PartitionConfig("iid"))
    with pytest.raises(ValueError, match="3 data sets with 2 clients each are 6 clients, found 5"):
        make_partition(source, PartitionConfig("chunks_of_dataset", 5))
    with pytest.raises(ValueError, match="A: chunks_of_dataset: 40 clients need as many samples, found 30"):
        make_partition(source, PartitionConfig("chunks_of_dataset", clients_per_dataset=40))


def images(dtype: type = np.uint8) -> Source:
    x = np.random.default_rng(1).integers(0, 256, (80, 6, 6, 2)).astype(dtype)
    return Source("images", x, (np.arange(80) % 3).astype(np.int32), 3)


def test_rotation_turns_the_images_of_a_group_and_nothing_else() -> None:
    source = images()
    before = source.x.copy()
    partition = make_partition(source, PartitionConfig("feature_shift", 8, groups=4))
    data = to_client_data(source, partition)
    assert partition.groups is not None
    for part, turns in zip(pooled(partition), partition.groups, strict=True):
        for row in part:
            np.testing.assert_array_equal(data.examples["x"][row], np.rot90(before[row], turns))
    np.testing.assert_array_equal(source.x, before)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_noise_grows_with_the_group(dtype: type) -> None:
    source = images(dtype)
    source.x[:] = source.x // 8 + 100  # far from the limits, so that clipping is rare
    config = PartitionConfig("feature_shift", 8, groups=3, shift="noise", shift_noise=0.5)
    partition = make_partition(source, config)
    x = to_client_data(source, partition).examples["x"]
    assert x.dtype == dtype
    again = to_client_data(source, make_partition(source, config)).examples["x"]
    np.testing.assert_array_equal(x, again)
    assert partition.groups is not None
    moved = np.zeros(80)
    for part, group in zip(pooled(partition), partition.groups, strict=True):
        moved[part] = group
    change = x.astype(float) - source.x
    deviations = [change[moved == group].std() / source.x.std() for group in range(3)]
    np.testing.assert_allclose(deviations, [0, 0.25, 0.5], atol=0.03)
    other = make_partition(source, dataclasses.replace(config, shift_noise=0.4))
    assert other.sha256 != partition.sha256  # the same rows, other features


@QUICK
@given(
    seed=st.integers(0, 10_000),
    overlap=st.integers(0, 6),
    fractions=st.sampled_from([(0.25, 0.1), (0.3, 0.0), (0.0, 0.2), (0.0, 0.0), (0.5, 0.4)]),
)
def test_ordered_splits_share_nothing(seed: int, overlap: int, fractions: tuple[float, float]) -> None:
    rng = np.random.default_rng(seed)
    segment = np.sort(rng.integers(0, 12, 200))
    owner = rng.integers(0, 3, 200) if seed % 2 else segment % 3
    parts = [np.flatnonzero(owner == client) for client in range(3)]
    train, validation, test, lost = ordered_parts(parts, segment, overlap, *fractions)
    kept = np.concatenate([*train, *validation, *test])
    assert len(set(kept.tolist())) == len(kept) == 200 - lost
    for client in range(3):
        assert len(train[client])
        for row in train[client]:
            for later in (*validation[client], *test[client]):
                if segment[later] == segment[row]:
                    assert later - row > overlap
        for row in validation[client]:
            assert all(later - row > overlap for later in test[client] if segment[later] == segment[row])
        if len(test[client]) or not fractions[0]:  # else the client only trains
            assert abs(len(test[client]) - fractions[0] * len(parts[client])) <= 1
            if overlap == 0 and fractions[1] < 0.25:
                assert abs(len(validation[client]) - fractions[1] * len(parts[client])) <= 6  # half of a short segment


def test_recordings_are_cut_in_order() -> None:
    segment = np.repeat(np.arange(4), 20)
    x, y = np.zeros((80, 1), np.float32), (np.arange(80) % 2).astype(np.int32)
    source = Source("signal", x, y, 2, client=segment // 2, segment=segment, overlap=1)
    partition = make_partition(source, PartitionConfig("natural", test_fraction=0.2, validation_fraction=0.1))
    assert partition.test[0].tolist() == [16, 17, 18, 19, 36, 37, 38, 39]
    assert partition.validation[0].tolist() == [13, 14, 33, 34]
    assert partition.train[0].tolist() == [*range(12), *range(20, 32)]
    assert partition.notes == ("left out 8 samples that share content with a later split",)
    mixed = make_partition(source, PartitionConfig("natural", split="random"))
    assert sizes(mixed).tolist() == [40, 40]
    with pytest.raises(ValueError, match=r"split='order' needs samples with an order, labels has none"):
        make_partition(LABELS, PartitionConfig("iid", split="order"))


def test_natural_clients_have_their_own_official_test_samples() -> None:
    rng = np.random.default_rng(0)
    client, test = rng.integers(0, 6, 300), rng.random(300) < 0.3
    client[test & (client == 5)] = 7  # writer 7 has test samples only, writer 5 none
    source = Source("written", np.zeros((300, 1), np.uint8), rng.integers(0, 3, 300), 3, client, official_test=test)
    partition = make_partition(source, PartitionConfig("natural", test="official"))
    for number in range(6):
        assert partition.test[number].tolist() == np.flatnonzero(test & (client == number)).tolist()
        assert set(client[partition.train[number]]) == {number}
    lost = int((client == 7).sum())
    assert partition.notes == (f"left out {lost} official test samples of clients that do not train",)
    strangers = dataclasses.replace(source, client=np.where(test, client + 10, client))
    shared = make_partition(strangers, PartitionConfig("natural", test="official"))
    assert shared.sizes("test").sum() == test.sum()  # nobody's own: shares by label


@pytest.mark.parametrize("method", ["iid", "dirichlet", "quantity", "natural"])
def test_nobody_trains_on_what_anybody_is_tested_on(method: str) -> None:
    segment = np.repeat(np.arange(30), 20)
    source = Source(
        "signal", np.zeros((600, 1), np.float32), (np.arange(600) % 3).astype(np.int32), 3, client=segment // 3,
        segment=segment, overlap=2,
    )  # fmt: skip
    partition = make_partition(source, PartitionConfig(method, 8, held_out=2, min_samples=20))
    assert partition.unseen is not None
    train, held = (
        np.concatenate([np.concatenate(one.rows(split)) for one in (partition, partition.unseen) for split in splits])
        for splits in (("train",), ("validation", "test"))
    )
    assert len(held) > 100
    near = (segment[train][:, None] == segment[held]) & (np.abs(train[:, None] - held) <= source.overlap)
    assert not near.any()
    mixed = make_partition(source, PartitionConfig(method, 8, split="random"))
    train, held = np.concatenate(mixed.train), np.concatenate(mixed.test)
    assert ((segment[train][:, None] == segment[held]) & (np.abs(train[:, None] - held) <= source.overlap)).any()


def test_a_client_that_only_has_later_samples_is_refused() -> None:
    segment = np.repeat(np.arange(4), 10)
    source = Source("s", np.zeros((40, 1), np.float32), np.zeros(40, np.int32), 1, segment=segment, overlap=1)
    with pytest.raises(ValueError, match=r"has no training samples .*: raise min_samples, or use split='random'"):
        make_partition(source, PartitionConfig("iid", 20, min_samples=1, test_fraction=0.5))


def test_the_options_of_a_shift_and_the_groups_are_hashed(tmp_path: Path) -> None:
    partition = make_partition(images(), PartitionConfig("feature_shift", 8, groups=3, shift="noise"))
    more = dataclasses.replace(partition, config=dataclasses.replace(partition.config, groups=4))
    regrouped = dataclasses.replace(partition, groups=np.roll(partition.groups, 1))
    assert len({partition.sha256, more.sha256, regrouped.sha256}) == 3


def test_data_of_equal_size_is_told_apart_by_its_labels(tmp_path: Path) -> None:
    make_partition(LABELS, PartitionConfig("iid", 4)).save(tmp_path / "p.npz")
    Partition.load(tmp_path / "p.npz", LABELS)
    with pytest.raises(ValueError, match="was made for data with other labels"):
        Partition.load(tmp_path / "p.npz", LABELS[::-1])


def test_the_features_of_held_out_clients_are_shifted_once_for_all() -> None:
    source = images()
    partition = make_partition(source, PartitionConfig("feature_shift", 8, groups=4, held_out=3))
    assert partition.unseen is not None
    data = to_client_data(source, partition)
    held = to_client_data(source, partition.unseen, data.examples)
    assert held.examples["x"] is data.examples["x"]
    alone = to_client_data(source, partition.unseen).examples["x"]
    for rows, turns in zip(pooled(partition.unseen), partition.unseen.groups, strict=True):
        for row in rows:
            np.testing.assert_array_equal(held.examples["x"][row], np.rot90(source.x[row], turns))
            np.testing.assert_array_equal(alone[row], np.rot90(source.x[row], turns))


def test_held_out_clients_never_train(tmp_path: Path) -> None:
    config = PartitionConfig("dirichlet", 12, alpha=0.5, held_out=3, seed=2)
    partition, whole = make_partition(LABELS, config), make_partition(LABELS, dataclasses.replace(config, held_out=0))
    assert partition.unseen is not None
    assert (len(partition), len(partition.unseen)) == (9, 3)
    every = sorted(map(tuple, [*partition.train, *partition.unseen.train]))
    assert every == sorted(map(tuple, whole.train))
    assert partition.sha256 not in (whole.sha256, dataclasses.replace(partition, unseen=None).sha256)
    partition.save(tmp_path / "p.npz")
    back = Partition.load(tmp_path / "p.npz", LABELS)
    assert back.sha256 == partition.sha256
    assert back.unseen is not None
    assert [rows.tolist() for rows in back.unseen.test] == [rows.tolist() for rows in partition.unseen.test]
    with pytest.raises(ValueError, match="held_out must leave a client that trains: 12 of 12"):
        make_partition(LABELS, dataclasses.replace(config, held_out=12))


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (LABELS, {"method": "shards", "clients": 1500, "min_samples": 1}, "need 3000 samples, found 2000"),
        (LABELS, {"method": "label_groups", "groups": 11}, "11 groups need as many classes, found 10"),
        (LABELS, {"method": "label_groups", "groups": 5, "clients": 4}, "5 groups need at least as many clients"),
        (LABELS, {"method": "quantity", "sizes": "pareto"}, "unknown value of sizes 'pareto'"),
        (LABELS, {"method": "quantity", "size_skew": -1.0}, "size_skew must be at least 0"),
        (LABELS, {"method": "quantity", "size_skew": float("nan")}, "size_skew must be at least 0"),
        (LABELS, {"method": "dirichlet", "sizes": "powerlaw"}, "sizes belongs to quantity"),
        (LABELS, {"dirichlet_by": "client", "balance": True}, "balance belongs to dirichlet_by='class'"),
        (images(), {"method": "feature_shift", "shift_noise": 2.0}, "shift_noise belongs to shift='noise'"),
        (images(), {"method": "feature_shift", "groups": 5}, "there are 4 quarter turns, found 5 groups"),
        (LABELS, {"method": "feature_shift"}, "only square images can be rotated"),
        (datasets(), {"method": "dataset_per_client", "test": "official"}, "needs a source with an official test set"),
    ],
)
def test_impossible_partitions_are_refused(source: Source | np.ndarray, options: dict, message: str) -> None:
    source = source if isinstance(source, Source) else Source("s", LABELS[:, None].astype(np.float32), LABELS, 10)
    with pytest.raises(ValueError, match=message):
        to_client_data(source, make_partition(source, PartitionConfig(**options)))  # type: ignore[arg-type]
