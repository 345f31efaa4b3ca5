"""UCI-HAR: human activities from the sensors of a smartphone, 30 people as clients.

Anguita, Ghio, Oneto, Parra, Reyes-Ortiz: "A Public Domain Dataset for Human Activity Recognition Using Smartphones",
ESANN 2013, https://archive.ics.uci.edu/dataset/240
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedjax_pfl.data.archives import Files, open_files
from fedjax_pfl.data.columns import read_columns
from fedjax_pfl.data.files import read_npy_xz, read_npz
from fedjax_pfl.data.memory import empty
from fedjax_pfl.data.sources.base import Source, SourceEntry
from fedjax_pfl.data.sources.finding import find_any

CHANNELS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
LENGTH, FEATURES, CLASSES = 128, 561, 6
ARCHIVE = "UCI HAR Dataset.zip"
USUAL = ("UCI HAR Dataset", ARCHIVE, "uci_har", "human+activity+recognition+using+smartphones.zip")
REMEDY = "fetch https://archive.ics.uci.edu/dataset/240 and give its folder or zip (see --data-dir)"


def _uci_har(argument: str, data_dir: Path | None) -> Source:
    """Raw windows: ``x (n, 128, 9)`` float32, channels as in ``CHANNELS``, in g and rad/s as published."""
    path = find_any(argument, USUAL, data_dir, REMEDY)
    if (path / "windows.npz").is_file():
        return _source("uci_har", path, *_packed(path))
    parts = _parts(path, signals=True)
    return _source("uci_har", path, *_joined(parts))


def _uci_har_features(argument: str, data_dir: Path | None) -> Source:
    """The 561 features of each window, scaled to -1..1 by their authors: ``x (n, 561)`` float32."""
    path = find_any(argument, USUAL, data_dir, REMEDY)
    return _source("uci_har_features", path, *_joined(_parts(path, signals=False)))


def _source(name: str, path: Path, x: np.ndarray, y: np.ndarray, subject: np.ndarray, test: np.ndarray) -> Source:
    """Windows stand in time order; neighbours of one bout share half of their samples."""
    same = (subject[1:] == subject[:-1]) & (y[1:] == y[:-1]) & (test[1:] == test[:-1])
    segment = np.concatenate([[0], np.cumsum(~same)]).astype(np.int32)
    return Source(
        f"{name}:{path}", x, y, CLASSES, subject, official_test=test, segment=segment, overlap=1,
        licence=UCI_HAR.licence, where=str(path),
    )  # fmt: skip


def _joined(parts: list[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    x, y, subject = (np.concatenate(leaves) for leaves in zip(*parts, strict=True))
    return x, y, subject, np.arange(len(y)) >= len(parts[0][1])


def _parts(path: Path, signals: bool) -> list[tuple[np.ndarray, ...]]:
    """Features, labels and subjects of the training and of the test part, from a folder or an archive."""
    with open_files(path) as files:
        inner = files.find(ARCHIVE)
        if inner is not None and files.find("train/y_train.txt") is None:  # the archive's own archive
            with open_files(files.read(inner), files.place(inner)) as nested:
                return [_part(nested, part, signals) for part in ("train", "test")]
        return [_part(files, part, signals) for part in ("train", "test")]


def _part(files: Files, part: str, signals: bool) -> tuple[np.ndarray, ...]:
    """``x``, ``y`` in 0..5 and the subject of each window."""
    label_file, subject_file = _name(files, f"{part}/y_{part}.txt"), _name(files, f"{part}/subject_{part}.txt")
    label = read_columns(files.read(label_file), files.place(label_file), 1, whole=True)[:, 0]
    wrong = (label < 1) | (label > CLASSES)
    if wrong.any():
        line = int(wrong.argmax())
        raise ValueError(f"{files.place(label_file)}: line {line + 1}: label {label[line]} is outside 1..{CLASSES}")
    subject = read_columns(files.read(subject_file), files.place(subject_file), 1, whole=True)[:, 0]
    _same_length(files, len(label), label_file, len(subject), subject_file)
    if signals:
        x = empty((len(label), LENGTH, len(CHANNELS)), np.float32)
        for place, channel in enumerate(CHANNELS):
            name = _name(files, f"{part}/Inertial Signals/{channel}_{part}.txt")
            x[..., place] = _table(files, name, LENGTH, len(label), label_file)
    else:
        x = _table(files, _name(files, f"{part}/X_{part}.txt"), FEATURES, len(label), label_file)
    return x, (label - 1).astype(np.int32), subject.astype(np.int32)


def _table(files: Files, name: str, columns: int, lines: int, label_file: str) -> np.ndarray:
    table = read_columns(files.read(name), files.place(name), columns)
    _same_length(files, lines, label_file, len(table), name)
    return table.astype(np.float32)


def _name(files: Files, ending: str) -> str:
    name = files.find(ending)
    if name is None:
        raise FileNotFoundError(f"{files.where}: has no {ending}: {REMEDY}")
    return name


def _same_length(files: Files, lines: int, name: str, others: int, other: str) -> None:
    if lines != others:
        raise ValueError(f"{files.place(name)} has {lines} lines but {other} has {others}: fetch them again")


def _packed(folder: Path) -> tuple[np.ndarray, ...]:
    """Windows that are cut from ``signals.npy.xz``, int16 ``(9, times)``, where ``windows.npz`` says."""
    place, names = folder / "windows.npz", ["start", "label", "subject", "is_test"]
    found = read_npz(place, [*names, "step"])
    signals = read_npy_xz(folder / "signals.npy.xz")
    missing = [name for name in [*names, "step"] if name not in found]
    if missing or len({found[name].shape for name in names}) > 1 or found["start"].ndim != 1 or found["step"].ndim:
        raise ValueError(
            f"{place}: needs {', '.join(names)}, one entry a window, and step: lacks {missing or 'entries'}"
        )
    if signals.ndim != 2 or len(signals) != len(CHANNELS) or signals.dtype.kind != "i":
        raise ValueError(f"{folder / 'signals.npy.xz'}: needs whole numbers (9, times), found {signals.shape}")
    start, label = found["start"].astype(np.int64), found["label"].astype(np.int32)
    outside = (start < 0) | (start > signals.shape[1] - LENGTH) | (label < 0) | (label >= CLASSES)
    if outside.any():
        window = int(outside.argmax())
        raise ValueError(f"{place}: window {window} has a start beyond the signals or a label outside 0..{CLASSES - 1}")
    views = np.lib.stride_tricks.sliding_window_view(signals.T, LENGTH, axis=0)  # (times, 9, 128)
    x = np.ascontiguousarray(views[start].transpose(0, 2, 1)) * np.float32(found["step"])
    return x, label, found["subject"].astype(np.int32), found["is_test"].astype(bool)


UCI_HAR = SourceEntry(
    "uci_har",
    "uci_har[:DIR]",
    "activities from 9 sensor signals in windows of 128, 30 people as clients",
    "CC BY 4.0 as listed by UCI; the data set's own readme forbids commercial use",
    _uci_har,
)
UCI_HAR_FEATURES = SourceEntry(
    "uci_har_features",
    "uci_har_features[:DIR]",
    "the same windows by their 561 published features",
    UCI_HAR.licence,
    _uci_har_features,
)
