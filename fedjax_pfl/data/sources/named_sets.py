"""What is published about the image sets that are known by name, and how their files are read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_pfl.data.sources import cifar, idx
from fedjax_pfl.data.sources.base import Source


class Named(NamedTuple):
    """What is published about a set, and how a local copy of it is read.

    train, test: published numbers of images. counts: images of each class in the whole training set, or None.
    first: the label that the files give to the first class. folders: names of its folder other than its own.
    read: the source of a folder, or None where the folder holds nothing of the set. scaling: shift and scale, if known.
    prepared: whether TensorFlow Datasets has it in this form.
    """

    name: str
    classes: int
    train: int
    test: int
    description: str
    licence: str
    get: str
    read: Callable[[Path], Source | None]
    forms: str
    folders: tuple[str, ...] = ()
    counts: tuple[int, ...] | None = None
    first: int = 0
    scaling: tuple[np.ndarray, np.ndarray] | None = None
    prepared: bool = True


MNIST_COUNTS = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
CIFAR_FOLDERS = {
    10: ("cifar-10-batches-py", "cifar-10-batches-bin"),
    100: ("cifar-100-python", "cifar-100-binary"),
}
EMNIST = {  # classes, training images, test images, label of the first class
    "byclass": (62, 697_932, 116_323, 0),
    "bymerge": (47, 697_932, 116_323, 0),
    "balanced": (47, 112_800, 18_800, 0),
    "letters": (26, 124_800, 20_800, 1),
    "digits": (10, 240_000, 40_000, 0),
    "mnist": (10, 60_000, 10_000, 0),
}


def _read_idx(folder: Path, stems: tuple[str, str] = ("train", "t10k"), first: int = 0) -> Source | None:
    return idx.read_folder(folder, stems, first) if any(idx.has_pair(folder, stem) for stem in stems) else None


def _read_nothing(folder: Path) -> None:
    return None


def _mnist_like(name: str, what: str, licence: str, get: str, counts: tuple[int, ...]) -> Named:
    return Named(
        name, 10, 60_000, 10_000, f"{what}, 28x28", licence, get, _read_idx, "the four idx or idx.gz files",
        counts=counts,
    )  # fmt: skip


def _emnist(split: str) -> Named:
    classes, train, test, first = EMNIST[split]
    stems = (f"emnist-{split}-train", f"emnist-{split}-test")
    return Named(
        f"emnist/{split}", classes, train, test, "handwritten characters, 28x28, transposed as published",
        "none stated: data of NIST, cite Cohen et al. 2017", "https://www.nist.gov/itl/products-and-services/emnist-dataset",
        functools.partial(_read_idx, stems=stems, first=first), f"{stems[0]}-images-idx3-ubyte.gz and the other three",
        ("emnist",), first=first,
    )  # fmt: skip


def cifar_set(classes: int, coarse: bool = False) -> Named:
    """CIFAR-10 or CIFAR-100; coarse: CIFAR-100 with its 20 superclasses."""
    return Named(
        f"cifar{classes}", 20 if coarse else classes, *cifar.MOST, "colour photographs, 32x32x3", cifar.LICENCE,
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        functools.partial(cifar.read_cifar, classes=classes, coarse=coarse),
        "binary or python batches or their .tar.gz or labels.npz with *_images*.npy.xz", CIFAR_FOLDERS[classes],
        (2500 if coarse else 50_000 // classes,) * (20 if coarse else classes), scaling=cifar.shift_and_scale(classes),
        prepared=not coarse,
    )  # fmt: skip


NAMED: dict[str, Named] = {
    one.name: one
    for one in (
        _mnist_like("mnist", "handwritten digits", "CC BY-SA 3.0 as commonly given",
                    "https://ossci-datasets.s3.amazonaws.com/mnist/", MNIST_COUNTS),
        _mnist_like("fashion_mnist", "pictures of clothes", "MIT",
                    "https://github.com/zalandoresearch/fashion-mnist", (6000,) * 10),
        *(_emnist(split) for split in EMNIST),
        cifar_set(10),
        cifar_set(100),
        Named("svhn_cropped", 10, 73_257, 26_032, "digits of house numbers, 32x32x3", "for non-commercial use only",
              "http://ufldl.stanford.edu/housenumbers/", _read_nothing, "files of its own"),
    )
}  # fmt: skip
