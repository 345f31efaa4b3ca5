"""LEAF's JSON files, user by user.

The files are what LEAF's ``preprocess.sh`` leaves, ``data/train/*.json`` and ``data/test/*.json``, each with ``users``,
``num_samples`` and ``user_data``. They are read one after the other, which takes about ten times the largest file in
memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_pfl.data.archives import Files, open_files

REMEDY = "make it with https://github.com/TalwalkarLab/leaf (preprocess.sh) and give its folder or a zip of data/"


class User(NamedTuple):
    """The samples of one user in one file; ``place`` is what errors call it."""

    place: str
    name: str
    x: list[Any]
    y: list[Any]
    test: bool


def read_users(path: Path) -> Iterator[User]:
    """All users of all files, the training files first, in the order of the files' names.

    A folder or archive without ``train`` and ``test`` folders is read whole, as training data. With them, the other
    folders that LEAF's scripts leave (``all_data``, ``sampled_data``, ...) are stages of the same data and not read.

    Raises:
        FileNotFoundError: no JSON file.
        ValueError: damaged JSON (with its position), users without data or data without users, counts that disagree.
    """
    if path.is_file() and path.suffix == ".json":
        yield from _file_users(path.read_bytes(), str(path), False)
        return
    with open_files(path) as files:
        chosen = _chosen(files)
        for name, test in chosen:
            yield from _file_users(files.read(name), files.place(name), test)


def _chosen(files: Files) -> list[tuple[str, bool]]:
    """The JSON files to read, and whether they are of the test set."""
    names = [name for name in files.names() if name.endswith(".json")]
    parts = {part: [name for name in names if Path(name).parent.name == part] for part in ("train", "test")}
    if not names or (parts["test"] and not parts["train"]):
        raise FileNotFoundError(f"{files.where}: has no train/*.json: {REMEDY}")
    if not parts["train"]:
        parts["train"] = names
    folders = sorted({str(Path(name).parent) for name in parts["train"]})
    if len(folders) > 1:
        raise ValueError(f"{files.where}: has JSON files in {', '.join(folders)}: name one of these folders")
    return [(name, False) for name in parts["train"]] + [(name, True) for name in parts["test"]]


def _file_users(data: bytes, place: str, test: bool) -> Iterator[User]:
    found = _parse(data, place)
    users, counts, held = (found.get(key) for key in ("users", "num_samples", "user_data"))
    if not isinstance(users, list) or not isinstance(counts, list) or not isinstance(held, dict):
        raise ValueError(f"{place}: needs the lists users and num_samples and the object user_data: {REMEDY}")
    if len(users) != len(counts) or not all(isinstance(user, str) for user in users) or len(set(users)) != len(users):
        raise ValueError(f"{place}: needs distinct users, and one entry of num_samples for each of {len(users)}")
    extra = sorted(set(held) - set(users))
    if extra:
        raise ValueError(f"{place}: user {extra[0]!r} is in user_data but not in users: damaged, make it again")
    for user, count in zip(users, counts, strict=True):
        own = held.pop(user, None)
        if not isinstance(own, dict) or not isinstance(own.get("x"), list) or not isinstance(own.get("y"), list):
            raise ValueError(f"{place}: user {user!r} has no lists x and y in user_data: damaged, make it again")
        if not len(own["x"]) == len(own["y"]) == count:
            raise ValueError(
                f"{place}: user {user!r} has {len(own['x'])} x, {len(own['y'])} y and num_samples {count}: damaged"
            )
        yield User(f"{place}: user {user!r}", user, own["x"], own["y"], test)


def _parse(data: bytes, place: str) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise ValueError(f"the key {key[:60]!r} occurs twice")
                seen.add(key)
        return made

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no finite number")

    try:
        found = json.loads(data, object_pairs_hook=once, parse_constant=refuse)
    except (ValueError, RecursionError) as error:  # a JSONDecodeError says line and column
        raise ValueError(f"{place}: no usable JSON ({error}): truncated or damaged, make it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{place}: holds no object with users, num_samples and user_data: {REMEDY}")
    return found
