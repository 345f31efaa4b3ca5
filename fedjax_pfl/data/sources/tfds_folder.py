"""Folders that TensorFlow Datasets has prepared: found by name, and their images read without TensorFlow."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fedjax_pfl.data.sources import cache
from fedjax_pfl.data.sources.crc32c import masked
from fedjax_pfl.data.sources.tfds_info import FEATURES, INFO, Prepared, inspect, read_json

VERSION = re.compile(r"\d+\.\d+\.\d+")
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
    info = read_json(folder / INFO)
    config = info.get("configName")
    return name in (info.get("name"), f"{info.get('name')}/{config}") if config else info.get("name") == name


def fingerprint(folder: Path) -> str:
    """Twelve hexadecimal digits that change with the names, sizes and dates of the files and with what they promise."""
    digest = hashlib.sha256((folder / INFO).read_bytes() + (folder / FEATURES).read_bytes())
    for path in sorted(folder.iterdir()):
        digest.update(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}\n".encode())
    return digest.hexdigest()[:12]


def convert(folder: Path, target: Path, name: str) -> None:
    """Store train and test images of a prepared folder as arrays in ``target`` (see ``cache.store``).

    Raises:
        ValueError: no image, label or train split, records in another format, damaged records (by their checksums),
            images of several sizes.
    """
    found = inspect(folder, name)
    if "train" not in found.counts:
        raise ValueError(f"{name}: needs the split train, has {', '.join(found.counts) or 'none'}")
    about = {
        "name": found.name, "classes": found.classes,
        "ignored": [f"split {split}" for split in sorted(set(found.counts) - set(SPLITS))]
        + [f"feature {key}" for key in found.others],
        "licence": found.licence,
    }  # fmt: skip
    splits = [split for split in SPLITS if split in found.counts]
    for path in (path for split in splits for path in found.files[split]):
        if not path.is_file():
            raise ValueError(f"{name}: {path}: is missing: prepare the data set again")
    count = sum(found.counts[split] for split in splits)
    if count > sum(path.stat().st_size for split in splits for path in found.files[split]):
        raise ValueError(f"{folder / INFO}: promises {count} records, more than the files can hold: prepare again")
    samples = (sample for split in splits for sample in _samples(found, split, name))
    cache.store(target, count, samples, about, name)


def _samples(found: Prepared, split: str, name: str) -> Iterator[tuple[np.ndarray, int, bool, str]]:
    """Image, label, whether of the test set, and place of each record, in the stored order."""
    import tensorflow_datasets as tfds

    image = tfds.features.Image(shape=found.shape, dtype=np.uint8)
    label = tfds.features.ClassLabel(num_classes=found.classes)
    features = tfds.features.FeaturesDict({"image": image, "label": label})
    read = _array_records if found.form == "array_record" else _tfrecords
    try:
        number = 0
        for path in found.files[split]:
            for record in read(path):
                one = features.deserialize_example_np(record)
                yield one["image"], int(one["label"]), split == "test", f"image {number} of {split}"
                number += 1
    except Exception as error:
        raise ValueError(
            f"{name}: {found.files[split][0].parent}: records of {split} are damaged ({error}): prepare again"
        ) from error


def _array_records(path: Path) -> Iterator[bytes]:
    """The records of a file, whose checksums the library compares."""
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    with ArrayRecordDataSource([str(path)]) as records:
        for start in range(0, len(records), BATCH):
            yield from records.__getitems__(range(start, min(start + BATCH, len(records))))


def _tfrecords(path: Path) -> Iterator[bytes]:
    """The records of a file: each a length (uint64) with its masked CRC32C, that many bytes with theirs."""
    left = path.stat().st_size
    with open(path, "rb") as stream:
        while left:
            head = stream.read(12)
            size = struct.unpack("<Q", head[:8])[0] if len(head) == 12 else left
            left -= 16 + size
            if left < 0:
                raise ValueError(f"{path.name} is truncated")
            record = stream.read(size)
            if head[8:] + stream.read(4) != struct.pack("<II", masked(head[:8]), masked(record)):
                raise ValueError(f"{path.name}: a record has another checksum than is stored")
            yield record
