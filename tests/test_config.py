"""Configurations: round trip through TOML, types, ranges, documentation."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import typing
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fedjax_pfl.algorithms import registry
from fedjax_pfl.experiment import toml
from fedjax_pfl.experiment.config import SECTION_OF, SECTIONS, Config, configure
from fedjax_pfl.experiment.errors import UserError

ENTRIES = registry()
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def values(hint: Any) -> st.SearchStrategy:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if type(None) in arguments:
        return st.none() | values(next(a for a in arguments if a is not type(None)))
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    floats = st.floats(allow_nan=False)
    return {bool: st.booleans(), int: st.integers(), float: floats, str: TEXT}[hint]


def instances(kind: type) -> st.SearchStrategy:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{field.name: values(hints[field.name]) for field in dataclasses.fields(kind)})


def configs() -> st.SearchStrategy:
    sections = {name: instances(kind) for name, kind in SECTIONS.items()}
    plain = {name: instances(e.options) for name, e in ENTRIES.items() if name in ("fedavg", "fedprox", "fixed_mixing")}
    return st.one_of(
        *(st.builds(Config, st.just(name), options, **sections) for name, options in plain.items())
    )  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(configs())
def test_toml_round_trip_is_exact(config: Config) -> None:
    text = toml.dumps(config)
    assert toml.loads(text) == config
    assert toml.digest(toml.loads(text)) == toml.digest(config)


@pytest.mark.parametrize("name", ENTRIES)
def test_every_algorithm_can_be_written_and_read(name: str) -> None:
    config = Config(name)
    assert toml.loads(toml.dumps(config)) == config


@pytest.mark.parametrize("kind", [*SECTIONS.values(), *(entry.options for entry in ENTRIES.values())])
def test_every_field_is_documented_and_none_is_a_default_where_it_is_allowed(kind: type) -> None:
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body
    for place, node in enumerate(body):
        if isinstance(node, ast.AnnAssign):
            after = body[place + 1] if place + 1 < len(body) else None
            assert isinstance(after, ast.Expr), f"{kind.__name__}.{node.target.id} needs a line of documentation"
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if type(None) in typing.get_args(hints[field.name]):
            assert field.default is None, "an option that is None is left out of the file"


def test_own_options_do_not_hide_common_ones() -> None:
    for entry in ENTRIES.values():
        assert not {field.name for field in dataclasses.fields(entry.options)} & set(SECTION_OF), entry.name
        assert entry.name not in SECTIONS


def test_defaults_are_those_of_the_documentation() -> None:
    expected = {
        "data": "digits", "partition": None, "alpha": 0.1, "clients": None, "rounds": 50, "join_ratio": 1.0,
        "local_epochs": 1, "batch_size": 10, "lr": 0.05, "model": None, "seed": 0, "seeds": 1, "eval_every": 5,
    }  # fmt: skip
    flat = Config().flat()
    assert {name: flat[name] for name in expected} == expected
    assert flat["validation_fraction"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, "rounds must be at least 1, found 0"),
        ({"eval_every": 0}, "eval_every must be at least 1"),
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"seed": 2**31}, "seed must lie in"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"local_epochs": 0}, "local_epochs must be at least 1"),
        ({"lr": -0.1}, "lr must be at least 0"),
        ({"lr": float("nan")}, "lr must be at least 0"),
        ({"lr": float("inf")}, "lr must be finite"),
        ({"momentum": 1.0}, "momentum must be in"),
        ({"momentum": 0.9, "optimizer": "adam"}, "momentum belongs to sgd"),
        ({"momentum": 0.9, "optimizer": "adamw"}, "momentum belongs to sgd"),
        ({"client_chunk": 0}, "client_chunk must be at least 1"),
        ({"clients": 0}, "clients must be at least 1"),
        ({"devices": 0}, "devices must be at least 1"),
        ({"roundz": 3}, "did you mean 'rounds'"),
    ],
)
def test_values_out_of_range_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        configure("fedavg", **changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds = ", "not valid TOML"),
        ("[rounds]\nroundz = 3", "did you mean 'rounds'"),
        ("[roundz]\nrounds = 3", "unknown table or key 'roundz': did you mean 'rounds'"),
        ("[rounds]\nrounds = 3.5", "must be of type int, found 3.5"),
        ("[rounds]\nrounds = true", "must be of type int, found True"),
        ("[data]\ndata = 3", "must be of type str, found 3"),
        ("[model]\nhidden = 3", "must be an array"),
        ("[training]\noptimizer = 'sdg'", "must be one of sgd, adam, adamw"),
        ("algorithm = 'fedavgg'", "did you mean 'fedavg'"),
        ("algorithm = 'fedprox'\n[options]\nmuu = 1.0", "did you mean 'mu'"),
        ("rounds = 3", "'rounds' must be a table"),
    ],
)
def test_a_bad_file_is_refused_with_the_remedy(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        toml.loads(text)


def test_integers_stand_for_floats_and_missing_options_for_defaults() -> None:
    config = toml.loads("algorithm = 'fedprox'\n[options]\nmu = 1\n[training]\nlr = 1\n")
    assert config == configure("fedprox", {"mu": 1.0}, lr=1.0)
    assert isinstance(config.options.mu, float)


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(UserError, match=r"there is no configuration .*nothing\.toml"):
        toml.read(tmp_path / "nothing.toml")


def test_unknown_own_option_is_named() -> None:
    with pytest.raises(ValueError, match="fedprox has no option 'muu': did you mean 'mu'"):
        configure("fedprox", {"muu": 1.0})
