"""Configurations as TOML: written complete, read with types checked. An option that is None is left out."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, Literal

from fedjax_pfl.experiment.config import SECTIONS, Config
from fedjax_pfl.experiment.errors import UserError, nearest


def dumps(config: Config) -> str:
    """The configuration as TOML: ``algorithm``, its ``[options]``, and one table for every section."""
    parts = {"options": config.options} | {name: getattr(config, name) for name in SECTIONS}
    return f"algorithm = {value(config.algorithm)}\n" + tables(parts)


def tables(parts: dict[str, Any]) -> str:
    """Dataclasses as TOML tables with the given titles."""
    lines: list[str] = []
    for title, part in parts.items():
        lines += ["", f"[{title}]"]
        for field in dataclasses.fields(part):
            found = getattr(part, field.name)
            lines.append(f"# {field.name}: not set" if found is None else f"{field.name} = {value(found)}")
    return "\n".join(lines) + "\n"


def loads(text: str, where: str = "config") -> Config:
    """The configuration of a TOML text; options that it does not name have their defaults.

    Raises:
        UserError: no valid TOML, an unknown table or option (with the nearest name), a value of another type.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{where} is not valid TOML: {error}") from error
    return from_tables(document, where)


def from_tables(document: dict[str, Any], where: str) -> Config:
    """The configuration of a parsed TOML document; see ``loads``."""
    from fedjax_pfl.algorithms import get

    known = ["algorithm", "options", *SECTIONS]
    for name, value in document.items():
        if name not in known:
            raise UserError(f"{where}: unknown table or key {name!r}{nearest(name, known)}")
        if isinstance(value, dict) == (name == "algorithm"):
            raise UserError(f"{where}: {name!r} must be a {'name' if name == 'algorithm' else 'table'}")
    entry = get(document.get("algorithm", Config.algorithm))
    kinds = {"options": entry.options} | SECTIONS
    parts = {name: _part(kind, document.get(name, {}), f"{where}: [{name}]") for name, kind in kinds.items()}
    return Config(entry.name, **parts)


def read(path: Path) -> Config:
    """The configuration in a file.

    Raises:
        UserError: no such file, or one that ``loads`` refuses.
    """
    try:
        return loads(path.read_text("utf-8"), str(path))
    except FileNotFoundError as error:
        raise UserError(f"there is no configuration {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def digest(config: Config) -> str:
    """A hash of the configuration."""
    return hashlib.sha256(dumps(config).encode()).hexdigest()


def value(item: Any) -> str:
    """A boolean, number, string, or a list or tuple of them, as TOML."""
    if isinstance(item, bool):
        return "true" if item else "false"
    if isinstance(item, (int, float)):
        return repr(item)
    if isinstance(item, str):
        return json.dumps(item, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(item, (tuple, list)):
        return f"[{', '.join(value(one) for one in item)}]"
    raise TypeError(f"{item!r} cannot be written as TOML")


def _part(kind: type, table: dict[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(kind)
    known = [field.name for field in dataclasses.fields(kind)]
    values = {}
    for name, value in table.items():
        if name not in known:
            raise UserError(f"{where} has no option {name!r}{nearest(name, known)}")
        values[name] = _typed(value, hints[name], f"{where}: {name}")
    return kind(**values)


def _typed(value: Any, hint: Any, where: str) -> Any:
    """The value as an annotation asks: integers become floats, arrays become tuples, nothing else is converted."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (a for a in arguments if a is not type(None))
        return _typed(value, inner, where)
    if origin is Literal:
        if value not in arguments:
            raise UserError(f"{where} must be one of {', '.join(map(str, arguments))}, found {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise UserError(f"{where} must be an array, found {value!r}")
        return tuple(_typed(item, arguments[0], where) for item in value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise UserError(f"{where} must be of type {hint.__name__}, found {value!r}")
    return value
