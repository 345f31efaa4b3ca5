"""Errors that are told in one line, and the nearest name to a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something that the user can put right; the message says how. ``code``: the exit code of the command."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, or all of them."""
    choices = list(known)
    near = difflib.get_close_matches(name, choices, n=1, cutoff=0.6)
    if near:
        return f": did you mean {near[0]!r}?"
    return f"; known: {', '.join(choices)}" if choices else "; it has none"
