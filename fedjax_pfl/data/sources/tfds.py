"""Image classification sets of TensorFlow Datasets: prepared once, then read from memory-mapped arrays."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fedjax_pfl.data.checks import unknown_name
from fedjax_pfl.data.sources import cache, tfds_folder
from fedjax_pfl.data.sources.base import DATA_VARIABLE, Source, SourceEntry
from fedjax_pfl.data.sources.no_tensorflow import tensorflow_or_stand_in
from fedjax_pfl.data.sources.tfds_errors import explained
from fedjax_pfl.data.sources.tfds_info import check_features

NAME = re.compile(r"[a-z0-9_]+(/[A-Za-z0-9_.+-]+)?")
RETRIES = 3


def load_tfds(name: str, data_dir: Path | None = None) -> Source:
    """The data set ``NAME[/CONFIG]``: from ``data_dir`` only if given, else local, else cached, else downloaded.

    A local folder is one that TensorFlow Datasets has prepared. Splits train and test are read, in the stored order,
    which is shuffled; ``where`` of the source names other splits and features, which are left out.

    Raises:
        ValueError: unknown name or configuration (with the nearest), no images with labels, no network (with the URL),
            a checksum that does not fit, images of several sizes, TensorFlow is needed and missing.
        FileNotFoundError: nothing prepared in ``data_dir``.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"tfds needs the name of a data set, tfds:NAME or tfds:NAME/CONFIG, found {name!r}")
    base = data_dir if data_dir is not None else os.environ.get(DATA_VARIABLE)
    folder = tfds_folder.find(Path(base), name) if base else None
    if folder is not None:
        return prepared(folder, name)
    if data_dir is not None:
        raise FileNotFoundError(
            f"tfds:{name}: {data_dir} has no folder {name}/VERSION that TensorFlow Datasets has prepared: correct "
            "--data-dir, or leave it out to download the data set"
        )
    return downloaded(name)


def prepared(folder: Path, name: str) -> Source:
    """The source of a prepared folder; its arrays are cached as long as its files stay as they are.

    Raises:
        ValueError: see ``tfds_folder.convert`` and ``cache.read``.
    """
    target = _home(name) / f"{folder.name}-{tfds_folder.fingerprint(folder)}"
    if not target.is_dir():
        tfds_folder.convert(folder, target, f"tfds:{name}")
    return _source(target, f"prepared in {folder}")


def downloaded(name: str) -> Source:
    """The source from the cache, without touching the network, or prepared and put there.

    Raises:
        ValueError: see ``load_tfds``.
    """
    home = _home(name)
    kept = [path for path in home.glob("*") if tfds_folder.VERSION.fullmatch(path.name)] if home.is_dir() else []
    if not kept:
        kept = [_prepare(name, home)]
    newest = max(kept, key=lambda path: [int(part) for part in path.name.split(".")])
    return _source(newest, "downloaded")


def _home(name: str) -> Path:
    return cache.cache_folder() / "tfds" / name.replace("/", "@")


def _source(folder: Path, origin: str) -> Source:
    found = cache.read(folder)
    ignored = "".join(f", {what} ignored" for what in found.about["ignored"])
    return Source(
        f"tfds:{found.about['name']}", found.images, found.labels, found.about["classes"],
        official_test=found.test if found.test.any() else None, scale=255.0, licence=found.about["licence"],
        where=f"TensorFlow Datasets, {origin}, cached in {folder}{ignored}",
    )  # fmt: skip


def _prepare(name: str, home: Path) -> Path:
    """Download and prepare a data set in a folder that is deleted afterwards; the folder of the arrays."""
    import tensorflow_datasets as tfds

    _check_name(name)
    root = cache.cache_folder()
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".work-", dir=root) as work, tensorflow_or_stand_in(), _few_retries():
        try:
            builder = tfds.builder(name, data_dir=work, file_format="array_record")
            info = builder.info
        except Exception as error:
            raise explained(error, name) from error
        features = dict(info.features.items()) if hasattr(info.features, "items") else {}
        check_features({key: type(one).__name__ for key, one in features.items()}, f"tfds:{name}")
        try:
            with contextlib.redirect_stdout(sys.stderr):  # it reports progress there, results are printed here
                builder.download_and_prepare(download_dir=os.path.join(work, "downloads"))
        except Exception as error:
            raise explained(error, name) from error
        target = home / str(info.version)
        tfds_folder.convert(Path(builder.data_path), target, f"tfds:{name}")
    return target


@contextlib.contextmanager
def _few_retries() -> Iterator[None]:
    """Without a network the library tries ten times, which takes minutes; here it gives up after a second or two."""
    from tensorflow_datasets.core.download import downloader

    kept = downloader.MAX_RETRIES
    downloader.MAX_RETRIES = RETRIES
    try:
        yield
    finally:
        downloader.MAX_RETRIES = kept


def _check_name(name: str) -> None:
    import tensorflow_datasets as tfds

    kind, _, config = name.partition("/")
    try:
        configs = list(tfds.builder_cls(kind).builder_configs)
    except tfds.core.registered.DatasetNotFoundError:
        known = tfds.list_builders(with_community_datasets=False)
        near = difflib.get_close_matches(kind, known, n=3, cutoff=0.4)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"TensorFlow Datasets has no data set {kind!r}.{hint}") from None
    if config and config not in configs:
        raise unknown_name(f"configuration of {kind}", config, configs)


def _load(argument: str, data_dir: Path | None) -> Source:
    return load_tfds(argument, data_dir)


TFDS = SourceEntry(
    "tfds",
    "tfds:NAME[/CONFIG]",
    "an image classification set of TensorFlow Datasets, downloaded and prepared once, or prepared in --data-dir",
    "the data set's own",
    _load,
)
