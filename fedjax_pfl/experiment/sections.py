"""The options that all algorithms have in common, in sections; each field with one line of documentation."""

from __future__ import annotations

import dataclasses
from typing import Literal

from fedjax_pfl.data.config import PartitionOptions


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Data, and the way it is dealt to clients."""

    data: str = "digits"
    """Data source, such as digits, cifar10, mnist-idx:DIR or csv:FILE,label=NAME (see: list data)."""
    data_dir: str | None = None
    """Folder in which files of data are looked for; nothing is downloaded then."""
    samples: int | None = None
    """At most so many samples of each data set, each class by its share, the same ones always (default: all)."""
    partition: str | None = None
    """How samples are dealt to clients (see: list partitions; default: dirichlet, or natural for several data sets)."""
    clients: int | None = None
    """Number of clients, those held out included (default: 20, or all that the source has of its own)."""
    partition_seed: int = 0
    """Seed of the partition, independent of the seed of the run."""
    partition_file: str | None = None
    """A partition.npz to use instead: of another run, or of: fedjax-pfl partition."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The model of every client."""

    model: str | None = None
    """Name of the model (see: list models; default: mlp for arrays, char_lstm for symbols, gin for graphs, gcn
    for nodes)."""
    hidden: tuple[int, ...] | None = None
    """Widths of the hidden layers of mlp (default: 200), harcnn (1024 512) and char_lstm (256 256), or the one width of
    all layers of a graph model (64)."""
    layers: int | None = None
    """Message-passing layers of a graph model (default: 3)."""
    drop: float | None = None
    """Share of the hidden values of a graph model that are dropped in training (default: 0.5)."""
    activation: Literal["relu", "tanh"] | None = None
    """Activation of lenet5 and fedavg_cnn (default: relu)."""
    pool: Literal["max", "mean", "sum"] | None = None
    """Pooling of lenet5 and fedavg_cnn, max or mean (default: max), and of a graph's nodes (default: sum)."""
    norm: Literal["group", "batch", "none"] | None = None
    """Normalisation of resnet8 and resnet18 (default: group)."""
    norm_groups: int | None = None
    """Groups of channels of a group norm (default: 2)."""
    width: int | None = None
    """Channels of the first stage of resnet8 (default: 16) and resnet18 (default: 64)."""
    vocabulary: int | None = None
    """Number of symbols that char_lstm reads (default: as many as classes)."""
    embedding: int | None = None
    """Length of a symbol's vector in char_lstm (default: 8)."""
    head: str = "head"
    """Path of the module that is the head; the rest is the body."""


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Local work of a client in a round."""

    local_epochs: int = 1
    """Passes over the client's training samples in a round."""
    batch_size: int = 10
    """Largest number of samples in a minibatch."""
    lr: float = 0.05
    """Client learning rate."""
    lr_schedule: Literal["constant", "cosine", "step"] = "constant"
    """The learning rate by round: constant, a cosine to 0, or times lr_decay every lr_step rounds."""
    lr_decay: float = 0.99
    """Factor of the schedule step."""
    lr_step: int = 1
    """Rounds between two factors of the schedule step."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """Local optimiser."""
    optimizer_state: Literal["restart", "keep"] = "restart"
    """Its state (moments, momentum): new in every round, or kept by each client from round to round."""
    momentum: float = 0.0
    """Momentum of sgd."""
    weight_decay: float = 0.0
    """Weight decay: added to the gradient by sgd and adam, decoupled from it in adamw."""
    statistics: Literal["average", "local", "reset"] = "average"
    """Running statistics of normalisation layers: averaged, kept by each client, or reset every round."""


@dataclasses.dataclass(frozen=True)
class RoundsConfig:
    """Rounds, cohorts, seeds and evaluation."""

    rounds: int = 50
    """Number of rounds."""
    join_ratio: float = 1.0
    """Share of the clients that is sampled in a round."""
    join_ratio_low: float | None = None
    """Smallest share: the number of participants is then uniform between the two."""
    dropout: float = 0.0
    """Probability that a sampled client does not report."""
    seed: int = 0
    """Seed of the initial model, the cohorts and the minibatches."""
    seeds: int = 1
    """Number of runs side by side, with seeds seed, seed + 1, ..."""
    eval_every: int = 5
    """Rounds between evaluations (round 0 and the last round are always evaluated)."""
    last_k: int = 5
    """Number of last evaluations in the mean of the last."""
    adapt_steps: int = 10
    """Local steps with which clients that were held out adapt the trained model at the end (with: --held-out)."""
    target_accuracy: float | None = None
    """Test accuracy (weighted mean over clients) to which the communication is counted."""
    on_nonfinite: Literal["stop", "continue"] = "stop"
    """When a client's update is not finite: stop at the end of these rounds, or count it and go on."""


@dataclasses.dataclass(frozen=True)
class MachineConfig:
    """How the work is laid out on the machine; results agree to rounding."""

    client_chunk: int | None = None
    """Clients trained at once; memory grows with it (default: by the backend)."""
    devices: int = 1
    """Devices over which clients are spread."""
    checkpoint_seconds: float = 30.0
    """Seconds between checkpoints at least; 0 saves at every evaluation. The end is always saved."""


SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "partition": PartitionOptions,
    "model": ModelConfig,
    "training": TrainingConfig,
    "rounds": RoundsConfig,
    "machine": MachineConfig,
}
SECTION_OF: dict[str, str] = {
    field.name: section for section, kind in SECTIONS.items() for field in dataclasses.fields(kind)
}
