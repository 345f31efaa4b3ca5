"""FedPer: Federated Learning with Personalization Layers.

Arivazhagan, Aggarwal, Singh, Choudhary; 2019; https://arxiv.org/abs/1912.00818

    server: base theta^0; every client i: head phi_i
    each round t: each client i in the cohort S:  (theta_i, phi_i) <- E epochs of SGD on both from (theta^t, phi_i)
        theta^{t+1} = sum_{i in S} n_i theta_i / sum_{i in S} n_i

Differs from the paper: all heads start equal (the initial model is the same for every method of a comparison).
"""

from __future__ import annotations

import dataclasses

from fedjax_pfl.algorithms.fedavg import averaging
from fedjax_pfl.engine.federation import Algorithm, Federation


@dataclasses.dataclass(frozen=True)
class Options:
    """FedPer (Arivazhagan et al. 2019): the body is averaged, every client keeps its own head."""


def fedper(fed: Federation, options: Options = Options()) -> Algorithm:
    """FedPer in a federation: averaging in which the head is private."""
    return averaging(fed, "fedper", private=fed.model.head)
