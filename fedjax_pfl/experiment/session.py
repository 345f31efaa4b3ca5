"""One run while it goes on: what happens after every evaluation, at the end, and when something breaks."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedjax_pfl.engine import simulate
from fedjax_pfl.engine.simulate import Progress, Result
from fedjax_pfl.engine.simulation import Simulation
from fedjax_pfl.evaluation import Scores, mean_over_clients
from fedjax_pfl.experiment import folder as files
from fedjax_pfl.experiment import memory
from fedjax_pfl.experiment.checkpoint import Checkpoints
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.console import Accuracy, Display
from fedjax_pfl.experiment.errors import UserError
from fedjax_pfl.experiment.interrupt import Interrupt
from fedjax_pfl.experiment.record import Recorder
from fedjax_pfl.experiment.setup import Extras
from fedjax_pfl.experiment.summary import results


class Outcome(NamedTuple):
    """A run that has ended, or was ended.

    summary: the content of ``summary.json``. state: the last state, sound in any case. code: the exit code for a shell:
    0, 1 after an update that was not finite, 130 or 143 after Ctrl-C or SIGTERM. problem: what ended it early.
    """

    folder: Path
    summary: dict[str, Any]
    state: Any
    code: int
    problem: str | None


@dataclasses.dataclass
class Session:
    """A run and everything that it writes to."""

    config: Config
    simulation: Simulation
    extras: Extras
    path: Path
    recorder: Recorder
    checkpoints: Checkpoints
    display: Display
    predicted: memory.Predicted
    command: str
    saved: int | None = None
    _written_s: float = 0.0
    _saved_at: float = 0.0

    def run(self, state: Any, first: int) -> Outcome:
        """The rounds from ``first`` on, and the folder's final files.

        Raises:
            UserError: out of memory, full disk.
        """
        self.saved = first or None
        self._saved_at = time.monotonic()
        with self.guarded(), Interrupt(self._interrupted) as interrupt:
            self.display.start(self.config.algorithm, first, self.simulation.rounds)

            def after(progress: Progress) -> bool:
                began = time.perf_counter()
                accuracy = Accuracy.of(progress.record.scores, self.recorder.samples)
                self.display.update(progress.round, accuracy, progress.seconds - self._written_s)
                stop = self._after(progress, interrupt.number is not None)
                self._written_s += time.perf_counter() - began
                return stop

            result = simulate.run(self.simulation, callbacks=[after], on_nonfinite="continue", state=state, first=first)
            self.display.stop()
            return self._finish(result, first, interrupt)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Turn a full disk and exhausted memory into advice, and leave the terminal and the folder in order."""
        try:
            yield
        except MemoryError as error:
            raise self._out_of_memory() from error
        except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:
            if files.disk_full(error):
                raise self._disk_full() from error
            if "RESOURCE_EXHAUSTED" in str(error):
                raise self._out_of_memory() from error
            raise
        finally:
            self.display.stop()
            self.checkpoints.close()

    def _after(self, progress: Progress, interrupted: bool) -> bool:
        self.recorder.add_rounds(progress.round - _length(progress.info), progress.info)
        self.recorder.add_evaluation(progress.record)
        failed = bool(progress.info) and bool(progress.info["failed"].any())
        stop = interrupted or (failed and self.config.rounds.on_nonfinite == "stop")
        late = time.monotonic() - self._saved_at >= self.config.machine.checkpoint_seconds
        if progress.round and (stop or late or progress.round == progress.rounds):
            self.recorder.save_arrays()  # before the checkpoint, so that a checkpoint always finds its evaluations
            self.checkpoints.save(progress.state, progress.round)
            self.saved, self._saved_at = progress.round, time.monotonic()
        return stop

    def _interrupted(self) -> None:
        self.display.stop()
        self.display.warn("finishing the current rounds, then saving; once more to stop at once without saving")

    def _finish(self, result: Result, first: int, interrupt: Interrupt) -> Outcome:
        self.recorder.write_clients(self.extras.partition, self.extras.source)
        arrays = self.simulation.artifacts(result.state)
        source = self.extras.source
        arrays["label_histogram"] = self.extras.partition.counts(source.y, num_classes=source.num_classes)
        done, failed = self.recorder.records[-1].round, result.failures and self.config.rounds.on_nonfinite == "stop"
        status = "nonfinite" if failed else "finished" if done == self.simulation.rounds else "interrupted"
        adapted = self._adapt(result.state) if status == "finished" else {}
        arrays |= {f"unseen_{when}": scores.accuracy for when, scores in adapted.items()}
        files.write_arrays(self.path / files.ARRAYS, arrays)
        summary = files.plain(self._summary(result, first, status) | {"unseen": self._unseen_summary(adapted)})
        files.write_json(self.path / files.SUMMARY, summary)
        if status == "nonfinite":
            return Outcome(self.path, summary, result.state, 1, self._nonfinite(result.failures))
        if result.failures:
            self.display.warn(f"{summary['failed_updates']:,} updates were not finite and were left out")
        if status == "interrupted":
            return Outcome(self.path, summary, result.state, interrupt.exit_code, f"stopped after round {done}")
        return Outcome(self.path, summary, result.state, 0, None)

    def _adapt(self, state: Any) -> dict[str, Scores]:
        """Test scores of the clients that were held out, ``before`` and ``after`` they adapt."""
        if self.extras.unseen is None:
            return {}
        return self.simulation.unseen(state, self.extras.unseen, self.config.rounds.adapt_steps).get("test", {})

    def _unseen_summary(self, adapted: dict[str, Scores]) -> dict[str, Any] | None:
        unseen = self.extras.partition.unseen
        if unseen is None or not adapted:
            return None
        samples = unseen.sizes("test")
        found: dict[str, Any] = {"clients": len(unseen), "steps": self.config.rounds.adapt_steps}
        for when, scores in adapted.items():
            means = mean_over_clients(scores.accuracy, samples)
            found[when] = {"weighted_mean": float(means.mean()), "std_over_seeds": float(means.std())}
            found[when]["per_seed"] = means.tolist()
        return found

    def _summary(self, result: Result, first: int, status: str) -> dict[str, Any]:
        seconds = max(result.run_s - self._written_s, 1e-9)
        done = self.recorder.records[-1].round - first
        peak, source = memory.peak_bytes()
        timing = {
            "compile_s": result.compile_s, "run_s": seconds, "write_s": self._written_s, "rounds_timed": done,
            "rounds_per_s": done / seconds, "client_steps_per_s": result.client_steps / seconds,
            "samples_per_s": result.samples / seconds,
        }  # fmt: skip
        return results(self.config, self.recorder, self.extras.source, self.extras.partition) | {
            "data": self.extras.source.name, "partition_sha256": self.extras.partition.sha256,
            "partition_notes": list(self.extras.partition.notes), "timing": timing,
            "memory": {"predicted_bytes": self.predicted.total, "peak_bytes": peak, "peak_source": source},
            "status": status, "command": self.command,
        }  # fmt: skip

    def _nonfinite(self, failures: Sequence[tuple[int, int, int]]) -> str:
        index, round_, client = failures[0]
        seed = self.config.rounds.seed + index
        return (
            f"the update of client {client} in round {round_ + 1} is not finite (seed {seed}; "
            f"{len(failures)} such updates in these rounds); the client kept its last model and round {self.saved} is "
            f"saved. Run again with a lower --lr, or go on, counting such updates: --resume {self.path} "
            "--on-nonfinite continue"
        )

    def _disk_full(self) -> UserError:
        kept = f"the checkpoint of round {self.saved} is kept" if self.saved else "no checkpoint was written yet"
        advice = f"free some space and continue with --resume {self.path}"
        return UserError(f"the disk of {self.path} is full; {kept}: {advice}", 1)

    def _out_of_memory(self) -> UserError:
        chunk = min(self.simulation.fed.chunk, len(self.extras.partition))
        advice = f"set --client-chunk below {chunk}" if chunk > 1 else "take a smaller --batch-size or --model"
        more = ", or fewer --seeds" if self.config.rounds.seeds > 1 else ""
        return UserError(f"out of memory: {advice}{more} (predicted: {self.predicted.total:,} bytes)", 1)


def _length(info: dict[str, Any]) -> int:
    return info["loss"].shape[1] if info else 0
