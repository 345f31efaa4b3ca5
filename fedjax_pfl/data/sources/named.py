"""The image sets that people ask for by name: from local files in any known form, else from TensorFlow Datasets."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path

import numpy as np

from fedjax_pfl.data.sources import tfds, tfds_folder
from fedjax_pfl.data.sources.base import DATA_VARIABLE, Source, SourceEntry, locate
from fedjax_pfl.data.sources.named_sets import NAMED, Named, cifar_set


def load_named(name: str, argument: str, data_dir: Path | None) -> Source:
    """A set of ``NAMED``; ``argument`` is a folder, or ``[DIR,]coarse`` for CIFAR-100's 20 superclasses.

    Local files are looked for in the folder of the argument, else in ``data_dir``; without both as ``./NAME`` and in
    the folder of the environment variable FEDJAX_PFL_DATA, and only then the set is downloaded.

    Raises:
        FileNotFoundError: nothing that fits in the folder that was given, with what was looked for and where to get it.
        ValueError: unusable files, more images than were published, the files of another set, no network.
    """
    coarse = name == "cifar100" and (argument == "coarse" or argument.endswith(",coarse"))
    one = cifar_set(100, coarse=True) if coarse else NAMED[name]
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
