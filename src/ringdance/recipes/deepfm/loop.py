"""The loop of train_torch.py and train_keras.py: options, epochs, evaluation, checkpoints, what is shown."""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import rates  # type: ignore[import-not-found]  # beside this file

import ringdance.numpy as hvd
from ringdance.data import Table, TableBatch
from ringdance.recipes.log import TRAINED_ON, TrainingLog, clock, scores_of

Array = np.ndarray[Any, Any]


def options(manual: str) -> argparse.Namespace:
    """Read the command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=manual, formatter_class=form, allow_abbrev=False)
    add = parser.add_argument
    text = "a prepared directory, or a file: Criteo's CSV or TSV, LibSVM, TFRecord; SageMaker: channel train"
    add("data", metavar="DATA", nargs="?", default=os.environ.get("SM_CHANNEL_TRAIN"), help=text)
    add("--table-size", type=int, metavar="N", help="for a file: rows of the table; default: 1,000,000")
    add("--validation", metavar="DATA", help="default: the split `validation` of DATA, else its own rows")
    add("--epochs", type=int, default=1, metavar="N", help="default: 1")
    add("--steps", type=int, metavar="N", help="end after so many steps of this run, with a checkpoint")
    add("--time-limit", type=float, metavar="S", help="end after so many seconds of this run, the same way")
    add("--batch-size", type=int, default=2048, metavar="N", help="rows for each rank; default: 2048")
    add("--dim", type=int, default=16, metavar="N", help="factors of each row of the table; default: 16")
    add("--hidden", default="400,400,400", metavar="A,B", help="widths of the layers; default: 400,400,400")
    shown = "; default: %(default)g"
    add("--rate", type=float, default=rates.RATE, metavar="R", help=f"Adam, for the layers{shown}")
    text = f"Adagrad, for the table{shown}"
    add("--table-rate", type=float, default=rates.TABLE_RATE, metavar="R", help=text)
    text = f"Adagrad's first sum of squares, of gradients summed over a batch of all ranks{shown}"
    add("--first-sum", type=float, default=rates.FIRST_SUM, metavar="S", help=text)
    text = f"multiply --rate by the number of ranks to the power F: 1 scales in full, 0 not at all{shown}"
    add("--scale-rate", type=float, default=rates.SCALE_RATE, metavar="F", help=text)
    add("--warmup", type=int, default=rates.WARMUP, metavar="STEPS", help=f"from 0 to the rates{shown}")
    add("--sharded", action="store_true", help="each rank has a part of the table, not all of it")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=1, metavar="N", help="of each rank that read and parse; default: 1")
    add("--evaluate-every", type=int, metavar="STEPS", help="default: after each epoch")
    add("--patience", type=int, metavar="N", help="end after N evaluations without a better AUC")
    add("--checkpoints", metavar="DIR", help="write them there; go on from the newest; keep the best model")
    add("--checkpoint-every", type=int, default=1000, metavar="STEPS", help="default: 1000")
    add("--keep", type=int, default=2, metavar="N", help="checkpoints; default: 2")
    add("--warm-start", metavar="MODEL", help="begin with a model that --export has written")
    add("--export", metavar="MODEL", help="write the best model (without --checkpoints: the last)")
    add("--log-every", type=int, default=50, metavar="STEPS", help="default: 50")
    add("--price-per-hour", type=float, metavar="P", help="of all machines together: print the cost so far")
    add("--tensorboard", metavar="DIR", help="write loss, speed and AUC there")
    given = parser.parse_args()
    if given.data is None:
        parser.error("DATA is missing")
    try:
        given.hidden = [int(one) for one in given.hidden.split(",")]
    except ValueError:
        parser.error(f"--hidden {given.hidden}: give widths such as 400,400,400")
    for name in ("epochs", "steps", "batch_size", "dim", "evaluate_every", "patience", "checkpoint_every"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(given, name)}: give 1 or more")
    if given.patience and not given.checkpoints:
        parser.error("--patience needs --checkpoints DIR, where the best model is kept")
    return given


class Model(Protocol):
    """What a framework does: train_torch.py and train_keras.py have one each."""

    framework: str
    table: hvd.EmbeddingTable

    def step(self, batch: TableBatch, rate: float) -> float:
        """Update by one batch; return the mean loss of this rank's rows."""

    def predict(self, ids: Array, values: Array) -> Array:
        """Return probabilities, shape (n,)."""

    def state(self) -> dict[str, Array]:
        """Return copies of the layers' weights and of their optimizer's state."""

    def restore(self, state: dict[str, Array]) -> None:
        """Take such values, equal on all ranks."""

    def export(self, directory: Path) -> None:
        """Write what score.py needs beside the table."""


@dataclass
class Position:
    """Where a training is; ``done`` counts rows of the epoch, ``worse`` evaluations since the best."""

    step: int = 0
    epoch: int = 0
    done: int = 0
    seconds: float = 0.0
    best: float = 0.0
    worse: int = 0


@dataclass
class Training:
    """A model with its data and its files, on each rank; ``split``: what ``check`` is of."""

    given: argparse.Namespace
    model: Model
    data: Table
    check: Table
    split: str
    at: Position = field(default_factory=Position)

    def __post_init__(self) -> None:
        given = self.given
        self.loader = hvd.table_loader(
            self.data, given.batch_size, seed=given.seed, threads=given.threads, drop_last=True
        )
        self.checks = hvd.table_loader(self.check, given.batch_size, shuffle=False, threads=given.threads)
        self.files = self.best = None
        if given.checkpoints:
            self.files = hvd.Checkpoints(given.checkpoints, given.keep, suffix=".npz")
            if self.split != TRAINED_ON:
                self.best = hvd.Checkpoints(given.checkpoints, 1, "best", ".npz")

    def rate(self) -> float:
        """Return the factor of the layers' learning rate in this step."""
        return float(self.warm() * hvd.size() ** self.given.scale_rate)

    def warm(self) -> float:
        """Return the share of the rates that the warm-up has reached."""
        return float(rates.warm(self.at.step + 1, self.given.warmup))

    def evaluate(self) -> dict[str, float]:
        """Return AUC, log-loss and calibration on the validation rows, each counted once.

        All ranks take part, each with a part of the rows: no rank waits for rank 0.
        """
        scores = hvd.BinaryScores()
        self.checks.set_epoch(0)
        for batch in self.checks:
            found = self.model.predict(batch.ids, batch.values)
            if batch.weight:  # else padding
                scores.add(found, batch.labels)
        return scores.result()

    def save(self, files: Any) -> None:
        """Begin to write a checkpoint: copies are made here, the files are written in the background."""
        if files is None:
            return
        state = self.model.state() if hvd.rank() == 0 else {}
        position = np.array(json.dumps(asdict(self.at)))
        files.save(self.at.step, lambda path: _write(path, {**state, "position": position}), self.model.table)

    def restore(self, files: Any) -> bool:
        """Load the newest checkpoint on all ranks; return whether there is one."""
        found = files.read(table=self.model.table) if files else None
        if found is None:
            return False
        with np.load(io.BytesIO(found[1])) as saved:
            state = dict(saved)
        self.at = Position(**json.loads(str(state.pop("position"))))
        self.model.restore(state)
        return True

    def begin(self) -> None:
        """Load the newest checkpoint, else yesterday's model, if there is one."""
        if self.restore(self.files) or not self.given.warm_start:
            return
        start = Path(self.given.warm_start)
        state, problem = hvd.broadcast_object(self._exported(start) if hvd.rank() == 0 else None)
        if problem:
            raise SystemExit(f"train_{self.model.framework}: --warm-start {start}: {problem}")
        self.model.table.load(start / "table.npy")
        self.model.restore(state)

    def _exported(self, model: Path) -> tuple[dict[str, Array], str]:
        """Return the layers of an exported model, or what is wrong with it."""
        try:
            about = json.loads((model / "model.json").read_text())
            mine = {"framework": self.model.framework, "fields": self.data.fields, "dim": self.given.dim}
            mine |= {"table_size": self.data.table_size}
            for name, value in mine.items():
                if about[name] != value:
                    return {}, f"its {name} is {about[name]}, here it is {value}"
            with np.load(model / "layers.npz") as saved:
                return dict(saved), ""
        except OSError as error:
            return {}, f"no exported model: {error.strerror}: {error.filename}"

    def export(self, directory: str) -> None:
        """Write the model for score.py: a directory that is complete when it has its name."""
        if self.best and self.best.numbers():
            self.restore(self.best)
        final, partial = Path(directory), Path(f"{directory}.partial")
        if hvd.rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self.model.table.save(partial / "table.npy")
        # What only one rank does takes seconds here. Marked, the waiting ranks do not warn.
        with hvd.pause_stall_check("export"):
            if hvd.rank() == 0:
                self.model.export(partial)
                _write(partial / "layers.npz", self.model.state())
                about = {"framework": self.model.framework, "fields": self.data.fields}
                about |= {"table_size": self.data.table_size, "dim": self.given.dim}
                (partial / "model.json").write_text(json.dumps(about | {"steps": self.at.step}, indent=1))
                shutil.rmtree(final, ignore_errors=True)
                os.replace(partial, final)
            hvd.barrier()


def train(training: Training) -> None:
    """Train from the newest checkpoint to the last epoch, the limits, or until the AUC gets no better."""
    given, data = training.given, training.data
    training.begin()
    log = Log(given, training.at, len(data))
    last = training.at.step + given.steps if given.steps else None
    over = training.at.epoch >= given.epochs or 0 < (given.patience or 0) <= training.at.worse
    while not over:
        at = training.at
        training.loader.set_epoch(at.epoch, at.done)
        end = training.loader.plan.end
        for batch in log.timed(training.loader):
            training.model.table.rate = given.table_rate * training.warm()
            loss = training.model.step(batch, training.rate())
            at.step, at.done = at.step + 1, batch.position
            ended = at.done == end
            if at.step % given.log_every == 0 or ended:
                over = log.line(at, loss, given.rate * training.rate())
            if ended:
                at.epoch, at.done = at.epoch + 1, 0
            over = over or at.step == last or at.epoch >= given.epochs
            every = given.evaluate_every
            if over or (at.step % every == 0 if every else ended):
                over = evaluate(training, log) or over
            if over or ended or at.step % given.checkpoint_every == 0:
                at.seconds = log.seconds()
                training.save(training.files)
            if over or ended:
                break
        else:  # fewer rows were left than a batch of so many ranks
            at.epoch, at.done = at.epoch + 1, 0
            over = at.epoch >= given.epochs
    if last and training.at.step < last and training.at.epoch >= given.epochs:
        log.print(f"ended before --steps: {given.epochs} epochs have no more rows; --epochs N for more")
    if given.export:
        training.export(given.export)
        log.print(f"model written to {given.export}")
    for files in (training.files, training.best):
        if files:
            files.close()
    log.close()


def evaluate(training: Training, log: Log) -> bool:
    """Evaluate and keep the best model; return whether it is time to stop."""
    at, found = training.at, training.evaluate()
    log.evaluation(at, found, training.split)
    if training.split == TRAINED_ON:  # the model that knows these rows best need not be the best
        return False
    if found["auc"] > at.best:
        at.best, at.worse = found["auc"], 0
        training.save(training.best)
        return False
    at.worse += 1
    if training.given.patience and at.worse >= training.given.patience:
        log.print(f"ended: no better AUC than {at.best:.5f} in {at.worse} evaluations")
        return True
    return False


class Log(TrainingLog):
    """The table of the steps."""

    def __init__(self, given: argparse.Namespace, at: Position, rows: int) -> None:
        super().__init__(given, at.seconds)
        self.limit, self.earlier, self.rows_in_epoch = given.time_limit, at.seconds, rows
        if at.step:
            self.print(f"going on after step {at.step}: epoch {at.epoch}, {at.done:,} of its rows are done")
        self.print(
            f"{'epoch':>7} {'step':>8} {'rate':>8} {'loss':>8} {'rows/s':>10} {'input':>6} {'time':>9} "
            f"{'cost':>8}"
        )

    def line(self, at: Position, loss: float, rate: float) -> bool:
        """Print a line on the steps since the last one; return whether the time is over. Collective."""
        mean, seconds = hvd.allreduce(np.array([loss, self.seconds() - self.earlier]), name="loss")
        speed, waiting = self.rates()
        self.print(
            f"{at.epoch + at.done / self.rows_in_epoch:7.2f} {at.step:8} {rate:8.3g} {mean:8.5f} "
            f"{speed:10,.0f} {waiting:6.1%} {clock(self.seconds()):>9} {self.cost():>8}"
        )
        self.scalars(at.step, loss=mean, rows_per_second=speed, waiting_for_input=waiting)
        return bool(self.limit and seconds > self.limit)

    def evaluation(self, at: Position, found: dict[str, float], split: str) -> None:
        """Print what an evaluation of a split has found."""
        self.print(
            f"after step {at.step}: {scores_of(found)} of {split}, {clock(self.seconds())} {self.cost():>8}"
        )
        self.scalars(at.step, **{name: found[name] for name in ("auc", "logloss", "calibration")})


def main(manual: str, make: Any, init: Callable[[], None] = hvd.init) -> None:
    """Train as the command line says.

    Args:
        manual: of the script.
        make: returns the model: ``make(given, table, fields)``.
        init: of the framework's binding, if that limits the framework's threads to a rank's cores.
    """
    given = options(manual)
    init()
    size = given.table_size or (None if Path(given.data).is_dir() else 1_000_000)
    data = Table.open(given.data, table_size=size)
    check, split = data, "validation"
    if given.validation:
        other = Path(given.validation)
        check = Table.open(other, "validation" if (other / "validation.json").exists() else "train",
                           table_size=None if other.is_dir() else data.table_size)  # fmt: skip
    elif (Path(given.data) / "validation.json").exists():
        check = Table.open(given.data, "validation")
    else:
        split = TRAINED_ON
        if given.patience:
            raise SystemExit(
                f"--patience {given.patience} needs rows that are not trained on: give --validation DATA, or "
                "prepare with --validation 0.1"
            )
    table = hvd.EmbeddingTable(
        data.table_size, 1 + given.dim, rate=given.table_rate, accumulator=given.first_sum,
        sharded=given.sharded, seed=given.seed,
    )  # fmt: skip
    training = Training(given, make(given, table, data.fields), data, check, split)
    if hvd.rank() == 0:
        bytes_ = table.values.nbytes + table.accumulators.nbytes
        print(
            f"DeepFM by {training.model.framework}: {hvd.size()} ranks, batch "
            f"{given.batch_size * hvd.size():,}; {len(data):,} rows, {len(check):,} for validation; a table "
            f"of {data.table_size:,} rows, {bytes_ / 1e6:,.0f} MB on each rank{', sharded' * table.sharded}",
            flush=True,
        )
    train(training)
    hvd.shutdown()


def _write(path: Path, state: dict[str, Array]) -> None:
    with open(path, "wb") as file:
        np.savez(file, allow_pickle=False, **state)
