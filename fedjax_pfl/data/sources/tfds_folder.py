"""Folders that TensorFlow Datasets has prepared: found by name, and their images read without TensorFlow."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.data.sources import cache

VERSION = re.compile(r"\d+\.\d+\.\d+")
INFO, FEATURES = "dataset_info.json", "features.json"
BATCH = 256  # records fetched at once: one by one is twice as slow
SPLITS = ("train", "test")


def find(base: Path, name: str) -> Path | None:
    """The newest prepared version of ``NAME[/CONFIG]`` in ``base``, or in ``base/NAME[/CONFIG]``, or None.

    ``base`` itself may be that version's folder, or the folder of versions, if its files say that it is this set.
    """
    for folder in (base, base / name):
        versions = [path for path in folder.glob("*") if VERSION.fullmatch(path.name)] if folder.is_dir() else []
        versions.sort(key=lambda path: [int(part) for part in path.name.split(".")])
        for candidate in (folder, *reversed(versions)):
            if (candidate / INFO).is_file() and (candidate / FEATURES).is_file() and _is(candidate, name):
                return candidate
    return None


def _is(folder: Path, name: str) -> bool:
    info = _json(folder / INFO)
    config = info.get("configName")
    return name in (info.get("name"), f"{info.get('name')}/{config}") if config else info.get("name") == name


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error}): prepare the data set again") from error
    return found


def fingerprint(folder: Path) -> str:
    """Twelve hexadecimal digits that change with the names, sizes and dates of the files and with what they promise."""
    digest = hashlib.sha256((folder / INFO).read_bytes() + (folder / FEATURES).read_bytes())
    for path in sorted(folder.iterdir()):
        digest.update(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}\n".encode())
    return digest.hexdigest()[:12]


def convert(folder: Path, target: Path, name: str) -> None:
    """Store train and test images of a prepared folder as arrays in ``target`` (see ``cache.store``).

    Raises:
        ValueError: no image, label or train split, records in another format, damaged records, images of several sizes.
    """
    foreign = re.findall(r'"pythonClassName"\s*:\s*"(?!tensorflow_datasets\.)([^"]*)"', (folder / FEATURES).read_text())
    if foreign:  # the library would import it
        raise ValueError(f"{folder / FEATURES}: names the class {foreign[0]}, which is not of TensorFlow Datasets")
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder_from_directory(folder)
    except Exception as error:
        raise ValueError(f"{folder}: no prepared data set ({error}): prepare it again") from error
    check_features(builder.info.features, name)
    counts = {split: info.num_examples for split, info in builder.info.splits.items()}
    if "train" not in counts:
        raise ValueError(f"{name}: needs the split train, has {', '.join(counts) or 'none'}")
    about = {
        "name": builder.info.full_name, "classes": builder.info.features["label"].num_classes,
        "ignored": [f"split {split}" for split in sorted(set(counts) - set(SPLITS))]
        + [f"feature {key}" for key in sorted(set(builder.info.features) - {"image", "label"})],
        "licence": _licence(builder.info),
    }  # fmt: skip
    splits = [split for split in SPLITS if split in counts]
    samples = (sample for split in splits for sample in _samples(builder, split, name))
    cache.store(target, sum(counts[split] for split in splits), samples, about, name)


def check_features(features: Any, name: str) -> None:
    """Refuse a data set that is no image classification set.

    Raises:
        ValueError: no feature ``image`` or ``label``, or of another kind, with the features found.
    """
    import tensorflow_datasets as tfds

    found = dict(features.items()) if hasattr(features, "items") else {}
    for key, kind in (("image", tfds.features.Image), ("label", tfds.features.ClassLabel)):
        if not isinstance(found.get(key), kind):
            shown = ", ".join(f"{other} ({type(feature).__name__})" for other, feature in found.items()) or "no names"
            raise ValueError(
                f"{name}: needs a feature {key} ({kind.__name__}), has {shown}: not a set of image classes"
            )


def _licence(info: Any) -> str:
    stated = getattr(info.redistribution_info, "license", "") or ""
    return str(stated) or f"not stated; see {info.homepage or 'the page of the data set'}"


def _samples(builder: Any, split: str, name: str) -> Iterator[tuple[np.ndarray, int, bool, str]]:
    """Image, label, whether of the test set, and place of each record, in the stored order."""
    try:
        for number, example in enumerate(_examples(builder, split)):
            yield example["image"], int(example["label"]), split == "test", f"image {number} of {split}"
    except Exception as error:
        raise ValueError(
            f"{name}: {builder.data_path}: records of {split} are damaged ({error}): prepare again"
        ) from error


def _examples(builder: Any, split: str) -> Iterator[dict[str, Any]]:
    kind = builder.info.file_format.value
    if kind == "array_record":
        records = builder.as_data_source(split=split)
        for start in range(0, len(records), BATCH):
            yield from records.__getitems__(range(start, min(start + BATCH, len(records))))
    elif kind == "tfrecord":
        for path in builder.info.splits[split].filepaths:
            for record in _tfrecords(Path(path)):
                yield builder.info.features.deserialize_example_np(record)
    else:
        raise ValueError(f"format {kind} is not read here, array_record and tfrecord are")


def _tfrecords(path: Path) -> Iterator[bytes]:
    """The records of a file: each a length (uint64) with a checksum, that many bytes, a checksum."""
    left = path.stat().st_size
    with open(path, "rb") as stream:
        while left:
            head = stream.read(12)
            size = struct.unpack("<Q", head[:8])[0] if len(head) == 12 else left
            left -= 16 + size
            if left < 0:
                raise ValueError(f"{path.name} is truncated")
            yield stream.read(size)
            stream.read(4)
