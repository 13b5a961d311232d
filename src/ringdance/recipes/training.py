"""The training loop of the recipes, with progress table, evaluation, checkpoints and the best model.

Note [Models of recipes]: Each recipe defines a class for its model with the following members.

- ``framework``: Name of the framework.
- ``figures()``: Returns this rank's metrics for the steps since the last call, "loss" first.
- ``evaluate()``: Returns metrics over the samples of all ranks, with each sample counted once. Collective.
- ``described(at, found)``: Formats ``found``, the metrics of an evaluation at position ``at``.
- ``average_statistics()``: Averages statistics that each rank computes from its own samples, such as the
  running means of batch normalization. Collective.
- ``state()``: Returns copies of the arrays for a checkpoint, by name. Called on rank 0.
- ``restore(state)``: Restores a state returned by ``state()``. Called with equal values on all ranks.
- ``export(directory)``: Writes the files of an exported model. Called on rank 0.
"""

from __future__ import annotations

import argparse
import io
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import ringdance.numpy as hvd
from ringdance.errors import ArgumentError
from ringdance.recipes.models import export, wrong_target
from ringdance.recipes.progress import ProgressTable, clock, diverged

Array = np.ndarray[Any, Any]
TRAINED_ON = "the only split"
"""Value of ``split`` if the data has only a training split, so metrics are not validation metrics."""


@dataclass
class Position:
    """A position in a training run.

    Attributes:
        step: Number of steps completed, in all epochs.
        epoch: The current epoch, from 0.
        done: Number of the current epoch's samples that were used for training.
        seconds: Training time so far, including earlier runs.
        best: Highest score of all evaluations.
        worse: Number of evaluations since the best one.
    """

    step: int = 0
    epoch: int = 0
    done: int = 0
    seconds: float = 0.0
    best: float = 0.0
    worse: int = 0


class Training:
    """Trains a model and manages its checkpoints. All ranks must create an instance.

    Args:
        given: Options of the recipe (see ``Options``). The attributes ``patience`` and ``sample_log`` are
            optional.
        model: Model to train. See Note [Models of recipes].
        options: Settings that must be the same when a run resumes from a checkpoint.
        unit: Name of the samples, such as "images".
        samples: Number of samples per epoch.
        epochs: Number of epochs in the training run.
        split: Name of the split that is evaluated.
        score: Name of the metric that determines the best model. Higher is better.
        suffix: File name suffix of the checkpoints.
        table: Embedding table to save with the model, if any.

    Attributes:
        at: The current position.
        kept: Position of the best model on disk. It may be ahead of the newest checkpoint.
    """

    def __init__(
        self, given: argparse.Namespace, model: Any, options: dict[str, Any], unit: str, samples: int,
        epochs: float, split: str, score: str, suffix: str = "", table: hvd.EmbeddingTable | None = None,
    ) -> None:
        if problem := hvd.broadcast_object(wrong_target(given) if hvd.rank() == 0 else ""):
            raise SystemExit(problem)
        self.given, self.model, self.score, self.table = given, model, score, table
        self.options = {"framework": model.framework, **options}
        self.unit, self.samples, self.epochs = unit, samples, epochs
        self.evaluated = f"{split} {unit}"
        if split == TRAINED_ON:
            self.evaluated = f"training {unit} (the data has no other split)"
        self.at, self.kept = Position(), Position()
        self.patience: int = getattr(given, "patience", None) or 0
        self.files = self.best = None
        if given.checkpoints:
            with _one_sentence():
                self.files = hvd.Checkpoints(given.checkpoints, given.keep, suffix=suffix)
            if split != TRAINED_ON:  # do not select the best model by its score on training samples
                self.best = hvd.Checkpoints(given.checkpoints, 1, "best", suffix)
        used = getattr(given, "sample_log", None)
        self._used = Path(used) / f"rank-{hvd.rank()}.jsonl" if used else None
        if self._used:
            self._used.parent.mkdir(parents=True, exist_ok=True)
        self.progress = ProgressTable(given, unit, samples, epochs)

    def print(self, text: str) -> None:
        """Print on rank 0."""
        self.progress.print(text)

    def _note(self, batch: Any) -> None:
        """Append the samples that this rank used in a step to its sample log."""
        if self._used:
            about = {"step": self.at.step, "epoch": self.at.epoch}
            with self._used.open("a") as file:
                print(json.dumps(about | {"samples": batch.indices[batch.indices >= 0].tolist()}), file=file)

    # Checkpoints ------------------------------------------------------------------------------------------

    def save(self, files: hvd.Checkpoints | None) -> None:
        """Copy the state, and start to write it as a checkpoint in the background."""
        if files is None:
            return
        self.at.seconds = self.progress.seconds()
        self.model.average_statistics()
        state = self.model.state() if hvd.rank() == 0 else {}
        floats = ((name, array) for name, array in state.items() if array.dtype.kind == "f")
        wrong = next((name for name, array in floats if not np.isfinite(array).all()), "")
        if wrong := hvd.broadcast_object(wrong):  # the loss is not affected until the next step
            raise SystemExit(diverged(f"{wrong} is not finite after", self.at.step))
        about = {"position": asdict(self.at), "options": self.options, "arrays": [*state]}
        state |= {name: np.array(json.dumps(value)) for name, value in about.items()}
        with _one_sentence():
            files.save(self.at.step, lambda path: write(path, state), self.table)

    def resume(self, best: bool = False) -> bool:
        """Restore the newest checkpoint, or the best model if ``best``. Returns False if none exists.

        Raises:
            SystemExit: The checkpoint was written with different options, or cannot be read.
        """
        restored = (best and self._restore(self.best)) or self._restore(self.files)
        if self.best and (kept := self._read(self.best)):
            self.kept = kept[1]
        self.progress.began = time.perf_counter() - self.at.seconds
        return restored

    def _restore(self, files: hvd.Checkpoints | None) -> bool:
        if files is None or (checkpoint := self._read(files)) is None:
            return False
        saved, self.at, state = checkpoint
        if self.table is not None:
            with _one_sentence():
                files.read(saved, self.table)
        self.model.restore(state)
        return True

    def _read(self, files: hvd.Checkpoints) -> tuple[int, Position, dict[str, Array]] | None:
        """Return the newest checkpoint's number, position and state, or None if none exists."""
        with _one_sentence():
            checkpoint = files.read()
        if checkpoint is None:
            return None
        where = f"{files.directory}: checkpoint {checkpoint[0]}"
        try:
            with np.load(io.BytesIO(checkpoint[1])) as saved:
                state = dict(saved)
            parts = (json.loads(str(state.pop(key))) for key in ("position", "options", "arrays"))
            about, made, names = parts
            at = Position(**about)
            if odd := {*names} ^ {*state}:
                raise ValueError(f"the array {min(odd)} is missing or unexpected")
        except Exception as error:  # NumPy raises many kinds of exceptions for damaged files
            raise SystemExit(
                f"{where} is damaged or not a checkpoint: {error}. Remove it to use the previous checkpoint."
            ) from None
        other = [
            f"{name} was {made.get(name)}, now {value}"
            for name, value in self.options.items() if made.get(name) != value
        ]  # fmt: skip
        if other:
            raise SystemExit(
                f"{where} was made with other options: {'; '.join(other)}. Use the same options, or another "
                "directory for --checkpoints."
            )
        return checkpoint[0], at, state

    # Training loop ----------------------------------------------------------------------------------------

    def train_or_evaluate(
        self, loader: Any, rate: Callable[[float], float], begin: Callable[[], None] = lambda: None
    ) -> None:
        """Resume from the newest checkpoint and train to the last epoch. With ``--evaluate``, only evaluate.

        Args:
            loader: Loader of the training samples. See ``run``.
            rate: Returns the learning rate, given the number of epochs completed, including a fraction.
            begin: Called if there is no checkpoint to resume from.
        """
        given = self.given
        if not self.resume(best=given.evaluate):
            if given.evaluate and given.checkpoints:
                raise SystemExit(f"--evaluate: {given.checkpoints} contains no checkpoints")
            begin()
        if given.evaluate:
            self.best = None
            self.evaluate()
            return

        def step(batch: Any, at: Position) -> float:
            now = rate(at.epoch + at.done / self.samples)
            self.model.step(batch, now)
            return now

        self.run(loader, step)

    def run(
        self, loader: Any, step: Callable[[Any, Position], float],
        due: Callable[[Position, bool, bool], bool] | None = None,
    ) -> None:
        """Train until the last epoch, ``--steps``, ``--time-limit`` or ``--patience`` ends the run.

        Args:
            loader: Loader of the training samples. Its ``plan.end`` is the position where an epoch ends.
            step: Updates the model with one batch, given the position. Returns the learning rate.
            due: Returns True if an evaluation is due, given the position, whether the epoch has ended, and
                whether training is about to end. By default, the model is evaluated after every
                ``given.evaluate_every`` epochs and at the end, or never if that option is 0.
        """
        given, at = self.given, self.at
        self.progress.clear()
        last = at.step + given.steps if given.steps else None
        patience = 0 < self.patience <= at.worse
        over = at.epoch >= self.epochs or patience
        if over:
            why = f"{at.worse} evaluations were not better" if patience else f"all {at.epoch} epochs are done"
            self.print(f"nothing left to do after step {at.step}: {why}")
        elif at.step:
            self.print(
                f"continuing after step {at.step}: epoch {at.epoch}, {at.done:,} {self.unit} already used"
            )
        while not over:
            loader.set_epoch(at.epoch, at.done)
            end = loader.plan.end
            for batch in self.progress.timed(loader):
                rate = step(batch, at)
                at.step, at.done = at.step + 1, batch.position
                self._note(batch)
                ended = at.done == end
                if at.step % given.log_every == 0 or ended or at.step == last:
                    trained = at.epoch * self.samples + at.done
                    over = self.progress.line(self.model.figures(), rate, at.step, trained)
                over = self._after(ended, over or at.step == last, due)
                if over:
                    break
            else:
                if at.done:  # the rest of the epoch is shorter than a global batch of this run
                    over = self._after(True, False, due)
        if last and at.step < last and at.epoch >= self.epochs:
            self.print(
                f"stopped before --steps: all {self.epochs:g} epochs are done. To train longer, use --epochs."
            )

    def _after(self, ended: bool, over: bool, due: Callable[[Position, bool, bool], bool] | None) -> bool:
        """Evaluate and save if due. Called after a step or an epoch. Returns True if training should end."""
        at = self.at
        if ended:
            at.epoch, at.done = at.epoch + 1, 0
        over = over or at.epoch >= self.epochs
        every = self.given.evaluate_every
        if due(at, ended, over) if due else ended and every and (over or at.epoch % every == 0):
            over = self.evaluate() or over
        if over or ended or at.step % self.given.checkpoint_every == 0:
            self.save(self.files)
        return over

    def evaluate(self) -> bool:
        """Evaluate, and save the model if it is the best so far. Returns True if training should stop."""
        at, metrics = self.at, self.model.evaluate()
        evaluated = f"{metrics['count']:,} {self.evaluated}"
        self.print(f"{self.model.described(at, metrics)} on {evaluated}, {clock(self.progress.seconds())}")
        self.progress.scalars(at.step, {f"evaluation_{name}": value for name, value in metrics.items()})
        if not np.isfinite(metrics[self.score]):
            self.save(self.files)
            self._close_files()
            raise SystemExit(
                f"The {self.score} on the {self.evaluated} is {metrics[self.score]} after step {at.step}, so "
                "no model is kept as the best or exported. Check whether all samples have the same label or "
                "no label."
            )
        if self.best is None:
            return False
        if metrics[self.score] > at.best:
            at.best, at.worse = metrics[self.score], 0
            if at.best > self.kept.best:
                self.kept = replace(at)
                self.save(self.best)
            return False
        # Do not count evaluations up to kept.step, at which an earlier run found a better model.
        at.worse += at.step > self.kept.step
        if self.patience and at.worse >= self.patience:
            self.print(f"stopped early: {self.score} was not above {at.best:.5f} in {at.worse} evaluations")
            return True
        return False

    def close(self, about: dict[str, Any]) -> None:
        """Export the best model if requested, and wait for checkpoints. ``about`` is added to model.json."""
        seconds, cost = self.progress.seconds(), self.progress.cost()
        if self.given.export:
            self._restore(self.best)  # first waits until the best model is on disk
            self.model.average_statistics()
            about = {"framework": self.model.framework, **about, "steps": self.at.step}
            export(self.given, self.model.export, about, self.table)
            self.print(f"model written to {self.given.export}")
        self._close_files()
        self.print(f"done in {clock(seconds)}{'' if cost == '-' else f', cost {cost}'}")
        self.progress.close()

    def _close_files(self) -> None:
        """Wait until all checkpoints have been written."""
        with _one_sentence():
            for files in (self.files, self.best):
                if files:
                    files.close()


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Convert checkpoint errors to SystemExit, to print one line instead of a traceback."""
    try:
        yield
    except (ArgumentError, hvd.CheckpointError) as error:
        raise SystemExit(str(error)) from None


def write(path: Path, state: dict[str, Array]) -> None:
    """Write arrays in the format ``.npz``, without adding this suffix to the file name."""
    arrays: Any = state  # array names must differ from np.savez's parameters
    with open(path, "wb") as file:
        np.savez(file, **arrays)
