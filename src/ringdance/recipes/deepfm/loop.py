"""Code shared by train_torch.py and train_keras.py: options, data, evaluation, export and ``main``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import rates  # type: ignore[import-not-found]  # in this directory

import ringdance.numpy as hvd
from ringdance.data import Table, TableBatch
from ringdance.errors import ArgumentError
from ringdance.recipes.models import scores_of, whole_model
from ringdance.recipes.options import Options, count, widths
from ringdance.recipes.training import TRAINED_ON, Position, Training, write

Array = np.ndarray[Any, Any]


def options(manual: str) -> argparse.Namespace:
    """Parse the command line."""
    parser = Options(description=manual)
    add = parser.add_argument
    text = "prepared directory, or file in CSV, TSV, LibSVM or TFRecord format (on SageMaker: channel train)"
    add("data", metavar="DATA", nargs="?", default=os.environ.get("SM_CHANNEL_TRAIN"), help=text)
    add("--table-size", type=int, metavar="N", help="table size if DATA is a file; default: 1,000,000")
    add("--validation", metavar="DATA", help="rows to evaluate; default: split `validation`, or else `train`")
    add("--epochs", type=count, default=1, metavar="N", help="epochs to train; default: 1")
    add("--batch-size", type=count, default=2048, metavar="N", help="rows per rank; default: 2048")
    add("--dim", type=count, default=16, metavar="N", help="factors in each table row; default: 16")
    add("--hidden", type=widths, default="400,400,400", metavar="A,B", help="default: 400,400,400")
    shown = "; default: %(default)g"
    add("--rate", type=float, default=rates.RATE, metavar="R", help=f"Adam's rate for the layers{shown}")
    text = f"Adagrad's learning rate for the table{shown}"
    add("--table-rate", type=float, default=rates.TABLE_RATE, metavar="R", help=text)
    text = f"Adagrad's initial sum of squares, for gradients summed over a batch of all ranks{shown}"
    add("--first-sum", type=float, default=rates.FIRST_SUM, metavar="S", help=text)
    text = f"multiply --rate by b^F, --table-rate by b^(-F/2); b: batch of all ranks / {rates.BATCH}{shown}"
    add("--scale-rate", type=float, default=rates.SCALE_RATE, metavar="F", help=text)
    add("--warmup", type=int, default=rates.WARMUP, metavar="STEPS", help=f"steps of linear warm-up{shown}")
    add("--sharded", action="store_true", help="divide the table among ranks instead of copying it")
    add("--threads", type=count, default=1, metavar="N", help="reader threads per rank; default: 1")
    add("--evaluate-every", type=count, metavar="STEPS", help="steps between evaluations; default: one epoch")
    add("--patience", type=count, metavar="N", help="stop after N evaluations in a row without a better AUC")
    add("--warm-start", metavar="MODEL", help="start from a model written by --export")
    parser.add_shared(keep=2, log_every=50)
    given = parser.parse_args()
    if given.data is None:
        parser.error("DATA is required. Pass a prepared directory or a file.")
    if given.patience and not given.checkpoints:
        parser.error("--patience requires --checkpoints DIR, where the best model is kept")
    return given


class TableModel:
    """Base class of the models in train_torch.py and train_keras.py. See Note [Models of recipes].

    Subclasses define ``step(batch, rate)``, which updates the model with one batch and returns the mean loss
    of this rank's rows; ``predict(ids, values)``, which returns probabilities, shape (n,); and
    ``export_layers(directory)``, which writes the layers for score.py.
    """

    framework: str
    table: hvd.EmbeddingTable

    def __init__(self) -> None:
        self.losses: list[float] = []  # loss of each step since the last call to figures()
        self.checks: Any = None  # loader for the validation rows

    def figures(self) -> dict[str, float]:
        """Return this rank's mean loss over the steps since the last call."""
        mean = float(np.mean(self.losses))
        self.losses.clear()
        return {"loss": mean}

    def evaluate(self) -> dict[str, float]:
        """Return AUC, log-loss and calibration on the validation rows. Each row is counted once.

        The rows are divided among all ranks, which therefore need not wait for rank 0.
        """
        scores = hvd.BinaryScores()
        self.checks.set_epoch(0)
        for batch in self.checks:
            predictions = self.predict(batch.ids, batch.values)  # type: ignore[attr-defined]
            if batch.weight:  # a batch of weight 0 is padding
                scores.add(predictions, batch.labels)
        return scores.result()

    def described(self, at: Position, found: dict[str, float]) -> str:
        """Format the metrics of an evaluation."""
        return f"after step {at.step}: {scores_of(found)}"

    def average_statistics(self) -> None:
        """Do nothing, because the layers have no running statistics."""

    def export(self, directory: Path) -> None:
        """Write the layers for score.py and for --warm-start. The embedding table is written separately."""
        self.export_layers(directory)  # type: ignore[attr-defined]
        write(directory / "layers.npz", self.state())  # type: ignore[attr-defined]


def warm_start(start: Path, model: Any, about: dict[str, Any]) -> None:
    """Initialize the model from an exported model whose settings match ``about``. Collective."""

    def exported() -> tuple[dict[str, Array], str]:
        """Return the exported layers and "", or {} and an error message if the model cannot be used."""
        try:
            exported_about = whole_model(start)
        except (ArgumentError, OSError) as error:
            return {}, str(error)
        for name, value in {"framework": model.framework, **about}.items():
            if exported_about.get(name) != value:
                return {}, f"its {name} is {exported_about.get(name)}, but here it is {value}"
        with np.load(start / "layers.npz") as saved:
            return dict(saved), ""

    state, problem = hvd.broadcast_object(exported() if hvd.rank() == 0 else None)
    if problem:
        raise SystemExit(f"--warm-start {start}: {problem}")
    model.table.load(start / "table.npy")
    model.restore(state)


def tables(given: argparse.Namespace) -> tuple[Table, Table, str]:
    """Open the tables for training and evaluation. Also returns the name of the evaluated split."""
    size = given.table_size or (None if Path(given.data).is_dir() else 1_000_000)
    try:
        data = Table.open(given.data, table_size=size)
        if given.validation:
            other = Path(given.validation)
            part = "validation" if (other / "validation.json").exists() else "train"
            size = None if other.is_dir() else data.table_size
            return data, Table.open(other, part, table_size=size), "validation"
        if (Path(given.data) / "validation.json").exists():
            return data, Table.open(given.data, "validation"), "validation"
    except ArgumentError as error:
        raise SystemExit(str(error)) from None
    if given.patience:
        raise SystemExit(
            f"--patience {given.patience} requires separate validation rows. Use --validation DATA, or "
            "prepare the data with --validation 0.1."
        )
    return data, data, TRAINED_ON


def unusable(splits: dict[str, Table]) -> str:
    """Return an error message if AUC is undefined on one of the splits, otherwise an empty string."""
    try:
        labels = {name: data.only_label() for name, data in splits.items()}
    except ArgumentError as error:
        return str(error)
    problems = [
        f"{name}: all {len(splits[name]):,} labels are {label:g}"
        for name, label in labels.items() if label is not None
    ]  # fmt: skip
    return f"{'; '.join(problems)}. AUC needs rows with and rows without clicks." if problems else ""


def main(manual: str, make: Any, init: Callable[[], None] = hvd.init) -> None:
    """Run the training script.

    Args:
        manual: The script's docstring, used as the text for --help.
        make: Creates the model. Called as ``make(given, table, fields)``.
        init: Initializes Ringdance. The ``init`` of a framework's binding also limits the framework's
            threads to the rank's cores.
    """
    given = options(manual)
    init()
    data, check, split = tables(given)
    splits = {"train": data} if check is data else {"train": data, split: check}
    if problem := hvd.broadcast_object(unusable(splits) if hvd.rank() == 0 else ""):
        raise SystemExit(problem)
    table = hvd.EmbeddingTable(
        data.table_size, 1 + given.dim, rate=given.table_rate, accumulator=given.first_sum,
        sharded=given.sharded, seed=given.seed,
    )  # fmt: skip
    model = make(given, table, data.fields)
    loader = hvd.table_loader(data, given.batch_size, seed=given.seed, threads=given.threads, drop_last=True)
    model.checks = hvd.table_loader(check, given.batch_size, shuffle=False, threads=given.threads)
    about = {"fields": data.fields, "table_size": data.table_size, "dim": given.dim, "hidden": given.hidden}
    same = {**about, "rows": len(data), "seed": given.seed}
    training = Training(
        given, model, same, "rows", len(data), given.epochs, split, "auc", ".npz", table
    )  # fmt: skip
    bytes_ = table.values.nbytes + table.accumulators.nbytes
    training.print(
        f"DeepFM by {model.framework}: {hvd.size()} ranks, batch {given.batch_size * hvd.size():,}; "
        f"{len(data):,} training rows, {'no' if check is data else f'{len(check):,}'} validation rows; "
        f"table: {data.table_size:,} rows, {bytes_ / 1e6:,.0f} MB per rank{', sharded' * table.sharded}"
    )
    if not training.resume() and given.warm_start:
        warm_start(Path(given.warm_start), model, about)

    scale = rates.scaled(given.batch_size * hvd.size(), given.scale_rate)

    def step(batch: TableBatch, at: Position) -> float:
        warm = rates.warm(at.step + 1, given.warmup)
        table.rate, factor = given.table_rate * warm / scale**0.5, warm * scale
        model.losses.append(model.step(batch, factor))
        return float(given.rate * factor)

    def due(at: Position, ended: bool, over: bool) -> bool:
        return over or (at.step % given.evaluate_every == 0 if given.evaluate_every else ended)

    training.run(loader, step, due)
    training.close(about)
    hvd.shutdown()

