"""What the engine asks of a model: ``init``, ``apply``, and where it has a head, ``features`` and ``classify``.

Variables are one flat mapping from a path such as ``params/head/kernel`` or ``batch_stats/bn1/mean`` to an array, so
that "the body", "the head" or "everything but the norms" is a predicate on names and a merge is ``a | b``.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

Array = Any
Variables = dict[str, Array]
Predicate = Callable[[str], bool]

PARAMS = "params/"


def partition(variables: Mapping[str, Array], predicate: Predicate) -> tuple[Variables, Variables]:
    """Split by name: ``(those where predicate holds, the others)``; ``yes | no`` merges them again."""
    yes = {name: leaf for name, leaf in variables.items() if predicate(name)}
    return yes, {name: leaf for name, leaf in variables.items() if name not in yes}


def is_trainable(name: str) -> bool:
    """Whether a variable is a parameter (and not a running statistic)."""
    return name.startswith(PARAMS)


def is_token(x: Array) -> bool:
    """Whether inputs are symbols (signed integers, given to a model as they are) and not features (uint8 or floats)."""
    return jnp.issubdtype(x.dtype, jnp.signedinteger)


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A model as pure functions of a flat mapping of variables.

    init: ``key -> variables``.
    apply: ``(variables, x, *, mask, key, train) -> (scores, variables)``, ``x`` ``(B, ...)``, ``mask`` ``(B,)`` marks
        real samples; the returned variables differ from the given ones in running statistics only.
    features, classify: ``(variables, x, *, mask, key, train) -> (z, variables)`` and ``(variables, z) -> scores``,
        or None where the model has no head that can be told apart.
    head: the predicate on names that tells the head from the body.
    private: the predicate on names of variables that have a meaning of their own at each client and so never leave it.
    fit: ``(variables, facts) -> variables``, fits newly initialised variables of one client to its data set, of which
        the facts are ``labels`` and ``classes``, scalar integers; or None.
    related: ``name -> Model``, other members of the same family (``structure``, ``two_stream``), or None.
    accumulate: ``(parameters, x, y, loss, *, mask, key) -> (total, gradient)`` of the losses of all real samples in
        training mode, summed, for models that take a batch in parts; or None. The gradient of ``apply`` is the same.
    """

    name: str
    init: Callable[[jax.Array], Variables]
    apply: Callable[..., tuple[Array, Variables]]
    head: Predicate
    features: Callable[..., tuple[Array, Variables]] | None = None
    classify: Callable[[Variables, Array], Array] | None = None
    private: Predicate = lambda name: False
    fit: Callable[[Variables, Mapping[str, Array]], Variables] | None = None
    related: Callable[[str], Model] | None = None
    accumulate: Callable[..., tuple[Array, Variables]] | None = None

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Name, shape and dtype of every variable, without running the model."""
        return jax.eval_shape(self.init, jax.random.key(0))

    def is_norm(self, name: str) -> bool:
        """Whether a variable belongs to a normalisation layer: its module has running statistics."""
        module = name.split("/", 1)[-1].rpartition("/")[0]
        return module in {stat.split("/", 1)[-1].rpartition("/")[0] for stat in self.shapes() if not is_trainable(stat)}

    def count(self, predicate: Predicate = is_trainable) -> int:
        """Number of scalars in the variables whose name satisfies the predicate (default: all parameters)."""
        return sum(int(leaf.size) for name, leaf in self.shapes().items() if predicate(name))

    def require_features(self, method: str) -> None:
        """Fail early for a method that needs the input of the head.

        Raises:
            ValueError: the model was built without ``features`` and ``classify``.
        """
        if self.features is None or self.classify is None:
            raise ValueError(
                f"{method} needs the features in front of the head, which model {self.name!r} does not give: "
                "name its head (flax_model(..., head=...)) or pass features= and classify="
            )


def flax_model(module: nn.Module, sample: Array, *, head: str | Predicate = "head", name: str | None = None) -> Model:
    """A model from any Flax Linen module.

    module: called as ``module(x)``; where its ``__call__`` has ``train`` or ``mask`` (None for all), they are passed. A
        module with batch statistics should take ``mask``: without it a last, smaller batch counts repeated samples.
    sample: a batch ``(B, ...)`` of model inputs, of which the shape matters, and whether they are tokens (signed
        integers): a model's other inputs are floats.
    head: path of the head's module (``"head"``, ``"classifier/out"``) or a predicate on parameter paths. With a path,
        ``features`` is the head's input and ``classify`` runs what follows.

    Raises:
        ValueError: the head matches no parameter, or every one.
    """
    accepts = inspect.signature(type(module).__call__).parameters
    sample = jnp.zeros((1, *jnp.shape(sample)[1:]), jnp.int32 if is_token(jnp.asarray(sample)) else float)

    def accepted(**options: Any) -> dict[str, Any]:
        return {name: value for name, value in options.items() if name in accepts}

    def call(variables: Variables, x: Array, mask: Array | None, key: Array | None, train: bool) -> Any:
        mutable = [c for c in _collections(variables) if c != "params"] if train else []
        rngs = None if key is None else {"dropout": key}
        options = accepted(train=train, mask=mask)
        out = module.apply(_nested(variables), x, **options, rngs=rngs, mutable=mutable or False)
        scores, updates = out if mutable else (out, {})
        return scores, variables | _flat(updates)

    @jax.jit
    def init(key: jax.Array) -> Variables:
        keys = dict(zip(("params", "dropout"), jax.random.split(key), strict=True))
        return _as_default_float(_flat(module.init(keys, sample, **accepted(train=False, mask=None))))

    def apply(variables: Variables, x: Array, *, mask: Any = None, key: Any = None, train: bool = False) -> Any:
        return call(variables, x, mask, key, train)

    model = Model(name or type(module).__name__, init, apply, _head_predicate(head))
    _check_head(model, head)
    if not isinstance(head, str):
        return model
    path = tuple(head.split("/"))

    def features(variables: Variables, x: Array, *, mask: Any = None, key: Any = None, train: bool = False) -> Any:
        caught: list[Array] = []

        def catch(run: Any, args: Any, kwargs: Any, context: Any) -> Any:
            if context.module.path == path and context.method_name == "__call__":
                caught.extend(args[:1])
            return run(*args, **kwargs)

        with nn.intercept_methods(catch):
            _, updated = call(variables, x, mask, key, train)
        if not caught:
            raise ValueError(f"the head {head!r} of {model.name!r} is not a module called with its input: no features")
        return caught[0], updated

    def classify(variables: Variables, z: Array) -> Array:
        def replace(run: Any, args: Any, kwargs: Any, context: Any) -> Any:
            inside = context.module.path == path and context.method_name == "__call__"
            return run(z, *args[1:], **kwargs) if inside else run(*args, **kwargs)

        with nn.intercept_methods(replace):  # the body runs on one dummy sample, unused: the compiler drops it
            return call(variables, sample, None, None, False)[0]

    return dataclasses.replace(model, features=features, classify=classify)


def function_model(
    init: Callable[[jax.Array], Any],
    apply: Callable[[Any, Array], Array],
    *,
    head: str | Predicate | None = None,
    features: Callable[[Any, Array], Array] | None = None,
    classify: Callable[[Any, Array], Array] | None = None,
    name: str = "function",
) -> Model:
    """A model from any pair ``init(key) -> params`` and ``apply(params, x) -> scores``; params is any pytree.

    Without ``head`` all parameters are body. ``features(params, x)`` and ``classify(params, z)`` come together.
    """
    structure = jax.tree.structure(jax.eval_shape(init, jax.random.key(0)))

    def flat(params: Any) -> Variables:
        leaves = jax.tree_util.tree_leaves_with_path(params)
        return {PARAMS + jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}

    names = list(flat(jax.eval_shape(init, jax.random.key(0))))

    def nested(variables: Variables) -> Any:
        return jax.tree.unflatten(structure, [variables[name] for name in names])

    def with_state(run: Callable[[Any, Array], Array]) -> Callable[..., tuple[Array, Variables]]:
        return lambda variables, x, *, mask=None, key=None, train=False: (run(nested(variables), x), variables)

    model = Model(
        name,
        lambda key: _as_default_float(flat(init(key))),
        with_state(apply),
        (lambda name: False) if head is None else _head_predicate(head),
        with_state(features) if features else None,
        (lambda variables, z: classify(nested(variables), z)) if classify else None,
    )
    if head is not None:
        _check_head(model, head)
    return model


def _head_predicate(head: str | Predicate) -> Predicate:
    if isinstance(head, str):
        return lambda name: f"{name.split('/', 1)[-1]}/".startswith(f"{head}/")
    return lambda name: head(name.split("/", 1)[-1])


def _check_head(model: Model, head: str | Predicate) -> None:
    paths = [name for name in model.shapes() if is_trainable(name)]
    matched = [path for path in paths if model.head(path)]
    if not matched or len(matched) == len(paths):
        what = "matches no parameter" if not matched else "matches every parameter"
        shown = ", ".join(path.removeprefix(PARAMS) for path in paths)
        raise ValueError(f"head {head!r} {what} of model {model.name!r}; its parameters are: {shown}")


def _flat(collections: Mapping[str, Any]) -> Variables:
    leaves = jax.tree_util.tree_leaves_with_path(dict(collections))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _nested(variables: Mapping[str, Array]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, leaf in variables.items():
        *parents, last = name.split("/")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return nested


def _collections(variables: Mapping[str, Array]) -> list[str]:
    return sorted({name.split("/", 1)[0] for name in variables})


def _as_default_float(variables: Variables) -> Variables:
    """Floating leaves in JAX's default float: float32, or float64 where x64 is on."""
    kind = jnp.result_type(float)
    return {n: v.astype(kind) if jnp.issubdtype(v.dtype, jnp.floating) else v for n, v in variables.items()}
