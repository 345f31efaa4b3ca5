"""Local: every client trains alone, without any communication.

The row that no comparison of personalized methods should miss: with few classes a client it is often hard to beat.

    every client i, each round in which it takes part:  w_i <- E epochs of minibatch SGD from w_i
"""

from __future__ import annotations

import dataclasses

from fedjax_pfl.algorithms.fedavg import averaging
from fedjax_pfl.engine.federation import Algorithm, Federation


@dataclasses.dataclass(frozen=True)
class Options:
    """Local training only: no communication."""


def local(fed: Federation, options: Options = Options()) -> Algorithm:
    """Local training in a federation: averaging in which every variable is private."""
    return averaging(fed, "local", private=lambda name: True)
