"""The registry of models: from a name, the number of classes and a sample to a ``Model``."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any

from fedjax_pfl.data.graphs import GraphBatch
from fedjax_pfl.data.nodes import NodeBatch
from fedjax_pfl.models.graph_family import graph_family
from fedjax_pfl.models.model import Model, flax_model
from fedjax_pfl.models.resnet import resnet8, resnet18
from fedjax_pfl.models.sequence import HARCNN, CharLSTM
from fedjax_pfl.models.tabular import MLP
from fedjax_pfl.models.vision import FedAvgCNN, LeNet5, PflCNN


@dataclasses.dataclass(frozen=True)
class ModelEntry:
    """One row of the registry.

    module: called as ``module(num_classes, **options)``, a Flax module whose head is called ``head``; for graphs a
        function ``(num_classes, sample, head=, **options) -> Model``.
    options: names of the options that it takes besides the number of classes.
    kind: what it is given: ``array``, ``tokens`` or ``graph`` (see ``Source.kind`` and ``READS``).
    """

    name: str
    description: str
    module: Callable[..., Any]
    options: tuple[str, ...] = ()
    kind: str = "array"


_POOLED = ("activation", "pool")
_RESIDUAL = ("norm", "norm_groups", "width")
_GRAPH = ("layers", "hidden", "drop", "pool")
DEFAULTS = {"array": "mlp", "tokens": "char_lstm", "graph": "gin", "nodes": "gcn"}  # the model of a kind of data
READS = {"nodes": ("graph", "array")}  # kinds of models for data that can be read in several ways


def _graph(layer: str) -> Callable[..., Model]:
    def build(num_classes: int, sample: Any, *, head: str, **options: Any) -> Model:
        widths = options.pop("hidden", (64,))
        if len(widths) != 1:
            raise ValueError(f"model {layer} has layers of one width: give one number as hidden, found {list(widths)}")
        changed = {"dropout": options.pop("drop")} if "drop" in options else {}
        return graph_family(layer, num_classes, sample, head=head, hidden=widths[0], **options, **changed)

    return build


MODELS: dict[str, ModelEntry] = {
    entry.name: entry
    for entry in (
        ModelEntry("mlp", "any array, flattened: dense layers with ReLU (default: one of 200)", MLP, ("hidden",)),
        ModelEntry("lenet5", "images from 16 x 16: LeNet-5, conv 6 and 16, dense 120 and 84", LeNet5, _POOLED),
        ModelEntry("fedavg_cnn", "images from 16 x 16: FedAvg's CNN, conv 32 and 64, dense 512", FedAvgCNN, _POOLED),
        ModelEntry("pfl_cnn", "images from 6 x 6: pfl-research's CNN, conv 32 and 64, dropout, dense 128", PflCNN),
        ModelEntry("resnet8", "images from 4 x 4: residual network, 16, 32 and 64 channels", resnet8, _RESIDUAL),
        ModelEntry("resnet18", "images from 8 x 8: ResNet-18 for CIFAR, 64 to 512 channels", resnet18, _RESIDUAL),
        ModelEntry(
            "harcnn", "windows (steps, channels) from 28 steps: conv 32 and 64, dense 1024 and 512", HARCNN, ("hidden",)
        ),
        ModelEntry(
            "char_lstm",
            "symbols (steps): embedding 8, two LSTM layers of 256 (LEAF's Shakespeare)",
            CharLSTM,
            ("vocabulary", "embedding", "hidden"),
            "tokens",
        ),
        *(
            ModelEntry(name, f"graphs or nodes: {what}, 3 layers of 64, dense 64", _graph(name), _GRAPH, "graph")
            for name, what in (
                ("gin", "isomorphism network, each layer an MLP"),
                ("gcn", "graph convolution"),
                ("graphsage", "mean of the neighbours"),
                ("gat", "attention, one head"),
            )
        ),
    )
}


def check_kind(name: str, kind: str, data: str) -> None:
    """Refuse a model that cannot read the data.

    Raises:
        ValueError: the model is given another kind of input than the data holds; the message names models that fit.
    """
    entry = find(name)
    kinds = READS.get(kind, (kind,))
    if entry.kind not in kinds:
        fit = ", ".join(other.name for other in MODELS.values() if other.kind in kinds) or "none yet"
        raise ValueError(f"model {entry.name} reads {entry.kind} data, {data} holds {kind} data: models for it: {fit}")


def build_model(name: str, num_classes: int, sample: Any, *, head: str = "head", **options: Any) -> Model:
    """The model called ``name`` for inputs like ``sample`` ``(B, ...)``; options that are None keep their default.

    Raises:
        ValueError: unknown name (with the nearest one), an option that this model does not take, a head that matches
            no parameter (with all paths), an option's value that the model cannot take, a sample of a shape or dtype
            that it cannot take; nothing has been compiled then.
    """
    entry = find(name)
    given = {key: value for key, value in options.items() if value is not None}
    for key in given:
        if key not in entry.options:
            takes = ", ".join(entry.options) or "none"
            raise ValueError(f"model {entry.name} takes no option {key!r}; its options: {takes}")
    _check_sizes(given)
    if entry.kind == "graph":
        if not isinstance(sample, GraphBatch | NodeBatch):
            raise ValueError(
                f"model {entry.name} reads graphs, the sample is none: nodes become the graphs of their clients by "
                "fedjax_pfl.data.subgraphs(source, partition)"
            )
        return entry.module(num_classes, sample, head=head, **given)
    if given.get("pool") == "sum":
        raise ValueError(f"pool of {entry.name} must be max or mean, found sum")
    return flax_model(entry.module(num_classes, **given), sample, head=head, name=entry.name)


def _check_sizes(options: dict[str, Any]) -> None:
    if any(width < 1 for width in options.get("hidden", ())):
        raise ValueError(f"hidden widths must be at least 1, found {list(options['hidden'])}")
    if not 0 <= options.get("drop", 0) < 1:
        raise ValueError(f"drop must be in [0, 1), found {options['drop']}")
    for name in ("norm_groups", "width", "embedding", "vocabulary", "layers"):
        if options.get(name, 1) < 1:
            raise ValueError(f"{name} must be at least 1, found {options[name]}")


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
