"""Arrays of one's own: npz files."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from fedjax_pfl.data.checks import MAPPING
from fedjax_pfl.data.files import read_npz
from fedjax_pfl.data.sources.base import Source, SourceEntry, locate


def _npz(argument: str, data_dir: Path | None) -> Source:
    if not argument:
        raise ValueError("npz needs a file: npz:FILE with arrays x, y and optionally client, test, num_classes")
    path = locate(argument, data_dir)
    found = read_npz(path, ["x", "y", "client", "test", "num_classes", "shift", "scale"])
    if "x" not in found or "y" not in found:
        with zipfile.ZipFile(path) as archive:
            names = sorted(name.removesuffix(".npy") for name in archive.namelist())
        raise ValueError(f"{path}: needs the arrays x and y, found {', '.join(names) or 'none'}")
    for name in ("y", "client", "test"):
        if name in found and found[name].ndim != 1:
            raise ValueError(f"{path}: {name} must have the shape (samples,), found {found[name].shape}")
    x = _features(found["x"], path)
    y, classes = _labels(found["y"], found.get("num_classes"), path)
    test, client = found.get("test"), found.get("client")
    if test is not None and not np.isin(test, (0, 1)).all():
        raise ValueError(f"{path}: test must be booleans or 0 and 1")
    if client is not None and client.dtype.kind not in "iuUS":
        raise ValueError(f"{path}: client ids must be integers or text, found dtype {client.dtype}")
    scale = found.get("scale", np.array(255.0 if x.dtype == np.uint8 else 1.0, np.float32))
    return Source(
        f"npz:{path}", x, y, classes, client, official_test=None if test is None else test.astype(bool),
        shift=found.get("shift", np.zeros((), np.float32)), scale=scale, licence="the file's own", where=str(path),
    )  # fmt: skip


def _features(x: np.ndarray, path: Path) -> np.ndarray:
    """uint8 as it is, other numbers as float32."""
    if x.dtype.kind not in "biuf" or x.ndim < 2:
        raise ValueError(f"{path}: x must be numbers of shape (samples, ...), found {x.dtype} {x.shape}")
    with np.errstate(over="ignore"):
        return x if x.dtype == np.uint8 else x.astype(np.float32)


def _labels(y: np.ndarray, declared: np.ndarray | None, path: Path) -> tuple[np.ndarray, int]:
    """Labels as int32 and the number of classes: all of 0..C-1 must occur unless the file says ``num_classes``."""
    if y.dtype.kind not in "iu":
        raise ValueError(f"{path}: y must be integers 0..C-1, found dtype {y.dtype}: {MAPPING}")
    present = np.unique(y)
    if declared is None and not np.array_equal(present, np.arange(len(present))):
        shown = ", ".join(str(label) for label in present[:8]) + (", ..." if len(present) > 8 else "")
        raise ValueError(f"{path}: labels are {shown} instead of 0..C-1: {MAPPING}, or store num_classes in the file")
    classes = len(present) if declared is None else int(declared)
    if present.size and (present[0] < 0 or present[-1] >= classes):
        raise ValueError(f"{path}: labels {present[0]}..{present[-1]} do not fit num_classes {classes}: {MAPPING}")
    return y.astype(np.int32), classes


NPZ = SourceEntry(
    "npz", "npz:FILE", "arrays x, y, optionally client, test, num_classes, shift, scale", "the file's own", _npz
)
