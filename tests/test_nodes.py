"""Nodes of one graph dealt to clients: communities, subgraphs, and graph models on them through the whole engine."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from common import assert_close
from runs import quick_report  # noqa: F401

import fedjax_pfl as fp
from fedjax_pfl.data import Partition, PartitionConfig, Source, load, make_partition, subgraphs, to_client_data
from fedjax_pfl.data.clients import SPLITS, shard
from fedjax_pfl.data.encodings import degree_index, walk_probabilities
from fedjax_pfl.data.nodes import NodeReader, client_graph
from fedjax_pfl.data.sources.base import DATA_VARIABLE
from fedjax_pfl.data.subgraphs import clients_of, count_edges
from fedjax_pfl.engine.sharding import client_mesh, place_data
from fedjax_pfl.engine.simulation import Simulation
from fedjax_pfl.experiment.cli import main
from fedjax_pfl.experiment.resuming import stored_summary
from fedjax_pfl.models.registry import build_model, check_kind

KEY = jax.random.key(1)
LAYERS = ("gin", "gcn", "graphsage", "gat")


def blocks(
    sizes: tuple[int, ...] = (14, 11, 8), inside: float = 0.6, across: float = 0.03, seed: int = 0
) -> dict[str, np.ndarray]:
    """A graph of dense blocks: features of four columns, three classes, some self-loops, nodes in random order."""
    rng = np.random.default_rng(seed)
    block = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    a, b = np.triu_indices(len(block), 0)
    near = np.where(a == b, 0.1, np.where(block[a] == block[b], inside, across))
    edges = np.stack([a, b], 1)[rng.random(len(a)) < near]
    y = rng.integers(0, 3, len(block))
    return {"x": rng.normal(size=(len(block), 4)), "y": y, "edges": edges, "block": block}


def source_of(folder: Path, graph: dict[str, np.ndarray], **changes: Any) -> Source:
    arrays = {name: array for name, array in (graph | changes).items() if name != "block"}
    np.savez(folder / "n.npz", **arrays)  # type: ignore[arg-type]
    return load(f"node:{folder / 'n.npz'}")


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return source_of(tmp_path, blocks())


def dealt(source: Source, method: str = "community", clients: int = 3, **options: Any) -> Partition:
    return make_partition(source, PartitionConfig(method, clients, **options))


def federation(source: Source, partition: Partition, name: str = "gcn", layers: int = 2, **options: Any) -> Any:
    """A federation of small networks without dropout on the clients' graphs."""
    own = subgraphs(source, partition)
    data, mesh = to_client_data(own, partition), options.get("mesh")
    data = place_data(data if mesh is None else shard(data, mesh.size), mesh)
    made = build_model(name, own.num_classes, own.sample(), hidden=(4,), layers=layers, drop=0.0)
    return fp.Federation(made, data, **({"batch_size": 4, "lr": 0.1} | options))


def every_score(fed: Any, variables: Any) -> dict[int, np.ndarray]:
    """The scores of each sample, batch by batch of its client's splits."""
    found: dict[int, np.ndarray] = {}
    apply = jax.jit(lambda variables, rows: fed.model.apply(variables, fed.data.gather(rows)["x"])[0])
    for split in map(fed.data.split, SPLITS):
        for start, count in zip(split.start, split.count, strict=True):
            rows = np.asarray(split.rows[start : start + count])
            for begin in range(0, len(rows), 3):
                padded = np.resize(rows[begin : begin + 3], 3)
                found |= dict(zip(padded.tolist(), np.asarray(apply(variables, padded)), strict=True))
    return found


def adjacency(graph: dict[str, np.ndarray]) -> np.ndarray:
    A = np.zeros((len(graph["y"]), len(graph["y"])))
    A[graph["edges"][:, 0], graph["edges"][:, 1]] = A[graph["edges"][:, 1], graph["edges"][:, 0]] = 1
    return A


def dense_gcn(variables: dict[str, Any], x: np.ndarray, A: np.ndarray) -> np.ndarray:
    """Scores of all nodes by whole matrices."""

    def dense(path: str, h: np.ndarray) -> np.ndarray:
        return h @ variables[f"params/{path}/kernel"] + variables[f"params/{path}/bias"]

    scale = (A.sum(0) + 1) ** -0.5
    S = scale[:, None] * (A + np.eye(len(A))) * scale
    h = dense("input", x)
    for layer in ("layer1", "layer2"):
        h = np.maximum(dense(f"core/{layer}", S @ h), 0)
    return dense("head", np.maximum(dense("post", h), 0))


@pytest.mark.parametrize("method", ["community", "iid"])
def test_gcn_on_a_clients_graph_equals_dense_matrices(method: str, tmp_path: Path, float64: None) -> None:
    graph = blocks()
    graph["y"][::9] = -1  # nodes without a label belong to nobody
    source = source_of(tmp_path, graph)
    partition = dealt(source, method)
    fed = federation(source, partition)
    variables = fed.model.init(KEY)
    found = every_score(fed, variables)
    assert sorted(found) == list(range(len(source)))
    x = graph["x"].astype(np.float32).astype(float)
    for part in clients_of(partition):
        nodes = source.x[part]
        expected = dense_gcn(variables, x[nodes], adjacency(graph)[np.ix_(nodes, nodes)])
        np.testing.assert_allclose(np.stack([found[sample] for sample in part]), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_padding_and_other_clients_never_matter(name: str, source: Source, float64: None) -> None:
    partition = dealt(source)
    own = subgraphs(source, partition)
    model = build_model(name, 3, own.sample(), hidden=(4,), layers=1, drop=0.5)
    variables, rows = model.init(KEY), partition.train[1]
    mine = clients_of(partition)[1]
    spoiled = dict(own.tables)
    for table, index in (("features", source.x), ("walk", None), ("degree", None)):
        kept = source.x[mine] if index is not None else np.flatnonzero(np.isin(own.tables["node"], source.x[mine]))
        array = np.array(own.tables[table])
        array[np.setdiff1d(np.arange(len(array)), kept)] = np.nan if array.dtype.kind == "f" else 99
        spoiled[table] = array
    larger = NodeReader(own.reader.nodes + 9, own.reader.edges + 30)  # type: ignore[union-attr]

    @jax.jit
    def both(x: Any, variables: Any) -> Any:
        def total(variables: Any) -> Any:
            scores = model.apply(variables, x, key=KEY, train=True)[0]
            return (scores**2).sum(), scores

        return jax.value_and_grad(total, has_aux=True)(variables)

    usual = both(jax.tree.map(jnp.asarray, own.reader(own.x[rows], own.tables)), variables)  # type: ignore[misc]
    for reader, tables in ((larger, own.tables), (own.reader, spoiled), (larger, spoiled)):
        assert_close(usual, both(jax.tree.map(jnp.asarray, reader(own.x[rows], tables)), variables))  # type: ignore[misc]
    assert np.isfinite(usual[0][0])


def test_edges_between_clients_are_gone_and_counted(tmp_path: Path) -> None:
    graph = blocks()
    graph["y"][:4] = -1
    source = source_of(tmp_path, graph)
    partition = dealt(source, "iid", 4)
    own, parts = subgraphs(source, partition), clients_of(partition)
    owner = np.full(len(graph["y"]), -1)
    for client, part in enumerate(parts):
        owner[source.x[part]] = client
    a, b = owner[graph["edges"]].T
    expected = ((a == b) & (a >= 0)).sum(), ((a != b) & (a >= 0) & (b >= 0)).sum(), ((a < 0) | (b < 0)).sum()
    assert count_edges(source, parts) == expected
    assert min(expected) > 0
    note = f"{expected[1]} of {len(a)} edges lie between clients, {expected[2]} end at nodes of no client"
    assert partition.notes[-1].startswith(f"{note}: graph models do without these")
    for part in parts:
        batch = own.reader(own.x[part], own.tables)  # type: ignore[misc]
        found = jax.tree.map(np.asarray, client_graph(batch))
        nodes, links = found.n_node[0], found.n_edge[0]
        assert nodes == len(part)
        A = np.zeros((batch.nodes, batch.nodes))
        np.add.at(A, (found.senders, found.receivers), 1)
        np.testing.assert_array_equal(A[:nodes, :nodes], adjacency(graph)[np.ix_(source.x[part], source.x[part])])
        assert A[nodes, nodes] == A[nodes:].sum() == A[:, nodes:].sum() == batch.edges - links
        np.testing.assert_array_equal(own.x[part, 4], np.arange(len(part)))
        np.testing.assert_array_equal(found.nodes["attributes"][:nodes], graph["x"][source.x[part]].astype(np.float32))
        row = np.array([[0, nodes, 0, links]])
        ends = found.senders[:links], found.receivers[:links]
        np.testing.assert_allclose(found.nodes["walk"][:nodes], walk_probabilities(row, *ends), atol=1e-6)
        np.testing.assert_array_equal(found.nodes["degree"][:nodes], degree_index(row, ends[0]))


def test_communities_stay_together(tmp_path: Path) -> None:
    graph = blocks((12, 11, 10, 6, 5, 4), 0.9, 0.01)
    source = source_of(tmp_path, graph)
    partition = dealt(source, clients=4)
    parts = clients_of(partition)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(48))
    assert max(map(len, parts)) <= 15
    for block in range(1, 6):  # none of these is larger than a fair share of 12
        assert len({client for client, part in enumerate(parts) if (graph["block"][part] == block).any()}) == 1
    assert dealt(source, clients=4).sha256 == partition.sha256
    large = dealt(source_of(tmp_path, blocks((60, 4), 0.3, 0.01)), clients=4)
    assert sorted(map(len, clients_of(large))) == [16] * 4
    assert "cut, larger than a fair share of 16" in large.notes[0]


def test_communities_are_the_same_in_another_process(source: Source) -> None:
    path = source.where
    script = (
        "import sys; from fedjax_pfl.data import *;"
        "print(make_partition(load(f'node:{sys.argv[1]}'), PartitionConfig('community', 3)).sha256)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "4321", "PYTHONPATH": str(Path(__file__).parent.parent)}
    out = subprocess.run([sys.executable, "-c", script, path], env=environment, capture_output=True, text=True)
    assert out.stdout.split() == [dealt(source).sha256], out.stderr


def test_communities_keep_a_published_test_set(tmp_path: Path) -> None:
    graph = blocks((20, 20), 0.5, 0.0)
    published = np.arange(0, 40, 4)
    source = source_of(tmp_path, graph, test=published)
    partition = dealt(source, clients=2, test="official")
    assert np.array_equal(np.sort(np.concatenate(partition.test)), published)
    for client in range(2):
        own = np.concatenate([partition.rows(split)[client] for split in SPLITS])
        assert len(np.unique(graph["block"][own])) == 1  # also the test nodes stay in their community
        assert len(own) == 20
    assert partition.sizes("validation").sum() > 0
    spread = dealt(source, "iid", 2, test="official")
    assert np.array_equal(np.sort(np.concatenate(spread.test)), published)
    with pytest.raises(ValueError, match="smallest client has 0 samples besides the published test set"):
        dealt(source_of(tmp_path, graph, test=np.flatnonzero(graph["block"])), clients=2, test="official")


def test_communities_need_edges(tmp_path: Path) -> None:
    alone = source_of(tmp_path, blocks(), edges=np.zeros((0, 2), int))
    for data in (alone, np.arange(20) % 2):
        with pytest.raises(ValueError, match="community: needs edges between samples, this data has none"):
            make_partition(data, PartitionConfig("community", 2))
    with pytest.raises(ValueError, match="smallest client has 10 samples, the minimum is 12"):
        dealt(source_of(tmp_path, blocks((10, 10, 10), 0.9, 0.0)), clients=2, min_samples=12)
    plain = Source("rows", np.zeros((4, 1), np.uint8), np.arange(4) % 2, 2)
    with pytest.raises(ValueError, match="holds array data without edges"):
        subgraphs(plain, make_partition(plain, PartitionConfig("iid", 2)))
    with pytest.raises(ValueError, match="the partition is of 4 samples"):
        subgraphs(alone, make_partition(plain, PartitionConfig("iid", 2)))


def test_clients_without_edges_train(tmp_path: Path, float64: None) -> None:
    """Where no client has an edge a GCN is a plain network; where some have, the others train beside them."""
    graph = blocks((10, 10), 0.9, 0.0)
    graph["y"] = graph["block"]
    lonely = graph["edges"][(graph["block"][graph["edges"]] == 0).all(1)]
    source = source_of(tmp_path, graph, edges=lonely)
    alone = source_of(tmp_path, graph, edges=np.zeros((0, 2), int))
    partition = dealt(source, "label_groups", 2, groups=2)
    assert sorted(count_edges(source, [part]).within for part in clients_of(partition)) == [0, len(lonely)]
    variables = federation(source, partition).model.init(KEY)
    x = graph["x"].astype(np.float32).astype(float)
    for one, A in ((source, adjacency(graph | {"edges": lonely})), (alone, np.zeros((20, 20)))):
        found = every_score(federation(one, partition), variables)
        np.testing.assert_allclose(np.stack([found[i] for i in range(20)]), dense_gcn(variables, x, A), rtol=1e-9)
    assert np.isfinite(trained(federation(alone, partition))[0]).all()


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_without_edges_are_finite(name: str, tmp_path: Path) -> None:
    source = source_of(tmp_path, blocks(), edges=np.zeros((0, 2), int))
    partition = dealt(source, "iid")
    own = subgraphs(source, partition)
    model = build_model(name, 3, own.sample(), hidden=(4,), layers=1)
    batch = jax.tree.map(jnp.asarray, own.reader(own.x[partition.train[0]], own.tables))  # type: ignore[misc]
    gradient = jax.jit(jax.grad(lambda v: (model.apply(v, batch)[0] ** 2).sum()))(model.init(KEY))
    assert all(np.isfinite(leaf).all() for leaf in gradient.values())
    assert np.any(gradient["params/input/kernel"])


def trained(fed: Any, name: str = "fedavg", rounds: int = 2) -> Any:
    """The training loss of the rounds, and the state at the end."""
    simulation = Simulation(fed, fp.build(name, fed), rounds=rounds, eval_every=rounds)
    state, info = simulation.advance(simulation.init(), 0, rounds)
    return info["loss"], state


def test_chunks_devices_and_static_loops_agree(source: Source, float64: None) -> None:
    partition = dealt(source, clients=5)
    usual, other, spread = (
        trained(federation(source, partition, layers=1, **options))
        for options in ({}, {"client_chunk": 3, "differentiable": True}, {"mesh": client_mesh(8)})
    )
    assert_close(usual, other)
    assert_close(usual, spread, 1e-7)  # rounded otherwise in another program


@pytest.mark.parametrize("name", ["fedstar", "fedgcf"])
def test_methods_on_structure_run(name: str, source: Source) -> None:
    loss, state = trained(federation(source, dealt(source, validation_fraction=0.2), layers=1), name, rounds=1)
    assert np.isfinite(loss).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state) if leaf.dtype.kind == "f")


def test_held_out_clients_have_graphs_of_their_own(source: Source) -> None:
    partition = dealt(source, clients=4, held_out=2)
    own = subgraphs(source, partition)
    data, held = (to_client_data(own, one) for one in (partition, partition.unseen))  # type: ignore[arg-type]
    rows = np.concatenate([data.train.rows, held.train.rows])
    assert len(np.unique(own.x[rows, 0])) == 4
    assert len(own.tables["node"]) == len(source)


def test_models_of_both_kinds_read_nodes(source: Source) -> None:
    for name in ("mlp", *LAYERS):
        check_kind(name, source.kind, source.name)
    with pytest.raises(ValueError, match=r"holds nodes data: models for it: mlp, .*gin, gcn"):
        check_kind("char_lstm", source.kind, source.name)
    assert build_model("mlp", 3, source.sample()).shapes()["params/dense1/kernel"].shape[0] == 4
    with pytest.raises(ValueError, match="nodes become the graphs of their clients by"):
        build_model("gcn", 3, source.sample())
    own = subgraphs(source, dealt(source))
    with pytest.raises(ValueError, match="pool belongs to the classification of whole graphs"):
        build_model("gcn", 3, own.sample(), pool="mean")
    model = build_model("gin", 3, own.sample())
    assert model.count(lambda name: "/core/" in name) == 24960
    assert model.count(lambda name: name.startswith("params/input/")) == 4 * 64 + 64
    two = model.related("two_stream")  # type: ignore[misc]
    assert two.count(lambda name: "/structure/" in name) == 14592
    assert not any(map(model.private, model.shapes()))
    small = dataclasses.replace(own, reader=NodeReader(5, 100))
    with pytest.raises(ValueError, match=r"sample \d+ is node \d+ of \d+ nodes .*do not fit into NodeReader"):
        federation_of(small, dealt(source), model)


def federation_of(own: Source, partition: Partition, model: Any) -> fp.Federation:
    return fp.Federation(model, place_data(to_client_data(own, partition), None))


def test_a_run_beats_the_majority_on_two_communities(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    quick_report: Any,  # noqa: F811
) -> None:
    """Classes are the communities, features say little of a node and more of its neighbours together."""
    graph = blocks((40, 40), 0.3, 0.02)
    rng = np.random.default_rng(5)
    x = rng.normal(size=(80, 4)) + np.stack([graph["block"], -graph["block"], *np.zeros((2, 80))], 1)
    source_of(tmp_path, graph, x=x, y=graph["block"])
    monkeypatch.chdir(tmp_path)
    words = "run fedavg --data node:n.npz --partition iid --clients 2 --hidden 8 --layers 1 --drop 0.1 --seeds 2"
    words += " --optimizer adam --lr 0.02 --batch-size 40 --local-epochs 3 --rounds 12 --eval-every 6 --out one"
    assert main(words.split()) == 0  # the model by default
    summary = stored_summary(Path("one")) or {}
    each = summary["test"]["personal"]["per_seed"]["weighted_mean"]
    assert len(each) == 2
    assert min(each) > 0.75  # the majority class: 0.5
    assert 'model = "gcn"' in Path("one/config.toml").read_text()
    assert "edges lie between clients" in capsys.readouterr().out


def test_gcn_beats_mlp_on_cora() -> None:
    base = Path(os.environ.get(DATA_VARIABLE, "absent"))
    if not (base / "planetoid/cora.npz").exists():
        pytest.skip(f"{DATA_VARIABLE} names no folder with planetoid/cora.npz")
    source = load("cora", base)
    partition = dealt(source, clients=5)
    assert np.ptp([len(part) for part in clients_of(partition)]) <= 20
    assert count_edges(source, clients_of(partition)).lost < 0.2
    found = {}
    for name in ("gcn", "mlp"):
        own = source if name == "mlp" else subgraphs(source, partition)
        options: dict[str, Any] = {"layers": 2, "drop": 0.0} if name == "gcn" else {}
        fed = fp.Federation(
            build_model(name, 7, own.sample(), hidden=(32,), **options),
            place_data(to_client_data(own, partition), None),
            batch_size=600, local_epochs=5, lr=0.01, optimizer=lambda lr: optax.adamw(lr, weight_decay=5e-4),
        )  # fmt: skip
        scores = fp.simulate(fed, fp.build("fedavg", fed), rounds=9, eval_every=9).records[-1].scores
        found[name] = float(np.mean(scores["test"]["personal"].accuracy))
    print(found)
    assert found["gcn"] > found["mlp"] + 0.03
