"""What TensorFlow Datasets calls of TensorFlow while it prepares plain images, for machines without TensorFlow.

Opening files and storing images as PNG is all that most image sets need. Anything else says that TensorFlow is missing.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import io
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

REMEDY = "pip install 'fedjax_pfl[tf]'"


class StandIn:
    """A namespace that names itself when something is asked of it that it has not.

    Raises:
        ModuleNotFoundError: with ``name`` tensorflow, for every attribute that was not given.
    """

    def __init__(self, path: str, **members: Any) -> None:
        self._path = path
        vars(self).update(members)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ModuleNotFoundError(f"{self._path}.{name} needs TensorFlow: {REMEDY}", name="tensorflow")


class _Eager:
    """The bytes that an eager tensor would hold."""

    def __init__(self, value: bytes) -> None:
        self.value = value

    def numpy(self) -> bytes:
        return self.value


def _encode_png(image: np.ndarray) -> _Eager:
    """``(h, w, c)`` uint8 as PNG, which loses nothing."""
    from PIL import Image

    if image.dtype != np.uint8 or image.shape[-1] not in (1, 3, 4):
        raise ModuleNotFoundError(f"a PNG of {image.dtype} {image.shape} needs TensorFlow: {REMEDY}", name="tensorflow")
    buffer = io.BytesIO()
    flat = image[..., 0] if image.shape[-1] == 1 else image
    Image.fromarray(flat).save(buffer, "PNG", compress_level=1)
    return _Eager(buffer.getvalue())


_FILES = StandIn(
    "tensorflow.io.gfile",
    GFile=open, exists=os.path.exists, isdir=os.path.isdir, listdir=os.listdir, glob=glob.glob,
)  # fmt: skip
TENSORFLOW = StandIn(
    "tensorflow",
    __version__="2.99.0",  # the library refuses old versions
    executing_eagerly=lambda: True,
    io=StandIn("tensorflow.io", gfile=_FILES),
    image=StandIn("tensorflow.image", encode_png=_encode_png),
    compat=StandIn("tensorflow.compat", as_text=lambda text: text.decode() if isinstance(text, bytes) else text),
)


@contextlib.contextmanager
def tensorflow_or_stand_in() -> Iterator[None]:
    """Let TensorFlow Datasets, and nobody else, use the stand-in inside the block where TensorFlow is missing."""
    if importlib.util.find_spec("tensorflow") is not None:
        yield
        return
    from tensorflow_datasets.core.utils import lazy_imports_utils

    # Not through sys.modules: the library and others look there to choose code that needs the whole of TensorFlow.
    members = vars(lazy_imports_utils.tensorflow)
    members["_module"] = TENSORFLOW
    try:
        yield
    finally:
        members.pop("_module", None)
