"""Graph sets and node sets: published counts, layouts, faults with file and line, and downloads."""

from __future__ import annotations

import dataclasses
import functools
import http.server
import json
import os
import pickle
import threading
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from common import assert_close

import fedjax_pfl as fp
from fedjax_pfl.data import Partition, PartitionConfig, make_partition, to_client_data
from fedjax_pfl.data.budgets import sample_batches, waste
from fedjax_pfl.data.clients import client_data
from fedjax_pfl.data.rows import Rows
from fedjax_pfl.data.sources import DATA_VARIABLE, Source, fetch, load, tu
from fedjax_pfl.experiment.cli import main
from fedjax_pfl.models.registry import build_model

DATA = Path(os.environ.get(DATA_VARIABLE, "absent"))
# graphs, classes, mean nodes, mean edges, node labels, attributes
PUBLISHED = {
    "MUTAG": (188, 2, 17.93, 19.79, 7, 0), "PTC_MR": (344, 2, 14.29, 14.69, 18, 0),
    "BZR": (405, 2, 35.75, 38.36, 10, 3),
    "COX2": (467, 2, 41.22, 43.45, 8, 3), "DHFR": (756, 2, 42.43, 44.54, 9, 3), "AIDS": (2000, 2, 15.69, 16.20, 38, 4),
    "NCI1": (4110, 2, 29.87, 32.30, 37, 0), "ENZYMES": (600, 6, 32.63, 62.14, 3, 18),
    "PROTEINS": (1113, 2, 39.06, 72.82, 3, 1), "DD": (1178, 2, 284.32, 715.66, 82, 0),
    "IMDB-BINARY": (1000, 2, 19.77, 96.53, 136, 0), "IMDB-MULTI": (1500, 3, 13.00, 65.94, 89, 0),
    "COLLAB": (5000, 3, 74.49, 2457.78, 492, 0),
}  # fmt: skip

# Three graphs: a triangle with a tail, two nodes without edges, two nodes with a doubled edge and a self-loop.
FILES = {
    "A": "1, 2\n2, 1\n2, 3\n3, 2\n1, 3\n3, 1\n3, 4\n4, 3\n7, 8\n8, 7\n7, 8\n8, 8\n",
    "graph_indicator": "1\n1\n1\n1\n2\n2\n3\n3\n",
    "graph_labels": "1\n-1\n1\n",
    "node_labels": "5\n5\n2\n9\n2\n2\n5\n9\n",
    "node_attributes": "".join(f"{n}.5, -{n}e-1\n" for n in range(8)),
}


def write(folder: Path, name: str = "SET", form: str = "folder", **changes: str | None) -> Path:
    """A set in TUDataset layout, with some files changed or (None) left out."""
    texts = {part: text for part, text in (FILES | changes).items() if text is not None}
    if form == "folder":
        (folder / name).mkdir(parents=True, exist_ok=True)
        for part, text in texts.items():
            (folder / name / f"{name}_{part}.txt").write_text(text)
        return folder / name
    with zipfile.ZipFile(folder / f"{name}.zip", "w", zipfile.ZIP_LZMA) as archive:
        for part, text in texts.items():
            archive.writestr(f"{name}/{name}_{part}.txt", text)
    return folder / f"{name}.zip"


def write_random(folder: Path, name: str, graphs: int, seed: int) -> None:
    """A set of random graphs of two to five nodes, by turns of two classes."""
    rng = np.random.default_rng(seed)
    nodes = rng.integers(2, 6, graphs)
    first = np.cumsum(nodes) - nodes + 1
    pairs = [(first[g], first[g] + k) for g in range(graphs) for k in range(1, nodes[g])]
    write(
        folder, name, A="".join(f"{a}, {b}\n{b}, {a}\n" for a, b in pairs), node_attributes=None,
        graph_indicator="".join(f"{g + 1}\n" for g in range(graphs) for _ in range(nodes[g])),
        graph_labels="".join(f"{g % 2}\n" for g in range(graphs)),
        node_labels="".join(f"{label}\n" for label in rng.integers(0, 3, nodes.sum())),
    )  # fmt: skip


def test_a_comparison_on_several_sets_ends_with_its_pictures(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for seed, name in enumerate(("ONE", "TWO", "THREE")):
        write_random(tmp_path, name, 12 + seed, seed)
    words = "--hidden 4 --layers 1 --rounds 2 --eval-every 2 --batch-size 16 --test-fraction 0.2"
    data = ["--data", "tu:ONE+TWO+THREE", "--data-dir", str(tmp_path)]
    assert main(["compare", "fedgcf", "local", *data, *words.split(), "--out", str(tmp_path / "out")]) == 0
    summary = json.loads((tmp_path / "out/fedgcf/summary.json").read_text())
    assert set(summary["datasets"]) == {"ONE", "TWO", "THREE"}
    pictures = {path.name for path in (tmp_path / "out/figures").iterdir()}
    assert {"data-sets.png", "topology.png", "training.png"} <= pictures
    assert "THREE" in capsys.readouterr().out


def edges(source: Source, graph: int) -> list[tuple[int, int]]:
    _, _, first, count, _ = source.x[graph]
    rows = slice(first, first + count)
    return list(zip(source.tables["senders"][rows].tolist(), source.tables["receivers"][rows].tolist(), strict=True))


@pytest.mark.parametrize("form", ["folder", "zip"])
def test_one_set(form: str, tmp_path: Path) -> None:
    source = load(f"tu:{write(tmp_path, form=form)}")
    assert source.x.tolist() == [[0, 4, 0, 8, 0], [4, 2, 8, 0, 0], [6, 2, 8, 4, 0]]
    assert edges(source, 0) == [(0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (2, 0), (2, 3), (3, 2)]
    assert edges(source, 1) == []
    assert edges(source, 2) == [(0, 1), (1, 0), (0, 1), (1, 1)]
    assert (source.kind, source.y.tolist(), source.num_classes) == ("graph", [1, 0, 1], 2)
    assert source.tables["node_label"].tolist() == [1, 1, 0, 2, 0, 0, 1, 2]
    assert source.tables["degree"].tolist() == [1, 1, 2, 0, 0, 0, 1, 1]
    np.testing.assert_allclose(source.tables["walk"][[3, 4, 7], :2], [[0, 1 / 3], [0, 0], [0.5, 0.75]], rtol=1e-6)
    assert "node_attributes" not in source.tables
    assert source.tables["labels_of_dataset"].tolist() == [3]
    assert source.tables["classes_of_dataset"].tolist() == [2]
    assert source.dataset is None
    assert {table.dtype for name, table in source.tables.items() if name != "walk"} == {np.dtype(np.int32)}
    batch = source.sample()
    assert (batch.rows.shape, len(batch.budgets)) == ((1, 5), 1)
    assert source.x.dtype == np.int32


def test_edges_in_another_order_are_sorted_by_graph(tmp_path: Path) -> None:
    lines = FILES["A"].splitlines(keepends=True)
    usual = load(f"tu:{write(tmp_path)}")
    source = load(f"tu:{write(tmp_path, 'OTHER', A=''.join(lines[8:] + lines[:8]))}")
    for name in ("senders", "receivers"):
        np.testing.assert_array_equal(source.tables[name], usual.tables[name])
    none = load(f"tu:{write(tmp_path, 'NONE', A='')}")
    assert none.x[:, 3].tolist() == [0, 0, 0]


def test_degrees_stand_for_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = load(f"tu:{write(tmp_path, node_labels=None, node_attributes=None)}")
    assert source.tables["node_label"].tolist() == [2, 2, 3, 1, 0, 0, 2, 2]
    assert source.tables["labels_of_dataset"].tolist() == [4]
    monkeypatch.setitem(tu.DEGREES, "SET", 2)
    source = load("tu:SET", tmp_path)
    assert source.tables["node_label"].tolist() == [2, 2, 2, 1, 0, 0, 2, 2]
    assert source.tables["labels_of_dataset"].tolist() == [3]


def test_attributes_are_an_option(tmp_path: Path) -> None:
    path = write(tmp_path)
    source = load(f"tu:{path},attributes")
    np.testing.assert_allclose(source.tables["node_attributes"][3], [3.5, -0.3], rtol=1e-6)
    assert source.name.endswith(",attributes")
    model = build_model("gin", 2, source.sample(), hidden=(4,))
    assert model.shapes()["params/input/attributes/kernel"].shape == (2, 4)
    write(tmp_path, "NONE", node_attributes=None)
    for argument in ("NONE,attributes", "SET+NONE,attributes"):
        with pytest.raises(ValueError, match="only a single data set that has node attributes"):
            load(f"tu:{argument}", tmp_path)
    with pytest.raises(ValueError, match=r"unknown option of tu 'attribute'.*Did you mean 'attributes'"):
        load(f"tu:{path},attribute")


def test_odd_graphs_train(tmp_path: Path) -> None:
    """Graphs without edges, isolated nodes, loops and doubled edges give finite scores and losses."""
    source = load(f"tu:{write(tmp_path)}")
    data = jax.tree.map(jnp.asarray, client_data_of(source))
    fed = fp.Federation(build_model("gin", 2, source.sample(), hidden=(4,), layers=1), data, batch_size=3)
    result = fp.simulate(fed, fp.build("fedavg", fed), rounds=2, eval_every=2)
    assert np.isfinite(result.info["loss"]).all()
    assert np.isfinite(result.records[-1].scores["test"]["shared"].loss).all()


def client_data_of(source: Source) -> Any:
    """One client that trains and is tested on all graphs."""
    train, test = np.arange(3), np.arange(3, 6)
    examples = {name: np.concatenate([leaf, leaf]) for name, leaf in source.examples().items()}
    return client_data(examples, 2, [train], None, [test], tables=source.tables, reader=source.reader)


def test_several_sets(tmp_path: Path) -> None:
    write(tmp_path / "tu", "ONE")
    three = "3\n1\n2\n"
    write(tmp_path, "TWO", "zip", graph_labels=three, node_labels=None, node_attributes=None)
    source = load("tu:ONE+TWO", tmp_path)
    assert source.datasets == ("ONE", "TWO")
    assert source.dataset.tolist() == source.client.tolist() == [0, 0, 0, 1, 1, 1]
    assert source.y.tolist() == [1, 0, 1, 2, 0, 1]
    assert source.num_classes == 3
    assert source.x[3:].tolist() == [[8, 4, 12, 8, 1], [12, 2, 20, 0, 1], [14, 2, 20, 4, 1]]
    for name in ("walk", "degree"):
        np.testing.assert_array_equal(source.tables[name][8:], source.tables[name][:8])
    assert edges(source, 5) == edges(source, 2)
    assert source.tables["labels_of_dataset"].tolist() == [3, 4]
    assert source.tables["classes_of_dataset"].tolist() == [2, 3]
    assert "node_attributes" not in source.tables
    rows = [tuple(np.array([k]) for k in pair) for pair in ((0, 1), (2, 4), (3, 5))]
    mixed = Partition(PartitionConfig(method="natural"), 6, *rows)
    with pytest.raises(ValueError, match=r"client 0 of the partition has samples of several data sets \(ONE, TWO\)"):
        to_client_data(source, mixed)
    with pytest.raises(ValueError, match="names ONE twice"):
        load("tu:ONE+TWO+ONE", tmp_path)


def test_npz_form(tmp_path: Path) -> None:
    arrays = {
        "num_nodes": [3, 2], "num_edges": [2, 2], "graph_label": [4, 1], "src": [0, 1, 0, 1], "dst": [1, 2, 1, 1],
    }  # fmt: skip

    def saved(**changes: Any) -> str:
        np.savez(tmp_path / "S.npz", **{name: np.array(value) for name, value in (arrays | changes).items()})
        return f"tu:{tmp_path / 'S.npz'}"

    source = load(saved())
    assert source.x.tolist() == [[0, 3, 0, 4, 0], [3, 2, 4, 3, 0]]
    assert sorted(edges(source, 0)) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert sorted(edges(source, 1)) == [(0, 1), (1, 0), (1, 1)]
    assert source.y.tolist() == [1, 0]
    for changes, message in (
        ({"src": [0, 1, 0, 2]}, "edge 3 of src and dst leads out of graph 1"),
        ({"src": [0, -1, 0, 1]}, "edge 1 .* leads out of graph 0"),
        ({"num_edges": [2, 3]}, "num_edges add up to 5, but src has 4"),
        ({"num_nodes": [3, 0]}, "graphs need nodes"),
        ({"graph_label": [1]}, "one entry a graph"),
        ({"graph_label": [1.5, 2]}, "needs whole numbers"),
        ({"src": [[0, 1, 0, 1]]}, "each with one axis"),
    ):
        with pytest.raises(ValueError, match=message):
            load(saved(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"A": "1, 2\n2, 9\n"}, r"SET_A\.txt: line 2: edge \[2, 9\], but nodes are 1\.\.8"),
        ({"A": "0, 2\n"}, r"SET_A\.txt: line 1: edge \[0, 2\]"),
        ({"A": "1, 2\n\n2, 1\n"}, r"SET_A\.txt: line 2 has 0 numbers"),
        ({"A": "1, 2\n4, 5\n"}, r"SET_A\.txt: line 2: edge \[4, 5\] joins two graphs"),
        ({"A": "1, 2\n2, 1.0\n"}, r"SET_A\.txt: line 2: '1\.0' is no whole number"),
        ({"A": "1 2\n"}, r"SET_A\.txt: line 1 needs 2 numbers with commas"),
        ({"A": "1, 2, 3\n"}, r"SET_A\.txt: line 1 has 3 numbers instead of 2"),
        ({"graph_indicator": "1\n1\n2\n1\n2\n2\n3\n3\n"}, r"line 4: graph 1 after 2: graphs must be numbered"),
        ({"graph_indicator": "1\n1\n1\n1\n3\n3\n4\n4\n"}, r"line 5: graph 3 after 1: .*and have nodes"),
        ({"graph_indicator": "0\n1\n1\n1\n2\n2\n3\n3\n"}, "line 1: graph 0 after nothing"),
        ({"graph_indicator": "1\n1\n1\n1\n2\n2\n3\n"}, r"SET_node_labels\.txt: has 8 lines for 7 nodes"),
        ({"graph_indicator": ""}, r"SET_graph_indicator\.txt: is empty"),
        ({"graph_labels": "1\n-1\n"}, r"numbers 3 graphs, but .*SET_graph_labels\.txt has 2 lines"),
        ({"graph_labels": "1\n-1\n1\n1\n"}, r"numbers 3 graphs, but .*SET_graph_labels\.txt has 4 lines"),
        ({"graph_labels": "1\nx\n1\n"}, r"SET_graph_labels\.txt: line 2: 'x' is no whole number"),
        ({"node_labels": "5\n"}, r"SET_node_labels\.txt: has 1 lines for 8 nodes"),
        ({"node_attributes": "1, 2\n"}, r"SET_node_attributes\.txt: has 1 lines for 8 nodes"),
        ({"node_attributes": "1, 2\n" * 7 + "1, nan\n"}, r"SET_node_attributes\.txt: line 8: 'nan'"),
    ],
)  # fmt: skip
def test_faults_name_file_and_line(changes: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(f"tu:{write(tmp_path, **changes)}")


def test_missing_sets_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    with pytest.raises(
        FileNotFoundError, match=r"MUTAG was not found in .*: fetch https://www\.chrsmrrs\.com/\S*/MUTAG\.zip"
    ):
        load("tu:MUTAG", tmp_path)
    with pytest.raises(FileNotFoundError, match="or take tu:COLLAB_500"):
        load("tu:COLLAB", tmp_path)
    with pytest.raises(FileNotFoundError, match="Did you mean 'MUTAG'"):
        load("tu:MUTAK", tmp_path)
    with pytest.raises(FileNotFoundError, match="correct --data-dir"):
        load("tu:MUTAG", tmp_path / "none")
    with pytest.raises(ValueError, match=r"tu needs data sets: .*ChemBio, Social, MIX"):
        load("tu", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no SET_graph_labels\.txt"):
        load(f"tu:{write(tmp_path, graph_labels=None)}")
    (tmp_path / "SET" / "OTHER_A.txt").write_text("")
    with pytest.raises(FileNotFoundError, match=r"needs one NAME_A\.txt"):
        load(f"tu:{tmp_path / 'SET'}")


class Served(http.server.BaseHTTPRequestHandler):
    """A server with a good file, one that is cut short, an endless one, and a way to another scheme."""

    folder = Path()

    def do_GET(self) -> None:
        name = self.path.strip("/")
        data = (self.folder / "MUTAG.zip").read_bytes()
        if name in ("DHFR.zip", "NCI1.zip"):  # a page instead of the file, and another archive
            data = b"<html>Please log in</html>" if name == "DHFR.zip" else (self.folder / "OTHER.zip").read_bytes()
        if name == "AIDS.zip":
            self.send_response(302)
            self.send_header("Location", "ftp://127.0.0.1/x")
            self.end_headers()
            return
        self.send_response(200 if name in ("MUTAG.zip", "BZR.zip", "DD.zip", "DHFR.zip", "NCI1.zip") else 404)
        if name != "DD.zip":
            self.send_header("Content-Length", str(len(data) + (name == "BZR.zip")))
        self.end_headers()
        self.wfile.write(data if name != "DD.zip" else bytes(5000))

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A local server in place of the collection; yields the empty cache folder."""
    write(tmp_path, "MUTAG", "zip")
    write(tmp_path, "OTHER", "zip", graph_indicator=None)
    handler = type("Here", (Served,), {"folder": tmp_path})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(tu, "ADDRESS", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setattr(fetch, "SCHEMES", ("https", "http"))
        monkeypatch.setenv("FEDJAX_PFL_CACHE", str(tmp_path / "cache"))
        for variable in (DATA_VARIABLE, "http_proxy", "HTTP_PROXY"):
            monkeypatch.delenv(variable, raising=False)
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        yield tmp_path / "cache"
        server.shutdown()


def test_missing_sets_are_fetched_once(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = load("tu:MUTAG")
    assert len(source) == 3
    assert source.where == str(served / "tu" / "MUTAG.zip")
    monkeypatch.setattr(tu, "ADDRESS", "http://127.0.0.1:1/")
    assert len(load("tu:MUTAG")) == 3


def test_failed_downloads_leave_nothing(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"ended after \d+ of \d+ bytes.*put it as tu/BZR\.zip"):
        load("tu:BZR")
    with pytest.raises(FileNotFoundError, match="404"):
        load("tu:COX2")
    with pytest.raises(ValueError, match=r"ftp://127\.0\.0\.1/x: only https is fetched"):
        load("tu:AIDS")
    with pytest.raises(ValueError, match=r"DHFR\.zip: is not the data set \(the answer: no readable zip"):
        load("tu:DHFR")
    with pytest.raises(ValueError, match=r"NCI1\.zip: is not the data set \(has no NAME_graph_indicator\.txt\)"):
        load("tu:NCI1")
    monkeypatch.setattr(fetch.fetch, "__defaults__", (4000,))
    with pytest.raises(ValueError, match="is larger than 4000 bytes"):
        load("tu:DD")
    monkeypatch.setattr(fetch, "SCHEMES", ("https",))
    with pytest.raises(ValueError, match="only https is fetched"):
        load("tu:MUTAG")
    assert not list(served.rglob("*.*"))


def test_a_damaged_download_is_named(served: Path, tmp_path: Path) -> None:
    load("tu:MUTAG")
    path = served / "tu" / "MUTAG.zip"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(
        ValueError, match=rf"MUTAG\.zip: no readable zip .*it is a download in the cache: delete {path}"
    ):
        load("tu:MUTAG")
    path.unlink()
    assert len(load("tu:MUTAG")) == 3
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "MUTAG.zip").write_bytes(b"hello")
    with pytest.raises(ValueError, match=r"no readable zip") as caught:
        load("tu:MUTAG", mine)
    assert "delete" not in str(caught.value)


@functools.cache
def published(name: str) -> Source:
    with pytest.MonkeyPatch.context() as patch:  # their walks are for test_encodings: they take many seconds
        patch.setattr(tu, "cached_walk", lambda x, *edges: np.zeros((x[:, 1].sum(), 16), np.float32))
        return load(f"tu:{name}", DATA)


def need(path: str) -> None:
    if not (DATA / path).exists():
        pytest.skip(f"{DATA_VARIABLE} names no folder with {path}")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name: str) -> None:
    need("tu")
    source = published(name)
    senders, receivers = source.tables["senders"], source.tables["receivers"]
    loops = int((senders == receivers).sum())
    graphs, classes, nodes, links, labels, _ = PUBLISHED[name]
    assert (len(source), source.num_classes) == (graphs, classes)
    assert round(source.x[:, 1].sum() / graphs, 2) == nodes
    assert round(((len(senders) - loops) / 2 + loops) / graphs, 2) == links
    assert source.tables["labels_of_dataset"].tolist() == [labels]
    assert source.tables["node_label"].max() + 1 == labels
    assert source.tables["walk"].shape == (source.x[:, 1].sum(), 16)
    assert waste(source.x, sample_batches(source.x), source.reader.budgets).share() < 0.35
    owner = np.repeat(np.arange(graphs), source.x[:, 3])
    assert (senders >= 0).all()
    assert (np.maximum(senders, receivers) < source.x[owner, 1]).all()
    assert source.x[-1, 2] + source.x[-1, 3] == len(senders)


@pytest.mark.parametrize("name", [name for name, row in PUBLISHED.items() if row[-1]])
def test_published_attributes(name: str) -> None:
    need("tu")
    assert load(f"tu:{name},attributes", DATA).tables["node_attributes"].shape[1] == PUBLISHED[name][-1]


def test_edges_are_those_of_the_text() -> None:
    need("tu/MUTAG.zip")
    source = published("MUTAG")
    with zipfile.ZipFile(DATA / "tu" / "MUTAG.zip") as archive:
        lines = archive.read("MUTAG/MUTAG_A.txt").decode().split("\n")
    first = source.x[np.repeat(np.arange(188), source.x[:, 3]), 0]
    back = np.stack([source.tables["senders"] + first + 1, source.tables["receivers"] + first + 1], 1)
    assert back.tolist() == [[int(number) for number in line.split(",")] for line in lines if line]


def test_collab_in_both_forms() -> None:
    """Every tenth graph of COLLAB exists as text too."""
    need("tu/COLLAB_500.zip")
    whole, tenth = published("COLLAB"), load("tu:COLLAB_500", DATA)
    np.testing.assert_array_equal(tenth.x[:, [1, 3]], whole.x[::10, [1, 3]])
    np.testing.assert_array_equal(tenth.y, whole.y[::10])
    for graph in (0, 123, 499):
        assert sorted(edges(tenth, graph)) == sorted(edges(whole, 10 * graph))
        own, other = (source.x[at, :2] for source, at in ((tenth, graph), (whole, 10 * graph)))
        np.testing.assert_array_equal(
            tenth.tables["node_label"][own[0] : own.sum()], whole.tables["node_label"][other[0] : other.sum()]
        )


def test_groups_and_client_data() -> None:
    need("tu")
    source = load("tu:MUTAG+PTC_MR+ENZYMES+IMDB-BINARY", DATA)
    assert (len(source), source.num_classes) == (188 + 344 + 600 + 1000, 6)
    assert tu.GROUPS["MIX"] == (*tu.GROUPS["ChemBio"], *tu.GROUPS["Social"])
    assert sorted(tu.GROUPS["MIX"]) == sorted(PUBLISHED)
    partition = make_partition(source, PartitionConfig(method="natural", min_samples=2))
    data = to_client_data(source, partition)
    assert data.num_clients == 4
    assert np.shares_memory(data.examples["x"], source.x)
    for name, table in source.tables.items():
        assert np.shares_memory(data.tables[name], table)


def planetoid_files() -> dict[str, Any]:
    """Seven nodes: four in allx, tests 6 and 4 (so 5 is isolated), with one edge listed twice and a self-loop."""
    x = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]], np.float32)
    y = np.eye(2, dtype=np.int32)[[0, 1, 1, 0]]
    csr = scipy.sparse.csr_matrix
    return {
        "x": csr(x[:2]), "y": y[:2], "allx": csr(x), "ally": y, "tx": csr(x[2:] + 0), "ty": y[2:],
        "graph": {0: [1, 1], 1: [0, 6], 2: [2], 3: [], 4: [0], 5: [], 6: [1]},
    }  # fmt: skip


def write_planetoid(folder: Path, index: str = "6\n4\n", **changes: Any) -> Path:
    for part, value in (planetoid_files() | changes).items():
        (folder / f"ind.cora.{part}").write_bytes(pickle.dumps(value, 2))
    (folder / "ind.cora.test.index").write_text(index)
    return folder


def test_planetoid_files(tmp_path: Path) -> None:
    source = load(f"cora:{write_planetoid(tmp_path)}")
    assert source.x.tolist() == [0, 1, 2, 3, 4, 6]  # node 5 has no label
    assert source.y.tolist() == [0, 1, 1, 0, 0, 1]
    assert source.official_test.tolist() == [False] * 4 + [True] * 2
    features = source.tables["features"]
    assert features.dtype == np.uint8
    assert features.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [1, 1, 0], [0, 0, 0], [0, 0, 1]]
    pairs = list(zip(source.tables["senders"].tolist(), source.tables["receivers"].tolist(), strict=True))
    assert pairs == [(0, 1), (0, 4), (1, 0), (1, 6), (2, 2), (4, 0), (6, 1)]
    np.testing.assert_array_equal(source.sample(), [[1, 0, 0]])
    halved = write_planetoid(tmp_path, allx=planetoid_files()["allx"] / 2)
    assert load(f"cora:{halved}").tables["features"].dtype == np.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index": "6\n6\n"}, "distinct nodes in 4..6"),
        ({"index": "6\n3\n"}, "distinct nodes in 4..6"),
        ({"index": "6\n7\n"}, "distinct nodes in 4..6"),
        ({"index": "6\n"}, "a row for each"),
        ({"index": "6\nx\n"}, r"ind\.cora\.test\.index: line 2: 'x'"),
        ({"ally": np.eye(2)[[0, 1, 1]]}, "a row for each"),
        ({"ally": np.full((4, 2), 0.5)}, "labels must be 0 and 1"),
        ({"ally": [1, 0, 1, 0]}, "labels must be 0 and 1"),
        ({"tx": scipy.sparse.csr_matrix(np.ones((2, 4)))}, "differ in their columns"),
        ({"tx": scipy.sparse.csr_matrix(np.full((2, 3), np.nan))}, r"ind\.cora\.tx: row 0 is not finite"),
        ({"tx": scipy.sparse.csr_matrix((2, 2**30))}, r"ind\.cora\.tx: needs a matrix of numbers, of at most"),
        ({"allx": "text"}, r"ind\.cora\.allx: needs a matrix"),
        ({"graph": [[1], [0]]}, "distinct nodes in 4"),
        ({"graph": {0: [9], **{node: [] for node in range(1, 7)}}}, r"ind\.cora\.graph: nodes must be 0\.\.6"),
        ({"graph": {node: [0.5] for node in range(7)}}, "a neighbour is no whole number"),
        ({"graph": dict.fromkeys(range(7), 1)}, "needs {node: "),
        ({"graph": {node + 1: [] for node in range(7)}}, r"nodes must be 0\.\.6"),
        ({"graph": os.system}, r"ind\.cora\.graph: byte \d+: the name \w+\.system is refused"),
    ],
)
def test_planetoid_faults(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(f"cora:{write_planetoid(tmp_path, **changes)}")


@pytest.mark.parametrize("rows", [4, 1])
def test_nearly_empty_matrices_are_not_made_dense(rows: int, tmp_path: Path) -> None:
    """2 kB of files that stand for gigabytes: sizes that fit each other, and sizes that do not."""
    width = (1 << 26) // rows
    wide = {part: scipy.sparse.csr_matrix((n, width)) for part, n in (("x", 2), ("allx", rows), ("tx", 2))}
    folder = write_planetoid(tmp_path, **wide)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 4000
    tracemalloc.start()
    try:
        message = "more than 1048576 cells: damaged" if rows == 4 else "a row for each"
        with pytest.raises(ValueError, match=message):
            load(f"cora:{folder}")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_kinds_of_planetoid_matrices(tmp_path: Path) -> None:
    """Other types than float32, entries of one place that add up, and arrays instead of matrices."""
    usual = load(f"cora:{write_planetoid(tmp_path)}").tables["features"]
    dense = planetoid_files()["allx"].toarray()
    twice = scipy.sparse.csr_matrix((np.full(2 * 5, 0.5), np.repeat([0, 1, 2, 0, 1], 2), [0, 2, 4, 6, 10]), (4, 3))
    assert twice.nnz == 10
    for allx in (scipy.sparse.csr_matrix(dense, dtype=np.int64), dense.astype(bool), dense.astype(np.float64), twice):
        found = load(f"cora:{write_planetoid(tmp_path, allx=allx)}").tables["features"]
        np.testing.assert_array_equal(found, usual)


def test_missing_planetoid_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (write_planetoid(tmp_path) / "ind.cora.ty").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no ind\.cora\.ty"):
        load(f"cora:{tmp_path}")
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"ind\.pubmed\.\* of https"):
        load("pubmed")


def test_nodes_of_an_npz_file(tmp_path: Path) -> None:
    arrays = {"x": np.array([[0.5, 1], [2, 3], [4, 5]]), "y": np.array([1, -1, 0]), "edges": np.array([[2, 0], [0, 2]])}

    def saved(**changes: Any) -> str:
        np.savez(tmp_path / "n.npz", **(arrays | changes))
        return f"node:{tmp_path / 'n.npz'}"

    source = load(saved())
    assert source.x.tolist() == [0, 2]
    assert source.y.tolist() == [1, 0]
    assert source.official_test is None
    assert source.tables["senders"].tolist() == [0, 2]
    assert load(saved(test=np.array([2]))).official_test.tolist() == [False, True]
    for changes, message in (
        ({"edges": np.array([[0, 3]])}, r"edges names nodes outside of 0\.\.2"),
        ({"test": np.array([-1])}, "test names nodes outside"),
        ({"y": np.array([1, 0])}, "wrong are the lengths"),
        ({"y": np.array([-1, -1, -1])}, r"y must be 0\.\.C-1"),
        ({"y": np.array([0.0, 1, 1])}, "wrong are y"),
        ({"x": np.full((3, 2), np.inf)}, "row 0 is not finite"),
    ):
        with pytest.raises(ValueError, match=message):
            load(saved(**changes))
    with pytest.raises(ValueError, match="node needs a file"):
        load("node")


@pytest.mark.parametrize(
    ("name", "nodes", "labelled", "features", "classes", "links"),
    [("cora", 2708, 2708, 1433, 7, 5278), ("citeseer", 3327, 3312, 3703, 6, 4676)],
)
def test_published_citations(name: str, nodes: int, labelled: int, features: int, classes: int, links: int) -> None:
    need(f"planetoid/{name}.zip")
    packed, raw = load(name, DATA), load(f"{name}:planetoid/{name}.zip", DATA)
    assert packed.where.endswith(".npz")
    for source in (packed, raw):
        assert (len(source), source.num_classes, source.official_test.sum()) == (labelled, classes, 1000)
        assert source.tables["features"].shape == (nodes, features)
        senders, receivers = source.tables["senders"], source.tables["receivers"]
        assert (senders <= receivers).sum() == links
    for leaf in ("x", "y", "official_test"):
        np.testing.assert_array_equal(getattr(packed, leaf), getattr(raw, leaf))
    for table in packed.tables:
        np.testing.assert_array_equal(packed.tables[table], raw.tables[table])
        assert packed.tables[table].dtype == raw.tables[table].dtype
    partition = make_partition(packed, PartitionConfig(method="iid", clients=5, test="official"))
    data = to_client_data(packed, partition)
    assert np.shares_memory(data.tables["features"], packed.tables["features"])
    rows = np.array([3, 5])
    batch = jax.tree.map(np.asarray, data.gather(rows))
    np.testing.assert_array_equal(batch["x"], packed.tables["features"][packed.x[rows]])
    assert Rows("features") == packed.reader


class Net(nn.Module):
    """One layer, then the head."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kind = jnp.result_type(float)
        return nn.Dense(2, name="head", param_dtype=kind)(nn.tanh(nn.Dense(4, param_dtype=kind)(x)))


def test_nodes_train_as_their_features(tmp_path: Path, float64: None) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 2, (60, 6)).astype(np.uint8), rng.integers(0, 2, 60)
    np.savez(tmp_path / "n.npz", x=x, y=y, edges=rng.integers(0, 60, (90, 2)))
    source = load(f"node:{tmp_path / 'n.npz'}")
    shared = to_client_data(source, make_partition(source, PartitionConfig(method="iid", clients=3)))
    copied = dataclasses.replace(shared, examples=shared.examples | {"x": x[source.x]}, tables={}, reader=None)
    scores = []
    for data in (shared, copied):
        model = fp.flax_model(Net(), np.zeros((1, 6), np.float32))
        fed = fp.Federation(model, jax.tree.map(jnp.asarray, data), batch_size=8, lr=0.3)
        scores.append(fp.simulate(fed, fp.build("fedavg", fed), rounds=2).records[-1].scores["test"])
    assert_close(*scores)
