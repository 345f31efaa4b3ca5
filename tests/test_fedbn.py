"""FedBN, and how the other methods of this kind deal with running statistics, on a tiny model with batch norm."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_algorithms
from common import SIZES, Case, NormNet, assert_close, assert_equal, federation

import fedjax_pfl as fp
from fedjax_pfl.engine.rounds import one_round
from fedjax_pfl.models.model import is_trainable, partition

M = len(SIZES)
NORMS = {f"params/norm/{n}" for n in ("scale", "bias")} | {f"batch_stats/norm/{n}" for n in ("mean", "var")}
normed = functools.partial(federation, module=NormNet())
quiet = pytest.mark.filterwarnings("ignore:fedbn")
POLICIES = [("fedbn", policy) for policy in ("average", "local", "reset")]
POLICIES += [("ditto", "average"), ("ditto", "local"), ("fedrep", "reset"), ("fedkd", "average"), ("fedkd", "reset")]
POLICIES += [("pfedhn", "average")]


def rounds(name: str, fed: fp.Federation, count: int = 3) -> tuple[Any, Any]:
    """The method and its state after some rounds."""
    algorithm = fp.build(name, fed)
    env, key = fed.env(algorithm.hyper), jax.random.key(2)
    state = algorithm.init(env, key)
    advance = jax.jit(lambda state, number: one_round(fed, algorithm, env, state, key, number, count)[0])
    for number in range(count):
        state = advance(state, number)
    return algorithm, state


@functools.cache
def under(name: str, statistics: str) -> tuple[fp.Federation, Any, Any]:
    """Federation, method and last state under a policy on statistics."""
    fed = normed(statistics=statistics, participation=fp.Participation(0.8, 0.2))
    return (fed, *rounds(name, fed))


@quiet
def test_without_norm_layers_it_is_fedavg_bit_for_bit() -> None:
    fed = federation(participation=fp.Participation(0.8, 0.2))
    (bn, a), (avg, b) = rounds("fedbn", fed), rounds("fedavg", fed)
    assert_equal(a, b)
    assert bn.floats == avg.floats
    assert bn.shared is not None


def test_the_warning_says_why_and_what_to_do() -> None:
    with pytest.warns(UserWarning, match="'Net' has no layer with running statistics.*FedAvg.*norm 'batch'"):
        fp.build("fedbn", federation())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fp.build("fedbn", normed())


@pytest.mark.parametrize("statistics", ["average", "local", "reset"])
def test_norm_layers_never_leave_their_client_and_the_rest_is_averaged(statistics: str, float64: None) -> None:
    fed, algorithm, state = under("fedbn", statistics)
    assert set(state.private) == NORMS
    assert set(state.shared) == {
        f"params/{layer}/{leaf}" for layer in ("dense1", "head") for leaf in ("kernel", "bias")
    }
    assert algorithm.floats == (6 * 4 + 4 + 4 * 3 + 3,) * 2
    assert algorithm.shared is None
    for name in NORMS:
        assert len({leaf.tobytes() for leaf in np.asarray(state.private[name])}) == M, "every client has its own"
    env = fed.env(algorithm.hyper)
    fresh = fed.model.init(jax.random.key(11))
    given = algorithm.newcomer(env, state, fresh)
    assert_equal({name: given[name] for name in NORMS}, {name: fresh[name] for name in NORMS})
    assert_equal({name: given[name] for name in state.shared}, state.shared)


def test_one_client_cannot_see_the_norm_layers_of_another(float64: None) -> None:
    fed = normed()
    algorithm = fp.build("fedbn", fed)
    env, key = fed.env(algorithm.hyper), jax.random.key(3)
    start = algorithm.init(env, key)
    cohort = fp.everyone(env.data)._replace(reports=jnp.arange(M) == 0)
    other = {name: leaf.at[1:].add(7.0) for name, leaf in start.private.items()}
    one, _ = jax.jit(algorithm.round)(env, start, cohort, key)
    two, _ = jax.jit(algorithm.round)(env, start._replace(private=other), cohort, key)
    assert_equal(one.shared, two.shared)
    assert_equal(jax.tree.map(lambda a: a[0], one.private), jax.tree.map(lambda a: a[0], two.private))


def test_average_and_local_statistics_are_the_same_and_reset_is_not(float64: None) -> None:
    average, local, reset = (under("fedbn", s)[2] for s in ("average", "local", "reset"))
    assert_close(average, local, 1e-14)
    name = "batch_stats/norm/mean"
    assert np.abs(np.asarray(average.private[name]) - np.asarray(reset.private[name])).max() > 1e-3


@pytest.mark.parametrize(("name", "statistics"), POLICIES)
def test_the_policies_on_statistics(name: str, statistics: str, float64: None) -> None:
    fed, algorithm, state = under(name, statistics)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    env = fed.env(algorithm.hyper)
    served = [algorithm.received(env, algorithm.serve(env, state), i) for i in range(M)]
    assert all(set(variables) == set(fed.model.shapes()) for variables in served)
    statistic = "batch_stats/norm/mean"
    equal = len({np.asarray(variables[statistic]).tobytes() for variables in served}) == 1
    assert equal == (statistics == "average" and name not in ("fedbn", "pfedhn"))
    initial = partition(fed.model.init(jax.random.key(0)), is_trainable)[1]
    assert any(np.abs(variables[statistic] - initial[statistic]).max() > 1e-3 for variables in served)


def test_the_common_test_with_batch_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_algorithms, "federation", normed)
    test_algorithms.test_runs_traces_once_is_deterministic_and_resumes_bit_for_bit(Case("fedbn"))
    test_algorithms.test_nobody_reports_leaves_the_state(Case("fedbn"))


def test_gradients_with_batch_norm(monkeypatch: pytest.MonkeyPatch, float64: None) -> None:
    monkeypatch.setattr(test_algorithms, "federation", normed)
    test_algorithms.test_gradient_through_rounds_agrees_with_central_differences(Case("fedbn", {}, ("lr",)), 1, None)
