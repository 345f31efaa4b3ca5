"""Images of one's own: a folder of classes with PNG or JPEG files."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_pfl.data.memory import empty
from fedjax_pfl.data.sources.base import Source, SourceEntry, locate, parse_options

ENDINGS = (".png", ".jpg", ".jpeg")
LARGEST = 1 << 24  # pixels of one image


class FolderConfig(NamedTuple):
    """Options of ``folder:DIR,KEY=VALUE,...``; ``gray`` may stand alone.

    size: height and width to which every image is resized (0: none is). gray: convert to one channel.
    """

    size: int = 0
    gray: bool = False


class _Image(NamedTuple):
    path: Path
    label: int
    test: bool


def parse(argument: str) -> tuple[str, FolderConfig]:
    """The folder and the options of ``"DIR,size=32,gray"``.

    Raises:
        ValueError: no folder, unknown option (with the nearest one), bad value.
    """
    path, *options = (part.strip() for part in argument.split(","))
    if not path:
        raise ValueError("folder needs a folder: folder:DIR with one sub-folder of PNG or JPEG images a class")
    given = parse_options(options, FolderConfig._fields, "folder")
    gray, size = given.get("gray", "0"), given.get("size", "0")
    if gray not in ("", "0", "1"):
        raise ValueError(f"folder: gray stands alone or is 0 or 1, found {gray!r}")
    if "size" in given and not (size.isdecimal() and 0 < int(size) <= 4096):
        raise ValueError(f"folder: size needs a whole number of pixels in 1..4096, found {size!r}")
    return path, FolderConfig(int(size), gray != "0")


def _folder(argument: str, data_dir: Path | None) -> Source:
    path, config = parse(argument)
    root = locate(path, data_dir)
    if not root.is_dir():
        raise ValueError(f"{root}: is no folder: give the folder that holds one sub-folder a class")
    classes, files = _files(root)
    first = _read(files[0].path, config)
    images = empty((len(files), *first.shape), np.uint8)
    for place, file in enumerate(files):
        image = first if place == 0 else _read(file.path, config)
        if image.shape != first.shape:
            raise ValueError(
                f"{file.path} is {_size(image)}, {files[0].path} is {_size(first)}: give all images one size and one "
                "number of channels, or add the options size=32 (resizes all) and gray (one channel)"
            )
        images[place] = image
    test = np.array([file.test for file in files])
    labels = np.array([file.label for file in files], np.int32)
    changed = (f", resized to {config.size}x{config.size}" if config.size else "") + ", gray" * config.gray
    return Source(
        f"folder:{argument}", images, labels, len(classes), official_test=test if test.any() else None, scale=255.0,
        licence="the images' own", where=f"{root}{changed}, classes {', '.join(classes)}",
    )  # fmt: skip


def _size(image: np.ndarray) -> str:
    height, width, channels = image.shape
    return f"{width}x{height} with {channels} channel{'s' * (channels != 1)}"


def _files(root: Path) -> tuple[list[str], list[_Image]]:
    """Class names, sorted, and all images, training images first, by class and name."""
    folders = {path.name for path in _folders(root, root)}
    split = folders <= {"train", "test"} and "train" in folders
    parts = (
        [(root / name, name == "test") for name in ("train", "test") if name in folders] if split else [(root, False)]
    )
    classes = sorted(path.name for path in _folders(parts[0][0], root))
    if not classes:
        raise ValueError(f"{parts[0][0]}: has no sub-folders: make one a class, with its images in it")
    files = []
    for part, test in parts:
        for folder in _folders(part, root):
            if folder.name not in classes:
                raise ValueError(
                    f"{folder}: the class {folder.name!r} is not in {parts[0][0]}: add it there or remove it"
                )
            found = [_inside(path, root) for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
            other = [path for path in found if path.suffix.lower() not in ENDINGS or not path.is_file()]
            if other or not found:
                raise ValueError(
                    f"{other[0]}: is no PNG or JPEG image: remove it" if other
                    else f"{folder}: an empty class: add images or remove the folder"
                )  # fmt: skip
            files += [_Image(path, classes.index(folder.name), test) for path in found]
    return classes, files


def _folders(folder: Path, root: Path) -> list[Path]:
    """Sub-folders in the order of their names; hidden ones are no classes."""
    found = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    return [path for path in found if _inside(path, root).is_dir()]


def _inside(path: Path, root: Path) -> Path:
    """The path, if it leads to a place inside the folder."""
    if path.is_symlink() and not path.resolve().is_relative_to(root.resolve()):
        raise ValueError(f"{path}: a link that leaves {root}: copy what it points to")
    return path


def _read(path: Path, config: FolderConfig) -> np.ndarray:
    """One image as ``(h, w, c)`` uint8."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=("PNG", "JPEG")) as image:
                if image.width * image.height > LARGEST:  # known from the header, before anything is decoded
                    raise ValueError(f"{image.width}x{image.height} pixels, more than {LARGEST}")
                if image.mode not in ("L", "RGB", "RGBA", "P", "1", "LA"):
                    raise ValueError(f"mode {image.mode}: 8 bits a channel are needed")
                kept = image.mode if image.mode in ("L", "RGB", "RGBA") else "L" if image.mode == "1" else "RGB"
                plain = image.convert("L" if config.gray else kept)
                if config.size:
                    plain = plain.resize((config.size, config.size), Image.Resampling.BILINEAR)
                array = np.asarray(plain)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"{path}: cannot be read ({error}): replace or remove it") from error
    return array[..., None] if array.ndim == 2 else array


FOLDER = SourceEntry(
    "folder",
    "folder:DIR[,size=N][,gray]",
    "sub-folders of PNG or JPEG images, one a class, optionally under train/ and test/",
    "the images' own",
    _folder,
)
