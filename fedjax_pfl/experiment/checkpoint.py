"""Checkpoints: the whole state after a round, with what tells whether it is sound and belongs to this run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl.experiment.errors import UserError

Tree = Any
KEEP = 2


class Restored(NamedTuple):
    """A state that was saved, and the number of rounds before it."""

    state: Tree
    round: int


class Checkpoints:
    """The last states of a run in a folder. A write that is cut short leaves the ones before as they were.

    A state is stored as the list of its leaves, without those of size zero.

    identity: what must be the same for a state to belong to the run, such as hashes of configuration and partition.
    """

    def __init__(self, folder: Path, identity: dict[str, str]) -> None:
        self.folder, self.identity = folder.absolute(), identity
        self._manager: Any = None

    def save(self, state: Tree, round_: int) -> None:
        """Save the state after ``round_`` rounds; the call returns when it is on the disk."""
        import orbax.checkpoint as ocp

        manager = self._open()
        if round_ in manager.all_steps():  # a damaged one, or one of a run that was resumed from an earlier state
            manager.delete(round_)
        leaves = _stored(state)
        about = {"identity": self.identity, "shapes": _shapes(leaves), "sha256": _digest(leaves)}
        items = {"state": ocp.args.StandardSave(leaves), "about": ocp.args.JsonSave(about)}
        manager.save(round_, args=ocp.args.Composite(**items), force=True)
        manager.wait_until_finished()

    def restore(self, template: Tree, note: Callable[[str], None] = print) -> Restored | None:
        """The newest sound state, in the shape and on the devices of ``template``; None where there is no checkpoint.

        A damaged one is passed over, and ``note`` is told.

        Raises:
            UserError: a checkpoint of another run, or all are damaged.
        """
        if not self.folder.is_dir():
            return None
        rounds = sorted(self._open().all_steps(), reverse=True)
        for round_ in rounds:
            try:
                found = self._load(template, round_)
            except UserError:
                raise
            except Exception as error:  # whatever a damaged file makes the reader raise
                reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
                note(f"the checkpoint of round {round_} in {self.folder} is damaged ({reason}): trying the one before")
                continue
            return Restored(found, round_)
        if rounds:
            raise UserError(f"all checkpoints in {self.folder} are damaged: start again in another folder")
        return None

    def close(self) -> None:
        """Release what the writer holds."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def _open(self) -> Any:
        import orbax.checkpoint as ocp

        if self._manager is None:
            options = ocp.CheckpointManagerOptions(max_to_keep=KEEP, enable_async_checkpointing=False, create=True)
            self._manager = ocp.CheckpointManager(self.folder, options=options)
        return self._manager

    def _load(self, template: Tree, round_: int) -> Tree:
        import orbax.checkpoint as ocp

        manager = self._open()
        about = manager.restore(round_, args=ocp.args.Composite(about=ocp.args.JsonRestore())).about
        for name, value in self.identity.items():
            if about["identity"].get(name) != value:
                raise UserError(
                    f"the checkpoints in {self.folder} belong to another run: their {name} differs: undo the change, "
                    "or start another run with --config and a new --out"
                )
        leaves, structure = jax.tree.flatten(template)
        wanted = [leaf for leaf in leaves if leaf.size]
        if about["shapes"] != _shapes(wanted):
            raise UserError(
                f"the checkpoint of round {round_} in {self.folder} has other shapes or types than this run: it was "
                f"made with another number of clients or devices, another model, or another precision "
                f"({_first_difference(about['shapes'], _shapes(wanted))})"
            )
        abstract = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in wanted]
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        stored = [np.asarray(leaf) for leaf in manager.restore(round_, args=args).state]
        if _digest(stored) != about["sha256"]:
            raise ValueError("its content does not match its sha256")
        values = iter(stored)
        placed = [jax.device_put(next(values), leaf.sharding) if leaf.size else leaf for leaf in leaves]
        return jax.tree.unflatten(structure, placed)


def _stored(state: Tree) -> list[np.ndarray]:
    return [np.asarray(jax.device_get(leaf)) for leaf in jax.tree.leaves(state) if leaf.size]


def _shapes(leaves: list[Any]) -> list[str]:
    return [f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves]


def _first_difference(found: list[str], wanted: list[str]) -> str:
    pairs = [f"found {a}, needed {b}" for a, b in zip(found, wanted, strict=False) if a != b]
    return pairs[0] if pairs else f"found {len(found)} arrays, needed {len(wanted)}"


def _digest(leaves: list[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for leaf in leaves:
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()
