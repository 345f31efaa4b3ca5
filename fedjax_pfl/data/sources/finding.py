"""Where a data set lies when its user does not say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedjax_pfl.data.sources.base import DATA_VARIABLE, locate


def find_any(argument: str, usual: Sequence[str], data_dir: Path | None, remedy: str) -> Path:
    """The path that an argument names, or without one the first of the ``usual`` names that exists (see ``locate``).

    Raises:
        FileNotFoundError: none of them; the error ends with the remedy.
    """
    names = [argument] if argument else list(usual)
    last = FileNotFoundError()
    for name in names:
        try:
            return locate(name, data_dir)
        except FileNotFoundError as error:
            last = error
    if len(names) == 1 or (data_dir is not None and not Path(data_dir).is_dir()):
        raise last
    listed = ", ".join(repr(name) for name in names)
    raise FileNotFoundError(f"none of {listed} is in --data-dir, here or in {DATA_VARIABLE}: {remedy}")
