"""The graph models of the registry: one network in three forms, and what of it belongs to a client's own data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from fedjax_pfl.data.graphs import GraphBatch
from fedjax_pfl.data.nodes import NodeBatch
from fedjax_pfl.models.graph import GNN, TwoStream
from fedjax_pfl.models.graph_model import graph_model
from fedjax_pfl.models.model import PARAMS, Model, Variables
from fedjax_pfl.models.node_model import node_model

OWN = ("input/", "post/", "head/")  # of a client whose data set has labels and classes of its own
SHARED_OF_TWO = "structure/"
FORMS = ("raw", "structure", "two_stream")


def is_core(name: str) -> bool:
    """Whether a variable of a network belongs to its core, which has the same shape in all forms but ``two_stream``."""
    return name.startswith(f"{PARAMS}core/")


def graph_family(
    layer: str, num_classes: int, sample: GraphBatch | NodeBatch, *, head: str = "head", **options: Any
) -> Model:
    """The network with layers of a kind on node labels, or on the features of nodes that are samples themselves.

    ``related`` gives its other forms. ``structure``: the same network on structural encodings; ``two_stream``:
    FedStar's, whose layers are of fixed kinds. Where the data holds several data sets, input, post and head stay at
    their clients (of ``two_stream`` everything but the structural stream), and are fitted to the client's own data set.

    sample: any batch of the data, whose tables tell labels, classes and data sets. options: see ``models.graph.GNN``.

    Raises:
        ValueError: an option's value that the network cannot take, or a form that there is not.
    """
    if isinstance(sample, NodeBatch):
        return _node_family(layer, num_classes, sample, head, options)
    labels = np.asarray(sample.tables["labels_of_dataset"])
    attributes = sample.tables.get("node_attributes")
    vocabulary, several = int(labels.max()), len(labels) > 1
    inputs: dict[str, Any] = {"vocabulary": vocabulary, "attributes": 0 if attributes is None else attributes.shape[1]}

    def form(name: str) -> Model:
        module = _network(name, layer, num_classes, inputs | options)
        two = name == "two_stream"

        def private(variable: str) -> bool:
            path = variable.removeprefix(PARAMS)
            own = not path.startswith(SHARED_OF_TWO) if two else path.startswith(OWN)
            return several and own

        def fit(variables: Variables, facts: Mapping[str, jax.Array]) -> Variables:
            return fitted(variables, facts, 0 if name == "structure" else vocabulary)

        return graph_model(
            module, sample, private=private, fit=fit if several else None, related=form, head=head,
            name=_title(layer, name),
        )  # fmt: skip

    return form("raw")


def _node_family(layer: str, num_classes: int, sample: NodeBatch, head: str, options: dict[str, Any]) -> Model:
    """The same for nodes: nothing is pooled, and nothing is a client's own, since all have the same features."""
    if "pool" in options:
        raise ValueError(f"pool belongs to the classification of whole graphs, model {layer} reads nodes: leave it out")
    options = options | {"vocabulary": 0, "attributes": sample.tables["features"].shape[1], "pool": "none"}

    def form(name: str) -> Model:
        module = _network(name, layer, num_classes, options)
        return node_model(module, sample, related=form, head=head, name=_title(layer, name))

    return form("raw")


def _network(form: str, layer: str, num_classes: int, options: dict[str, Any]) -> nn.Module:
    if form not in FORMS:
        raise ValueError(f"graph models have no form {form!r}: choose one of {', '.join(FORMS)}")
    if form == "two_stream":
        return TwoStream(num_classes, **options)
    return GNN(num_classes, layer=layer, stream=form, **options)  # type: ignore[arg-type]


def _title(layer: str, form: str) -> str:
    return {"raw": layer, "two_stream": form}.get(form, f"{layer}_{form}")  # two streams have layers of their own


def fitted(variables: Variables, facts: Mapping[str, jax.Array], vocabulary: int) -> Variables:
    """Newly initialised variables of one client (some or all), fitted to its data set.

    The look-up of labels was drawn for ``vocabulary`` of them: rows that the data set lacks become zero, the others and
    the bias get the scale of its own number (0: the input is no look-up and stays as it is). Columns of the head for
    classes that the data set lacks become zero.
    """
    found = dict(variables)
    scale = jnp.sqrt(vocabulary / jnp.maximum(facts["labels"], 1))
    for name, leaf in variables.items():
        path = name.removeprefix(PARAMS)
        if path == "input/kernel" and vocabulary:
            kept = jnp.arange(leaf.shape[0]) < facts["labels"]
            found[name] = jnp.where(kept[:, None], leaf * scale.astype(leaf.dtype), 0)
        elif path == "input/bias" and vocabulary:
            found[name] = leaf * scale.astype(leaf.dtype)
        elif path.startswith("head/"):
            found[name] = jnp.where(jnp.arange(leaf.shape[-1]) < facts["classes"], leaf, 0)
    return found
