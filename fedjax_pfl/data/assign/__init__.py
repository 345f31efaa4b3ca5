"""Partition methods: which client gets which sample. One function each, on the host, driven by one seeded generator."""

from fedjax_pfl.data.assign.base import Assignment, PartitionEntry, Pool
from fedjax_pfl.data.assign.checking import check_against
from fedjax_pfl.data.assign.community import community
from fedjax_pfl.data.assign.given import chunks_of_dataset, dataset_per_client, natural, skewed_chunks_of_dataset
from fedjax_pfl.data.assign.labels import dirichlet, label_groups, pathological, shards
from fedjax_pfl.data.assign.sizes import feature_shift, iid, quantity
from fedjax_pfl.data.config import PartitionConfig

__all__ = ["PARTITIONS", "Assignment", "PartitionEntry", "Pool", "check_config"]

_TABLE: tuple[PartitionEntry, ...] = (
    PartitionEntry("iid", "a random deal, sizes within one", (), iid),
    PartitionEntry(
        "dirichlet", "classes shared by Dirichlet(alpha) proportions", ("alpha", "dirichlet_by", "balance"), dirichlet
    ),
    PartitionEntry("pathological", "exactly k classes per client", ("classes_per_client", "balance"), pathological),
    PartitionEntry("shards", "shards of the label-sorted samples, dealt at random", ("shards_per_client",), shards),
    PartitionEntry("quantity", "a random deal of skewed sizes", ("sizes", "size_skew"), quantity),
    PartitionEntry("natural", "the source's own clients", (), natural, apart=True),
    PartitionEntry("label_groups", "groups of clients with the same classes", ("groups",), label_groups),
    PartitionEntry(
        "feature_shift", "groups of clients with rotated or noisy features", ("groups", "shift", "shift_noise"),
        feature_shift, shift=True,
    ),
    PartitionEntry("dataset_per_client", "one client per data set", (), dataset_per_client, apart=True),
    PartitionEntry(
        "chunks_of_dataset", "several clients per data set", ("clients_per_dataset",), chunks_of_dataset, apart=True
    ),
    PartitionEntry(
        "skewed_chunks_of_dataset", "several clients per data set, classes shared by Dirichlet(alpha)",
        ("clients_per_dataset", "alpha"), skewed_chunks_of_dataset, apart=True,
    ),
    PartitionEntry("community", "communities of a graph's nodes (Louvain)", (), community, linked=True),
)  # fmt: skip
PARTITIONS: dict[str, PartitionEntry] = {entry.name: entry for entry in _TABLE}


def check_config(config: PartitionConfig) -> None:
    """Refuse values that no data set can satisfy.

    Raises:
        ValueError: an unknown method, a value out of range (with the range), an option of another method.
    """
    check_against(config, PARTITIONS)
