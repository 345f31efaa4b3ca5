"""The evaluation contract: summaries by hand, absent splits and samples, what is measured and how often."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import CLASSES, SIZES, federation, tiny_data

import fedjax_pfl as fp
from fedjax_pfl.data.clients import client_data
from fedjax_pfl.evaluation import evaluate, mean_over_clients, scores_of, summary

M = len(SIZES)
NAN = float("nan")


def test_summary_by_hand() -> None:
    values, samples = np.array([0.5, NAN, 1.0, 0.25]), np.array([2, 9, 1, 5])
    found = summary(values, samples)
    mean = (0.5 + 1.0 + 0.25) / 3
    assert found == pytest.approx(
        {
            "weighted_mean": (2 * 0.5 + 1.0 + 5 * 0.25) / 8,
            "uniform_mean": mean,
            "std": np.sqrt(((0.5 - mean) ** 2 + (1 - mean) ** 2 + (0.25 - mean) ** 2) / 3),
            "worst_decile": 0.25,
            "min": 0.25,
            "clients_without_samples": 1.0,
        }
    )


@pytest.mark.parametrize(("clients", "lowest"), [(9, 1), (10, 1), (20, 2), (25, 2)])
def test_the_worst_decile_is_the_mean_of_the_lowest_tenth(clients: int, lowest: int) -> None:
    values = np.random.default_rng(0).permutation(np.arange(clients) / clients)
    assert summary(values, np.ones(clients))["worst_decile"] == pytest.approx(np.arange(lowest).mean() / clients)


def test_weights_stay_with_their_clients() -> None:
    values, samples = np.array([0.9, 0.1, 0.5]), np.array([1, 10, 100])
    assert summary(values, samples)["weighted_mean"] == pytest.approx((0.9 + 1 + 50) / 111)


def test_summary_of_nothing_is_nan() -> None:
    found = summary(np.array([NAN, NAN]), np.array([0, 0]))
    assert found.pop("clients_without_samples") == 2
    assert set(found) == {"weighted_mean", "uniform_mean", "std", "worst_decile", "min"}
    assert all(np.isnan(value) for value in found.values())


def test_mean_over_clients() -> None:
    values = np.array([[1.0, 0.0, NAN], [NAN, NAN, NAN], [0.5, NAN, 0.25]])
    np.testing.assert_allclose(mean_over_clients(values, np.array([1, 3, 4])), [0.25, NAN, (0.5 + 1.0) / 5])


def counted(fed: Any, algorithm: fp.Algorithm) -> tuple[fp.Algorithm, list[int]]:
    calls: list[int] = []

    def predict(*args: Any) -> Any:
        calls.append(1)
        return fed.scores(*args)

    return algorithm._replace(predict=predict), calls


def once(fed: Any, algorithm: fp.Algorithm, whole: bool) -> int:
    """How often ``predict`` is traced: by the whole evaluation, or by one model on one split."""
    algorithm, calls = counted(fed, algorithm)
    env = fed.env(algorithm.hyper)
    state = algorithm.init(env, jax.random.key(0))
    if whole:
        jax.eval_shape(lambda s: evaluate(fed, algorithm, env, s), state)
    else:
        served = algorithm.serve(env, state)
        jax.eval_shape(lambda s: scores_of(fed, algorithm, env, s, algorithm.received, "test"), served)
    return len(calls)


@pytest.mark.parametrize(
    ("method", "models", "kinds"),
    [
        ("fedavg", 1, {"received", "personal", "shared"}),
        ("fedavg_ft", 2, {"received", "personal", "shared"}),
        ("fedper", 1, {"received", "personal"}),
        ("fedapa", 2, {"received", "personal"}),
    ],
)
def test_a_model_declared_twice_is_measured_once(method: str, models: int, kinds: set[str]) -> None:
    fed = federation()
    algorithm = fp.build(method, fed)
    splits = 2
    assert once(fed, algorithm, whole=True) == models * splits * once(fed, algorithm, whole=False)
    env = fed.env(algorithm.hyper)
    found = jax.eval_shape(lambda s: evaluate(fed, algorithm, env, s), algorithm.init(env, jax.random.key(0)))
    assert set(found) == {"validation", "test"}
    assert all(set(kinds_) == kinds for kinds_ in found.values())


def unequal_tests() -> Any:
    """Client 1 has no test samples; nobody has validation samples."""
    data = tiny_data()
    test = [split_rows(data, i)[:n] for i, n in enumerate((4, 0, 1, 3, 4))]
    train = [data.train.rows[s : s + c] for s, c in zip(data.train.start, data.train.count, strict=True)]
    return client_data(data.examples, CLASSES, train, None, test)


def split_rows(data: Any, i: int) -> np.ndarray:
    return data.test.rows[data.test.start[i] : data.test.start[i] + data.test.count[i]]


def test_scores_by_hand_absent_split_and_a_client_without_samples(float64: None) -> None:
    data = unequal_tests()
    fed = federation(data).replace(evaluation_batch=3)
    result = fp.simulate(fed, algorithm := fp.build("fedper", fed), rounds=2, eval_every=2)
    scores = result.records[-1].scores
    assert set(scores) == {"test"}, "a split without samples is absent"
    env = fed.env(algorithm.hyper)
    for i in range(M):
        accuracy, loss = scores["test"]["received"].accuracy[0, i], scores["test"]["received"].loss[0, i]
        rows = split_rows(data, i)
        if not len(rows):
            assert np.isnan(accuracy)
            assert np.isnan(loss)
            continue
        variables = algorithm.received(env, result.state, i)
        logits = np.asarray(fed.model.apply(variables, jnp.asarray(data.examples["x"][rows]))[0])
        y = data.examples["y"][rows]
        assert accuracy == pytest.approx((logits.argmax(1) == y).mean())
        log_probability = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        assert loss == pytest.approx(-log_probability[np.arange(len(y)), y].mean(), rel=1e-10)


def test_a_federation_without_any_held_out_data_has_no_scores() -> None:
    data = tiny_data()
    train = [data.train.rows[s : s + c] for s, c in zip(data.train.start, data.train.count, strict=True)]
    fed = federation(client_data(data.examples, CLASSES, train))
    algorithm = fp.build("fedavg", fed)
    env = fed.env(algorithm.hyper)
    assert evaluate(fed, algorithm, env, algorithm.init(env, jax.random.key(0))) == {}
    with pytest.raises(ValueError, match="fedhr needs validation data"):
        fed.require_validation("fedhr")


def test_inputs_are_normalised_for_training_and_evaluation_alike(float64: None) -> None:
    data = tiny_data()
    raw = dataclasses.replace(data, examples=data.examples | {"x": 3.0 * data.examples["x"] + 2.0})
    plain, shifted = federation(data), federation(raw, shift=2.0, scale=3.0)
    a, b = (fp.simulate(fed, fp.build("fedavg", fed), rounds=2, eval_every=2) for fed in (plain, shifted))
    for name in a.state.shared:
        np.testing.assert_allclose(a.state.shared[name], b.state.shared[name], 1e-9)
    np.testing.assert_allclose(a.records[-1].scores["test"]["shared"].loss, b.records[-1].scores["test"]["shared"].loss)


def test_the_participation_masks_are_logged_by_client() -> None:
    participation, rounds, key = fp.Participation(0.6, 0.3), 5, jax.random.key(2)
    fed = federation(participation=participation)
    result = fp.simulate(fed, fp.build("fedavg", fed), rounds=rounds, eval_every=2, seed=2)
    drawn = [participation.draw(fed.data, key, jnp.int32(r), rounds) for r in range(rounds)]
    np.testing.assert_array_equal(result.info["trains"][0], [c.trains for c in drawn])
    np.testing.assert_array_equal(result.info["reported"][0], [c.trains & c.reports for c in drawn])
    assert result.info["trains"].sum() > result.info["reported"].sum()
