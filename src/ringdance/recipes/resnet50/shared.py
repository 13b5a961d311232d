"""What train_torch.py and train_keras.py do alike: data, learning rate, beginning, steps, evaluation, end."""

from __future__ import annotations

import argparse
import difflib
import os
from pathlib import Path
from typing import Any

from presets import Preset  # type: ignore[import-not-found]  # beside this file

import ringdance.numpy as hvd
from ringdance.data import Dataset, Synthetic
from ringdance.errors import ArgumentError
from ringdance.recipes.files import whole_model
from ringdance.recipes.log import TRAINED_ON, Position, TrainingLog
from ringdance.recipes.training import Training
from ringdance.training.schedules import Schedule


def schedule_of(preset: Preset, given: argparse.Namespace, images: int, batch: int) -> Schedule:
    """Return the learning rate over the epochs; ``images``: of an epoch; ``batch``: of all ranks."""
    peak = preset.rate_for(batch) if given.rate is None else given.rate
    # Without a source's figure the first step has one share of the warm-up: at a rate of 0 it would be lost.
    start = preset.warmup_start or peak * batch / max(preset.warmup_epochs * images, batch)
    return Schedule(
        peak, preset.epochs, preset.schedule, preset.warmup_epochs, min(start, peak), preset.milestones
    )


def datasets(given: argparse.Namespace) -> tuple[Any, Any, str]:
    """Return what to train on, what to evaluate, and the name of the latter."""
    if given.synthetic:
        data: Any = Synthetic(given.synthetic_images)
        return data, data, TRAINED_ON
    try:
        data = Dataset.open(given.data, "train")
        if (Path(given.data) / "validation.json").exists():
            return data, Dataset.open(given.data, "validation"), "validation"
    except ArgumentError as error:
        raise SystemExit(str(error)) from None
    return data, data, TRAINED_ON


def ranks_of(count: int) -> tuple[int, ...]:
    """Return which k of the top k tell something about so many classes."""
    return (1, 5) if count > 5 else (1,)


def described(at: Position, found: dict[str, float]) -> str:
    """Return the text of an evaluation."""
    shares = (f"top-{name[3:]} {share:.2%}" for name, share in found.items() if name.startswith("top"))
    when = f"after {at.epoch} epochs" if at.step else "before any training"
    return f"{when}: {', '.join(shares)} of {found['count']:,} images"


def begin_with(given: argparse.Namespace, model: Any, classes: int) -> str:
    """Load weights on rank 0, but for a head of other classes; return what is to be said about it."""
    file, fresh, problem = Path(given.weights), list[str](), ""
    try:
        if hvd.rank() == 0:
            file = _exported(file, model) if file.is_dir() else file
            fresh = model.load_weights(str(file))
    except ArgumentError as error:
        problem = f"--weights {error}"
    except OSError as error:
        problem = f"--weights {file}: {error.strerror or error}"
    except Exception as error:  # of files of any kind
        problem = f"--weights {file}: not of this model: {error}".splitlines()[0]
    if fresh and given.evaluate:
        problem = f"--weights {file}: it has not {classes} classes, so there is nothing to evaluate"
    fresh, problem = hvd.broadcast_object((fresh, problem))
    if problem:
        raise SystemExit(problem)
    head = f", but {', '.join(fresh)} fresh: it has not {classes} classes" if fresh else ""
    return f"weights of {file}{head}"


def _exported(directory: Path, model: Any) -> Path:
    """Return the file of weights of an exported model."""
    framework = whole_model(directory, "framework", "image_size")["framework"]
    if framework != model.framework:
        raise ArgumentError(
            f"{directory}: it was exported by train_{framework}.py, whose weights train_{model.framework}.py "
            "cannot read"
        )
    return directory / str(model.weights)


def unknown(name: str, library: str, names: list[str]) -> str:
    """Return the error of a model that a library does not have."""
    lower = {one.lower(): one for one in names}
    near = difflib.get_close_matches(name.lower(), lower, n=3)
    text = f"did you mean {' or '.join(lower[one] for one in near)}?" if near else ", ".join(names)
    return f"--model {name} is no classifier of {library}: {text}"


def train(
    given: argparse.Namespace, preset: Preset, model: Any, data: Any, loader: Any, split: str,
    framework: str,
) -> None:
    """Train from the newest checkpoint to the last epoch, or only evaluate; then export.

    Args:
        given: what the command line says.
        preset: with what the command line sets.
        model: of this rank: a ``recipes.training.Model`` with ``step``, ``figures``, ``load_weights``,
            ``weights``, its file in an export, and ``equal``, which gives all ranks that of rank 0.
        data: to train on.
        loader: of that.
        split: what evaluations are of.
        framework: that is at work, to be shown.
    """
    same = {"model": given.model or f"ResNet-50 of width {given.width}", "classes": len(data.classes)}
    same |= {"optimizer": preset.optimizer, "precision": preset.precision, "ema": bool(preset.ema)}
    if model.framework == "keras":  # whose optimizer has other variables then
        same["accumulate"] = given.accumulate
    if not given.evaluate:
        same |= {"images": len(data), "preset": given.preset, "seed": given.seed}
    if given.evaluate and given.checkpoints and not hvd.broadcast_object(Path(given.checkpoints).is_dir()):
        raise SystemExit(f"--evaluate: there is no directory {given.checkpoints}")
    training = Training(given, model, same, model.figures, split, "top1", described)
    if hvd.rank() == 0:
        batch = loader.plan.batch_size * hvd.size()
        epochs = f", {preset.epochs:g} epochs\npreset {given.preset} ({preset.source}): {preset.expected}"
        print(
            f"{same['model']} by {framework}: {hvd.size()} ranks, batch {batch:,}, {preset.optimizer}, "
            f"{preset.precision}, {len(data):,} images of {len(data.classes)} classes"
            f"{'' if given.evaluate else epochs}", flush=True,
        )  # fmt: skip
    found = (given.evaluate and training.restore(training.best)) or training.resume()
    if given.evaluate and given.checkpoints and not found:
        raise SystemExit(f"--evaluate: there is no checkpoint in {given.checkpoints}")
    log = TrainingLog(given, "images", len(data), preset.epochs, training.at)
    if not found:
        if given.weights:
            log.print(begin_with(given, model, len(data.classes)))
        model.equal()
    if given.evaluate:
        training.best = None
        training.evaluate(log)
    else:
        schedule = schedule_of(preset, given, len(data), loader.plan.batch_size * hvd.size())

        def step(batch: Any, at: Position) -> float:
            epoch = at.epoch + at.done / len(data)
            rate = schedule(epoch)
            model.step(batch, rate, at.step, epoch < preset.warmup_epochs)
            return rate

        training.run(loader, log, preset.epochs, step)
    about = {"model": same["model"], "image_size": preset.evaluated, "classes": list(data.classes)}
    if model.framework == "keras":
        about["backend"] = os.environ["KERAS_BACKEND"]
    training.close(log, about)
