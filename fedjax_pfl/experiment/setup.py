"""From a configuration to a federation: data, partition, model, local optimiser, devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from fedjax_pfl.algorithms import get
from fedjax_pfl.data import ClientData, Partition, PartitionConfig, Source, load, make_partition, shard, to_client_data
from fedjax_pfl.data.assign import check_config
from fedjax_pfl.data.graphs import GraphReader
from fedjax_pfl.data.subgraphs import subgraphs
from fedjax_pfl.data.thinning import thinned
from fedjax_pfl.engine.cohort import Participation
from fedjax_pfl.engine.federation import Algorithm, Federation
from fedjax_pfl.engine.sharding import client_mesh, place_data
from fedjax_pfl.experiment.config import Config, TrainingConfig
from fedjax_pfl.models.registry import DEFAULTS, build_model, check_kind, find


class Extras(NamedTuple):
    """What a federation is made from: the source with its host arrays, and who has which samples.

    unseen: the data of clients that were held out, on the devices, or None.
    """

    source: Source
    partition: Partition
    unseen: ClientData | None = None


def build_federation(config: Config, extras: Extras | None = None) -> tuple[Federation, Extras]:
    """The federation of a configuration, with its data on the devices.

    extras: the result of another configuration of the same data, to spare loading it again.

    Raises:
        ValueError: an option out of range, unusable data, a partition that cannot be met, a model that does not fit.
        FileNotFoundError: missing data.
    """
    config.check()
    if config.model.model is not None:
        find(config.model.model)
    mesh = client_mesh(config.machine.devices)
    source, partition, _ = extras = extras or load_data(config)
    name = config.model.model or DEFAULTS[source.kind]
    check_kind(name, source.kind, source.name)
    if source.kind == "nodes" and find(name).kind == "graph":
        source = subgraphs(source, partition)
    model = build_model(name, source.num_classes, source.sample(), **_model_options(config))
    participation = Participation(config.rounds.join_ratio, config.rounds.dropout, config.rounds.join_ratio_low)
    data, unseen = _placed(source, partition, config.machine.devices, mesh)
    fed = Federation(
        model, data, shift=source.shift, scale=source.scale, client_chunk=config.machine.client_chunk,
        seeds_at_once=config.rounds.seeds, participation=participation, mesh=mesh, **_local_work(config),
    )  # fmt: skip
    return fed, extras._replace(unseen=unseen)


def _placed(
    source: Source, partition: Partition, devices: int, mesh: Mesh | None
) -> tuple[ClientData, ClientData | None]:
    """The data of the clients that train and of those held out, on the devices; on one device they share examples."""
    data = to_client_data(source, partition)
    if partition.unseen is None:
        return place_data(shard(data, devices, nodes_of_clients(data)), mesh), None
    held = to_client_data(source, partition.unseen, data.examples)
    if mesh is not None:
        return place_data(shard(data, devices, nodes_of_clients(data)), mesh), place_data(shard(held, devices), mesh)
    data = place_data(data, None)
    splits = place_data(dataclasses.replace(held, examples={}, tables={}), None)
    return data, dataclasses.replace(splits, examples=data.examples, tables=data.tables)


def nodes_of_clients(data: ClientData) -> np.ndarray | None:
    """Nodes in the training graphs of each client, ``(M,)``, by which clients are dealt to devices; else None."""
    if not isinstance(data.reader, GraphReader):
        return None
    client = np.repeat(np.arange(data.slots), data.train.count)
    return np.bincount(client, data.examples["x"][data.train.rows[: len(client)], 1], data.slots)


def completed(config: Config, extras: Extras) -> Config:
    """The configuration with the model and the partition that it leaves to the data."""
    if config.model.model is None:
        config = config.replace(model=DEFAULTS[extras.source.kind])
    if config.data.partition is None and config.data.partition_file is None:
        config = config.replace(partition=extras.partition.config.method)
    return config


def with_local_work(fed: Federation, config: Config) -> Federation:
    """The same federation with the local work of another configuration."""
    return fed.replace(**_local_work(config))


def build_algorithm(config: Config, fed: Federation) -> Algorithm:
    """The algorithm of a configuration in its federation.

    Raises:
        ValueError: the algorithm refuses its options or the federation.
    """
    return get(config.algorithm).build(fed, config.options)


def optimizer(training: TrainingConfig) -> Callable[[Any], optax.GradientTransformation]:
    """The local optimiser as a function of the (traced) learning rate."""
    if training.optimizer == "adamw":
        return lambda lr: optax.adamw(lr, weight_decay=training.weight_decay)
    plain = optax.adam if training.optimizer == "adam" else partial(optax.sgd, momentum=training.momentum or None)
    if training.weight_decay:
        decay = optax.add_decayed_weights(training.weight_decay)
        return lambda lr: optax.chain(decay, plain(lr))
    return plain


def schedule(training: TrainingConfig, rounds: int) -> Callable[[jax.Array], jax.Array] | None:
    """The factor on the learning rate by round, counted from 0."""
    if training.lr_schedule == "cosine":
        return optax.cosine_decay_schedule(1.0, rounds)
    if training.lr_schedule == "step":
        return optax.exponential_decay(1.0, training.lr_step, training.lr_decay, staircase=True)
    return None


def load_data(config: Config) -> Extras:
    """The source of a configuration, and who has which of its samples; no model is built."""
    data = config.data
    method = data.partition or PartitionConfig.method
    options = PartitionConfig(method, data.clients, data.partition_seed, **vars(config.partition))
    check_config(options)
    if data.partition_file is not None:
        Partition.load(data.partition_file)  # what is wrong with it is told before the data is loaded
    source = load(data.data, data.data_dir)
    if data.samples is not None:
        source = thinned(source, data.samples)
    if data.partition_file is not None:
        return Extras(source, Partition.load(data.partition_file, source.y))
    if data.partition is None and len(source.datasets) > 1:
        options = dataclasses.replace(options, method="natural")
    return Extras(source, make_partition(source, options))


def _model_options(config: Config) -> dict[str, Any]:
    options = vars(config.model)
    return {name: value for name, value in options.items() if name != "model"}


def _local_work(config: Config) -> dict[str, Any]:
    training = config.training
    return {
        "batch_size": training.batch_size, "local_epochs": training.local_epochs, "lr": training.lr,
        "lr_schedule": schedule(training, config.rounds.rounds), "optimizer": optimizer(training),
        "statistics": training.statistics, "keep_optimizer": training.optimizer_state == "keep",
    }  # fmt: skip
