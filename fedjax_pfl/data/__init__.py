"""Data sources, partitions and ragged client data."""

from fedjax_pfl.data.assign import PARTITIONS
from fedjax_pfl.data.clients import ClientData, Split, client_data, shard
from fedjax_pfl.data.config import PartitionConfig, PartitionOptions
from fedjax_pfl.data.making import make_partition, to_client_data
from fedjax_pfl.data.partition import Partition
from fedjax_pfl.data.sources import SOURCES, Source, load
from fedjax_pfl.data.subgraphs import subgraphs

__all__ = [
    "PARTITIONS", "SOURCES", "ClientData", "Partition", "PartitionConfig", "PartitionOptions", "Source", "Split",
    "client_data", "load", "make_partition", "shard", "subgraphs", "to_client_data",
]  # fmt: skip
