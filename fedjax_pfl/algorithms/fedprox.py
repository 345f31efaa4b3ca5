"""FedProx: Federated Optimization in Heterogeneous Networks.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith; MLSys 2020; https://arxiv.org/abs/1812.06127

    FedAvg in which client i descends  h_i(w) = F_i(w) + mu/2 ||w - w^t||^2,  w^t the received model

Differs from the paper: the number of local epochs is the same for all clients (no gamma-inexact stragglers), and the
mean is over the cohort by n_i, as in FedAvg, so that mu = 0 is FedAvg exactly. What a model keeps at its client (of
graphs: input and readout, where data sets differ) is received from nobody and bears no penalty.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from fedjax_pfl.algorithms.fedavg import averaging
from fedjax_pfl.engine import tree
from fedjax_pfl.engine.federation import Algorithm, Federation
from fedjax_pfl.models.model import Variables


@dataclasses.dataclass(frozen=True)
class Options:
    """FedProx (Li et al. 2020): FedAvg with a proximal term that holds clients near the received model."""

    mu: float = 0.1
    """Weight mu of the proximal term mu/2 ||w - w^t||^2."""


def fedprox(fed: Federation, options: Options = Options()) -> Algorithm:
    """FedProx in a federation.

    Raises:
        ValueError: mu is negative or NaN.
    """
    if not options.mu >= 0:
        raise ValueError(f"fedprox needs mu >= 0, found {options.mu}")

    def proximal(variables: Variables, anchor: Any) -> jax.Array:
        shared, hyper = anchor
        difference = {name: variables[name] - shared[name] for name in variables if name in shared}
        return hyper["mu"] / 2 * tree.dot(difference, difference)

    return averaging(fed, "fedprox", penalty=proximal, mu=options.mu)
