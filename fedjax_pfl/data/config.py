"""The options of a partition."""

from __future__ import annotations

import dataclasses
from typing import Literal

DEFAULT_CLIENTS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionOptions:
    """What partitions read besides the method, the number of clients and the seed."""

    alpha: float = 0.1
    """Concentration of the Dirichlet partitions: small is skewed, large is IID."""
    dirichlet_by: Literal["class", "client"] = "class"
    """Proportions are drawn for each class over clients, or for each client over classes (dirichlet)."""
    classes_per_client: int = 2
    """Classes of each client in the pathological partition."""
    shards_per_client: int = 2
    """Shards of label-sorted samples that each client gets (shards)."""
    sizes: Literal["lognormal", "powerlaw"] = "lognormal"
    """Distribution of client sizes (quantity)."""
    size_skew: float = 1.0
    """Deviation of the logarithm of lognormal sizes, or exponent of the power law; 0 is equal (quantity)."""
    groups: int = 4
    """Number of groups of clients (label_groups, feature_shift)."""
    shift: Literal["rotation", "noise"] = "rotation"
    """What differs between groups: quarter turns of the images, or the level of noise (feature_shift)."""
    shift_noise: float = 1.0
    """Deviation of the noise in the last group, in deviations of the features; the first has none (feature_shift)."""
    clients_per_dataset: int = 2
    """Clients that share a data set (chunks_of_dataset, skewed_chunks_of_dataset)."""
    balance: bool = False
    """Equal client sizes, within one (dirichlet by class, pathological)."""
    min_samples: int = 2
    """Smallest number of samples of a client, all its splits together."""
    validation_fraction: float = 0.1
    """Share of each client's samples that is its validation set; 0 for none."""
    test_fraction: float = 0.25
    """Share of each client's samples that is its test set (with: --test local)."""
    test: Literal["local", "official"] = "local"
    """Test samples: a share of each client's own, or the published test set, dealt by labels (or natural client)."""
    split: Literal["auto", "random", "order"] = "auto"
    """Splits of a client: at random by class, or recordings cut in order with a gap; auto: as the data asks for."""
    held_out: int = 0
    """Clients, of all, that never train: the trained models are adapted to them at the end."""


@dataclasses.dataclass(frozen=True)
class PartitionConfig(PartitionOptions):
    """How samples are dealt to clients: a method, its options and a seed."""

    method: str = "dirichlet"
    """Name of the method (see ``PARTITIONS``)."""
    clients: int | None = None
    """Number of clients, those held out included; None: 20, or all that the source has of its own."""
    seed: int = 0
    """Seed of the partition, independent of the model's."""
