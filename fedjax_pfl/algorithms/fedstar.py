"""FedStar: Federated Learning on Non-IID Graphs via Structural Knowledge Sharing.

Tan, Liu, Long, Jiang, Lu, Zhang; AAAI 2023; https://arxiv.org/abs/2211.13009

    every client: a network of two streams; at each layer  x <- GIN([x || s]),  s <- tanh(GCN(s)),  where s starts from
        structural encodings and x from the client's own node features
    each round t, every client i of the cohort S:
        s-stream <- the shared one;  E epochs of minibatch descent on both streams
    shared s-stream <- sum_{i in S} n_i s-stream_i / sum_{i in S} n_i

Only the structural stream is shared, all else stays at its client. ``personal`` is the client's network with the stream
as averaged, so it is ``received``. The released code keeps each client's Adam from round to round (an option of the
federation). A newcomer would lack all other layers: none is served. The method brings its own
network, with the width, depth and dropout of the federation's graph model.
"""

from __future__ import annotations

import dataclasses

from fedjax_pfl.algorithms.fedavg import averaging
from fedjax_pfl.engine.federation import Algorithm, Federation
from fedjax_pfl.models.graph_family import SHARED_OF_TWO
from fedjax_pfl.models.model import PARAMS


@dataclasses.dataclass(frozen=True)
class Options:
    """FedStar (Tan et al. 2023): clients share what they learn about structure, in a stream of its own."""


def fedstar(fed: Federation, options: Options = Options()) -> Algorithm:
    """FedStar in a federation of graphs.

    Raises:
        ValueError: the federation's model is no graph model.
    """
    two = fed.with_related("two_stream", "fedstar")
    algorithm = averaging(two, "fedstar", private=lambda name: not name.startswith(PARAMS + SHARED_OF_TWO))
    return algorithm._replace(newcomer=None, trains=(two,))
