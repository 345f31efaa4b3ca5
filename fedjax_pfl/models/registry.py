"""The registry of models: from a name, the number of classes and a sample to a ``Model``."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any

import flax.linen as nn

from fedjax_pfl.models.model import Model, flax_model
from fedjax_pfl.models.tabular import MLP
from fedjax_pfl.models.vision import FedAvgCNN, LeNet5


@dataclasses.dataclass(frozen=True)
class ModelEntry:
    """One row of the registry.

    module: called as ``module(num_classes, **options)``, a Flax module whose head is called ``head``.
    options: names of the options that it takes besides the number of classes.
    kind: what it is given: ``array``, ``tokens`` or ``graph`` (see ``Source.kind``).
    """

    name: str
    description: str
    module: Callable[..., nn.Module]
    options: tuple[str, ...] = ()
    kind: str = "array"


MODELS: dict[str, ModelEntry] = {
    entry.name: entry
    for entry in (
        ModelEntry("mlp", "dense layers with ReLU on the flattened input (default: one of 200)", MLP, ("hidden",)),
        ModelEntry("lenet5", "LeNet-5: conv 6 and 16, dense 120 and 84", LeNet5, ("activation", "pool")),
        ModelEntry("fedavg_cnn", "the CNN of FedAvg: conv 32 and 64, dense 512", FedAvgCNN, ("activation", "pool")),
    )
}


def check_kind(name: str, kind: str, data: str) -> None:
    """Refuse a model that cannot read the data.

    Raises:
        ValueError: the model is given another kind of input than the data holds; the message names models that fit.
    """
    entry = find(name)
    if entry.kind != kind:
        fit = ", ".join(other.name for other in MODELS.values() if other.kind == kind) or "none yet"
        raise ValueError(f"model {entry.name} reads {entry.kind} data, {data} holds {kind} data: models for it: {fit}")


def build_model(name: str, num_classes: int, sample: Any, *, head: str = "head", **options: Any) -> Model:
    """The model called ``name`` for inputs like ``sample`` ``(B, ...)``; options that are None keep their default.

    Raises:
        ValueError: unknown name (with the nearest one), an option that this model does not take, a head that matches
            no parameter (with all paths), a sample of a shape that the model cannot take.
    """
    entry = find(name)
    given = {key: value for key, value in options.items() if value is not None}
    for key in given:
        if key not in entry.options:
            takes = ", ".join(entry.options) or "none"
            raise ValueError(f"model {entry.name} takes no option {key!r}; its options: {takes}")
    if any(width < 1 for width in given.get("hidden", ())):
        raise ValueError(f"hidden widths must be at least 1, found {list(given['hidden'])}")
    return flax_model(entry.module(num_classes, **given), sample, head=head, name=entry.name)


def find(name: str) -> ModelEntry:
    """The entry called ``name``; hyphens count as underscores.

    Raises:
        ValueError: there is none; the message gives the nearest name.
    """
    key = name.replace("-", "_")
    if key not in MODELS:
        near = difflib.get_close_matches(key, MODELS, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown model {name!r}.{hint} Known: {', '.join(MODELS)}")
    return MODELS[key]
