"""What every partition refuses before it looks at data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal, get_args, get_origin, get_type_hints

from fedjax_pfl.data.assign.base import PartitionEntry
from fedjax_pfl.data.checks import unknown_name
from fedjax_pfl.data.config import PartitionConfig

RANGES: dict[str, tuple[float, float]] = {
    "clients": (1, math.inf), "classes_per_client": (1, math.inf), "shards_per_client": (1, math.inf),
    "groups": (1, math.inf), "clients_per_dataset": (1, math.inf), "min_samples": (1, math.inf),
    "held_out": (0, math.inf), "seed": (0, math.inf), "size_skew": (0, 20), "shift_noise": (0, 1e6),
}  # fmt: skip


def check_against(config: PartitionConfig, methods: Mapping[str, PartitionEntry]) -> None:
    """``check_config`` with a registry of methods."""
    if config.method not in methods:
        raise unknown_name("partition", config.method, methods)
    for name, kind in get_type_hints(PartitionConfig).items():
        if get_origin(kind) is Literal and getattr(config, name) not in get_args(kind):
            raise unknown_name(f"value of {name}", getattr(config, name), get_args(kind))
    fields = {field.name: field for field in dataclasses.fields(config)}
    for name in sorted({option for entry in methods.values() for option in entry.options}):
        if getattr(config, name) != fields[name].default and name not in methods[config.method].options:
            readers = ", ".join(entry.name for entry in methods.values() if name in entry.options)
            raise ValueError(f"{name} belongs to {readers}; partition {config.method!r} does not read it: leave it out")
    if config.balance and config.method == "dirichlet" and config.dirichlet_by == "client":
        raise ValueError("balance belongs to dirichlet_by='class': by client all sizes are equal already: leave it out")
    if config.shift != "noise" and config.shift_noise != fields["shift_noise"].default:
        raise ValueError(f"shift_noise belongs to shift='noise', the shift is {config.shift!r}: leave it out")
    _check_ranges(config)
    if config.test == "local" and config.test_fraction + config.validation_fraction >= 1:
        raise ValueError(
            f"test_fraction {config.test_fraction} and validation_fraction {config.validation_fraction} leave nothing "
            "to train on: their sum must be below 1"
        )


def _check_ranges(config: PartitionConfig) -> None:
    for name, (low, high) in RANGES.items():
        value = getattr(config, name)
        if value is not None and not value >= low:
            raise ValueError(f"{name} must be at least {low}, found {value}")
        if value is not None and not value <= high:
            raise ValueError(f"{name} must be at most {high}, found {value}")
    if not 0 < config.alpha < math.inf:
        raise ValueError(f"alpha must be positive and finite, found {config.alpha}")
    for name in ("test_fraction", "validation_fraction"):
        if not 0 <= getattr(config, name) < 1:
            raise ValueError(f"{name} must lie in 0 <= value < 1, found {getattr(config, name)}")
