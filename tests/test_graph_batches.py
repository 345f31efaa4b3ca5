"""Graph batches: packing against plain NumPy batching, and graph models through the whole engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st

import fedjax_pfl as fp
from fedjax_pfl.data import PartitionConfig, Source, make_partition, to_client_data
from fedjax_pfl.data.budgets import budgets_for, waste
from fedjax_pfl.data.clients import shard
from fedjax_pfl.data.encodings import degree_index, walk_probabilities
from fedjax_pfl.data.graphs import Budget, GraphBatch, GraphReader, facts_of, last_of, micro_batch, pack
from fedjax_pfl.engine import local
from fedjax_pfl.engine.rounds import rollout
from fedjax_pfl.engine.sharding import client_mesh, place_data
from fedjax_pfl.engine.simulation import Simulation
from fedjax_pfl.engine.unseen import adapt
from fedjax_pfl.experiment.setup import nodes_of_clients
from fedjax_pfl.models.model import Model
from fedjax_pfl.models.registry import build_model

BUDGETS = (Budget(16, 24, 6, 2.0, 2), Budget(16, 60, 5, together=1, dense=True), Budget(33, 300, 4))
ONE = BUDGETS[2:]  # fewer programs to compile
CLASSES, LABELS = (2, 3), (4, 6)
KEY = jax.random.key(3)


def tables_of(nodes: np.ndarray, edges: np.ndarray, dataset: np.ndarray, seed: int) -> tuple[np.ndarray, dict]:
    """Rows and tables of random graphs of so many nodes and edges."""
    rng = np.random.default_rng(seed)
    x = np.stack([np.cumsum(nodes) - nodes, nodes, np.cumsum(edges) - edges, edges, dataset], 1).astype(np.int32)
    ends = [rng.integers(0, np.repeat(nodes, edges)).astype(np.int32) for _ in range(2)]
    labels = rng.integers(0, np.repeat(np.array(LABELS)[dataset], nodes)).astype(np.int32)
    tables = {"senders": ends[0], "receivers": ends[1], "node_label": labels}
    tables |= {"walk": walk_probabilities(x, *ends), "degree": degree_index(x, ends[0])}
    facts = {"labels_of_dataset": LABELS, "classes_of_dataset": CLASSES}
    return x, tables | {name: np.array(value, np.int32) for name, value in facts.items()}


def source(graphs: int = 60, sets: int = 2, seed: int = 0, budgets: tuple[Budget, ...] = ONE) -> Source:
    """Random graphs of two data sets, or of one, whose class tells whether they have many edges."""
    rng = np.random.default_rng(seed)
    dataset = np.sort(np.arange(graphs) % sets)
    nodes = rng.integers(1, 9, graphs)
    nodes[rng.integers(graphs)] = 30
    edges = rng.integers(0, 3 * nodes + 1)
    x, tables = tables_of(nodes, edges, dataset, seed)
    y = (edges > 1.5 * nodes).astype(np.int32)
    named = {"dataset": dataset.astype(np.int32), "client": dataset, "datasets": ("A", "B")} if sets > 1 else {}
    if sets == 1:
        tables |= {name: tables[name][:1] for name in ("labels_of_dataset", "classes_of_dataset")}
    return Source("graphs", x, y, CLASSES[sets - 1], kind="graph", tables=tables, reader=GraphReader(budgets), **named)


def model_of(one: Source, name: str = "gin", **options: Any) -> Model:
    return build_model(name, one.num_classes, one.sample(), **({"hidden": (4,), "layers": 1} | options))


def dealt(one: Source, clients: int, **options: Any) -> fp.data.Partition:
    """Clients of about equal size, each of one data set."""
    if one.dataset is None:
        return make_partition(one, PartitionConfig(method="iid", clients=clients, **options))
    each = clients // len(one.datasets)
    return make_partition(one, PartitionConfig(method="chunks_of_dataset", clients_per_dataset=each, **options))


def federation(one: Source, clients: int = 4, model: Model | None = None, **options: Any) -> fp.Federation:
    """A federation with batches of 8 graphs and dropout of one half."""
    data = to_client_data(one, dealt(one, clients))
    mesh = options.get("mesh")
    data = place_data(data if mesh is None else shard(data, mesh.size), mesh)
    return fp.Federation(model or model_of(one), data, **({"batch_size": 8, "lr": 0.1} | options))


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    nodes = np.array(draw(st.lists(st.integers(0, 32) | st.integers(0, 6), min_size=9, max_size=9)))
    edges = np.array([draw(st.integers(0, min(300, 9 * n))) for n in nodes])
    return nodes, edges, np.array(draw(st.lists(st.booleans(), min_size=9, max_size=9)))


def filled(table: np.ndarray, length: int) -> np.ndarray:
    return np.concatenate([table, np.zeros((length - len(table), *table.shape[1:]), table.dtype)])


take = jax.jit(
    lambda batch, packed, first, end, number: (
        last := last_of(packed, batch.budgets[number], first, end),
        *micro_batch(batch, packed, batch.budgets[number], first, last),
    ),
    static_argnums=4,
)


@settings(max_examples=40, deadline=None)
@given(batches())
def test_no_graph_is_dropped_or_cut(drawn: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    nodes, edges, mask = drawn
    x, tables = tables_of(nodes, edges, np.arange(9) % 2, 0)
    tables = {n: t if n.endswith("dataset") else filled(t, 9 * 300) for n, t in tables.items()}
    batch = jax.tree.map(jnp.asarray, GraphReader(BUDGETS)(x, tables))
    packed = jax.jit(pack)(batch, mask)
    seen: list[int] = []
    for number, budget in enumerate(BUDGETS):
        first, end = int(packed.bounds[number]), int(packed.bounds[number + 1])
        while first < end:
            first, graphs, place = jax.tree.map(np.asarray, take(batch, packed, first, end, number))
            check_padding(graphs, budget)
            assert ("adjacency" in graphs.globals) == budget.dense
            starts = np.cumsum(graphs.n_node) - graphs.n_node, np.cumsum(graphs.n_edge) - graphs.n_edge
            for g, graph in enumerate(place[place < 9]):
                seen.append(int(graph))
                n0, n1, e0, e1, d = x[graph]
                n, e = slice(starts[0][g], starts[0][g] + n1), slice(starts[1][g], starts[1][g] + e1)
                assert (graphs.n_node[g], graphs.n_edge[g], graphs.globals["classes"][g]) == (n1, e1, CLASSES[d])
                for name, table in (("label", "node_label"), ("walk", "walk"), ("degree", "degree")):
                    np.testing.assert_array_equal(graphs.nodes[name][n], tables[table][n0 : n0 + n1])
                np.testing.assert_array_equal(graphs.senders[e] - n.start, tables["senders"][e0 : e0 + e1])
                np.testing.assert_array_equal(graphs.receivers[e] - n.start, tables["receivers"][e0 : e0 + e1])
                if number + 1 < len(BUDGETS):
                    assert bool(budget.suits(n1, e1))
            assert not graphs.n_node[(place < 9).sum() : -1].any()
    assert sorted(seen) == np.flatnonzero(mask).tolist()


@pytest.mark.parametrize("name", ["gin", "gcn", "graphsage", "gat"])
def test_sums_by_the_adjacency_matrix_are_those_over_edges(name: str, float64: None) -> None:
    one = source()
    model = model_of(one, name)
    batch = batch_of(one, np.arange(0, 60, 4))
    loss = lambda scores, y: -jax.nn.log_softmax(scores)[jnp.arange(len(y)), y]  # noqa: E731
    labels, mask, variables = jnp.asarray(one.y[::4]), jnp.arange(15) < 13, model.init(KEY)

    def trained(dense: bool) -> Any:
        own = dataclasses.replace(batch, budgets=(ONE[0]._replace(dense=dense),))
        return jax.jit(lambda v: model.accumulate(v, own, labels, loss, mask=mask, key=KEY))(variables)  # type: ignore[misc]

    assert_close(trained(True), trained(False), 1e-9)


def test_dense_graphs_get_dense_budgets() -> None:
    many = np.full(300, 40)
    for edges, dense in ((90, False), (1200, True)):
        x = tables_of(many, np.full(300, edges), np.zeros(300, int), 0)[0]
        assert {budget.dense for budget in budgets_for(x)} == {dense}


def check_padding(graphs: Any, budget: Budget) -> None:
    """As jraph pads: the last graph owns all padding, and there is at least one padding node."""
    assert graphs.n_node.sum() == budget.nodes == len(graphs.nodes["label"])
    assert graphs.n_edge.sum() == budget.edges == len(graphs.senders)
    assert len(graphs.n_node) == budget.graphs + 1
    assert graphs.n_node[-1] >= 1
    real, links = budget.nodes - graphs.n_node[-1], budget.edges - graphs.n_edge[-1]
    for ends in (graphs.senders, graphs.receivers):
        assert (ends[:links] < real).all()
        assert ((ends[links:] >= real) & (ends[links:] < budget.nodes)).all()


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 60)), min_size=1, max_size=60), st.integers(1, 3))
def test_chosen_budgets_suit_every_graph(graphs: list[tuple[int, int]], sets: int) -> None:
    nodes, edges = (np.array(column) for column in zip(*((n, n * d // 4) for n, d in graphs), strict=True))
    rows = [np.cumsum(nodes) - nodes, nodes, np.cumsum(edges) - edges, edges, np.arange(len(graphs)) % sets]
    x = np.stack(rows, 1).astype(np.int32)
    budgets = budgets_for(x)
    GraphReader(budgets).check(x)
    left = np.ones(len(x), bool)
    for place, budget in enumerate(budgets):
        own = left & budget.suits(nodes, edges) if place + 1 < len(budgets) else left
        left &= ~own
        together = (
            np.sort(nodes[own])[::-1][: budget.together].sum(),
            np.sort(edges[own])[::-1][: budget.together].sum(),
        )
        assert together[0] < budget.nodes  # any so many of them fit
        assert together[1] <= budget.edges
        assert budget.together <= budget.graphs
    batch = jax.tree.map(jnp.asarray, GraphBatch(x, {}, budgets))
    packed, count = pack(batch), 0
    for number, budget in enumerate(budgets):
        first, end = packed.bounds[number], packed.bounds[number + 1]
        while first < end:
            first, count = last_of(packed, budget, first, end), count + 1
    assert waste(x, [np.arange(len(x))], budgets).micro_batches == count


def test_budgets_of_other_data_are_refused() -> None:
    one = source()
    small = dataclasses.replace(one, reader=GraphReader(BUDGETS[:2]))  # room for 15 nodes
    with pytest.raises(ValueError, match=r"graph \d+ has 30 nodes .*more than the budgets"):
        federation(small, model=model_of(one))


def batch_of(one: Source, rows: np.ndarray, **changes: Any) -> GraphBatch:
    return dataclasses.replace(jax.tree.map(jnp.asarray, one.reader(one.x[rows], one.tables)), **changes)  # type: ignore[misc]


@pytest.mark.parametrize("name", ["gin", "gcn", "graphsage", "gat"])
def test_scores_are_those_of_single_graphs(name: str, float64: None) -> None:
    one = source(budgets=BUDGETS)
    model = model_of(one, name)
    variables = model.init(KEY)
    rows = np.random.default_rng(0).permutation(60)[:14]
    mask = np.arange(14) < 11
    scores, same = jax.jit(lambda v, x: model.apply(v, x, mask=mask))(variables, batch_of(one, rows))
    assert_close(same, variables)
    alone = jax.jit(lambda v, x: model.apply(v, x, mask=jnp.ones(1, bool))[0][0])
    for place, row in enumerate(rows[:11]):
        np.testing.assert_allclose(scores[place], alone(variables, batch_of(one, rows[place : place + 1])), rtol=1e-9)
        assert (scores[place] < -1e8).sum() == 3 - CLASSES[one.x[row, 4]]
    assert not scores[11:].any()


@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_four_gradients_agree(drop: float, float64: None) -> None:
    """By the second loop, and with dropout by static loops and by accumulation, without it graph by graph."""
    one = source(budgets=BUDGETS)
    model = model_of(one, drop=drop)
    variables, rows = model.init(KEY), np.arange(20, 34)
    y, mask = jnp.asarray(one.y[rows]), jnp.arange(14) != 3

    def total(variables: Any, scan: bool) -> jax.Array:
        scores, _ = model.apply(variables, batch_of(one, rows, scan=scan), mask=mask, key=KEY, train=True)
        return jnp.where(mask, fp.engine.federation.cross_entropy(scores, y), 0).sum()

    gradient, loss = jax.jit(jax.value_and_grad(total), static_argnums=1), fp.engine.federation.cross_entropy
    dynamic = gradient(variables, False)
    assert all(np.abs(leaf).max() > 0 for leaf in dynamic[1].values())
    if drop:
        assert_close(dynamic, gradient(variables, True))
        score = jax.jit(lambda v, x: model.apply(v, x, mask=mask, key=KEY, train=True)[0])
        assert_close(*(score(variables, batch_of(one, rows, scan=scan)) for scan in (False, True)))
        summed = jax.jit(lambda v, x: model.accumulate(v, x, y, loss, mask=mask, key=KEY))
        assert_close(dynamic, summed(variables, batch_of(one, rows)))
        return

    @jax.jit
    def single(variables: Any, x: GraphBatch, y: jax.Array) -> Any:
        return jax.value_and_grad(lambda v: loss(model.apply(v, x, mask=jnp.ones(1, bool))[0], y).sum())(variables)

    parts = [single(variables, batch_of(one, rows[i : i + 1]), y[i : i + 1]) for i in range(14) if i != 3]
    assert_close(dynamic, jax.tree.map(lambda *leaves: sum(leaves), *parts), 1e-8)


def test_plain_step_equals_accumulated_step(float64: None) -> None:
    fed = federation(source(), clients=2)
    whole = fed.replace(model=dataclasses.replace(fed.model, accumulate=None))
    batch = fed.data.gather(jnp.arange(8)) | {"mask": jnp.arange(8) < 6}

    def penalty(variables: Any, anchor: Any) -> jax.Array:
        return anchor * sum((leaf**2).sum() for leaf in variables.values())

    def stepped(fed: fp.Federation) -> Any:
        def step(variables: Any) -> local.Training:
            carry = local.begin(fed, jnp.asarray(0.1), variables, anchor=jnp.asarray(0.3))
            return local.step(fed, carry, batch, KEY, penalty)

        return jax.jit(step)(fed.model.init(KEY))

    assert_close(stepped(fed), stepped(whole))


def ends(fed: fp.Federation, name: str = "fedavg", rounds: int = 2, **options: Any) -> Any:
    """Scores at the end by client, and the training loss of the rounds."""
    algorithm = fp.build(name, fed, **options)
    simulation = Simulation(fed, algorithm, rounds=rounds, eval_every=rounds)
    state, info = simulation.advance(simulation.init(), 0, rounds)
    return simulation.evaluate(state, rounds).scores, info["loss"]


def test_chunks_and_devices_agree(float64: None) -> None:
    one = source(sets=1)
    usual = ends(federation(one, clients=5, client_chunk=1))
    spread = ends(federation(one, clients=5, client_chunk=2, mesh=client_mesh(2)))  # one slot is padding
    assert_close(usual, spread, 1e-7)  # weights are drawn in single precision, and rounded otherwise in another program
    assert np.isfinite(usual[1]).all()


def test_seeds_side_by_side_agree(float64: None) -> None:
    fed = federation(source(), clients=2)
    algorithm = fp.build("fedper", fed)
    both = fp.simulate(fed, algorithm, rounds=2, eval_every=2, seeds=2)
    second = fp.simulate(fed, algorithm, rounds=2, eval_every=2, seed=1)
    assert_close(jax.tree.map(lambda leaf: leaf[1:], both.records[-1].scores), second.records[-1].scores)


def test_a_round_can_be_differentiated(float64: None) -> None:
    fed = federation(source(24), clients=2)
    usual = ends(fed, rounds=1)[1]
    fed = fed.replace(differentiable=True)
    algorithm = fp.build("fedavg", fed)
    assert_close(usual, ends(fed, rounds=1)[1])

    @jax.jit
    def size_after(lr: jax.Array) -> jax.Array:
        env = fed.env(algorithm.hyper | {"lr": lr})
        state, _ = rollout(fed, algorithm, env, algorithm.init(env, KEY), KEY, 1)
        return sum((leaf**2).sum() for leaf in state.shared.values())

    gradient = jax.grad(size_after)(0.1)
    np.testing.assert_allclose(gradient, (size_after(0.1 + 1e-6) - size_after(0.1 - 1e-6)) / 2e-6, rtol=1e-4)


def test_clients_are_dealt_to_devices_by_their_nodes() -> None:
    one = source()
    partition = dealt(one, 4)
    nodes = [one.x[rows, 1].sum() for rows in partition.train]
    assert nodes_of_clients(to_client_data(one, partition)).tolist() == nodes


def test_initial_rows_are_fitted_to_data_sets() -> None:
    one = source()
    fed = federation(one, clients=4)
    env = fed.env({"lr": 0.1})
    facts = facts_of(fed.data)
    assert facts["labels"].tolist() == [4, 4, 6, 6]
    assert facts["classes"].tolist() == [2, 2, 3, 3]
    fresh = fed.model.init(KEY)
    rows = fed.initial_rows(env, fresh)
    kernel = rows["params/input/kernel"]
    np.testing.assert_allclose(kernel[0, :4], fresh["params/input/kernel"][:4] * 1.5**0.5, rtol=1e-6)
    assert not kernel[:2, 4:].any()
    np.testing.assert_array_equal(kernel[2], fresh["params/input/kernel"])
    for name in ("kernel", "bias"):
        head = rows[f"params/head/{name}"]
        assert not head[:2, ..., 2:].any()
        np.testing.assert_array_equal(head[3], fresh[f"params/head/{name}"])
    np.testing.assert_array_equal(
        rows["params/core/layer1/dense1/kernel"][1], fresh["params/core/layer1/dense1/kernel"]
    )
    mesh = client_mesh(4)
    spread = federation(one, clients=4, mesh=mesh)
    np.testing.assert_array_equal(np.sort(facts_of(spread.data)["labels"]), [4, 4, 6, 6])
    structure = fed.model.related("structure")  # type: ignore[misc]
    same = structure.init(KEY)
    fitted = structure.fit(same, {"labels": 4, "classes": 2})  # type: ignore[misc]
    np.testing.assert_array_equal(fitted["params/input/kernel"], same["params/input/kernel"])


def test_only_the_core_leaves_a_client_with_its_own_data_set() -> None:
    one = source()
    fed = federation(one, model=build_model("gin", 3, one.sample()))
    own = {name.split("/")[1] for name in fed.model.shapes() if fed.stays(name)}
    assert own == {"input", "post", "head"}
    for name in ("fedavg", "fedprox", "fedper", "ditto", "pfedhn", "gcfl", "gcfl_plus"):
        assert fp.build(name, fed).floats == (24960, 24960)
    assert fp.build("local", fed).floats == (0, 0)
    two = fed.model.related("two_stream")  # type: ignore[misc]
    assert two.count(lambda name: not two.private(name)) == 14592
    single = source(sets=1)
    model = build_model("gin", 2, single.sample())
    assert not any(map(model.private, model.shapes()))
    assert model.fit is None
    with pytest.raises(ValueError, match="no form 'three': choose one of raw, structure, two_stream"):
        model.related("three")  # type: ignore[misc]


def test_a_method_with_two_models_runs_on_several_data_sets() -> None:
    scores, loss = ends(federation(source(), clients=2), "ditto")
    assert np.isfinite(loss).all()
    assert np.isfinite(scores["test"]["personal"].loss).all()


def test_clients_of_one_data_set_learn() -> None:
    fed = federation(
        source(120, sets=1), clients=3, model=model_of(source(sets=1), drop=0.0, hidden=(8,)), optimizer=adam
    )
    algorithm = fp.build("fedavg", fed)
    result = fp.simulate(fed, algorithm, rounds=60, eval_every=60)
    assert result.info["loss"][0, -1] < 0.6 * result.info["loss"][0, 0]


def adam(lr: Any) -> Any:
    import optax

    return optax.adam(0.1 * lr)


def test_newcomers_start_from_what_fits_their_data_set(float64: None) -> None:
    one = source()
    partition = dealt(one, 4, held_out=2, seed=1)
    data, held = (jax.tree.map(jnp.asarray, to_client_data(one, p)) for p in (partition, partition.unseen))
    fed = fp.Federation(model_of(one), data, batch_size=8, lr=0.1)
    algorithm = fp.build("fedavg", fed)
    env = fed.env(algorithm.hyper)
    state = algorithm.init(env, KEY)
    found = jax.jit(lambda data: adapt(fed, algorithm, env, state, data, KEY, 3))(held)["test"]
    other = fed.replace(data=held)
    rows = other.initial_rows(other.env(algorithm.hyper), fed.model.init(fp.engine.random.stream(KEY, 0)))
    assert set(found) == {"before", "after"}
    assert np.isfinite(found["after"].loss).all()
    assert not np.array_equal(found["before"].loss, found["after"].loss)
    for slot in range(2):
        variables = jax.tree.map(lambda leaf, slot=slot: leaf[slot], rows) | state.shared
        start, count = int(held.test.start[slot]), int(held.test.count[slot])
        batch = held.gather(held.test.rows[start : start + count])
        scores = fed.model.apply(variables, batch["x"], mask=jnp.ones(count, bool))[0]
        loss = fp.engine.federation.cross_entropy(scores, batch["y"]).mean()
        np.testing.assert_allclose(found["before"].loss[slot], loss, rtol=1e-6)


def test_registry_refuses_what_graph_models_cannot_take() -> None:
    one = source()
    for options, message in (
        ({"hidden": (8, 8)}, "one width"), ({"drop": 1.0}, r"drop must be in \[0, 1\)"),
        ({"layers": 0}, "layers must be at least 1"), ({"norm": "batch"}, "takes no option 'norm'"),
        ({"head": "readout"}, "no parameter in its head"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            build_model("gin", 3, one.sample(), **options)
    with pytest.raises(ValueError, match="pool of lenet5 must be max or mean"):
        build_model("lenet5", 3, np.zeros((1, 28, 28, 1)), pool="sum")
