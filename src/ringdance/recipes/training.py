"""What the recipes' trainings share: position, evaluations, checkpoints, the best model."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import ringdance.numpy as hvd
from ringdance.errors import ArgumentError, optional
from ringdance.recipes.files import export, wrong_target
from ringdance.recipes.log import TRAINED_ON, Position, TrainingLog, clock, diverged

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


class Training:
    """A model with its files, and where it is, on each rank.

    Args:
        given: options of the recipe: ``checkpoints``, ``checkpoint_every``, ``keep``, ``steps`` and
            ``log_every``; ``patience``, if it has that.
        model: see :class:`Model`.
        options: with which a checkpoint must have been made for this training to go on from it.
        figures: returns this rank's figures, "loss" first, of the steps since it was called last.
        split: what evaluations are of.
        score: that of an evaluation's figures which the best model has the most of.
        describe: returns the text of an evaluation.
        suffix: of checkpoints' names.
        table: saved with the model.

    Attributes:
        at: the position.
        kept: that of the best model on the disk, which may be newer than the newest checkpoint.
    """

    def __init__(
        self, given: argparse.Namespace, model: Model, options: dict[str, Any],
        figures: Callable[[], dict[str, float]], split: str, score: str,
        describe: Callable[[Position, dict[str, float]], str], suffix: str = "",
        table: hvd.EmbeddingTable | None = None,
    ) -> None:
        problem = hvd.broadcast_object(_refused(given) if hvd.rank() == 0 else "")
        if problem:
            raise SystemExit(problem)
        self.given, self.model, self.figures, self.split, self.score = given, model, figures, split, score
        self.options = {"framework": model.framework, **options}
        self.describe, self.table, self.at, self.kept = describe, table, Position(), Position()
        self.files = self.best = None
        if given.checkpoints:
            with _one_sentence():
                self.files = hvd.Checkpoints(given.checkpoints, given.keep, suffix=suffix)
            if split != TRAINED_ON:  # the model that knows these best need not be the best
                self.best = hvd.Checkpoints(given.checkpoints, 1, "best", suffix)

    def save(self, files: hvd.Checkpoints | None) -> None:
        """Begin to write a checkpoint: copies are made here, the files are written in the background."""
        if files is None:
            return
        self.model.average_statistics()
        state = self.model.state() if hvd.rank() == 0 else {}
        floats = ((name, one) for name, one in state.items() if one.dtype.kind == "f")
        wrong = next((name for name, one in floats if not np.isfinite(one).all()), "")
        if wrong := hvd.broadcast_object(wrong):  # the loss shows it one step later
            raise SystemExit(diverged(f"{wrong} is not finite after", self.at.step))
        about = {"position": asdict(self.at), "options": self.options, "arrays": [*state]}
        state |= {name: np.array(json.dumps(value)) for name, value in about.items()}
        with _one_sentence():
            files.save(self.at.step, lambda path: write(path, state), self.table)

    def restore(self, files: hvd.Checkpoints | None) -> bool:
        """Load the newest checkpoint on all ranks; return whether there is one.

        Raises:
            SystemExit: it was made with other options, or cannot be read.
        """
        if files is None or (found := self._read(files)) is None:
            return False
        number, self.at, state = found
        if self.table is not None:
            with _one_sentence():
                files.read(number, self.table)
        self.model.restore(state)
        return True

    def resume(self) -> bool:
        """Go on from the newest checkpoint, if there is one; return whether there is."""
        found = self.restore(self.files)
        if self.best and (kept := self._read(self.best)):
            self.kept = kept[1]
        return found

    def _read(self, files: hvd.Checkpoints) -> tuple[int, Position, dict[str, Array]] | None:
        """Return number, position and state of the newest checkpoint."""
        with _one_sentence():
            found = files.read()
        if found is None:
            return None
        number, content = found
        where = f"{files.directory}: checkpoint {number}"
        try:
            with np.load(io.BytesIO(content)) as saved:
                state = dict(saved)
            at, made = (json.loads(str(state.pop(name))) for name in ("position", "options"))
            at = Position(**at)
            names = json.loads(str(state.pop("arrays", json.dumps([*state]))))  # a version before has none
            if odd := {*names} ^ {*state}:
                raise ValueError(f"the array {min(odd)} is missing, or one too many")
        except Exception as error:  # of damaged files NumPy raises many
            raise SystemExit(
                f"{where} is damaged, or of something else: {error}. Remove it to go on from the one before."
            ) from None
        other = [
            f"{name} was {made.get(name)}, now {value}"
            for name, value in self.options.items() if made.get(name) != value
        ]  # fmt: skip
        if other:
            raise SystemExit(
                f"{where} was made with other options: {'; '.join(other)}. Give the same ones, or another "
                "directory to --checkpoints."
            )
        return number, at, state

    def run(
        self, loader: Any, log: TrainingLog, epochs: float, step: Callable[[Any, Position], float],
        due: Callable[[Position, bool, bool], bool] | None = None,
    ) -> None:
        """Train from the position to the last epoch, the limits, or until evaluations get no better.

        Args:
            loader: of the samples; ``loader.plan`` says where an epoch ends.
            log: prints what is done.
            epochs: when to end.
            step: updates the model by a batch at a position; returns the rate.
            due: whether to evaluate, given the position, whether an epoch has ended, and the training. By
                default after each ``given.evaluate_every`` epochs, and in the end; 0: never.
        """
        given, at = self.given, self.at
        last = at.step + given.steps if given.steps else None
        patience = 0 < (getattr(given, "patience", None) or 0) <= at.worse
        over = at.epoch >= epochs or patience
        if over:
            why = f"{at.worse} evaluations were no better" if patience else f"{at.epoch} epochs are done"
            log.print(f"nothing is left to do after step {at.step}: {why}")
        elif at.step:
            log.print(
                f"going on after step {at.step}: epoch {at.epoch}, {at.done:,} of its {log.unit} are done"
            )
        while not over:
            loader.set_epoch(at.epoch, at.done)
            end = loader.plan.end
            for batch in log.timed(loader):
                rate = step(batch, at)
                at.step, at.done = at.step + 1, batch.position
                log.use(at.step, at.epoch, batch)
                ended = at.done == end
                if at.step % given.log_every == 0 or ended or at.step == last:
                    over = log.line(at.step, at.epoch * log.epoch + at.done, rate, self.figures())
                over = self._after(log, ended, over or at.step == last, epochs, due)
                if over:
                    break
            else:
                if at.done:  # fewer samples were left than a batch of so many ranks
                    over = self._after(log, True, False, epochs, due)
        if last and at.step < last and at.epoch >= epochs:
            log.print(
                f"ended before --steps: {epochs:g} epochs have no more {log.unit}; --epochs N for more"
            )

    def _after(
        self, log: TrainingLog, ended: bool, over: bool, epochs: float,
        due: Callable[[Position, bool, bool], bool] | None,
    ) -> bool:
        """Do what is due after a step or at the end of an epoch; return whether the training is over."""
        at = self.at
        if ended:
            at.epoch, at.done = at.epoch + 1, 0
        over = over or at.epoch >= epochs
        every = self.given.evaluate_every
        if due(at, ended, over) if due else ended and every and (over or at.epoch % every == 0):
            over = self.evaluate(log) or over
        if over or ended or at.step % self.given.checkpoint_every == 0:
            log.add_up(at)
            self.save(self.files)
        return over

    def evaluate(self, log: TrainingLog) -> bool:
        """Evaluate and keep the best model; return whether it is time to stop."""
        at, found, patience = self.at, self.model.evaluate(), getattr(self.given, "patience", None)
        log.print(f"{self.describe(at, found)} of {self.split}, {clock(log.seconds())}")
        log.scalars(at.step, **{f"evaluation_{name}": value for name, value in found.items()})
        if not np.isfinite(found[self.score]):
            log.add_up(at)
            self.save(self.files)
            self._close_files()
            raise SystemExit(
                f"The {self.score} of {self.split} is {found[self.score]} after step {at.step}: no model is "
                "kept as the best, or exported. Do all samples have the same label, or none? Give others."
            )
        if self.best is None:
            return False
        if found[self.score] > at.best:
            at.best, at.worse = found[self.score], 0
            if at.best > self.kept.best:
                self.kept = replace(at)
                self.save(self.best)
            return False
        at.worse += at.step > self.kept.step  # up to there a run before has gone on
        if patience and at.worse >= patience:
            log.print(f"ended: no better {self.score} than {at.best:.5f} in {at.worse} evaluations")
            return True
        return False

    def close(self, log: TrainingLog, about: dict[str, Any]) -> None:
        """Export the best model, if that was asked for, as a directory that ``about`` describes."""
        if self.given.export:
            self.restore(self.best)  # once it is written
            self.model.average_statistics()
            about = {"framework": self.model.framework, **about, "steps": self.at.step}
            export(self.given, self.model.export, about, self.table)
            log.print(f"model written to {self.given.export}")
        self._close_files()
        log.close()

    def _close_files(self) -> None:
        """Wait until all checkpoints are written."""
        with _one_sentence():
            for files in (self.files, self.best):
                if files:
                    files.close()


@contextmanager
def _one_sentence() -> Iterator[None]:
    """End with the text of what is wrong with checkpoints, on all ranks."""
    try:
        yield
    except (ArgumentError, hvd.CheckpointError) as error:
        raise SystemExit(str(error)) from None


def _refused(given: argparse.Namespace) -> str:
    """Return why rank 0 could not write what it is to write in the end, or ""."""
    try:
        if given.tensorboard:
            optional("tensorboardX", ArgumentError, "--tensorboard needs tensorboardX")
    except ArgumentError as error:
        return str(error)
    return wrong_target(given)


def write(path: Path, state: dict[str, Array]) -> None:
    """Write arrays into a file of any name."""
    arrays: Any = state  # none is named as an argument of savez, of which NumPy 2.2 has one more
    with open(path, "wb") as file:
        np.savez(file, **arrays)
