"""Local optimisers: what weight decay means, and a state that is kept from round to round."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from common import Case, assert_close, build, federation, tiny_data

import fedjax_pfl as fp
from fedjax_pfl.engine.simulation import Simulation
from fedjax_pfl.experiment.config import TrainingConfig
from fedjax_pfl.experiment.setup import optimizer


@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_weight_decay_is_in_the_gradient_of_adam_and_decoupled_in_adamw(
    name: str, decay: float, float64: None
) -> None:  # fmt: skip
    rng = np.random.default_rng(0)
    params, slow = {"w": rng.normal(size=4)}, reference.Adam(0.1, decay, decoupled=name == "adamw")
    expected, ours = params, jax.tree.map(jnp.asarray, params)
    made = optimizer(TrainingConfig(optimizer=name, weight_decay=decay))(0.1)
    state = made.init(ours)
    for _ in range(4):
        gradient = {"w": rng.normal(size=4)}
        updates, state = made.update(jax.tree.map(jnp.asarray, gradient), state, ours)
        ours, expected = optax.apply_updates(ours, updates), slow.step(expected, gradient)
    assert_close(ours, expected, 1e-10)


ALONE = [  # a client alone gets back what it sent, so that its rounds are one training
    Case("local"),
    Case("fixed_mixing"),
    Case("fedapa"),
    Case("gcfl"),
    Case("fedstar", form="family"),
    Case("fedgcf", {"policy": "fixed:0", "clusters": 1}, form="family"),
    Case("fedgcf", {"policy": "fixed:1", "clusters": 1}, form="family"),
]


def after(case: Case, rounds: int, epochs: int, keep: bool) -> list[jax.Array]:
    """What a client alone has after some rounds."""
    options = {"batch_size": 6, "local_epochs": epochs, "optimizer": optax.adam, "lr": 0.1, "keep_optimizer": keep}
    fed = case.federation(tiny_data((6,)), **options)
    algorithm = build(case, fed)
    env, key, first = fed.env(algorithm.hyper), jax.random.key(0), jnp.int32(0)

    @jax.jit
    def run(state: Any) -> Any:
        state = fp.rollout(fed, algorithm, env, state, key, rounds)[0]
        if case.options.get("policy") == "fixed:1":  # it is the structural model that comes back
            return state.core, state.structure
        return algorithm.received(env, state, first), algorithm.personal(env, state, first)

    return jax.tree.leaves(run(algorithm.init(env, key)))


@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.id)
def test_rounds_with_a_kept_optimiser_are_one_training(case: Case, float64: None) -> None:
    assert_close(after(case, 4, 1, keep=True), after(case, 1, 4, keep=False), 1e-9)


def test_rounds_with_a_fresh_optimiser_are_another_training(float64: None) -> None:
    anew, whole = after(ALONE[0], 4, 1, keep=False), after(ALONE[0], 1, 4, keep=False)
    assert max(float(abs(a - b).max()) for a, b in zip(anew, whole, strict=True)) > 1e-3


def test_a_method_that_cannot_keep_optimisers_is_refused() -> None:
    fed = federation(keep_optimizer=True)
    with pytest.raises(ValueError, match="fedrep cannot keep the clients' optimisers"):
        Simulation(fed, fp.build("fedrep", fed), rounds=1)
