"""The methods, one paper a file, and the registry built from the files.

A file ``NAME.py`` defines ``Options``, a frozen dataclass whose float fields are the numeric hyper-parameters, and a
function ``NAME(fed, options) -> Algorithm``. A file whose name starts with an underscore is not a method.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from fedjax_pfl.engine.federation import Algorithm


@dataclasses.dataclass(frozen=True)
class Entry:
    """A method of the registry: its name, options, builder, and the first line of its file (title of the paper)."""

    name: str
    options: type
    build: Callable[..., Algorithm]
    title: str


def registry() -> dict[str, Entry]:
    """All methods by name, in alphabetical order."""
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))
    return {name: _entry(name) for name in names}


def get(name: str) -> Entry:
    """The method called ``name``.

    Raises:
        ValueError: there is none; the message gives the nearest name.
    """
    found = registry()
    if name not in found:
        near = difflib.get_close_matches(name.replace("-", "_"), found, n=1)
        hint = f": did you mean {near[0]!r}?" if near else f": choose one of {', '.join(found)}"
        raise ValueError(f"unknown algorithm {name!r}{hint}")
    return found[name]


def build(name: str, fed: Any, **options: Any) -> Algorithm:
    """The method called ``name`` in a federation, with options by keyword.

    Raises:
        ValueError: unknown name or option.
    """
    entry = get(name)
    known = [field.name for field in dataclasses.fields(entry.options)]
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f": did you mean {near[0]!r}?" if near else f"; its options: {', '.join(known) or 'none'}"
            raise ValueError(f"{name} has no option {option!r}{hint}")
    return entry.build(fed, entry.options(**options))


def _entry(name: str) -> Entry:
    module = importlib.import_module(f"{__name__}.{name}")
    title = (module.__doc__ or name).splitlines()[0]
    return Entry(name, module.Options, getattr(module, name), title)
