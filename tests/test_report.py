"""The report: what the page says about made-up run folders, and what it refuses."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedjax_pfl.data import Partition, PartitionConfig, Source
from fedjax_pfl.engine.simulation import Record
from fedjax_pfl.evaluation import Scores, summary
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.record import Recorder
from fedjax_pfl.experiment.report import write_report
from fedjax_pfl.experiment.report.folder import read_run, read_runs
from fedjax_pfl.experiment.report.tables import MAX_ROWS
from fedjax_pfl.experiment.summary import results

CLASSES = 10
EVIL = "<script>alert(1)</script>\"&'$x_{$"
Arrays = dict[str, np.ndarray]


def per_client_arrays(
    rng: np.random.Generator, sizes: np.ndarray, at: np.ndarray, seeds: int, level: float, kinds: tuple[str, ...]
) -> Arrays:
    """Accuracies that rise over rounds to about ``level``, received below personal; the last client has no test."""
    samples = {"train": sizes, "validation": sizes // 8, "test": sizes // 3}
    if len(sizes) > 1:
        samples["test"][-1] = 0
    found: Arrays = {"rounds": at, "seeds": np.arange(seeds)}
    found |= {f"samples_{split}": size for split, size in samples.items()}
    hard = rng.beta(2, 7, len(sizes))
    for split in ("validation", "test"):
        for kind in kinds:
            rise = 1 - np.exp(-(at + 2.0 * (kind == "personal")) / (at[-1] / 5))
            top = (level - 0.06 * (kind == "received")) * (0.1 + 0.9 * rise)
            values = top[:, None, None] * (1 - 0.5 * hard) + rng.normal(0, 0.02, (len(at), seeds, len(sizes)))
            found[f"{split}/{kind}/accuracy"] = np.where(samples[split] > 0, values.clip(0, 1), np.nan)
            found[f"{split}/{kind}/loss"] = -np.log(values.clip(0.01, 1))
    return found


def headline(arrays: Arrays, kind: str) -> dict[str, Any] | None:
    """The summary's entry of one kind of model."""
    if f"test/{kind}/accuracy" not in arrays:
        return None
    last = [summary(values, arrays["samples_test"]) for values in arrays[f"test/{kind}/accuracy"][-1]]
    lists = {
        name: [one[name] for one in last] for name in ("weighted_mean", "uniform_mean", "std", "worst_decile", "min")
    }
    lists |= {"last_k_mean": lists["weighted_mean"], "at_best_validation": lists["weighted_mean"]}
    means = {name: float(np.mean(values)) for name, values in lists.items()}
    return means | {
        "per_seed": lists,
        "std_over_seeds": {name: float(np.std(values)) for name, values in lists.items()},
    }


def weights_like(histogram: np.ndarray, seeds: int, rng: np.random.Generator) -> np.ndarray:
    """Row-stochastic weights, large on the diagonal and between clients with like labels."""
    unit = histogram / np.linalg.norm(histogram, axis=1, keepdims=True)
    A = 0.08 * (unit @ unit.T) ** 2 + rng.uniform(0, 0.012, (seeds, len(unit), len(unit)))
    A[:, np.arange(len(unit)), np.arange(len(unit))] = rng.uniform(0.4, 0.8, (seeds, len(unit)))
    return A / A.sum(-1, keepdims=True)


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_run(
    folder: Path, algorithm: str, *, options: dict[str, Any] | None = None, clients: int = 12, seeds: int = 2,
    rounds: int = 10, every: int = 5, level: float = 0.9, floats: int = 85_000, weights: bool = False,
    kinds: tuple[str, ...] = ("received", "personal"), **overrides: Any,
) -> Path:  # fmt: skip
    """A folder such as a run writes."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(clients)
    sizes = np.maximum(rng.lognormal(4.0, 0.7, clients).astype(int), 3)
    shares = rng.dirichlet(np.full(CLASSES, 0.1), clients)
    histogram = np.stack([rng.multinomial(n, p) for n, p in zip(sizes, shares, strict=True)])
    rng = np.random.default_rng([len(algorithm), round(1000 * level)])
    arrays = per_client_arrays(rng, sizes, np.arange(0, rounds + 1, every), seeds, level, kinds)
    np.savez(folder / "per_client.npz", **arrays)
    metrics = [
        {"round": int(r), "seed": s, "split": split, "kind": kind}
        | {m: summary(arrays[f"{split}/{kind}/{m}"][k, s], arrays[f"samples_{split}"]) for m in ("accuracy", "loss")}
        for k, r in enumerate(arrays["rounds"])
        for s, split, kind in itertools.product(range(seeds), ("validation", "test"), kinds)
    ]
    write_lines(folder / "metrics.jsonl", metrics)
    own = {"weight_entropy": 1.2, "self_weight": 0.7} if weights else {}
    write_lines(folder / "rounds.jsonl", [
        {"round": r, "seed": s, "loss": 2.3 * np.exp(-r / 18) + 0.02 * s, **own, "trains": clients, "reported": clients,
         "failed": [], "floats_up": floats * clients, "floats_down": floats * clients}
        for r in range(1, rounds + 1) for s in range(seeds)
    ])  # fmt: skip
    artifacts = {"aggregation_weights": weights_like(histogram, seeds, rng)} if weights else {}
    np.savez(folder / "arrays.npz", label_histogram=histogram, **artifacts)
    total = floats * clients * rounds
    told = {
        "algorithm": algorithm, "options": options or {}, "seeds": list(range(seeds)), "rounds": rounds,
        "clients": clients, "partition_sha256": "4f1d" * 16, "failures": [], "status": "finished",
        "test": {kind: headline(arrays, kind) for kind in ("received", "personal", "shared")},
        "communication": {"floats_up": total, "floats_down": total},
        "timing": {"compile_s": 3.21, "run_s": 8.4, "rounds_per_s": 5.95, "samples_per_s": None},
        "memory": {"predicted_bytes": 31_000_000, "peak_bytes": 612_000_000, "peak_source": "process resident size"},
        "command": f"fedjax-pfl run {algorithm} --data digits",
    } | overrides  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(told))
    (folder / "environment.json").write_text(json.dumps({"python": "3.11.2", "device_kind": "cpu"}))
    (folder / "config.toml").write_text(
        f'algorithm = "{algorithm}"\n[data]\ndata = "digits"\npartition = "dirichlet"\nalpha = 0.1\n'
        '[model]\nmodel = "mlp"\n'
    )
    return folder


class Page(HTMLParser):
    """Checks that elements nest and collects ids, addresses, and the cells of the first table by row."""

    VOID = ("meta", "br", "img", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.scripts = 0
        self.rows: list[list[str]] = []
        self.tables = 0
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        found = dict(attrs)
        self.ids += [found["id"]] if found.get("id") else []
        self.addresses += [str(found[name]) for name in ("src", "href", "xlink:href") if name in found]
        self.scripts += tag == "script"
        self.tables += tag == "table"
        if tag == "tr" and self.tables == 1:
            self.rows.append([])
        if tag in ("td", "th") and self.rows and self.tables == 1:
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.tables == 1 and "td" in self.open + ["td"] * ("th" in self.open) and self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    root = tmp_path_factory.mktemp("four")
    folders = [
        write_run(root / "a", "fedapa", options={"variant": "descent", "eta": 0.1}, weights=True, level=0.97),
        write_run(root / "b", "fedapa", options={"variant": "released", "eta": 0.1}, weights=True),
        write_run(root / "c", "fedavg", kinds=("received", "personal", "shared"), level=0.8),
        write_run(root / "d", "local", floats=0, level=0.85),
    ]
    path = write_report(folders, root / "out", "fedjax-pfl compare fedapa local")
    return path.read_text("utf-8"), path


def test_page_is_whole_and_self_contained(four: tuple[str, Path]) -> None:
    text, path = four
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    assert all(address.startswith(("#", "data:")) for address in page.addresses)
    assert page.scripts == 1
    assert "url(#" in text
    assert not re.search(r"url\((?!#)", text)
    assert "@import" not in text
    assert path.name == "report.html"
    assert not list(path.parent.glob("*.partial"))


def test_svg_is_well_formed_and_described(four: tuple[str, Path]) -> None:
    found = re.findall(r"<svg.*?</svg>", four[0], flags=re.DOTALL)
    assert len(found) == 8
    for svg in found:
        root = ElementTree.fromstring(svg)
        assert root.get("role") == "img"
        assert len(root.get("aria-label", "")) > 20
        assert "#385af8" not in svg
        assert "var(--" in svg


def test_figures_are_written_as_png(four: tuple[str, Path]) -> None:
    names = {file.name for file in (four[1].parent / "figures").glob("*.png")}
    drawn = "results curves clients partition weights-1 weights-2 communication training"
    assert names == {f"{name}.png" for name in drawn.split()}


def test_table_marks_the_best_and_leaves_absent_blank(four: tuple[str, Path]) -> None:
    run = {name: read_run(four[1].parent.parent / name) for name in "abcd"}
    rows = {row[0].strip(): row for row in Page(four[0]).rows if row[0]}
    best = rows["fedapa(variant=descent)"]
    mean, spread = run["a"].test("personal", "weighted_mean"), run["a"].spread("personal", "weighted_mean")
    assert mean is not None
    assert spread is not None
    assert best[1] == f"{100 * mean:.1f} (best) ±{100 * spread:.1f}"
    shared = {name: row[3] for name, row in rows.items() if name != "algorithm"}
    assert [name for name, cell in shared.items() if cell] == ["fedavg"]
    assert rows["local"][-3].startswith("0")  # nothing sent is a measurement, not an absent one


def test_facts_and_commands(four: tuple[str, Path]) -> None:
    text = four[0]
    for fact in ("Dirichlet(0.1)", "digits", "mlp", "2 (0, 1)", "4f1d" * 16, "process resident size", "584 MiB",
                 "fedjax-pfl compare fedapa local", "fedjax-pfl run fedavg --data digits"):  # fmt: skip
        assert fact in text
    assert "do not compare" not in text
    assert 'class="notice"' not in text


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("troubled")
    failures = [{"seed": 0, "round": 3, "client": EVIL}]
    trouble = {"status": "interrupted", "rounds_planned": 50, "command": EVIL, "failures": failures}
    trouble |= {"partition_notes": ["left out 3 samples"]}
    first = write_run(root / "a", "fedapa", options={"name": EVIL}, seeds=1, **trouble)
    second = write_run(root / EVIL.replace("/", ""), "fedapa", options={"name": "b\n\x00"}, partition_sha256="00")
    with open(first / "metrics.jsonl", "a") as stream:
        stream.write('{"round": 15, "se')
    return write_report([first, second], root / "page.html", EVIL).read_text("utf-8")


def test_texts_of_runs_are_escaped(troubled: str) -> None:
    assert "<script>alert" not in troubled
    assert "&lt;script&gt;alert(1)" in troubled
    assert Page(troubled).scripts == 1
    for svg in re.findall(r"<svg.*?</svg>", troubled, flags=re.DOTALL):
        ElementTree.fromstring(svg)


def test_what_forbids_a_comparison_is_told(troubled: str) -> None:
    assert "was interrupted after 10 of 50 rounds" in troubled
    assert "The runs differ in their partition" in troubled
    assert "The runs differ in their seeds" in troubled
    assert "Partition: left out 3 samples." in troubled
    assert "1 update was not finite (seed 0, round 3" in troubled


def test_interrupted_run_without_results(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "a", "fedavg", status="interrupted", test=None, communication=None, timing=None, memory=None
    )
    for name in ("metrics.jsonl", "rounds.jsonl", "per_client.npz", "arrays.npz"):
        (folder / name).unlink()
    text = write_report([folder], tmp_path, "x").read_text("utf-8")
    assert "No test accuracy was measured." in text
    assert "<svg" not in text


def test_ten_thousand_clients(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", "fedavg", clients=10_000, seeds=1, rounds=5)
    text = write_report([folder], tmp_path, "x").read_text("utf-8")
    assert len(text) < 1_000_000
    assert f"the {MAX_ROWS} of 10,000 with the lowest accuracy" in text
    assert "Of 10,000 clients 300 are dots" in text
    assert len(re.findall(r'<th scope="row">\d+</th>', text)) == MAX_ROWS


def test_one_client(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", "fedapa", clients=1, seeds=1, rounds=2, every=1, weights=True)
    text = write_report([folder], tmp_path, "x").read_text("utf-8")
    assert "over 1 client." in text
    assert "(best)" not in text
    assert "±" not in Page(text).rows[-1][1]


def test_labels_tell_runs_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"{i}", "fedprox", options={"mu": mu}) for i, mu in enumerate((0.1, 0.1, 1.0))]
    config = folders[1] / "config.toml"
    config.write_text(config.read_text() + "[training]\nlr = 0.5\n")
    folders += [write_run(tmp_path / "4", "local"), write_run(tmp_path / "5", "local")]
    labels = [run.label for run in read_runs(folders)]
    assert len(set(labels)) == 5
    told = ["fedprox (mu=0.1)", "fedprox (mu=0.1, lr=0.5)", "fedprox (mu=1)", "local (folder=4)", "local (folder=5)"]
    assert labels == told
    assert read_runs([folders[3]])[0].label == "local"


@pytest.mark.parametrize("name", ["summary.json", "config.toml", "environment.json", "metrics.jsonl", "per_client.npz"])
def test_missing_file_names_the_folder(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path / "the-run", "fedavg", clients=2)
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"the-run: {re.escape(name)} is missing"):
        write_report([folder], tmp_path / "out", "x")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["summary.json", "config.toml", "rounds.jsonl", "per_client.npz", "arrays.npz"])
def test_damaged_file_names_the_folder(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path / "the-run", "fedavg", clients=2)
    (folder / name).write_text("{]\n")
    with pytest.raises(ValueError, match=rf"the-run: {re.escape(name)} is damaged"):
        write_report([folder], tmp_path / "out", "x")


def test_pickles_are_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "the-run", "fedavg", clients=2)
    np.savez(folder / "arrays.npz", label_histogram=np.array([{}], object))
    with pytest.raises(ValueError, match=r"arrays.npz is damaged"):
        read_run(folder)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run folder given"):
        write_report([], tmp_path, "x")
    with pytest.raises(FileNotFoundError, match="nowhere: no such run folder"):
        write_report([tmp_path / "nowhere"], tmp_path, "x")


def graph_run(folder: Path, algorithm: str = "fedgcf", **arrays: np.ndarray) -> Path:
    """A run of 5 clients on three data sets, with more arrays."""
    kinds = {"received": {"mean": 0.5, "std_over_seeds": 0.01}, "personal": {"mean": 0.625, "std_over_seeds": 0.02}}
    none = {kind: {"mean": None, "std_over_seeds": None} for kind in kinds}
    names = ["MUTAG", "BZR", EVIL, "BZR", "BZR"]
    sets = {"MUTAG": kinds, "BZR": kinds | {"personal": {"mean": 0.875, "std_over_seeds": 0.0}}, EVIL: none}
    mean = {"personal": {"mean": 0.75, "std_over_seeds": 0.03}}
    write_run(folder, algorithm, clients=5, dataset_of_client=names, datasets=sets, datasets_mean=mean)
    with np.load(folder / "arrays.npz") as found:
        np.savez(folder / "arrays.npz", **(dict(found) | arrays))
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for row in rows if "topology" in arrays else ():
        row |= {f"arm0.{k}": row["round"] * k for k in (1, 3, 5)} | {f"cluster{k}": k for k in range(1, 13)}
        row |= {"ratio": 0.1 if row["round"] < 4 else 0.5}
    write_lines(folder / "rounds.jsonl", rows)
    return folder


def graph_arrays() -> Arrays:
    """Of two seeds; the last client did not report."""
    d = np.full((2, 5, 5), np.inf)
    d[:, :4, :4] = 1.0
    d[:, 0, 2] = d[:, 2, 0] = 3.0  # a path over another client is shorter
    clusters = np.array([[0, 0, 1, 2, -1]] * 2)
    return {"topology": d, "cluster": clusters, "path_ends": np.array([[[0, 2], [-1, -1]]] * 2)}


def test_accuracy_by_data_set(tmp_path: Path) -> None:
    other = write_run(tmp_path / "b", "fedavg", clients=5)
    text = write_report([graph_run(tmp_path / "a"), other], tmp_path / "out", "x").read_text("utf-8")
    card = text[text.index("<h3>By data set</h3>") : text.index("All summaries")]
    cells = re.findall(r'<td data-value="([^"]*)">', card)
    assert cells == ["0.625", "0.875", "", "0.75", "", "", "", ""]
    assert "62.5 <" in card
    assert "\N{PLUS-MINUS SIGN}2.0" in card
    assert text.count('<th scope="col">MUTAG</th>') == 2  # received as well, folded away
    assert "<td>MUTAG</td>" in text
    assert Page(text).scripts == 1


def test_clients_as_a_graph_and_as_bars(tmp_path: Path) -> None:
    first = graph_run(tmp_path / "a", **graph_arrays())
    second = graph_run(tmp_path / "b", "gcfl", cluster=np.array([[0, 1, 0, 0, 1]] * 2))
    path = write_report([first, second], tmp_path / "out", "x")
    text = path.read_text("utf-8")
    assert {file.name for file in path.parent.glob("figures/topology*")} == {"topology-1.png", "topology-2.png"}
    section = text[text.index('<section id="topology"') : text.index('<section id="communication"')]
    for told in ("MUTAG", "BZR 1", "BZR 3", "cluster 3 (1)", "length 2, 2 edges", "in the last round of seed 0",
                 "Left out: 1 client without an edge, for want of a report", "BZR 1, BZR 4", "2 in all."):  # fmt: skip
        assert told in section
    assert "<script>" not in section


def test_many_series_share_a_panel(tmp_path: Path) -> None:
    runs = [graph_run(tmp_path / name, name, **graph_arrays()) for name in ("one", "two")]
    alone, both = (write_report(r, tmp_path / f"out{len(r)}", "x").read_text("utf-8") for r in (runs[:1], runs))
    head = "Small multiples over rounds: training loss, plays of each arm"
    assert f'{head}, clients in each cluster (10 of 12), ratio in every round"' in alone
    assert f"{head}: one, plays of each arm: two, clients in each cluster (10 of 12): one" in both
    assert "arm0.1" not in alone
    assert "3\N{MULTIPLICATION SIGN}" in alone
    assert "7\N{MULTIPLICATION SIGN}" in alone
    assert "how often each was taken" not in both


@pytest.mark.parametrize(
    "bad", [{"topology": np.zeros((2, 5, 4))}, {"cluster": np.zeros(5, int)}, {"path_ends": np.full((2, 1, 2), 5)}]
)
def test_damaged_topology_names_the_folder(tmp_path: Path, bad: Arrays) -> None:
    folder = graph_run(tmp_path / "the-run", **(graph_arrays() | bad))
    with pytest.raises(ValueError, match=r"the-run: arrays.npz is damaged"):
        write_report([folder], tmp_path / "out", "x")


def test_no_graph_before_the_first_round(tmp_path: Path) -> None:
    nothing = {"topology": np.full((2, 5, 5), np.inf), "cluster": np.full((2, 5), -1)}
    folder = graph_run(tmp_path / "a", **nothing)
    assert 'id="topology"' not in write_report([folder], tmp_path / "out", "x").read_text("utf-8")


def test_equal_results_are_told_as_equal(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, name) for name in ("aa", "bb", "cc")]
    text = write_report(runs, tmp_path / "out", "x").read_text("utf-8")
    assert "aa, bb and cc have the same highest mean test accuracy" in text
    assert "follows with" not in text


def recorded(path: Path, sets: list[list[int]]) -> dict[str, Any]:
    """Results of two seeds of clients whose only test samples are from these data sets of three."""
    accuracy = np.array([[0.5, 1.0, 0.25, np.nan][: len(sets)], [0.5, 0.5, 0.75, np.nan][: len(sets)]])
    dataset = np.array([one for own in sets for one in own], np.int32)
    rows = np.split(np.arange(len(dataset)), np.cumsum([len(own) for own in sets])[:-1])
    train, test = tuple(part[:1] for part in rows), tuple(part[1:] for part in rows)
    y = np.zeros(len(dataset), np.int32)
    empty = tuple(part[:0] for part in rows)
    partition = Partition(PartitionConfig("natural"), len(y), train, empty, test)
    source = Source("s", np.zeros((len(y), 1), np.float32), y, 2, dataset=dataset, datasets=("A", "B", "C"))
    recorder = Recorder(path, [0, 1], partition, (1, 1))
    recorder.records.append(Record(0, {"test": {"personal": Scores(accuracy, accuracy)}}))
    return results(Config(), recorder, source, partition)


def test_summary_by_data_set(tmp_path: Path) -> None:
    found = recorded(tmp_path, [[0, 0], [0, 0, 0, 0], [1, 1, 1], [2]])
    assert found["dataset_of_client"] == ["A", "A", "B", "C"]
    a, b = [(0.5 + 3 * 1.0) / 4, (0.5 + 3 * 0.5) / 4], [0.25, 0.75]  # client 1 has three test samples, client 0 one
    assert found["datasets"]["A"]["personal"]["per_seed"] == pytest.approx(a)
    assert found["datasets"]["A"]["personal"]["mean"] == pytest.approx(np.mean(a))
    assert found["datasets"]["B"]["personal"]["std_over_seeds"] == pytest.approx(0.25)
    assert np.isnan(found["datasets"]["C"]["personal"]["mean"])  # no test samples: absent, and not in the mean
    assert found["datasets_mean"]["personal"]["per_seed"] == pytest.approx((np.array(a) + b) / 2)
    assert found["datasets_mean"]["personal"]["std_over_seeds"] == pytest.approx(abs(a[0] + b[0] - a[1] - b[1]) / 4)


def test_import_leaves_matplotlib_alone() -> None:
    code = (
        "import sys; from fedjax_pfl.experiment import plots, report; "
        "sys.exit(sum(name in sys.modules for name in ('matplotlib', 'scipy.cluster', 'networkx')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
