"""Train, validation and test parts of each client: seeded, stratified, all clients at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedjax_pfl.data.dealing import apportion, deal

Parts = list[np.ndarray]


def split_parts(
    parts: Sequence[np.ndarray], labels: np.ndarray, test: float, validation: float, rng: np.random.Generator
) -> tuple[Parts, Parts, Parts]:
    """Train, validation and test rows of each client, ascending.

    Within a client the samples of each class are spread evenly over a random order whose head is the test part, so
    every part has the client's label proportions to within one or two samples a class. Every client keeps a training
    sample; one with two samples has a test sample (``test > 0``); one has a validation sample (``validation > 0``)
    where two samples are left to train on, and only there.
    """
    clients = len(parts)
    rows = np.concatenate([np.zeros(0, np.int64), *parts])
    sizes = np.array([len(part) for part in parts])
    owner = np.repeat(np.arange(clients), sizes)
    order = np.lexsort((rng.random(len(rows)), labels[rows], owner))
    rows = rows[order]
    cell, begin = _cells(owner, labels[rows])
    key = (np.arange(len(rows)) - begin[cell] + rng.random(len(begin))[cell]) / np.bincount(cell)[cell]
    rows = rows[np.lexsort((key, owner))]

    tests = np.clip(np.rint(test * sizes), (test > 0) & (sizes >= 2), np.maximum(sizes - 1, 0))
    rest = sizes - tests
    validations = np.clip(np.rint(validation * sizes), (validation > 0) & (rest >= 3), np.maximum(rest - 2, 0))
    place = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    kind = (place >= tests[owner]).astype(int) + (place >= (tests + validations)[owner])
    named = [_regroup(rows[kind == which], owner[kind == which], clients) for which in (2, 1, 0)]
    return named[0], named[1], named[2]


def _cells(owner: np.ndarray, kind: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Runs of one owner and kind in sorted samples: the run of each sample ``(n,)``, and where each run begins."""
    first = np.ones(len(owner), bool)
    first[1:] = (owner[1:] != owner[:-1]) | (kind[1:] != kind[:-1])
    return np.cumsum(first) - 1, np.flatnonzero(first)


def _regroup(rows: np.ndarray, owner: np.ndarray, clients: int) -> Parts:
    ordered = rows[np.lexsort((rows, owner))]
    return np.split(ordered, np.cumsum(np.bincount(owner, minlength=clients))[:-1])


def official_parts(
    counts: np.ndarray, official: np.ndarray, labels: np.ndarray, rng: np.random.Generator
) -> tuple[Parts, list[str]]:
    """Shares of the official test samples by the label counts ``(M, C)`` of the clients: each sample at most once.

    Of each class a client gets its share of the class's samples, to within one; classes of no client are left out.
    """
    supply = np.bincount(labels[official], minlength=counts.shape[1])
    held = counts.sum(0)
    shares = (counts / np.maximum(held, 1)).T
    plan = apportion(np.where(held > 0, supply, 0), shares, rng).T
    parts = [official[part] for part in deal(labels[official], plan, rng)]
    lost = int(supply[held == 0].sum())
    return parts, [f"left out {lost} official test samples of classes that no client has"] if lost else []


def ordered_parts(
    parts: Sequence[np.ndarray], segment: np.ndarray, overlap: int, test: float, validation: float
) -> tuple[Parts, Parts, Parts, int]:
    """Train, validation and test rows of each client, ascending, where neighbours in the source share content.

    Each segment of a client is cut in order: training samples first, then validation, then test. Test and validation
    have the client's fractions (validation at most half of what is left); training loses the samples in between, of
    which one of the ``overlap`` samples behind is held back, so that nothing that is tested was trained on. A client
    that this would leave without a training sample only trains.

    Returns:
        Train, validation and test rows, and how many samples were left out.
    """
    clients = len(parts)
    rows = np.concatenate([np.zeros(0, np.int64), *parts])
    owner = np.repeat(np.arange(clients), [len(part) for part in parts])
    order = np.lexsort((rows, segment[rows], owner))
    rows, owner = rows[order], owner[order]
    cell, begin = _cells(owner, segment[rows])
    length, place = np.bincount(cell), np.arange(len(rows)) - begin[cell]
    done = np.cumsum(length) - np.searchsorted(owner, owner[begin])  # samples of the client up to the cell's end

    def share(fraction: float) -> np.ndarray:
        """Whole numbers for each cell that add up to the client's fraction."""
        return (np.rint(fraction * done) - np.rint(fraction * (done - length))).astype(np.int64)

    def clear_of(stop: np.ndarray) -> np.ndarray:
        """How many of a cell's first samples share nothing with those from place ``stop`` on."""
        later = np.append(rows, 0)[begin + np.minimum(stop, length - 1)]
        bound = np.where(stop < length, later - overlap, np.iinfo(np.int64).max)
        return np.bincount(cell[rows < bound[cell]], minlength=len(length))

    tested = length - share(test)
    room = clear_of(tested)
    held = room - np.minimum(share(validation), room // 2)
    trained = np.minimum(clear_of(np.where(held < room, held, tested)), held)
    kind = np.where(place >= tested[cell], 2, np.where((place >= held[cell]) & (place < room[cell]), 1, 0))
    dropped = (kind == 0) & (place >= trained[cell])
    barren = np.bincount(owner[(kind == 0) & ~dropped], minlength=clients) == 0
    kind, dropped = np.where(barren[owner], 0, kind), dropped & ~barren[owner]
    named = [_regroup(rows[(kind == k) & ~dropped], owner[(kind == k) & ~dropped], clients) for k in (0, 1, 2)]
    return named[0], named[1], named[2], int(dropped.sum())
