"""The configuration of a run: typed sections, each field with one line of documentation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from fedjax_pfl.experiment.errors import nearest


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Data, and which client has which samples."""

    data: str = "digits"
    """Data source: digits, mnist-idx:DIR, npz:FILE, synthetic[:KEY=VALUE,...] (see: list data)."""
    data_dir: str | None = None
    """Folder in which relative paths of data are looked for first."""
    partition: str = "dirichlet"
    """How samples are dealt to clients: iid, dirichlet, pathological, natural (see: list partitions)."""
    alpha: float = 0.1
    """Parameter of the Dirichlet partition: small is skewed, large is IID."""
    clients: int = 20
    """Number of clients; 0 takes all of a natural partition."""
    classes_per_client: int = 2
    """Classes of each client in the pathological partition."""
    balance: bool = False
    """Equal client sizes, within one (dirichlet, pathological)."""
    min_samples: int = 2
    """Smallest number of samples of a client, all its splits together."""
    validation_fraction: float = 0.1
    """Share of each client's samples that is its validation set; 0 for none."""
    test_fraction: float = 0.25
    """Share of each client's samples that is its test set (with: --test local)."""
    test: Literal["local", "official"] = "local"
    """Test samples: a share of each client's own, or of the published test set by the client's labels."""
    partition_seed: int = 0
    """Seed of the partition, independent of the seed of the run."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The model of every client."""

    model: str = "mlp"
    """Name of the model (see: list models)."""
    hidden: tuple[int, ...] | None = None
    """Widths of the hidden layers of mlp (default: 200)."""
    activation: Literal["relu", "tanh"] | None = None
    """Activation of lenet5 and fedavg_cnn (default: relu)."""
    pool: Literal["max", "mean"] | None = None
    """Pooling of lenet5 and fedavg_cnn (default: max)."""
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
    optimizer: Literal["sgd", "adam"] = "sgd"
    """Local optimiser; its state is new in every round."""
    momentum: float = 0.0
    """Momentum of sgd."""
    weight_decay: float = 0.0
    """Weight decay: added to the gradient by sgd, decoupled in adam."""
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
    "model": ModelConfig,
    "training": TrainingConfig,
    "rounds": RoundsConfig,
    "machine": MachineConfig,
}
SECTION_OF: dict[str, str] = {
    field.name: section for section, kind in SECTIONS.items() for field in dataclasses.fields(kind)
}


@dataclasses.dataclass(frozen=True)
class Config:
    """A run: an algorithm with its own options, and the sections that all algorithms have in common.

    options: an instance of the algorithm's ``Options``; None stands for its defaults.
    """

    algorithm: str = "fedavg"
    options: Any = None
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    rounds: RoundsConfig = RoundsConfig()
    machine: MachineConfig = MachineConfig()

    def __post_init__(self) -> None:
        if self.options is None:
            from fedjax_pfl.algorithms import get

            object.__setattr__(self, "options", get(self.algorithm).options())

    def flat(self) -> dict[str, Any]:
        """Every common option by its name."""
        return {name: getattr(getattr(self, section), name) for name, section in SECTION_OF.items()}

    def replace(self, **changes: Any) -> Config:
        """A copy in which common options, given by their names, have other values.

        Raises:
            ValueError: an unknown option, with the nearest name.
        """
        sections: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            if name not in SECTION_OF:
                raise ValueError(f"there is no option {name!r}{nearest(name, SECTION_OF)}")
            sections.setdefault(SECTION_OF[name], {})[name] = value
        parts = {name: dataclasses.replace(getattr(self, name), **values) for name, values in sections.items()}
        return dataclasses.replace(self, **parts)

    def check(self) -> None:
        """Refuse values out of range, before anything is loaded or compiled.

        Raises:
            ValueError: naming the option, its value and the allowed range.
        """
        values = self.flat()
        for name, low in LEAST.items():
            if values[name] is not None and not values[name] >= low:
                raise ValueError(f"{name} must be at least {low}, found {values[name]}")
        for name, value in (values | dataclasses.asdict(self.options)).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} must be finite, found {value}")
        if self.rounds.seed + self.rounds.seeds > 2**31:
            raise ValueError(f"seed must lie in 0..{2**31 - self.rounds.seeds}, found {self.rounds.seed}")
        if not 0 <= self.training.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), found {self.training.momentum}")
        if self.training.momentum and self.training.optimizer != "sgd":
            raise ValueError(f"momentum belongs to sgd; {self.training.optimizer} has none: leave it at 0")
        if self.data.clients == 0 and self.data.partition != "natural":
            raise ValueError("clients must be at least 1, found 0 (0 takes all of a natural partition)")


LEAST: dict[str, float] = {
    "clients": 0, "partition_seed": 0, "local_epochs": 1, "batch_size": 1, "lr": 0, "lr_decay": 0, "lr_step": 1,
    "weight_decay": 0, "rounds": 1, "seed": 0, "seeds": 1, "eval_every": 1, "last_k": 1, "client_chunk": 1,
    "devices": 1, "checkpoint_seconds": 0,
}  # fmt: skip


def configure(algorithm: str, options: dict[str, Any] | None = None, **common: Any) -> Config:
    """A configuration from flat names: ``configure("fedprox", {"mu": 0.01}, clients=50, rounds=100)``.

    Raises:
        ValueError: an unknown algorithm or option (with the nearest name), a value out of range.
    """
    from fedjax_pfl.algorithms import get

    entry = get(algorithm)
    known = [field.name for field in dataclasses.fields(entry.options)]
    for name in options or {}:
        if name not in known:
            raise ValueError(f"{entry.name} has no option {name!r}{nearest(name, known)}")
    config = Config(entry.name, entry.options(**(options or {}))).replace(**common)
    config.check()
    return config
