"""CIFAR's images packed as ``train_images*.npy.xz`` and ``test_images*.npy.xz``."""

from __future__ import annotations

import lzma
import re
from pathlib import Path

import numpy as np

from fedjax_pfl.data.sources.cifar_files import readable


def fill(folder: Path, stem: str, room: np.ndarray) -> int:
    """Fill the head of ``room`` (n, 32, 32, 3) uint8 from the files of a stem, by number; how many images there were.

    Raises:
        ValueError: damaged files, images of another size, more of them than there is room for.
    """
    done = 0
    for path in sorted(folder.glob(f"{stem}_images*.npy.xz"), key=_number):
        done += _fill(path, room[done:])
    return done


def _number(path: Path) -> tuple[int, str]:
    return int((re.findall(r"\d+", path.name) or ["0"])[-1]), path.name


def _fill(path: Path, room: np.ndarray) -> int:
    """Read one file of images into the head of ``room``; how many there were."""
    with readable(str(path)):
        try:
            with lzma.open(path) as stream:
                np.lib.format.read_magic(stream)
                shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
                if fortran or dtype != np.uint8 or shape[1:] != room.shape[1:] or shape[0] > len(room):
                    raise ValueError(f"holds {dtype} {shape}, at most {room.shape} of uint8 have labels")
                view = room[: shape[0]].data.cast("B") if shape[0] else memoryview(b"")
                done = 0
                while done < len(view):
                    got = stream.readinto(view[done:])  # type: ignore[attr-defined]
                    if not got:
                        raise ValueError("ends too early: truncated")
                    done += got
                if stream.read(1):
                    raise ValueError(f"holds more than the {shape} of its header")
        except (ValueError, lzma.LZMAError) as error:
            raise ValueError(f"{path}: {error}: fetch it again") from error
    return int(shape[0])
