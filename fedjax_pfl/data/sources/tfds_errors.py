"""What goes wrong while TensorFlow Datasets prepares a set, said in one line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fedjax_pfl.data.sources.no_tensorflow import REMEDY


def _chain(error: BaseException | None) -> Iterator[Any]:
    """An error and what caused it, outermost first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def explained(error: Exception, name: str) -> ValueError:
    """What failed while TensorFlow Datasets prepared the set ``name``, in one line with a remedy; to be raised."""
    elsewhere = "or get the data elsewhere and give its folder with --data-dir"
    for cause in _chain(error):
        kind = type(cause).__name__
        address = getattr(getattr(cause, "request", None), "url", None)
        if address:
            return ValueError(f"tfds:{name}: cannot download {address} ({kind}): check the network, {elsewhere}")
        if kind == "DownloadError":
            return ValueError(f"tfds:{name}: {_line(cause)}: try again later, {elsewhere}")
        if kind == "NonMatchingChecksumError":
            return ValueError(
                f"tfds:{name}: {_line(cause)}: the file was changed at its source: try again, {elsewhere}"
            )
        if isinstance(cause, ModuleNotFoundError) and cause.name:
            remedy = REMEDY if cause.name == "tensorflow" else f"pip install {cause.name}"
            return ValueError(f"tfds:{name}: preparing this set needs {cause.name}, which is not installed: {remedy}")
    return ValueError(f"tfds:{name}: cannot be prepared ({type(error).__name__}: {_line(error)}), {elsewhere}")


def _line(error: BaseException) -> str:
    """The text of an error on one line, without the pointers to other pages."""
    return " ".join(str(error).partition("To debug")[0].split()).rstrip(".")
