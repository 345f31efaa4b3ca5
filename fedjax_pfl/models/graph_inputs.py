"""First layers of the classifiers of graphs: what a batch says about its nodes -> `(N, hidden)`.

A look-up stands for the product with a one-hot vector, in values and in the number of inputs that a layer starts with.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedjax_pfl.models.graph_layers import linear, uniform_within

WALK, DEGREES = 16, 16  # columns of "walk", values of "degree"


def look_up(table: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of `table (V, H)` at `index (N,)`: `(N, H)`, the product of the one-hot index and the table.

    An index outside the table cannot be seen when a model is traced: its row is NaN.
    """
    return table.at[index.astype(jnp.uint32)].get(mode="fill", fill_value=jnp.nan)  # unsigned: -1 is no last row


class LabelInput(nn.Module):
    """Dense layer of the one-hot label, and of the attributes where there are some: `(N, hidden)`.

    Parameters: `kernel (vocabulary, hidden)`, `bias (hidden,)` (inputs: `vocabulary`), `attributes/kernel (F, hidden)`.
    A label outside the vocabulary gives NaN scores for its graph; labels are checked when they are loaded.

    Raises:
        ValueError: the batch's attributes are not those that the model was built for.
    """

    hidden: int
    vocabulary: int
    attributes: int = 0

    @nn.compact
    def __call__(self, nodes: Mapping[str, jax.Array]) -> jax.Array:
        init = uniform_within(self.vocabulary)
        table = self.param("kernel", init, (self.vocabulary, self.hidden))
        x = look_up(table, nodes["label"]) + self.param("bias", init, (self.hidden,))
        width = nodes["attributes"].shape[-1] if "attributes" in nodes else 0
        if width != self.attributes:
            raise ValueError(f"the batch has {width} node attributes, the model was built with {self.attributes}")
        if width:
            x += linear(self.hidden, width, "attributes", use_bias=False)(nodes["attributes"])
        return x


class FeatureInput(nn.Module):
    """Dense layer of the attributes alone, for nodes without labels: `(N, hidden)`; `kernel (F, hidden)`, `bias`.

    Raises:
        ValueError: as in `LabelInput`.
    """

    hidden: int
    attributes: int

    @nn.compact
    def __call__(self, nodes: Mapping[str, jax.Array]) -> jax.Array:
        x = nodes["attributes"]
        if x.shape[-1] != self.attributes:
            raise ValueError(f"the batch has {x.shape[-1]} node attributes, the model was built with {self.attributes}")
        init = uniform_within(self.attributes)
        kernel = self.param("kernel", init, (self.attributes, self.hidden))
        return x @ kernel + self.param("bias", init, (self.hidden,))


class StructureInput(nn.Module):
    """Dense layer 32 -> `hidden` of walk and one-hot degree: `(N, hidden)`; `kernel (32, hidden)`, `bias (hidden,)`."""

    hidden: int

    @nn.compact
    def __call__(self, nodes: Mapping[str, jax.Array]) -> jax.Array:
        init = uniform_within(WALK + DEGREES)
        kernel = self.param("kernel", init, (WALK + DEGREES, self.hidden))
        bias = self.param("bias", init, (self.hidden,))
        return nodes["walk"] @ kernel[:WALK] + look_up(kernel[WALK:], nodes["degree"]) + bias
