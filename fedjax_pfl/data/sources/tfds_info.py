"""What a folder that TensorFlow Datasets has prepared says about itself, without asking that library.

It would import whatever classes ``features.json`` names. Only numbers, titles and file names are taken from the files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

INFO, FEATURES = "dataset_info.json", "features.json"
FORMATS = ("array_record", "tfrecord")
TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
_CLASSES = "tensorflow_datasets.core.features."
KINDS = {  # what the library calls its features in features.json
    f"{_CLASSES}features_dict.FeaturesDict": "FeaturesDict",
    f"{_CLASSES}image_feature.Image": "Image",
    f"{_CLASSES}class_label_feature.ClassLabel": "ClassLabel",
}


class Prepared(NamedTuple):
    """What a prepared folder promises: files and numbers of records of each split, and image and label."""

    name: str
    form: str
    files: dict[str, list[Path]]
    counts: dict[str, int]
    shape: tuple[int | None, ...]
    classes: int
    others: list[str]
    licence: str


def inspect(folder: Path, name: str) -> Prepared:
    """What the two JSON files of a prepared folder say; nothing that they name is imported.

    Raises:
        ValueError: other than TensorFlow Datasets writes them, no image classification set, another format.
    """
    info, features = read_json(folder / INFO), read_json(folder / FEATURES)
    if KINDS.get(str(features.get("pythonClassName"))) != "FeaturesDict" or "type" in features:
        raise ValueError(f"{folder / FEATURES}: is no FeaturesDict as TensorFlow Datasets writes it: prepare it again")
    form = info.get("fileFormat", "tfrecord")
    if form not in FORMATS:
        raise ValueError(f"{name}: {folder}: format {form} is not read here, {' and '.join(FORMATS)} are")
    place = folder / FEATURES
    try:
        parts = {str(key): dict(one) for key, one in features["featuresDict"]["features"].items()}
        named = {key: str(one.get("pythonClassName", "no class")) for key, one in parts.items()}
        check_features({key: KINDS.get(kind, kind) for key, kind in named.items()}, name)
        shape = _shape(parts["image"]["image"], name)
        classes = _number(parts["label"]["classLabel"]["numClasses"])
        place = folder / INFO
        files = {str(one["name"]): _files(folder, info, form, one) for one in info["splits"]}
        counts = {str(one["name"]): sum(map(_number, one.get("shardLengths", []))) for one in info["splits"]}
        title = "/".join(filter(None, (info["name"], info.get("configName"), info["version"])))
        stated = info.get("redistributionInfo", {}).get("license")
        home = next(iter(info.get("location", {}).get("urls", [])), "the page of the data set")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{place}: another structure than expected ({error!r}): prepare again") from error
    others = sorted(set(parts) - {"image", "label"})
    licence = str(stated or f"not stated; see {home}")
    return Prepared(title, form, files, counts, shape, classes, others, licence)


def _number(stated: Any) -> int:
    if not re.fullmatch(r"-?[0-9]{1,15}", str(stated)):
        raise TypeError(f"{str(stated)[:20]!r} is no whole number")
    return int(stated)


def _shape(image: Mapping[str, Any], name: str) -> tuple[int | None, ...]:
    """Height, width and channels of all images, None where they vary."""
    shape = tuple(None if _number(size) < 0 else _number(size) for size in image["shape"]["dimensions"])
    if image.get("dtype", "uint8") != "uint8" or len(shape) != 3:
        raise ValueError(f"{name}: images are {image.get('dtype')} {shape}, (h, w, c) of uint8 are needed")
    return shape


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: unreadable or something else.
    """
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read ({error}): prepare the data set again") from error
    return found


def _files(folder: Path, info: Mapping[str, Any], form: str, split: Mapping[str, Any]) -> list[Path]:
    """The files of a split; a name that would lead out of the folder is refused."""
    total, names = len(split.get("shardLengths", [])), []
    for shard in range(total):
        index, count = f"{shard:05d}", f"{total:05d}"
        values = {"DATASET": info["name"], "SPLIT": split["name"], "FILEFORMAT": form, "SHARD_INDEX": index}
        values |= {"NUM_SHARDS": count, "SHARD_X_OF_Y": f"{index}-of-{count}"}
        template = split.get("filepathTemplate") or TEMPLATE
        names.append(re.sub(r"\{(\w+)\}", lambda found: str(values[found[1]]), template))  # noqa: B023
    for name in names:
        if not re.fullmatch(r"[\w.+-]+", name):
            raise ValueError(f"{folder / INFO}: the file name {name[:60]!r} is refused: prepare the data set again")
    return [folder / name for name in names]


def check_features(kinds: Mapping[str, str], name: str) -> None:
    """Refuse a data set that is no image classification set. kinds: the class of each feature.

    Raises:
        ValueError: no feature ``image`` or ``label``, or of another kind, with the features found.
    """
    for key, kind in (("image", "Image"), ("label", "ClassLabel")):
        if kinds.get(key) != kind:
            shown = ", ".join(f"{other} ({found})" for other, found in kinds.items()) or "no names"
            raise ValueError(f"{name}: needs a feature {key} ({kind}), has {shown}: not a set of image classes")
