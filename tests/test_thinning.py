"""A part of a source: how many of which samples, the same ones always, and what keeps its place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedjax_pfl.data import Source
from fedjax_pfl.data.thinning import thinned
from fedjax_pfl.experiment.config import configure
from fedjax_pfl.experiment.setup import load_data


def source(sizes: dict[tuple[int, bool, int], int], seed: int = 0) -> Source:
    """So many samples of each (data set, published test, class), in random order; x counts them."""
    rows = np.repeat(np.array(list(sizes), int).reshape(-1, 3), list(sizes.values()), 0)
    rows = np.random.default_rng(seed).permutation(rows)
    x = np.arange(len(rows), dtype=np.float32)[:, None]
    y, test = rows[:, 2].astype(np.int32), rows[:, 1].astype(bool)
    return Source("s", x, y, 3, official_test=test, dataset=rows[:, 0].astype(np.int32), datasets=("A", "B"))


strata = st.fixed_dictionaries({(d, t, c): st.integers(1, 30) for d in (0, 1) for t in (False, True) for c in range(3)})


@given(strata, st.integers(1, 100), st.integers(0, 5))
@example({(d, t, c): 30 if (t, c) == (False, 0) else 1 for d in (0, 1) for t in (False, True) for c in range(3)}, 15, 0)
def test_each_class_keeps_its_share(sizes: dict[tuple[int, bool, int], int], samples: int, seed: int) -> None:
    whole = source(sizes, seed)
    part = thinned(whole, samples, seed)
    for d in (0, 1):
        total = sum(n for key, n in sizes.items() if key[0] == d)
        assert (part.dataset == d).sum() == min(samples, total)
        for (of, t, c), n in sizes.items():
            if of == d:
                found = ((part.dataset == d) & (part.official_test == t) & (part.y == c)).sum()
                assert abs(found - min(samples, total) * n / total) < 1
    own = part.x[:, 0].astype(int)
    assert (np.diff(own) > 0).all(), "in the order of the source"
    for name in ("y", "official_test", "dataset"):
        np.testing.assert_array_equal(getattr(part, name), getattr(whole, name)[own])


def test_the_same_samples_always_and_others_by_another_seed() -> None:
    whole = source({(0, False, c): 40 for c in range(3)})
    assert np.array_equal(thinned(whole, 30).x, thinned(whole, 30).x)
    assert not np.array_equal(thinned(whole, 30).x, thinned(whole, 30, 1).x)
    assert thinned(whole, 120) is whole
    assert thinned(whole, 30).name == "s, 30 of 120 samples"


def test_windows_overlap_as_far_as_those_that_are_left() -> None:
    n, overlap = 60, 9
    x = np.arange(n, dtype=np.float32)[:, None]
    of = {"client": np.arange(n) // 20, "segment": (np.arange(n) // 10).astype(np.int32)}
    part = thinned(Source("w", x, np.zeros(n, np.int32), 1, overlap=overlap, **of), 15)
    at = part.x[:, 0].astype(int)
    assert part.overlap == max(sum(0 < b - a <= overlap for b in at) for a in at)
    assert part.overlap < overlap
    for name, leaf in of.items():
        np.testing.assert_array_equal(getattr(part, name), leaf[at])


def test_what_cannot_be_thinned_is_told() -> None:
    whole = source({(0, False, 0): 4})
    with pytest.raises(ValueError, match="samples must be at least 1, found 0"):
        thinned(whole, 0)
    with pytest.raises(ValueError, match="the nodes of one graph cannot be thinned out: leave out --samples"):
        thinned(Source("n", whole.x, whole.y, 3, kind="nodes"), 2)


def test_the_option() -> None:
    config = configure("local", samples=60, clients=2)
    config.check()
    source, partition, _ = load_data(config)
    assert len(source) == 60
    assert sum(len(rows) for split in ("train", "validation", "test") for rows in getattr(partition, split)) == 60
    with pytest.raises(ValueError, match="samples must be at least 1, found 0"):
        configure("local", samples=0)
