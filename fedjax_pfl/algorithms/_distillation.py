"""Mutual distillation of a teacher and a student on one client, the local work of FedKD."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_pfl.aggregation import safe_divide, safe_norm
from fedjax_pfl.engine import local, tree
from fedjax_pfl.engine.federation import Federation
from fedjax_pfl.models.model import Variables, is_trainable, partition

Tree = Any


class Constants(NamedTuple):
    """What a client's work reads: learning rate, clip norm, energy T, and the student as received."""

    lr: jax.Array
    clip: jax.Array
    energy: jax.Array
    received: Variables


class Carry(NamedTuple):
    """A client at work. W ``(d, d)``; optimizers: of teacher, student and W; loss: of the teacher, times samples."""

    teacher: Variables
    student: Variables
    W: jax.Array
    optimizers: tuple[Tree, ...]
    constants: Constants
    loss: jax.Array
    samples: jax.Array


def feature_size(fed: Federation) -> int:
    """Size d of the features in front of the head (their last axis).

    Raises:
        ValueError: the model gives no features.
    """
    fed.model.require_features("distillation")
    features: Any = fed.model.features
    batch = {"x": fed.inputs(1), "mask": jax.ShapeDtypeStruct((1,), bool)}
    z = jax.eval_shape(lambda v, b: features(v, fed.prepare(b), mask=b["mask"])[0], fed.model.shapes(), batch)
    return int(z.shape[-1])


def start(fed: Federation, teacher: Variables, student: Variables, W: jax.Array, constants: Constants) -> Carry:
    """Teacher, student and W with fresh optimisers."""
    teacher, student = teacher | fed.fresh_statistics, student | fed.fresh_statistics
    trained = (partition(teacher, is_trainable)[0], partition(student, is_trainable)[0], W)
    optimizers = tuple(fed.optimizer(constants.lr).init(parameters) for parameters in trained)
    zero = jnp.zeros((), jnp.result_type(float))
    return Carry(teacher, student, W, optimizers, constants, zero, zero)


def distil(fed: Federation, carry: Carry, batch: dict[str, jax.Array], key: jax.Array) -> Carry:
    """One step of teacher, student and W on a minibatch, each on its own loss in its own parameters."""
    (t, t_statistics), (s, s_statistics) = (partition(v, is_trainable) for v in (carry.teacher, carry.student))

    def losses(t: Variables, s: Variables, W: jax.Array) -> Any:
        h_t, p_t, new_t = _forward(fed, t | t_statistics, batch, key)
        h_s, p_s, new_s = _forward(fed, s | s_statistics, batch, key)
        own, drawn = (fed.loss(p_t, batch["y"]), fed.loss(p_s, batch["y"])), (_kl(p_s, p_t), _kl(p_t, p_s))
        apart = ((h_t - h_s @ W) ** 2).reshape(len(h_t), -1).mean(1)
        mean = [local.masked_mean(values, batch["mask"]) for values in (*own, *(kl + apart for kl in drawn))]
        return mean, (new_t, new_s)

    (ce_t, ce_s, _, _), pull, (new_t, new_s) = jax.vjp(losses, t, s, carry.W, has_aux=True)
    one, zero = jnp.ones_like(ce_t), jnp.zeros_like(ce_t)
    weight = safe_divide(one, ce_t + ce_s)  # a cotangent, not a factor of the loss: nothing descends it
    gradients = (pull([one, zero, weight, zero])[0], *pull([zero, one, zero, weight])[1:])
    moved, optimizers = [], []
    for parameters, gradient, optimizer in zip((t, s, carry.W), gradients, carry.optimizers, strict=True):
        updates, optimizer = fed.optimizer(carry.constants.lr).update(
            clipped(gradient, carry.constants.clip), optimizer, parameters
        )
        moved.append(optax.apply_updates(parameters, updates))
        optimizers.append(optimizer)
    samples = batch["mask"].sum().astype(carry.samples.dtype)
    return carry._replace(
        teacher=moved[0] | new_t, student=moved[1] | new_s, W=moved[2], optimizers=tuple(optimizers),
        loss=carry.loss + ce_t * samples, samples=carry.samples + samples,
    )  # fmt: skip


def clipped(gradient: Tree, most: jax.Array | float) -> Tree:
    """The gradient, shortened to the norm ``most`` where it is longer; a norm that overflows gives zeros."""
    norm = safe_norm(jnp.stack([safe_norm(leaf) for leaf in jax.tree.leaves(gradient)]))
    return tree.scale(jnp.minimum(1, most / norm), gradient)


def _forward(fed: Federation, variables: Variables, batch: dict[str, jax.Array], key: jax.Array) -> Any:
    """Features, scores and running statistics of a minibatch."""
    features, classify = fed.model.features, fed.model.classify
    assert features is not None  # asked of the model before
    assert classify is not None
    h, updated = features(variables, fed.prepare(batch), mask=batch["mask"], key=key, train=True)
    return h, classify(variables, h), partition(updated, is_trainable)[1]


def _kl(p: jax.Array, q: jax.Array) -> jax.Array:
    """KL(p || q) of each sample, from scores ``(B, C)``: ``(B,)``."""
    log_p, log_q = jax.nn.log_softmax(p), jax.nn.log_softmax(q)
    return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
