"""The digits that come with scikit-learn: no download, no files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedjax_pfl.data.sources.base import Source, SourceEntry


def _digits(argument: str, data_dir: Path | None) -> Source:
    if argument:
        raise ValueError(f"digits takes no options, found {argument!r}")
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = bunch.images.astype(np.uint8)[..., None]
    where = "Alpaydin and Kaynak (1998), the copy of scikit-learn"
    return Source("digits", x, bunch.target.astype(np.int32), 10, scale=16.0, licence=DIGITS.licence, where=where)


DIGITS = SourceEntry("digits", "digits", "1,797 images 8x8 of digits, embedded in scikit-learn", "CC BY 4.0", _digits)
