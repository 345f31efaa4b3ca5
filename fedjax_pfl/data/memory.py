"""Host memory that a CPU backend can use as it is."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

LINE = 64  # bytes: arrays that start at a multiple of it are shared with a CPU backend, others are copied


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """``np.empty`` whose first byte lies at a multiple of ``LINE``."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + LINE, np.uint8)
    start = -raw.ctypes.data % LINE
    return raw[start : start + size].view(dtype).reshape(shape)
