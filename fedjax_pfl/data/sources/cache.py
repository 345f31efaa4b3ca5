"""Prepared images on disk: memory-mapped arrays in a folder that appears whole or not at all."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

CACHE_VARIABLE = "FEDJAX_PFL_CACHE"
ABOUT = "about.json"
FILES = {"images": "images.npy", "labels": "labels.npy", "test": "test.npy"}


class Images(NamedTuple):
    """images: ``(n, h, w, c)`` uint8, mapped; labels: ``(n,)`` int32; test: ``(n,)`` bool; about: what was stored."""

    images: np.ndarray
    labels: np.ndarray
    test: np.ndarray
    about: dict[str, Any]


def cache_folder() -> Path:
    """Where prepared data is kept: FEDJAX_PFL_CACHE, else ``fedjax_pfl`` in XDG_CACHE_HOME, else in ``~/.cache``."""
    if os.environ.get(CACHE_VARIABLE):
        return Path(os.environ[CACHE_VARIABLE]).expanduser().absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "fedjax_pfl"  # a relative XDG path is void


def store(
    folder: Path, count: int, samples: Iterable[tuple[np.ndarray, int, bool, str]], about: Mapping[str, Any], name: str
) -> None:
    """Write ``count`` samples (image, label, is test, place) one by one; ``name`` and the place appear in errors.

    Raises:
        ValueError: images of several sizes or no uint8, a negative label, more or fewer samples than ``count``.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        labels, test = np.empty(count, np.int32), np.empty(count, bool)
        with open(partial / FILES["images"], "wb") as stream:
            shape = _write_images(stream, count, samples, labels, test, name)
        np.save(partial / FILES["labels"], labels)
        np.save(partial / FILES["test"], test)
        arrays = {"images": shape, "labels": labels.shape, "test": test.shape}
        files = {key: {"shape": list(arrays[key]), "sha256": _sha256(partial / FILES[key])} for key in FILES}
        (partial / ABOUT).write_text(json.dumps({**about, "files": files}, indent=1))
        try:
            os.rename(partial, folder)
        except OSError:
            if not (folder / ABOUT).is_file():  # another process was quicker otherwise, and wrote the same
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_images(
    stream: IO[bytes],
    count: int,
    samples: Iterable[tuple[np.ndarray, int, bool, str]],
    labels: np.ndarray,
    test: np.ndarray,
    name: str,
) -> tuple[int, ...]:
    """Write the images behind one npy header and fill the labels; the shape of all."""
    first, done = None, 0
    for image, label, is_test, place in samples:
        if first is None:
            first = (image.shape, place)
            header = {"descr": "|u1", "fortran_order": False, "shape": (count, *image.shape)}
            np.lib.format.write_array_header_1_0(stream, header)
        if image.dtype != np.uint8 or image.ndim != 3:
            raise ValueError(f"{name}: {place} is {image.dtype} {image.shape}, images (h, w, c) of uint8 are needed")
        if image.shape != first[0]:
            raise ValueError(
                f"{name}: images differ in size: {first[1]} has {first[0]}, {place} has {image.shape}: resize them, "
                "store them in folders of classes and load those with folder:DIR,size=32"
            )
        if label < 0 or done == count:
            raise ValueError(
                f"{name}: {place} has no label" if label < 0 else f"{name}: holds more than {count} images"
            )
        stream.write(np.ascontiguousarray(image).data)
        labels[done], test[done] = label, is_test
        done += 1
    if first is None or done < count:
        raise ValueError(f"{name}: holds {done} of the {count} images that it announces: prepare it again")
    return (count, *first[0])


def read(folder: Path) -> Images:
    """The arrays that ``store`` wrote, the images mapped into memory and not read yet.

    Raises:
        ValueError: another shape, type or hash than was stored, with the folder to delete.
    """
    try:
        about = json.loads((folder / ABOUT).read_text())
        arrays = {key: _open(folder / FILES[key], about["files"][key]) for key in FILES}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}: the cached data is damaged ({error}): delete this folder, load again") from error
    return Images(np.asarray(arrays["images"]), np.array(arrays["labels"]), np.array(arrays["test"]), about)


def _open(path: Path, promised: Mapping[str, Any]) -> np.ndarray:
    kind, shape = {"images": np.uint8, "labels": np.int32, "test": np.bool_}[path.stem], tuple(promised["shape"])
    if path.stat().st_size < math.prod(shape) * np.dtype(kind).itemsize:
        raise ValueError(f"{path.name} is truncated")
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.shape != shape or array.dtype != kind:
        raise ValueError(f"{path.name} holds {array.dtype} {array.shape} instead of {shape}")
    if _sha256(path) != promised["sha256"]:
        raise ValueError(f"{path.name} has another sha256 than was stored")
    return array


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
