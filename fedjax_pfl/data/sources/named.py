"""The image sets that people ask for by name: from local files in any known form, else from TensorFlow Datasets."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_pfl.data.sources import cifar, idx, tfds, tfds_folder
from fedjax_pfl.data.sources.base import DATA_VARIABLE, Source, SourceEntry, locate


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


def _cifar(classes: int, coarse: bool = False) -> Named:
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
        _cifar(10),
        _cifar(100),
        Named("svhn_cropped", 10, 73_257, 26_032, "digits of house numbers, 32x32x3", "for non-commercial use only",
              "http://ufldl.stanford.edu/housenumbers/", _read_nothing, "files of its own"),
    )
}  # fmt: skip


def load_named(name: str, argument: str, data_dir: Path | None) -> Source:
    """A set of ``NAMED``; ``argument`` is a folder, or ``[DIR,]coarse`` for CIFAR-100's 20 superclasses.

    Local files are looked for in the folder of the argument, else in ``data_dir``; without both as ``./NAME`` and in
    the folder of the environment variable FEDJAX_PFL_DATA, and only then the set is downloaded.

    Raises:
        FileNotFoundError: nothing that fits in the folder that was given, with what was looked for and where to get it.
        ValueError: unusable files, more images than were published, the files of another set, no network.
    """
    coarse = name == "cifar100" and (argument == "coarse" or argument.endswith(",coarse"))
    one = _cifar(100, coarse=True) if coarse else NAMED[name]
    path = argument.removesuffix("coarse").removesuffix(",") if coarse else argument
    given = locate(path, data_dir) if path else data_dir
    if given is not None and not given.exists():
        raise FileNotFoundError(f"the data folder {str(given)!r} does not exist: correct --data-dir")
    places = _places(given, one) if given is not None else [Path(name)]
    if given is None and os.environ.get(DATA_VARIABLE):
        places += _places(Path(os.environ[DATA_VARIABLE]), one)
    for place in places:
        found = _local(place, one)
        if found is not None:
            return _finished(found, one)
    if given is not None or not one.prepared:
        tried = ", ".join(str(place.absolute()) for place in places)
        raise FileNotFoundError(
            f"{name}: no {one.forms} and no folder prepared by TensorFlow Datasets in {tried}: get it from {one.get}"
            + (", or leave --data-dir out to download it" if one.prepared else " and give its folder with --data-dir")
        )
    return _finished(tfds.downloaded(name), one)


def _places(base: Path, one: Named) -> list[Path]:
    return [base] if base.is_file() else [base, base / one.name, *(base / folder for folder in one.folders)]


def _local(place: Path, one: Named) -> Source | None:
    """The set in one folder or archive, None where nothing of it is there."""
    if not place.exists():
        return None
    found = one.read(place)
    if found is None and place.is_dir() and one.prepared:
        folder = tfds_folder.find(place, one.name)
        found = None if folder is None else tfds.prepared(folder, one.name)
    return found


def _finished(found: Source, one: Named) -> Source:
    """Checked against what is published, with the set's name, licence, and shift and scale."""
    test = np.zeros(len(found), bool) if found.official_test is None else found.official_test
    train, held_out = int((~test).sum()), int(test.sum())
    y = found.y - one.first if found.name.startswith("tfds:") and one.first else found.y
    if train > one.train or held_out > one.test:
        raise ValueError(
            f"{found.where}: {train} training and {held_out} test images are more than {one.name} has "
            f"({one.train} and {one.test}): another set"
        )
    if y.min() < 0 or y.max() >= one.classes:
        raise ValueError(f"{found.where}: labels {y.min()}..{y.max()} do not fit {one.name}'s {one.classes} classes")
    if one.counts and train == one.train and tuple(np.bincount(y[~test], minlength=one.classes)) != one.counts:
        raise ValueError(f"{found.where}: the classes have other sizes than in {one.name}: the files of another set")
    note = "" if (train, held_out) == (one.train, one.test) else (
        f"; a part: {train:,} of {one.train:,} training and {held_out:,} of {one.test:,} test images"
    )  # fmt: skip
    shift, scale = one.scaling or (found.shift, found.scale)
    name = one.name + ":coarse" * found.name.endswith(":coarse")
    return dataclasses.replace(
        found, name=name, y=y, num_classes=one.classes, shift=shift, scale=scale, licence=one.licence,
        where=found.where + note,
    )  # fmt: skip


def _entry(one: Named) -> SourceEntry:
    options = "[:DIR][,coarse]" if one.name == "cifar100" else "[:DIR]"
    about = f"{one.description}: {one.train:,} + {one.test:,} images, {one.classes} classes; from {one.get}"
    return SourceEntry(one.name, one.name + options, about, one.licence, functools.partial(load_named, one.name))


NAMED_ENTRIES = tuple(_entry(one) for one in NAMED.values())
