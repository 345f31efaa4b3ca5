"""Checkpoints: exact, atomic, told apart by run, and passed over where damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from runs import assert_same_state

from fedjax_pfl.experiment.checkpoint import Checkpoints
from fedjax_pfl.experiment.errors import UserError

IDENTITY = {"configuration": "abc", "partition": "def"}


class State(NamedTuple):
    """Every kind of leaf that a state may have."""

    weights: Any
    nothing: Any = None
    empty: Any = None
    zero: Any = None


def state(value: float = 1.0) -> State:
    weights = {
        "a": jnp.full((3, 2), float(value)),
        "half": jnp.full(3, value, jnp.bfloat16),
        "flag": jnp.array([True, False]),
    }
    return State(weights | {"count": jnp.int32(7)}, None, {}, jnp.zeros((0, 3)))


@pytest.fixture
def checkpoints(tmp_path: Path):
    found = Checkpoints(tmp_path / "checkpoints", IDENTITY)
    yield found
    found.close()


def damage(checkpoints: Checkpoints, round_: int, how: str) -> None:
    checkpoints.close()
    folder = checkpoints.folder / str(round_)
    files = [file for file in (folder / "state").rglob("*") if file.is_file()]
    for file in files:
        if how == "remove" and file.parent.name == "d":
            file.unlink()
        if how == "truncate":
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        if how == "flip" and file.parent.name == "d":
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 0xFF
            file.write_bytes(bytes(content))
    if how == "about":
        (folder / "about" / "metadata").write_text("{")


def test_round_trip_is_exact_and_the_last_two_are_kept(checkpoints: Checkpoints) -> None:
    for round_ in (5, 10, 15):
        checkpoints.save(state(round_ / 3), round_)
    assert sorted(path.name for path in checkpoints.folder.iterdir() if path.name.isdigit()) == ["10", "15"]
    found = checkpoints.restore(state())
    assert found is not None
    assert found.round == 15
    assert_same_state(found.state, state(5.0))
    assert jax.tree.structure(found.state) == jax.tree.structure(state())
    assert found.state.weights["half"].dtype == jnp.bfloat16


def test_without_a_checkpoint_there_is_nothing(checkpoints: Checkpoints) -> None:
    assert checkpoints.restore(state()) is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the reader, when it gives up
@pytest.mark.parametrize("how", ["remove", "truncate", "flip", "about"])
def test_a_damaged_checkpoint_is_passed_over_and_can_be_written_again(checkpoints: Checkpoints, how: str) -> None:
    checkpoints.save(state(5), 5)
    checkpoints.save(state(10), 10)
    damage(checkpoints, 10, how)
    notes: list[str] = []
    found = checkpoints.restore(state(), notes.append)
    assert found is not None
    assert found.round == 5
    assert "round 10" in notes[0]
    assert "damaged" in notes[0]
    checkpoints.save(state(11), 10)
    again = checkpoints.restore(state(), notes.append)
    assert again is not None
    assert_same_state(again.state, state(11))
    assert len(notes) == 1


def test_all_damaged_is_an_error(checkpoints: Checkpoints) -> None:
    checkpoints.save(state(), 5)
    damage(checkpoints, 5, "truncate")
    with pytest.raises(UserError, match=r"all checkpoints in .* are damaged"):
        checkpoints.restore(state(), lambda note: None)


def test_a_write_that_was_cut_short_is_not_seen(checkpoints: Checkpoints) -> None:
    checkpoints.save(state(5), 5)
    checkpoints.close()
    (checkpoints.folder / "10.orbax-checkpoint-tmp-3").mkdir()
    (checkpoints.folder / "10.orbax-checkpoint-tmp-3" / "state").write_text("half")
    found = checkpoints.restore(state())
    assert found is not None
    assert found.round == 5


def test_other_shapes_are_named(checkpoints: Checkpoints) -> None:
    checkpoints.save(state(), 5)
    other = state()._replace(weights=state().weights | {"a": jnp.zeros((4, 2))})
    with pytest.raises(
        UserError, match=r"other shapes .*number of clients.*found float32\[3, 2\], needed float32\[4, 2\]"
    ):
        checkpoints.restore(other)


def test_another_run_is_named(checkpoints: Checkpoints) -> None:
    checkpoints.save(state(), 5)
    checkpoints.close()
    other = Checkpoints(checkpoints.folder, IDENTITY | {"configuration": "xyz"})
    with pytest.raises(UserError, match="another run: their configuration differs"):
        other.restore(state())
    other.close()
