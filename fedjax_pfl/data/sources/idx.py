"""MNIST-style idx files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedjax_pfl.data.checks import MAPPING
from fedjax_pfl.data.files import read_idx, read_npz
from fedjax_pfl.data.memory import empty
from fedjax_pfl.data.sources.base import Source, SourceEntry, locate


def _idx_file(folder: Path, stem: str, rank: int) -> Path | None:
    """``stem-idx3-ubyte`` in a folder, also with a dot for the first dash behind the stem, also gzipped."""
    names = [f"{stem}{dash}idx{rank}-ubyte{end}" for end in ("", ".gz") for dash in "-."]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _idx_pair(folder: Path, stem: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Images ``(n, h, w, 1)`` and labels ``(n,)`` of one pair of files, None where both are missing."""
    images, labels = _idx_file(folder, f"{stem}-images", 3), _idx_file(folder, f"{stem}-labels", 1)
    if images is None and labels is None:
        return None
    if images is None or labels is None:
        lost = f"{stem}-images-idx3-ubyte" if images is None else f"{stem}-labels-idx1-ubyte"
        raise FileNotFoundError(
            f"{folder}: {lost} (or .gz) is missing beside its partner: add it or remove the partner"
        )
    x, y = read_idx(images, 3), read_idx(labels, 1)
    if len(x) != len(y):
        raise ValueError(f"{images} has {len(x)} images but {labels} has {len(y)} labels: they do not belong together")
    return x[..., None], y.astype(np.int32)


def _mnist_idx(argument: str, data_dir: Path | None) -> Source:
    if not argument and data_dir is not None and _idx_file(data_dir, "train-images", 3):
        argument = "."
    return read_folder(locate(argument or "mnist", data_dir))


def read_folder(folder: Path, stems: tuple[str, str] = ("train", "t10k"), first: int = 0) -> Source:
    """The source of a folder with the pairs ``STEM-images-idx3-ubyte`` and ``STEM-labels-idx1-ubyte`` (or .gz).

    stems: of the training and the test pair, which may be missing. first: the label of the first class.

    Raises:
        FileNotFoundError: no training pair, a file without its partner.
        ValueError: damaged files, numbers or sizes of images that differ, labels that do not start at ``first``.
    """
    train, test = (_idx_pair(folder, stem) for stem in stems)
    if train is None:
        raise FileNotFoundError(
            f"{folder}: no {stems[0]}-images-idx3-ubyte and {stems[0]}-labels-idx1-ubyte (or .gz): put MNIST's four "
            "files there, for instance from https://ossci-datasets.s3.amazonaws.com/mnist/"
        )
    pairs = [train] if test is None else [train, test]
    if len({x.shape[1:] for x, _ in pairs}) > 1:
        raise ValueError(f"{folder}: training and test images differ in size: {[x.shape[1:] for x, _ in pairs]}")
    y = np.concatenate([y for _, y in pairs])
    x = np.concatenate([x for x, _ in pairs], out=empty((len(y), *train[0].shape[1:]), np.uint8))
    if y.size and y.min() != first and (first or y.min() > 0):
        raise ValueError(f"{folder}: labels start at {y.min()} instead of {first}: store them as npz and {MAPPING}")
    y = y - first if first else y
    official = None if test is None else np.arange(len(y)) >= len(train[1])
    return Source(
        f"mnist-idx:{folder}", x, y, int(y.max(initial=0)) + 1, _writers(folder, pairs), official_test=official,
        scale=255.0, licence=MNIST_IDX.licence, where=str(folder),
    )  # fmt: skip


def has_pair(folder: Path, stem: str) -> bool:
    """Whether a folder has at least one file of a pair."""
    return any(_idx_file(folder, f"{stem}-{kind}", rank) for kind, rank in (("images", 3), ("labels", 1)))


def _writers(folder: Path, pairs: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray | None:
    """Writer numbers from an optional ``writers.npz`` (``train_writer``, ``test_writer``) beside the images."""
    if not (folder / "writers.npz").is_file():
        return None
    names = ["train_writer", "test_writer"][: len(pairs)]
    found = read_npz(folder / "writers.npz", names)
    if [found[name].shape if name in found else None for name in names] != [y.shape for _, y in pairs]:
        raise ValueError(f"{folder / 'writers.npz'}: needs {names}, one writer an image: correct or remove it")
    return np.concatenate([found[name] for name in names])


MNIST_IDX = SourceEntry(
    "mnist-idx",
    "mnist-idx[:DIR]",
    "MNIST's four idx or idx.gz files (or Fashion-MNIST's), natural clients from writers.npz where it exists",
    "CC BY-SA 3.0 as commonly given for MNIST; MIT for Fashion-MNIST",
    _mnist_idx,
)
