"""FedStar: a round against a loop over clients; what is shared and what stays."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from common import SIZES, assert_close, federation, graph_data, graph_federation, trained

import fedjax_pfl as fp
from fedjax_pfl.engine.rounds import one_round
from fedjax_pfl.models.registry import build_model

KEY = jax.random.key(3)
M = len(SIZES)


def is_stream(name: str) -> bool:
    return name.startswith("params/structure/")


def row(stack: Any, i: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[i], stack)


def test_rounds_average_the_structure_stream_and_nothing_else(float64: None) -> None:
    fed = graph_federation(participation=fp.Participation(0.6))
    algorithm = fp.build("fedstar", fed)
    env, two = fed.env(algorithm.hyper), fed.with_related("two_stream", "test")
    advance = jax.jit(lambda state, t: one_round(fed, algorithm, env, state, KEY, t, 10))
    state = algorithm.init(env, KEY)
    first = state
    for t in range(2):
        new, info = advance(state, np.int32(t))
        there = np.flatnonzero(info["reported"])
        assert len(there) == 3
        starts = [algorithm.received(env, state, i) for i in range(M)]
        after = dict(zip(there, trained(fed_of(two, there), [starts[i] for i in there], KEY, t), strict=True))
        total = sum(SIZES[i] for i in there)
        mean = {n: sum(SIZES[i] * after[i][n] for i in there) / total for n in starts[0] if is_stream(n)}
        assert_close(new.shared, mean, 1e-9)
        for i in range(M):
            own = {name: leaf for name, leaf in after.get(i, starts[i]).items() if not is_stream(name)}
            assert_close(row(new.private, i), own, 1e-9)
            assert_close(algorithm.received(env, new, i), own | mean, 1e-9)
            assert_close(algorithm.personal(env, new, i), algorithm.received(env, new, i), 0)
        state = new
    moved = {name.split("/")[1] for name, leaf in state.private.items() if np.abs(leaf - first.private[name]).max() > 0}
    assert moved == {"input", "nodes", "merge", "post", "head"}


def fed_of(fed: fp.Federation, there: np.ndarray) -> fp.Federation:
    """The same federation with some of its clients, their ids and so their batches unchanged."""
    train = fed.data.train
    split = train._replace(start=train.start[there], count=train.count[there])
    return fed.replace(data=dataclasses.replace(fed.data, train=split, ids=fed.data.ids[there]))


def test_only_the_structure_stream_is_sent() -> None:
    data = graph_data()
    single = {name: table[-1:] if name.endswith("_of_dataset") else table for name, table in data.tables.items()}
    for one in (data, dataclasses.replace(data, tables=single)):
        model = build_model("gin", 3, one.gather(np.zeros(1, int))["x"])
        fed = graph_federation(one).replace(model=model)
        algorithm = fp.build("fedstar", fed)
        assert algorithm.floats == (14592, 14592)
        assert algorithm.shared is None
        state = jax.eval_shape(algorithm.init, fed.env(algorithm.hyper), KEY)
        assert all(map(is_stream, state.shared))
        assert not any(map(is_stream, state.private))


def test_a_graph_model_is_needed() -> None:
    with pytest.raises(ValueError, match=r"fedstar needs a graph model \(gin, gcn, graphsage, gat\), 'Net' is none"):
        fp.build("fedstar", federation())
