"""What the recipes' trainings share: position, evaluations, checkpoints, the best model, export."""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import ringdance.numpy as hvd
from ringdance.recipes.log import TRAINED_ON, TrainingLog, clock

Array = np.ndarray[Any, Any]


class Model(Protocol):
    """What a recipe's script has for its framework."""

    framework: str

    def evaluate(self) -> dict[str, float]:
        """Return figures of the samples of all ranks, each counted once; collective."""

    def average_statistics(self) -> None:
        """Average what each rank has of its own samples, as normalization's statistics; collective."""

    def state(self) -> dict[str, Array]:
        """Return copies of the weights and of the optimizer's state; asked on rank 0."""

    def restore(self, state: dict[str, Array]) -> None:
        """Take such values, equal on all ranks."""

    def export(self, directory: Path) -> None:
        """Write what score.py needs; asked on rank 0."""


@dataclass
class Position:
    """Where a training is.

    Attributes:
        step: so many are done, in all epochs.
        epoch: the current one, from 0.
        done: samples of it.
        seconds: so far, with those of earlier runs.
        best: the best evaluation.
        worse: evaluations since then.
    """

    step: int = 0
    epoch: int = 0
    done: int = 0
    seconds: float = 0.0
    best: float = 0.0
    worse: int = 0


class Training:
    """A model with its files, and where it is, on each rank.

    Args:
        given: options of the recipe: ``checkpoints``, ``checkpoint_every``, ``keep``, ``steps`` and
            ``log_every``; ``patience``, if it has that.
        model: see :class:`Model`.
        options: with which a checkpoint must have been made for this training to go on from it.
        split: what evaluations are of.
        score: that of an evaluation's figures which the best model has the most of.
        describe: returns the text of an evaluation.
        suffix: of checkpoints' names.
        table: saved with the model.

    Attributes:
        at: the position.
    """

    def __init__(
        self, given: argparse.Namespace, model: Model, options: dict[str, Any], split: str, score: str,
        describe: Callable[[Position, dict[str, float]], str], suffix: str = "",
        table: hvd.EmbeddingTable | None = None,
    ) -> None:
        self.given, self.model, self.split, self.score = given, model, split, score
        self.options = {"framework": model.framework, **options}
        self.describe, self.table, self.at = describe, table, Position()
        self.files = self.best = None
        if given.checkpoints:
            self.files = hvd.Checkpoints(given.checkpoints, given.keep, suffix=suffix)
            if split != TRAINED_ON:  # the model that knows these best need not be the best
                self.best = hvd.Checkpoints(given.checkpoints, 1, "best", suffix)

    def save(self, files: hvd.Checkpoints | None) -> None:
        """Begin to write a checkpoint: copies are made here, the files are written in the background."""
        if files is None:
            return
        self.model.average_statistics()
        state = self.model.state() if hvd.rank() == 0 else {}
        about = {"position": asdict(self.at), "options": self.options}
        state |= {name: np.array(json.dumps(value)) for name, value in about.items()}
        files.save(self.at.step, lambda path: write(path, state), self.table)

    def restore(self, files: hvd.Checkpoints | None) -> bool:
        """Load the newest checkpoint on all ranks; return whether there is one.

        Raises:
            SystemExit: it was made with other options.
        """
        found = files.read() if files else None
        if files is None or found is None:
            return False
        number, content = found
        try:
            with np.load(io.BytesIO(content)) as saved:
                state = dict(saved)
            at, made = (json.loads(str(state.pop(name))) for name in ("position", "options"))
        except (KeyError, ValueError, OSError) as error:
            raise SystemExit(f"{files.directory}: checkpoint {number} is of no recipe: {error}") from None
        other = [
            f"{name} was {made.get(name)}, now {value}"
            for name, value in self.options.items() if made.get(name) != value
        ]  # fmt: skip
        if other:
            raise SystemExit(
                f"{files.directory}: checkpoint {number} was made with other options: {'; '.join(other)}. "
                "Give the same ones, or another directory to --checkpoints."
            )
        if self.table is not None:
            files.read(number, self.table)
        self.at = Position(**at)
        self.model.restore(state)
        return True

    def run(
        self, loader: Any, log: TrainingLog, epochs: float, step: Callable[[Any, Position], Any],
        due: Callable[[Position, bool, bool], bool],
    ) -> None:
        """Train from the position to the last epoch, the limits, or until evaluations get no better.

        Args:
            loader: of the samples; ``loader.plan`` says where an epoch ends.
            log: prints what is done.
            epochs: when to end.
            step: updates the model by a batch at a position; returns the rate, and a function that returns
                this rank's figures of the steps since it was called last.
            due: whether to evaluate, given the position, whether an epoch has ended, and the training.
        """
        given, at = self.given, self.at
        if at.step:
            log.print(
                f"going on after step {at.step}: epoch {at.epoch}, {at.done:,} of its {log.unit} are done"
            )
        last = at.step + given.steps if given.steps else None
        over = at.epoch >= epochs or 0 < (getattr(given, "patience", None) or 0) <= at.worse
        while not over:
            loader.set_epoch(at.epoch, at.done)
            end = loader.plan.end
            for batch in log.timed(loader):
                rate, figures = step(batch, at)
                at.step, at.done = at.step + 1, batch.position
                log.use(at.step, at.epoch, batch)
                ended = at.done == end
                if at.step % given.log_every == 0 or ended:
                    over = log.line(at.step, at.epoch * log.epoch + at.done, rate, figures())
                if ended:
                    at.epoch, at.done = at.epoch + 1, 0
                over = over or at.step == last or at.epoch >= epochs
                if due(at, ended, over):
                    over = self.evaluate(log) or over
                if over or ended or at.step % given.checkpoint_every == 0:
                    at.seconds = log.seconds()
                    self.save(self.files)
                if over or ended:
                    break
            else:  # fewer samples were left than a batch of so many ranks
                at.epoch, at.done = at.epoch + 1, 0
                over = at.epoch >= epochs
        if last and at.step < last and at.epoch >= epochs:
            log.print(
                f"ended before --steps: {epochs:g} epochs have no more {log.unit}; --epochs N for more"
            )

    def evaluate(self, log: TrainingLog) -> bool:
        """Evaluate and keep the best model; return whether it is time to stop."""
        at, found, patience = self.at, self.model.evaluate(), getattr(self.given, "patience", None)
        log.print(f"{self.describe(at, found)} of {self.split}, {clock(log.seconds())}")
        log.scalars(at.step, **found)
        if self.best is None:
            return False
        if found[self.score] > at.best:
            at.best, at.worse = found[self.score], 0
            self.save(self.best)
            return False
        at.worse += 1
        if patience and at.worse >= patience:
            log.print(f"ended: no better {self.score} than {at.best:.5f} in {at.worse} evaluations")
            return True
        return False

    def close(self, log: TrainingLog, about: dict[str, Any]) -> None:
        """Export the best model, if that was asked for, as a directory that ``about`` describes."""
        if self.given.export:
            if self.best and self.best.numbers():
                self.restore(self.best)
            self._export(self.given.export, about | {"steps": self.at.step})
            log.print(f"model written to {self.given.export}")
        for files in (self.files, self.best):
            if files:
                files.close()
        log.close()

    def _export(self, directory: str, about: dict[str, Any]) -> None:
        """Write the model for score.py: a directory that is complete when it has its name."""
        final, partial = Path(directory), Path(f"{directory}.partial")
        self.model.average_statistics()
        if hvd.rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        if self.table is not None:
            self.table.save(partial / "table.npy")
        # What only one rank does takes seconds here. Marked, the waiting ranks do not warn.
        with hvd.pause_stall_check("export"):
            if hvd.rank() == 0:
                self.model.export(partial)
                about = {"framework": self.model.framework, **about}
                (partial / "model.json").write_text(json.dumps(about, indent=1))
                shutil.rmtree(final, ignore_errors=True)
                os.replace(partial, final)
            hvd.barrier()


def write(path: Path, state: dict[str, Array]) -> None:
    """Write arrays into a file of any name."""
    with open(path, "wb") as file:
        np.savez(file, allow_pickle=False, **state)
