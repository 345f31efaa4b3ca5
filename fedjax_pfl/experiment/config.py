"""The configuration of a run: an algorithm with its own options, and the common ones."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from fedjax_pfl.data.config import PartitionOptions
from fedjax_pfl.experiment.errors import nearest
from fedjax_pfl.experiment.sections import (
    SECTION_OF,
    SECTIONS,
    DataConfig,
    MachineConfig,
    ModelConfig,
    RoundsConfig,
    TrainingConfig,
)

__all__ = [
    "SECTIONS", "SECTION_OF", "Config", "DataConfig", "MachineConfig", "ModelConfig", "PartitionOptions",
    "RoundsConfig", "TrainingConfig", "configure",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config:
    """A run: an algorithm with its own options, and the sections that all algorithms have in common.

    options: an instance of the algorithm's ``Options``; None stands for its defaults.
    """

    algorithm: str = "fedavg"
    options: Any = None
    data: DataConfig = DataConfig()
    partition: PartitionOptions = PartitionOptions()
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
        if self.rounds.target_accuracy is not None and not 0 < self.rounds.target_accuracy <= 1:
            raise ValueError(f"target_accuracy must lie in 0 < value <= 1, found {self.rounds.target_accuracy}")
        if not 0 <= self.training.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), found {self.training.momentum}")
        if self.training.momentum and self.training.optimizer != "sgd":
            raise ValueError(f"momentum belongs to sgd; {self.training.optimizer} has none: leave it at 0")
        held = self.partition.held_out or self.data.partition_file
        if not held and self.rounds.adapt_steps != RoundsConfig.adapt_steps:
            raise ValueError("adapt_steps belongs to held_out, and no client is held out: leave it out")
        if self.data.partition_file is not None:
            ignored = dataclasses.replace(
                self.data, data=DataConfig.data, data_dir=None, samples=None, partition_file=None
            )
            for part in (ignored, self.partition):
                for field in dataclasses.fields(part):
                    if getattr(part, field.name) != field.default:
                        option = field.name.replace("_", "-")
                        raise ValueError(f"--partition-file says who has which samples: leave out --{option}")


LEAST: dict[str, float] = {
    "samples": 1, "clients": 1, "partition_seed": 0, "local_epochs": 1, "batch_size": 1, "lr": 0, "lr_decay": 0,
    "lr_step": 1, "weight_decay": 0, "rounds": 1, "seed": 0, "seeds": 1, "eval_every": 1, "last_k": 1, "adapt_steps": 1,
    "client_chunk": 1, "devices": 1, "checkpoint_seconds": 0,
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
