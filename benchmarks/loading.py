"""How fast and in how much memory a full CIFAR-10 becomes client data, each form in a fresh process.

    python benchmarks/loading.py
    python benchmarks/loading.py --forms cache binary binary.tar.gz python python.tar.gz --repeats 3

The set is made of random pixels: 50,000 + 10,000 images. Timed are loading, the Dirichlet partition for 100 clients and
the client data; then every pixel is read once, which maps the cached arrays into memory, and the client data goes to
the device (on a CPU that is the same memory). Memory is the process's peak (VmHWM) over its memory before loading, by
the bytes of all images. Files are in the page cache.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import platform
import statistics
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

TRAIN, TEST, PIXELS = 50_000, 10_000, 3072
BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
FORMS = ("cache", "binary", "binary.tar.gz", "python", "python.tar.gz")


@dataclasses.dataclass
class Options:
    """Loading of CIFAR-10."""

    forms: tuple[str, ...] = ("cache", "binary")
    """cache (arrays prepared by TensorFlow Datasets), binary, python (official batches), .tar.gz (their archives)."""
    clients: int = 100
    """Number of clients."""
    repeats: int = 3
    """Fresh processes a form; medians are printed."""
    measure: str | None = None
    """Measure this form in this process, with the data in --folder (used by the script itself)."""
    folder: Path = Path()
    """Where the data is."""


def make(form: str, folder: Path) -> None:
    """Write a full-size set of random images in one form."""
    rng = np.random.default_rng(0)
    labels = rng.integers(10, size=TRAIN + TEST)
    labels[:TRAIN] = rng.permutation(np.arange(TRAIN) % 10)  # as many of each class as the real set has
    pixels = rng.integers(256, size=(TRAIN + TEST, PIXELS), dtype=np.uint8)
    if form == "cache":
        from fedjax_pfl.data.sources import cache

        rows = enumerate(zip(pixels, labels, strict=True))
        samples = ((row.reshape(32, 32, 3), int(y), place >= TRAIN, str(place)) for place, (row, y) in rows)
        about = {"name": "cifar10/3.0.2", "classes": 10, "ignored": [], "licence": "none"}
        cache.store(folder / "tfds" / "cifar10" / "3.0.2", TRAIN + TEST, samples, about, "cifar10")
        return
    kind, _, packed = form.partition(".")
    files = {}
    for name, rows, y in zip(BATCHES, np.split(pixels, 6), np.split(labels, 6), strict=True):
        if kind == "binary":
            files[name + ".bin"] = np.concatenate([y[:, None].astype(np.uint8), rows], 1).tobytes()
        else:
            files[name] = python2({"data": rows, "labels": y.tolist()})
    if not packed:
        for name, data in files.items():
            (folder / name).write_bytes(data)
        return
    with tarfile.open(folder / f"cifar-10-{kind}.tar.gz", "w:gz", compresslevel=1) as tar:
        for name in sorted(files, reverse=True):
            member = tarfile.TarInfo(f"cifar/{name}")
            member.size = len(files[name])
            tar.addfile(member, io.BytesIO(files[name]))


def python2(batch: dict[str, Any]) -> bytes:
    """A batch as Python 2 pickled it: the pixels are a byte string (T) instead of bytes (B)."""
    data, size = pickle.dumps(batch, 3), struct.pack("<I", batch["data"].nbytes)
    return b"\x80\x02" + data[2:].replace(b"B" + size, b"T" + size)


def status(field: str) -> int:
    """Bytes of a field of this process's status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def measure(form: str, folder: Path, clients: int) -> dict[str, float]:
    """Seconds and peak memory of one form in this process."""
    import jax

    from fedjax_pfl.data import PartitionConfig, load, make_partition, to_client_data
    from fedjax_pfl.engine.sharding import place_data

    jax.device_put(0)  # what a program has in memory anyway

    os.environ["FEDJAX_PFL_CACHE"] = str(folder)
    os.environ.pop("FEDJAX_PFL_DATA", None)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far belongs to the imports
    before, began = status("VmRSS"), time.perf_counter()
    source = load("cifar10", None if form == "cache" else folder)
    loaded = time.perf_counter()
    partition = make_partition(source, PartitionConfig("dirichlet", clients=clients))
    data = to_client_data(source, partition)
    done = time.perf_counter()
    x = data.examples["x"]
    peak = status("VmHWM") - before
    total = sum(int(x[start : start + 1000].sum()) for start in range(0, len(x), 1000))
    read = status("VmHWM") - before
    data = jax.block_until_ready(place_data(data, None))
    placed = status("VmHWM") - before
    assert len(x) == TRAIN + TEST
    assert total > 0
    assert data.num_clients == clients
    return {"load": loaded - began, "all": done - began, "read": time.perf_counter() - done,
            "peak": peak / x.nbytes, "peak read": read / x.nbytes, "placed": placed / x.nbytes}  # fmt: skip


def main(options: Options) -> None:
    """Make each form, measure it in fresh processes and print a table."""
    if options.measure:
        print(json.dumps(measure(options.measure, options.folder, options.clients)))
        return
    table = Table("form", "load s", "client data s", "peak", "every pixel s", "peak then", "on the device")
    for form in options.forms:
        if form not in FORMS:
            raise ValueError(f"unknown form {form!r}: choose from {', '.join(FORMS)}")
        with tempfile.TemporaryDirectory() as folder:
            make(form, Path(folder))
            command = [sys.executable, __file__, "--measure", form, "--folder", folder]
            command += ["--clients", str(options.clients)]
            found = []
            for _ in range(options.repeats):
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found.append(json.loads(done.stdout.splitlines()[-1]))
        median = {key: statistics.median(one[key] for one in found) for key in found[0]}
        table.add_row(form, f"{median['load']:.2f}", f"{median['all']:.2f}", f"{median['peak']:.2f}x",
                      f"{median['read']:.2f}", f"{median['peak read']:.2f}x", f"{median['placed']:.2f}x")  # fmt: skip
    console = Console()
    console.print(f"{options.clients} clients, {os.cpu_count()} cores, {platform.machine()}, numpy {np.__version__}")
    console.print(table)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
