"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009) from local files: official batches, their archives, or packed arrays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_pfl.data.files import read_npz
from fedjax_pfl.data.memory import empty
from fedjax_pfl.data.sources.base import Source
from fedjax_pfl.data.sources.cifar_files import (
    ARCHIVES,
    FORMS,
    PIXELS,
    SIDE,
    Form,
    open_batches,
    read_binary,
    read_packed,
    read_pickled,
    records,
)  # fmt: skip

MOST = (50_000, 10_000)  # published training and test images
SURPLUS = 2  # bytes of a pickled batch by the bytes of its pixels, at most
STATISTICS = {  # mean and deviation of each channel of the 50,000 training images, pixels in 0..1
    10: ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    100: ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
LICENCE = "none stated: cite Krizhevsky, Learning multiple layers of features from tiny images (2009)"


class Arrays(NamedTuple):
    """images: ``(n, 32, 32, 3)`` uint8, training images first; labels: ``(n,)`` int32; train: how many are those."""

    images: np.ndarray
    labels: np.ndarray
    train: int


def shift_and_scale(classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of the channels in the units of uint8 pixels: two ``(3,)`` float32."""
    mean, deviation = (np.array(values, np.float32) * 255 for values in STATISTICS[classes])
    return mean, deviation


def read_cifar(path: Path, classes: int, coarse: bool = False) -> Source | None:
    """The set in a folder or archive, None where nothing of it is there; ``coarse`` takes CIFAR-100's 20 superclasses.

    Of several forms in a folder the binary batches come first, then python batches, archives, packed arrays.

    Raises:
        FileNotFoundError: some batches are missing.
        ValueError: truncated or damaged files, labels out of range, numbers of images that differ or exceed the set's.
    """
    for place, form in _places(path, classes):
        found = _read_packed(place, classes, coarse) if form is None else _read_batches(place, form, classes, coarse)
        shift, scale = shift_and_scale(classes)
        official = np.arange(len(found.labels)) >= found.train
        name = f"cifar{classes}{':coarse' * coarse}"
        where = f"{place}{'' if form is None else ', binary' if form.binary else ', python'}"
        return Source(
            name, found.images, found.labels, 20 if coarse else classes, official_test=official, shift=shift,
            scale=scale, licence=LICENCE, where=where,
        )  # fmt: skip
    return None


def _places(path: Path, classes: int) -> list[tuple[Path, Form | None]]:
    """What of the set is in a folder, the preferred form first (None: packed)."""
    if path.is_file():
        return [(path, form) for form in FORMS[classes] if form.binary == ("binary" in path.name)]
    places: list[tuple[Path, Form | None]] = [
        (path, form) for form in FORMS[classes] if any((path / name).is_file() for name in form.names)
    ]
    archives = zip(ARCHIVES[classes], FORMS[classes], strict=True)
    places += [(path / name, form) for name, form in archives if (path / name).is_file()]
    packed = (path / "labels.npz").is_file() and any(path.glob("train_images*.npy.xz"))
    return places + ([(path, None)] if packed else [])


def _read_batches(path: Path, form: Form, classes: int, coarse: bool) -> Arrays:
    column, count = (0 if coarse else 1, 2) if classes == 100 else (0, 1)
    keys = ("coarse_labels", "fine_labels") if classes == 100 else ("labels",)
    with open_batches(path, form) as (files, names):
        sizes = [files.member(name).size for name in names]
        rooms = [records(files, name, count) if form.binary else files.member(name).size // PIXELS for name in names]
        if form.binary:
            _check_sizes(rooms, path)
        elif sum(rooms) > SURPLUS * sum(MOST):
            raise ValueError(f"{path}: {sum(sizes)} bytes are more than the set has")
        images = empty((sum(rooms), SIDE, SIDE, 3), np.uint8)  # pages that are never written take no memory
        parts = np.split(images, np.cumsum(rooms)[:-1])
        labels = [np.zeros(0, np.int32)] * len(names)
        for at in sorted(range(len(names)), key=lambda at: files.member(names[at]).offset):
            name, part = names[at], parts[at]
            found = read_binary(files, name, part, count) if form.binary else read_pickled(files, name, part, keys)
            labels[at] = _checked(found[:, column], 20 if coarse else classes, files.place(name))
    sizes = [len(one) for one in labels]
    _check_sizes(sizes, path)
    done = 0
    for part, size in zip(parts, sizes, strict=True):  # a pickled batch is smaller than its file
        images[done : done + size] = part[:size]
        done += size
    return Arrays(images[:done], np.concatenate(labels), sum(sizes[:-1]))


def _check_sizes(sizes: Sequence[int], path: Path) -> None:
    """Training batches of one size (the last is the test set), no more images than were published."""
    if len(set(sizes[:-1])) > 1:
        raise ValueError(
            f"{path}: training batches have {list(sizes[:-1])} images, they must be equal: fetch them again"
        )
    if sum(sizes[:-1]) > MOST[0] or sizes[-1] > MOST[1]:
        raise ValueError(
            f"{path}: {sum(sizes[:-1])} training and {sizes[-1]} test images are more than the set's {MOST}"
        )


def _checked(labels: np.ndarray, classes: int, place: str) -> np.ndarray:
    bad = np.flatnonzero((labels < 0) | (labels >= classes))
    if bad.size:
        raise ValueError(f"{place}: label {labels[bad[0]]} of image {bad[0]} is outside 0..{classes - 1}: another set?")
    return labels.astype(np.int32)


def _read_packed(folder: Path, classes: int, coarse: bool) -> Arrays:
    """``labels.npz`` with train_labels and test_labels, and the images in ``train_images*.npy.xz``, ``test_*``."""
    found = read_npz(folder / "labels.npz", ["train_labels", "test_labels", "coarse_of_class"])
    place = str(folder / "labels.npz")
    wrong = [name for name in ("train_labels", "test_labels") if name not in found or found[name].ndim != 1
             or found[name].dtype.kind not in "iu"]  # fmt: skip
    if wrong or (coarse and found.get("coarse_of_class", np.zeros(0)).shape != (classes,)):
        raise ValueError(f"{place}: needs {wrong[0] if wrong else 'coarse_of_class'}, one whole number an entry")
    sizes = [len(found["train_labels"]), len(found["test_labels"])]
    _check_sizes(sizes, folder)
    images = empty((sum(sizes), SIDE, SIDE, 3), np.uint8)
    for stem, part in (("train", images[: sizes[0]]), ("test", images[sizes[0] :])):
        done = read_packed(folder, stem, part)
        if done != len(part):
            raise ValueError(
                f"{folder}: {done} {stem} images but {len(part)} labels: files are missing or of another set"
            )
    labels = _checked(np.concatenate([found["train_labels"], found["test_labels"]]), classes, place)
    if coarse:
        labels = _checked(found["coarse_of_class"][labels], 20, f"{place}, coarse_of_class")
    return Arrays(images, labels, sizes[0])
