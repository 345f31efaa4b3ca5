"""FedBN: Federated Learning on Non-IID Features via Local Batch Normalization.

Li, Jiang, Zhang, Kamp, Dou; ICLR 2021; https://arxiv.org/abs/2102.07623

    FedAvg in which the layers of batch normalisation, parameters and running statistics, stay at their client:
    each round t, each client i of the cohort S:  (theta_i, psi_i) <- E epochs of SGD from (theta^t, psi_i)
        theta^{t+1} = sum_{i in S} n_i theta_i / sum_{i in S} n_i

Differs from the paper: the mean is weighted by n_i, as in FedAvg (the released code weighs clients equally), so that a
model without such layers gives FedAvg bit for bit, with a warning. The layers are those that keep running statistics,
whatever their name; group norm keeps none. The policy on statistics: ``average`` and ``local`` are the same here,
``reset`` starts a client's statistics anew in every round, its scale and bias live on. A newcomer gets the averaged
body with newly initialised norm layers: those of other clients never left them.
"""

from __future__ import annotations

import dataclasses
import warnings

from fedjax_pfl.algorithms.fedavg import averaging
from fedjax_pfl.engine.federation import Algorithm, Federation


@dataclasses.dataclass(frozen=True)
class Options:
    """FedBN (Li et al. 2021): FedAvg in which batch norm, with its running statistics, stays at every client."""


def fedbn(fed: Federation, options: Options = Options()) -> Algorithm:
    """FedBN in a federation: averaging in which the norm layers are private.

    Warns:
        UserWarning: the model has no layer with running statistics.
    """
    norms = frozenset(name for name in fed.model.shapes() if fed.model.is_norm(name))
    if not norms:
        warnings.warn(
            f"fedbn: model {fed.model.name!r} has no layer with running statistics (batch norm), so this is FedAvg "
            "exactly: take a model with batch norm, such as resnet8 with norm 'batch'",
            stacklevel=2,
        )
    return averaging(fed, "fedbn", private=norms.__contains__)
