"""A federation: a model, its loss, the clients' data and how clients work."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from fedjax_pfl.data.clients import SPLITS, ClientData
from fedjax_pfl.data.graphs import GraphBatch, GraphReader, facts_of
from fedjax_pfl.data.nodes import NodeBatch, NodeReader
from fedjax_pfl.engine import tree
from fedjax_pfl.engine.clients import Work
from fedjax_pfl.engine.cohort import Participation
from fedjax_pfl.models.model import Model, Variables, is_token, is_trainable

Tree = Any
STATISTICS = ("average", "local", "reset")


class Env(NamedTuple):
    """What a compiled function is given besides the state: client data and the numeric hyper-parameters, all traced."""

    data: ClientData
    hyper: dict[str, jax.Array]


class Algorithm(NamedTuple):
    """A method as pure functions of one state (a NamedTuple of arrays, with None for absent parts).

    init: ``(env, key) -> State``. round: ``(env, state, cohort, key) -> (State, Info)``, Info a dict of diagnostics
        with at least ``loss`` (mean training loss) and ``reported`` ``(slots,)`` bool.
    received, personal: ``(env, state, i) -> variables`` of the client in slot i: what the server would send it now,
        together with its private parts; and its deliverable. They read row i of fields named in ``rows`` only.
    shared: ``(env, state) -> variables`` of the global model, None for a method without one.
    predict: ``(env, variables, batch) -> scores (B, C)``.
    rows: names of the State's fields that have one row a client; they are split over devices.
    floats: floats that one participant uploads and downloads in a round; where they change from round to round, entries
        ``floats_up`` and ``floats_down`` of the Info, means over participants, replace them.
    hyper: the numeric hyper-parameters of the method (the learning rate ``lr`` included): they enter ``env``.
    serve: ``(env, state) -> State``, called once before ``received`` of many clients is asked: puts what depends on
        several clients into rows.
    newcomer: ``(env, state, fresh) -> variables`` that the server gives a client it has never seen; ``fresh`` are newly
        initialised variables, for what no client shares. None: the method has nothing for such a client.
    trains: federations with the models that a client trains side by side; empty: the federation's own model alone.
    keeps_optimizer: whether the State holds the clients' optimisers where the federation keeps them.
    artifacts: ``(env, state) -> {name: array}``, what a report should show of the last state besides accuracy;
        axes of length ``slots`` are clients. ``aggregation_weights`` ``(slots, slots)`` is drawn as a heat map.
    """

    name: str
    init: Callable[[Env, jax.Array], Any]
    round: Callable[..., tuple[Any, dict[str, jax.Array]]]
    received: Callable[[Env, Any, jax.Array], Variables]
    personal: Callable[[Env, Any, jax.Array], Variables]
    shared: Callable[[Env, Any], Variables] | None
    predict: Callable[..., jax.Array]
    rows: tuple[str, ...]
    floats: tuple[int, int]
    hyper: Mapping[str, float]
    serve: Callable[[Env, Any], Any] = lambda env, state: state
    artifacts: Callable[[Env, Any], dict[str, jax.Array]] = lambda env, state: {}
    newcomer: Callable[[Env, Any, Variables], Variables] | None = None
    trains: tuple[Federation, ...] = ()
    keeps_optimizer: bool = False


def cross_entropy(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """Softmax cross-entropy of each sample: ``(B, C), (B,) -> (B,)``."""
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels)


@dataclasses.dataclass(frozen=True, eq=False)
class Federation:
    """Model + loss + client data + local work, the surroundings in which every algorithm runs.

    model: see ``Model``; data: ``ClientData`` on the devices.
    loss: ``(scores (B, C), labels (B,)) -> (B,)``.
    batch_size, local_epochs: local work of a round. lr: client learning rate, traced; lr_schedule: factor on it as a
        function of the round. optimizer: ``lr -> optax.GradientTransformation``. keep_optimizer: each client keeps its
        optimiser's state from round to round (methods that cannot are refused); else it starts anew every round, except
        where a method says otherwise.
    shift, scale: the model sees ``(x - shift) / scale``.
    statistics: what happens to running statistics: ``average`` with the parameters, ``local`` to each client,
        ``reset`` at the start of every round.
    client_chunk: clients trained at once (None: chosen by the backend). seeds_at_once: how many seeds ``simulate`` will
        train side by side: of a CPU's default chunk each has a part. evaluation_batch: samples of one client that are
        evaluated at once, at most.
    participation: how cohorts are drawn. differentiable: rounds can be differentiated in reverse mode.
    mesh: devices over which clients are spread; ``data`` is then dealt to as many blocks (``data.clients.shard``).

    Raises:
        ValueError: an option out of range, data that is not dealt to the devices of the mesh.
    """

    model: Model
    data: ClientData
    loss: Callable[[jax.Array, jax.Array], jax.Array] = cross_entropy
    batch_size: int = 10
    local_epochs: int = 1
    lr: float = 0.05
    lr_schedule: Callable[[jax.Array], jax.Array] | None = None
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd
    keep_optimizer: bool = False
    shift: Any = 0.0
    scale: Any = 1.0
    statistics: str = "average"
    client_chunk: int | None = None
    seeds_at_once: int = 1
    evaluation_batch: int = 128
    participation: Participation = Participation()
    differentiable: bool = False
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "local_epochs", "seeds_at_once", "evaluation_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name.replace('_', ' ')} must be at least 1, found {getattr(self, name)}")
        if self.client_chunk is not None and self.client_chunk < 1:
            raise ValueError(f"client chunk must be at least 1, found {self.client_chunk}")
        if not self.lr >= 0:
            raise ValueError(f"lr must not be negative, found {self.lr}")
        if self.statistics not in STATISTICS:
            raise ValueError(f"statistics must be one of {', '.join(STATISTICS)}, found {self.statistics!r}")
        if not np.all(np.asarray(self.scale)):
            raise ValueError("scale must not be 0 anywhere: features are divided by it")
        reader = self.data.reader
        if isinstance(reader, GraphReader | NodeReader) and not isinstance(self.data.examples["x"], jax.core.Tracer):
            reader.check(self.data.examples["x"])
        if is_token(self.inputs(1)) and (np.any(np.asarray(self.shift)) or np.any(np.asarray(self.scale) != 1)):
            raise ValueError("tokens (signed integers) have no shift and scale: leave them out, or store x as floats")
        devices = 1 if self.mesh is None else self.mesh.size
        if self.data.shards != devices:  # rows count within a block: clients would read each other's samples
            raise ValueError(
                f"the data is dealt to {self.data.shards} device(s) and the mesh has {devices}: deal it with "
                "fedjax_pfl.data.clients.shard(data, mesh.size)"
            )

    def check_scores(self) -> None:
        """Refuse a model that does not give a score for each class (where the loss is cross-entropy).

        Raises:
            ValueError: the scores have another shape.
        """
        batch = {"x": self.inputs(1), "mask": jax.ShapeDtypeStruct((1,), bool)}
        scores = jax.eval_shape(lambda v, b: self.scores(self.env({}), v, b), self.model.shapes(), batch)
        needed = (1, self.data.num_classes)
        if self.loss is cross_entropy and scores.shape != needed:
            raise ValueError(
                f"model {self.model.name!r} gives scores of shape {scores.shape} for one sample; {needed} is needed "
                f"for the {needed[1]} classes of the data"
            )

    def check_optimizers(self, algorithm: Algorithm) -> None:
        """Refuse a method that cannot keep the clients' optimisers where they are to be kept.

        Raises:
            ValueError: naming the method and the option.
        """
        if self.keep_optimizer and not algorithm.keeps_optimizer:
            raise ValueError(
                f"{algorithm.name} cannot keep the clients' optimisers over rounds: let them start anew "
                "(--optimizer-state restart, keep_optimizer=False)"
            )

    def env(self, hyper: Mapping[str, Any]) -> Env:
        """The traced surroundings, from the algorithm's (or changed) numeric hyper-parameters."""
        return Env(self.data, {name: jnp.asarray(value, jnp.result_type(float)) for name, value in hyper.items()})

    def hyper(self, **own: float) -> dict[str, float]:
        """The hyper-parameters of every method (``lr``) and a method's own."""
        return {"lr": self.lr, **own}

    def replace(self, **changes: Any) -> Federation:
        """A copy with other fields."""
        return dataclasses.replace(self, **changes)

    def with_related(self, form: str, method: str) -> Federation:
        """The same federation with another form of its graph model (see ``Model.related``).

        Raises:
            ValueError: the model is of no family that has such forms.
        """
        if self.model.related is None:
            raise ValueError(f"{method} needs a graph model (gin, gcn, graphsage, gat), {self.model.name!r} is none")
        return self.replace(model=self.model.related(form))

    def learning_rate(self, env: Env, round_: jax.Array) -> jax.Array:
        """The client learning rate of a round: the same for clients that were absent."""
        return env.hyper["lr"] * (1.0 if self.lr_schedule is None else self.lr_schedule(round_))

    @property
    def chunk(self) -> int:
        """Clients trained at once; on a CPU one, where a batch comes in parts, as many as it needs at each client, or
        is the client's whole graph (measured: twice as fast)."""
        one = self.model.accumulate is not None or isinstance(self.data.reader, NodeReader)
        if self.client_chunk is None and one and jax.default_backend() == "cpu":
            return 1
        return self.client_chunk or default_chunk(tree.nbytes(self.model.shapes()), self.seeds_at_once)

    def work(self, **changes: Any) -> Work:
        """The local work of one round."""
        clients = self.data.num_clients
        work = Work(
            self.batch_size, self.local_epochs, chunk=self.chunk,
            most=self.participation.most(clients), differentiable=self.differentiable, mesh=self.mesh,
        )  # fmt: skip
        return dataclasses.replace(work, **changes)

    def evaluation_work(self, split: str) -> Work:
        """How a split of all clients is evaluated."""
        largest = max(self.data.limit(split), 1)
        at_once = largest if isinstance(self.data.reader, NodeReader) else self.evaluation_batch  # one pass serves all
        return self.work(split=split, batch_size=min(at_once, largest), most=None)

    def inputs(self, batch_size: int) -> Any:
        """Shape and dtype of the ``x`` of a batch, before ``prepare``."""
        rows = jax.ShapeDtypeStruct((batch_size,), jnp.int32)
        return jax.eval_shape(lambda data, rows: data.gather(rows)["x"], self.data, rows)

    def prepare(self, batch: Mapping[str, Any]) -> Any:
        """The model's input: the features normalised, in the default float; tokens and graphs as they are."""
        if isinstance(batch["x"], GraphBatch):
            return dataclasses.replace(batch["x"], scan=self.differentiable)
        if isinstance(batch["x"], NodeBatch) or is_token(batch["x"]):
            return batch["x"]
        kind = jnp.result_type(float)
        return (batch["x"].astype(kind) - jnp.asarray(self.shift, kind)) / jnp.asarray(self.scale, kind)

    def scores(self, env: Env, variables: Variables, batch: Mapping[str, jax.Array]) -> jax.Array:
        """The model's scores in evaluation mode, ``(B, C)``: the default ``predict``."""
        return self.model.apply(variables, self.prepare(batch), mask=batch["mask"], key=None, train=False)[0]

    def stays(self, name: str) -> bool:
        """Whether a variable stays at its client: one of its own meaning there, or by the policy on statistics."""
        return self.model.private(name) or (self.statistics != "average" and not is_trainable(name))

    def initial_rows(self, env: Env, variables: Tree) -> Tree:
        """Newly initialised variables as rows, leaves ``(slots, ...)``: equal, or fitted to each client's data set.

        variables: some of the model's, by their names.
        """
        rows = tree.broadcast(variables, env.data.slots)
        if self.model.fit is None or not variables:
            return rows
        return jax.vmap(self.model.fit)(rows, facts_of(env.data))

    @functools.cached_property
    def fresh_statistics(self) -> Variables:
        """Running statistics as initialised, for the policy ``reset``; empty otherwise."""
        if self.statistics != "reset":
            return {}
        with jax.ensure_compile_time_eval():  # asked first inside a trace, whose tracers must not be kept
            return {n: v for n, v in self.model.init(jax.random.key(0)).items() if not is_trainable(n)}

    def has(self, split: str) -> bool:
        """Whether any client has samples in a split."""
        return self.data.limits[SPLITS.index(split)] > 0

    def require_validation(self, method: str) -> None:
        """Refuse a method that needs validation data where there is none.

        Raises:
            ValueError: no client has validation samples.
        """
        if not self.has("validation"):
            raise ValueError(f"{method} needs validation data: set a validation fraction above 0")


def default_chunk(model_bytes: int, seeds: int = 1) -> int:
    """Clients trained at once: on a CPU as many as stay in the cache (measured: up to four models), else many."""
    if jax.default_backend() != "cpu":
        return 256
    return max(min(3 * 2**20 // max(model_bytes, 1), 4) // seeds, 1)
