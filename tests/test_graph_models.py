"""Graph networks against products of dense matrices, and what must not matter: order, padding, absent classes."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_pfl.models.graph import GNN, MASKED, Core, TwoStream, pool
from fedjax_pfl.models.graph_layers import GAT, GCN, GIN, Dropout, GraphSAGE

VOCABULARY, CLASSES, ATTRIBUTES = 5, 3, 2
LAYERS = {"gin": GIN(4), "gcn": GCN(4), "graphsage": GraphSAGE(4), "gat": GAT(4), "gat, 2 heads": GAT(4, heads=2)}
SIZES = {"num_classes": CLASSES, "vocabulary": VOCABULARY, "hidden": 8}
SMALL, ONE = SIZES | {"layers": 2}, SIZES | {"layers": 1}
NETWORKS = {
    "gin": GNN(**SMALL, attributes=ATTRIBUTES),
    "gcn": GNN(**ONE, layer="gcn", pool="mean", stream="structure"),
    "graphsage": GNN(**ONE, layer="graphsage", pool="max", stream="structure"),
    "gat": GNN(**ONE, layer="gat", heads=2, attributes=ATTRIBUTES),
    "two_stream": TwoStream(**SMALL, attributes=ATTRIBUTES),
}


class Graph(NamedTuple):
    """One graph on the host: node arrays by name, edges `(E, 2)` (sender, receiver), classes of its data set."""

    nodes: dict[str, np.ndarray]
    edges: np.ndarray
    classes: int


def _graph(rng: np.random.Generator, nodes: int, edges: int, classes: int = CLASSES) -> Graph:
    values = {
        "label": rng.integers(0, VOCABULARY, nodes).astype(np.int32),
        "degree": rng.integers(0, 16, nodes).astype(np.int32),
        "walk": rng.uniform(size=(nodes, 16)),
        "attributes": rng.normal(size=(nodes, ATTRIBUTES)),
    }
    return Graph(values, rng.integers(0, max(nodes, 1), (edges if nodes else 0, 2)), classes)


def _graphs(seed: int, count: int = 4) -> list[Graph]:
    """Random graphs with loops, repeated edges and isolated nodes, one without edges, one without nodes."""
    rng = np.random.default_rng(seed)
    drawn = (rng.integers((1, 0, 1), (7, 12, CLASSES + 1)).tolist() for _ in range(count))
    return [_graph(rng, 3, 0), _graph(rng, 0, 0), *(_graph(rng, *sizes) for sizes in drawn)]


def _batch(graphs: list[Graph], nodes: int, edges: int, count: int, seed: int = 0) -> jraph.GraphsTuple:
    """Graphs padded to `nodes`, `edges` and `count` (padding included) with random values and edges in the padding."""
    rng = np.random.default_rng(seed)
    sizes, degrees = [len(g.nodes["label"]) for g in graphs], [len(g.edges) for g in graphs]
    rest = nodes - sum(sizes), edges - sum(degrees), count - len(graphs) - 1
    assert rest[0] > 0
    assert min(rest) >= 0
    padding = _graph(rng, *rest[:2])
    starts = np.cumsum([0, *sizes])
    ends = np.concatenate([g.edges + start for g, start in zip([*graphs, padding], starts, strict=True)])
    return jraph.GraphsTuple(
        nodes={k: jnp.asarray(np.concatenate([g.nodes[k] for g in [*graphs, padding]])) for k in padding.nodes},
        edges=None,
        senders=jnp.asarray(ends[:, 0], jnp.int32),
        receivers=jnp.asarray(ends[:, 1], jnp.int32),
        globals={"classes": jnp.asarray([*(g.classes for g in graphs), *[1] * (rest[2] + 1)])},
        n_node=jnp.asarray([*sizes, *[0] * rest[2], rest[0]]),
        n_edge=jnp.asarray([*degrees, *[0] * rest[2], rest[1]]),
    )


@functools.cache
def _variables(name: str) -> Any:
    """Double-precision parameters of a network; only for tests with the fixture `float64`."""
    variables = jax.jit(NETWORKS[name].init)(jax.random.key(1), _batch(_graphs(0), 40, 60, 9))
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, float), variables)


@functools.cache
def _compiled(name: str) -> Any:
    """(variables, batch, real (G,), train, key=0) -> gradient of a sum over the real graphs' classes, and scores."""

    def loss(variables: Any, batch: jraph.GraphsTuple, real: jax.Array, train: bool, key: int = 0) -> Any:
        scores = NETWORKS[name].apply(variables, batch, train=train, rngs={"dropout": jax.random.key(key)})[: len(real)]
        shares = nn.log_softmax(scores) * jnp.cos(jnp.arange(scores.size)).reshape(scores.shape)
        return jnp.where(real[:, None] & (scores > MASKED / 2), shares, 0).sum(), scores

    return jax.jit(jax.grad(loss, has_aux=True), static_argnums=3)


def _close(got: Any, want: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-9, 1e-10), got, want)


# Layers against dense matrices


def _dense_reference(name: str, p: dict[str, Any], x: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The layer's formula with the matrix `counts[receiver, sender]` of edge counts."""
    if name == "gin":
        h = (np.eye(len(x)) + counts) @ x
        h = np.maximum(h @ p["dense1"]["kernel"] + p["dense1"]["bias"], 0)
        return h @ p["dense2"]["kernel"] + p["dense2"]["bias"]
    if name == "gcn":
        a = counts + np.eye(len(x))
        d = np.diag(a.sum(1) ** -0.5)
        return d @ a @ d @ x @ p["kernel"] + p["bias"]
    if name == "graphsage":
        mean = counts / np.maximum(counts.sum(1, keepdims=True), 1) @ x
        return x @ p["self"]["kernel"] + p["self"]["bias"] + mean @ p["neighbours"]["kernel"]
    a, h = counts + np.eye(len(x)), x @ p["dense"]["kernel"]
    parts = []
    for head, part in enumerate(np.split(h, len(p["sender"]), 1)):
        raw = (part @ p["receiver"][head])[:, None] + (part @ p["sender"][head])[None]
        weights = a * np.exp(np.where(raw > 0, raw, 0.2 * raw))
        parts.append(weights / weights.sum(1, keepdims=True) @ part)
    return np.concatenate(parts, 1) + p["bias"]


EDGES = {
    "no edges": [],
    "isolated nodes": [(0, 1), (1, 0)],
    "self-loops": [(0, 0), (1, 1), (0, 1), (3, 3)],
    "duplicate edges": [(0, 1), (0, 1), (1, 0), (1, 0), (2, 2), (2, 2)],
    "one direction": [(0, 1), (2, 1), (3, 1), (1, 4)],
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_is_its_formula_on_dense_matrices(name: str, float64: None) -> None:
    layer, rng, cases = LAYERS[name], np.random.default_rng(2), list(EDGES.values())
    x = rng.normal(size=(5 * len(cases), 3))
    ends = np.concatenate([5 * i + np.array(pairs, np.int32).reshape(-1, 2) for i, pairs in enumerate(cases)])
    counts = np.zeros((len(x), len(x)))
    np.add.at(counts, (ends[:, 1], ends[:, 0]), 1)

    @jax.jit
    def run(params: Any, x: Any, graphs: jraph.GraphsTuple) -> Any:
        def loss(params: Any, x: Any) -> Any:
            y = layer.apply(params, x, graphs)
            return (y**2).sum(), y

        return jax.grad(loss, (0, 1), has_aux=True)(params, x)

    params = jax.jit(layer.init)(jax.random.key(0), x, _edges_only(ends, 25))
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), params)
    for edges, rows in ((ends, len(x)), (ends[:0], 5)):
        slopes, got = run(params, x[:rows], _edges_only(edges, rows))
        matrix = counts[:rows, :rows] if len(edges) else np.zeros((rows, rows))
        want = _dense_reference(name.split(",")[0], jax.tree.map(np.asarray, params["params"]), x[:rows], matrix)
        np.testing.assert_allclose(got, want, 1e-9, 1e-10)
        assert all(np.isfinite(s).all() for s in jax.tree.leaves(slopes))


def _edges_only(edges: np.ndarray, nodes: int) -> jraph.GraphsTuple:
    ends = jnp.asarray(edges, jnp.int32)
    return jraph.GraphsTuple(None, None, ends[:, 1], ends[:, 0], None, jnp.array([nodes]), jnp.array([len(edges)]))


def test_gin_adds_its_fixed_epsilon() -> None:
    graphs, x = _edges_only(np.zeros((0, 2)), 2), jnp.arange(6.0).reshape(2, 3)
    params = GIN(4).init(jax.random.key(0), x, graphs)
    want = GIN(4).apply(params, 1.5 * x, graphs)
    np.testing.assert_allclose(GIN(4, epsilon=0.5).apply(params, x, graphs), want, 1e-6)


def test_two_streams_are_their_formula_on_dense_matrices(float64: None) -> None:
    p = jax.tree.map(np.asarray, _variables("two_stream")["params"])
    graph = _graph(np.random.default_rng(4), 6, 11)
    batch = _batch([graph], 40, 60, 9)
    counts = np.zeros((6, 6))
    np.add.at(counts, (graph.edges[:, 1], graph.edges[:, 0]), 1)

    def dense(part: Any, x: np.ndarray) -> np.ndarray:
        return x @ part["kernel"] + part["bias"]

    x = p["input"]["kernel"][graph.nodes["label"]] + p["input"]["bias"]
    x = x + graph.nodes["attributes"] @ p["input"]["attributes"]["kernel"]
    s = dense(p["structure"]["input"], np.concatenate([graph.nodes["walk"], np.eye(16)[graph.nodes["degree"]]], 1))
    for layer in ("layer1", "layer2"):
        x = np.maximum(_dense_reference("gin", p["nodes"][layer], np.concatenate([x, s], 1), counts), 0)
        s = np.tanh(_dense_reference("gcn", p["structure"][layer], s, counts))
    pooled = dense(p["merge"], np.concatenate([x, s], 1)).sum(0)
    want = dense(p["head"], np.maximum(dense(p["post"], pooled), 0))
    _, got = _compiled("two_stream")(_variables("two_stream"), batch, np.arange(8) < 1, False)
    np.testing.assert_allclose(got[0], want, 1e-9, 1e-10)


@pytest.mark.parametrize("how", ["sum", "mean", "max"])
def test_pooling_is_numpys_on_each_graph(how: Any) -> None:
    graphs = _graphs(5)
    batch = _batch(graphs, 40, 60, 9)
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32) - 2  # a maximum below zero
    got, start = pool(jnp.asarray(x), batch, how), 0
    for row, graph in zip(got, graphs, strict=False):
        part = x[start : start + len(graph.nodes["label"])]
        start += len(part)
        np.testing.assert_allclose(row, getattr(part, how)(0) if len(part) else np.zeros(3), 1e-5)
    np.testing.assert_array_equal(got[len(graphs) : -1], 0)


# What must not matter


def _permuted(graph: Graph, rng: np.random.Generator) -> Graph:
    order = rng.permutation(len(graph.nodes["label"]))
    place = np.argsort(order)
    edges = graph.edges[rng.permutation(len(graph.edges))]
    return Graph({k: v[order] for k, v in graph.nodes.items()}, place[edges] if len(edges) else edges, graph.classes)


@pytest.mark.parametrize("name", NETWORKS)
def test_order_of_nodes_edges_and_graphs_does_not_matter(name: str, float64: None) -> None:
    variables, run = _variables(name), _compiled(name)
    for seed in range(5):
        rng, graphs = np.random.default_rng(seed), _graphs(seed)
        order = rng.permutation(len(graphs))
        mixed = [_permuted(graphs[i], rng) for i in order]
        real = np.arange(8) < len(graphs)
        _, want = run(variables, _batch(graphs, 40, 60, 9), real, False)
        _, got = run(variables, _batch(mixed, 40, 60, 9), real, False)
        _close(got[: len(order)], want[order])


@pytest.mark.parametrize(("name", "train"), [*((name, False) for name in NETWORKS), ("two_stream", True)])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), count=st.integers(0, 5))
def test_padding_changes_neither_scores_nor_gradients(name: str, train: bool, seed: int, count: int) -> None:
    with jax.enable_x64(True):
        variables, graphs = _variables(name), _graphs(seed, count)
        (slopes, scores), (more_slopes, more) = (
            _compiled(name)(variables, _batch(graphs, *sizes, seed), np.arange(sizes[2] - 1) < len(graphs), train)
            for sizes in ((40, 60, 9), (57, 91, 12))
        )
        _close(more[: len(graphs)], scores[: len(graphs)])
        _close(more_slopes, slopes)
        assert all(np.isfinite(s).all() for s in jax.tree.leaves(slopes))


def test_stacked_clients_and_derivatives_of_gradients(float64: None) -> None:
    run, variables = _compiled("gin"), _variables("gin")
    batches = [_batch(_graphs(seed), 40, 60, 9) for seed in (1, 2)]
    real = np.ones(6, bool)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    got = jax.vmap(lambda b: run(variables, b, real, False))(stacked)
    _close(got, jax.tree.map(lambda *leaves: jnp.stack(leaves), *(run(variables, b, real, False) for b in batches)))

    def norm(step: Any) -> Any:
        shifted = jax.tree.map(lambda v: v * (1 + step), variables)
        return sum((g**2).sum() for g in jax.tree.leaves(run(shifted, batches[0], real, False)[0]))

    slope, reverse = jax.jit(lambda: (jax.jvp(norm, (0.0,), (1.0,))[1], jax.grad(norm)(0.0)))()
    norm = jax.jit(norm)
    np.testing.assert_allclose(slope, reverse, 1e-9)
    np.testing.assert_allclose(slope, (norm(1e-5) - norm(-1e-5)) / 2e-5, 1e-4)


# Expressiveness, inputs, classes, sizes, dropout


def _complete(nodes: int) -> Graph:
    values = {"label": np.zeros(nodes, np.int32), "degree": np.zeros(nodes, np.int32), "walk": np.zeros((nodes, 16))}
    return Graph(values, np.array([(i, j) for i in range(nodes) for j in range(nodes) if i != j]), CLASSES)


def _one_kind(graphs: list[Graph], nodes: int, edges: int) -> jraph.GraphsTuple:
    batch = _batch([g._replace(nodes=g.nodes | {"attributes": np.zeros((len(g.nodes["label"]), 2))}) for g in graphs],
                   nodes, edges, len(graphs) + 1)  # fmt: skip
    return batch._replace(nodes={k: v for k, v in batch.nodes.items() if k != "attributes"})


def test_sums_tell_complete_graphs_apart_and_means_cannot() -> None:
    batch = _one_kind([_complete(3), _complete(4)], 10, 20)
    for network, differ in (
        (GNN(**ONE), True),
        (GNN(**ONE, layer="graphsage", pool="mean"), False),
    ):
        three, four, _ = jax.jit(network.apply)(jax.jit(network.init)(jax.random.key(0), batch), batch)
        assert np.allclose(three, four, atol=1e-5) != differ


@pytest.mark.parametrize("stream", ["raw", "structure"])
def test_look_up_is_the_product_with_the_one_hot_symbol(stream: Any) -> None:
    batch = _batch(_graphs(3), 40, 60, 9)
    network = GNN(**ONE, stream=stream, attributes=ATTRIBUTES)
    variables = jax.jit(network.init)(jax.random.key(0), batch)
    _, caught = network.apply(variables, batch, capture_intermediates=lambda module, _: module.name == "input")
    (got,) = caught["intermediates"]["input"]["__call__"]
    p, nodes = variables["params"]["input"], batch.nodes
    if stream == "raw":
        want = nn.one_hot(nodes["label"], VOCABULARY) @ p["kernel"] + p["bias"]
        want += nodes["attributes"] @ p["attributes"]["kernel"]
    else:
        want = jnp.concatenate([nodes["walk"], nn.one_hot(nodes["degree"], 16)], 1) @ p["kernel"] + p["bias"]
    np.testing.assert_allclose(got, want, 1e-5, 1e-6)


def test_a_label_outside_the_vocabulary_shows() -> None:
    batch, network = _one_kind([_complete(3), _complete(4)], 10, 20), GNN(**ONE)
    variables = jax.jit(network.init)(jax.random.key(0), batch)
    for wrong in (-1, VOCABULARY):
        label = batch.nodes["label"].at[1].set(wrong)
        scores = jax.jit(network.apply)(variables, batch._replace(nodes=batch.nodes | {"label": label}))
        assert np.isnan(scores[0]).all()
        assert np.isfinite(scores[1]).all()


def test_classes_that_a_data_set_lacks_have_no_probability_and_no_gradient() -> None:
    batch = _one_kind([_complete(3)._replace(classes=2), _complete(4)._replace(classes=1)], 10, 20)
    network = GNN(**ONE)
    variables = jax.jit(network.init)(jax.random.key(0), batch)

    def loss(variables: Any) -> Any:
        scores = network.apply(variables, batch)[:-1]
        return -nn.log_softmax(scores)[jnp.arange(2), jnp.array([1, 0])].sum(), scores

    slopes, scores = jax.jit(jax.grad(loss, has_aux=True))(variables)
    np.testing.assert_array_equal(nn.softmax(scores) > 0, [[True, True, False], [True, False, False]])
    head = slopes["params"]["head"]
    np.testing.assert_array_equal(head["kernel"][:, 2], 0)
    np.testing.assert_array_equal(head["bias"][2], 0)
    assert np.abs(head["bias"][:2]).min() > 0


def _floats(network: nn.Module, part: str) -> tuple[int, set[str]]:
    shapes = jax.eval_shape(network.init, jax.random.key(0), _one_kind([_complete(3)], 10, 20))["params"]
    return sum(leaf.size for leaf in jax.tree.leaves(shapes[part])), set(shapes)


def test_shared_parts_have_the_published_sizes() -> None:
    names = {"input", "core", "post", "head"}
    assert _floats(GNN(2, 37), "core") == _floats(GNN(2, 89, stream="structure"), "core") == (24_960, names)
    assert _floats(TwoStream(2, 37), "structure") == (14_592, {"input", "structure", "nodes", "merge", "post", "head"})
    assert _floats(TwoStream(2, 37), "nodes")[0] == 3 * (128 * 64 + 64 + 64 * 64 + 64)
    assert _floats(GNN(2, 37), "input")[0] == 38 * 64


def test_all_parameters_start_uniform_within_one_over_the_root_of_the_inputs() -> None:
    params = jax.jit(GNN(2, 400).init)(jax.random.key(0), _one_kind([_complete(3)], 10, 20))["params"]
    for leaf, inputs in (
        (params["input"]["kernel"], 400),
        (params["core"]["layer2"]["dense1"]["kernel"], 64),
        (params["post"]["kernel"], 64),
    ):
        assert 0.99 < np.abs(leaf).max() * inputs**0.5 <= 1
        np.testing.assert_allclose(leaf.var() * inputs, 1 / 3, 0.05)
    assert 0.8 < np.abs(params["input"]["bias"]).max() * 20 <= 1
    assert 0.8 < np.abs(params["core"]["layer1"]["dense1"]["bias"]).max() * 8 <= 1


@pytest.mark.parametrize("rate", [0.5, 0.2])
def test_dropout_keeps_the_mean_and_drops_values_independently(rate: float) -> None:
    x = jnp.ones((3000, 40))
    y = np.asarray(Dropout(rate, deterministic=False).apply({}, x, rngs={"dropout": jax.random.key(0)}))
    np.testing.assert_allclose(np.unique(y), [0, 1 / (1 - rate)], 1e-6)
    np.testing.assert_allclose(y.mean(0), 1, atol=0.1)
    correlation = np.corrcoef(y.T) - np.eye(40)
    assert np.abs(correlation).max() < 0.1


def test_dropout_acts_in_training_only() -> None:
    batch = _batch(_graphs(1), 40, 60, 9)
    for network in (NETWORKS["gin"].clone(layers=1), NETWORKS["two_stream"].clone(layers=1)):

        @functools.partial(jax.jit, static_argnums=(1, 2))
        def run(variables: Any, rate: float, train: bool, key: int, network: Any = network) -> Any:
            return network.clone(dropout=rate).apply(
                variables, batch, train=train, rngs={"dropout": jax.random.key(key)}
            )

        variables = jax.jit(network.init)(jax.random.key(0), batch)
        plain = run(variables, 0.5, False, 0)
        np.testing.assert_array_equal(plain, run(variables, 0.5, False, 1))
        np.testing.assert_allclose(plain, run(variables, 0.0, True, 0), 1e-5, 1e-5)
        assert not np.allclose(run(variables, 0.5, True, 0), run(variables, 0.5, True, 1))


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (GNN(2, 5, layer="gine"), "unknown layer 'gine'; choose one of gin, gcn, graphsage, gat"),  # type: ignore[arg-type]
        (GNN(2, 5, pool="median"), "unknown pool 'median'; choose one of sum, mean, max"),  # type: ignore[arg-type]
        (GNN(2, 5, stream="both"), "unknown stream 'both'; choose one of raw, structure"),  # type: ignore[arg-type]
        (GNN(2, 5, attributes=4), "has 0 node attributes, the model was built with 4"),
        (GNN(2, 5, layer="gat", heads=3), "64 features cannot be split over 3 heads"),
    ],
)
def test_wrong_options_are_named(network: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        network.init(jax.random.key(0), _one_kind([_complete(3)], 10, 20))


def test_core_holds_every_kind_of_layer_under_the_same_names() -> None:
    batch, x = _batch(_graphs(1), 40, 60, 9), jnp.ones((40, 64))
    for layer in ("gin", "gcn", "graphsage", "gat"):
        shapes = jax.eval_shape(Core(layer).init, jax.random.key(0), x, batch)["params"]  # type: ignore[arg-type]
        assert set(shapes) == {"layer1", "layer2", "layer3"}
