"""The evaluation contract: per-client arrays for all clients, of every model a method declares, and their summaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.engine.clients import measure
from fedjax_pfl.engine.federation import Algorithm, Env, Federation
from fedjax_pfl.engine.sharding import COMMON, ROWS, data_spec
from fedjax_pfl.models.model import Variables

KINDS = ("received", "personal", "shared")
EVALUATED = ("validation", "test")


class Scores(NamedTuple):
    """Accuracy and mean loss of each client, NaN for a client without samples: leaves ``(..., slots)``."""

    accuracy: Any
    loss: Any


def state_spec(rows: Sequence[str], state: Any) -> Any:
    """How a state is split over devices: its ``rows`` fields along ``clients``, the others on every device."""
    return type(state)(*(ROWS if field in rows else COMMON for field in state._fields))


def scores_of(
    fed: Federation, algorithm: Algorithm, env: Env, state: Any, deliver: Callable[..., Variables], split: str
) -> Scores:
    """Accuracy and loss of ``deliver(env, state, slot)`` on a split, for every slot: leaves ``(slots,)``."""
    return measured_scores(fed, algorithm.predict, algorithm.rows, env, state, deliver, split)


def measured_scores(
    fed: Federation, predict: Callable[..., jax.Array], rows: Sequence[str], env: Env, state: Any,
    deliver: Callable[..., Variables], split: str, who: jax.Array | None = None,
) -> Scores:  # fmt: skip
    """``scores_of`` for the use within a round: NaN for clients outside of ``who`` ``(slots,)`` bool, default all."""

    def stat(delivered: tuple[Env, Variables], batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        scores = predict(delivered[0], delivered[1], batch)
        right = batch["mask"] & (scores.argmax(-1) == batch["y"]) & ~jnp.isnan(scores).any(-1)
        loss = jnp.where(batch["mask"], fed.loss(scores, batch["y"]), 0)
        return {"right": right.sum().astype(loss.dtype), "loss": loss.sum()}

    spec = (Env(data_spec(env.data), COMMON), state_spec(rows, state))  # type: ignore[arg-type]
    sums = measure(
        stat, lambda common, slot: (common[0], deliver(*common, slot)), common=(env, state), data=env.data,
        work=fed.evaluation_work(split), who=who, common_spec=spec,
    )  # fmt: skip
    count = env.data.split(split).count
    count = count if who is None else jnp.where(who, count, 0)
    share = {name: jnp.where(count > 0, total / jnp.maximum(count, 1), jnp.nan) for name, total in sums.items()}
    return Scores(share["right"], share["loss"])


def evaluate(fed: Federation, algorithm: Algorithm, env: Env, state: Any) -> dict[str, dict[str, Scores]]:
    """Every declared model of every client on validation and test: ``split -> kind -> Scores``.

    A split without samples and a kind that the method does not have are absent. A model declared twice (FedAvg's
    ``received`` is its ``personal``) is measured once.
    """
    state = algorithm.serve(env, state)
    deliver = {"received": algorithm.received, "personal": algorithm.personal}
    if algorithm.shared is not None:
        deliver["shared"] = one_for_all(algorithm.shared)
    results: dict[str, dict[str, Scores]] = {}
    for split in (name for name in EVALUATED if fed.has(name)):
        measured: dict[Any, Scores] = {}
        for function in deliver.values():
            identity = _identity(function)
            if identity not in measured:
                measured[identity] = scores_of(fed, algorithm, env, state, function, split)
        results[split] = {kind: measured[_identity(function)] for kind, function in deliver.items()}
    return results


def one_for_all(shared: Callable[[Env, Any], Variables]) -> Callable[[Env, Any, jax.Array], Variables]:
    """The global model as the model of client ``i``; evaluated once however often it is declared."""

    def deliver(env: Env, state: Any, i: jax.Array) -> Variables:
        return shared(env, state)

    deliver.shared = shared  # type: ignore[attr-defined]
    return deliver


def _identity(function: Callable[..., Variables]) -> Any:
    return getattr(function, "shared", function)


def summary(values: np.ndarray, samples: np.ndarray) -> dict[str, float]:
    """Summaries over clients of one per-client metric.

    values: ``(M,)``, NaN where a client has no samples (left out and counted); samples: ``(M,)``, the weights.

    Returns:
        ``weighted_mean``, ``uniform_mean``, ``std`` (population), ``worst_decile`` (mean of the lowest tenth, at
        least one client), ``min`` and ``clients_without_samples``; NaN where no client has samples.
    """
    present = ~np.isnan(values)
    kept, weights = np.sort(values[present]), samples[present][np.argsort(values[present], kind="stable")]
    absent = {"clients_without_samples": float((~present).sum())}
    if not kept.size:
        return dict.fromkeys(("weighted_mean", "uniform_mean", "std", "worst_decile", "min"), float("nan")) | absent
    return {
        "weighted_mean": float(np.average(kept, weights=weights)),
        "uniform_mean": float(kept.mean()),
        "std": float(kept.std()),
        "worst_decile": float(kept[: max(1, kept.size // 10)].mean()),
        "min": float(kept[0]),
    } | absent


def mean_over_clients(values: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Sample-weighted mean over the last axis, NaN clients left out: ``(..., M) -> (...)``."""
    present = ~np.isnan(values)
    weights = np.where(present, samples, 0.0)
    total = weights.sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(total > 0, (np.where(present, values, 0.0) * weights).sum(-1) / total, np.nan)
