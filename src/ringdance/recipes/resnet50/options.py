"""The options of train_torch.py and train_keras.py, and the order in which both do things."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from presets import PRESETS, Preset  # type: ignore[import-not-found]  # beside this file

import ringdance.numpy as hvd
from ringdance.data import Dataset, Synthetic
from ringdance.recipes.log import TRAINED_ON, TrainingLog
from ringdance.recipes.training import Position, Training
from ringdance.training.schedules import Schedule

_POSITIVE = (
    "epochs", "steps", "batch_size", "accumulate", "checkpoint_every", "log_every", "width", "threads"
)  # fmt: skip


def parser(manual: str) -> argparse.ArgumentParser:
    """Return a parser of the options that both have; a script may add its own."""
    form = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=manual, formatter_class=form, allow_abbrev=False)
    add = made.add_argument
    names = f"default: 8xV100; {', '.join(PRESETS)}"
    add("--preset", default="8xV100", choices=PRESETS, metavar="NAME", help=names)
    add("--data", metavar="DIR", help="a data set that `ringdance data prepare` has written")
    add("--synthetic", action="store_true", help="random pixels instead of data")
    add("--synthetic-images", type=int, default=1_281_167, metavar="N", help="default: 1,281,167")
    add("--epochs", type=int, metavar="N", help="length of the schedule")
    add("--steps", type=int, metavar="N", help="end after so many steps of this run, with a checkpoint")
    add("--batch-size", type=int, metavar="N", help="images for each rank and pass; the rate goes with it")
    add("--accumulate", type=int, default=1, metavar="N", help="passes in each step; default: 1")
    add("--model", metavar="NAME", help="of the library instead of our ResNet-50: see above")
    add("--width", type=int, default=64, help="channels of our ResNet-50's first stage; default: 64")
    add("--weights", metavar="FILE", help="begin with these; a head of other classes is left fresh")
    add("--optimizer", choices=("sgd", "lars"))
    add("--rate", type=float, metavar="R", help="peak learning rate of the whole batch, not scaled further")
    add("--precision", choices=("float32", "float16", "bfloat16"))
    add("--image-size", type=int, metavar="PIXELS")
    add("--label-smoothing", type=float, metavar="S", help="share of a target that all classes get")
    add("--mixup", type=float, metavar="ALPHA", help="mix pairs of images; 0: do not")
    add("--cutmix", type=float, metavar="ALPHA", help="put parts of images into others; 0: do not")
    add("--erase", type=float, metavar="P", help="probability that a part of an image becomes grey")
    add("--ema", type=float, metavar="D", help="evaluate averaged weights, of which a step keeps D: 0.9999")
    add("--threads", type=int, metavar="N", help="that decode images; default: the cores of each rank")
    add("--seed", type=int, default=0)
    text = "write them there, also after each epoch, and the best model; go on from the newest"
    add("--checkpoints", metavar="DIR", help=text)
    add("--checkpoint-every", type=int, default=1000, metavar="STEPS", help="default: 1000")
    add("--keep", type=int, default=3, metavar="N", help="checkpoints; default: 3")
    add("--evaluate-every", type=int, default=1, metavar="EPOCHS", help="and at the end (1); 0: never")
    text = "only evaluate: the best model of --checkpoints, else its newest, or --weights"
    add("--evaluate", action="store_true", help=text)
    add("--export", metavar="MODEL", help="write the best model (else the last) for score.py")
    add("--log-every", type=int, default=20, metavar="STEPS", help="default: 20")
    add("--price-per-hour", type=float, metavar="P", help="of all machines together: print the cost so far")
    add("--tensorboard", metavar="DIR", help="write loss, rate, speed and accuracy there")
    add("--sample-log", metavar="DIR", help="write there which images each rank used in each step")
    return made


def read(made: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line, and check what it says."""
    given = made.parse_args()
    if bool(given.data) == given.synthetic:
        made.error("give either --data DIR or --synthetic")
    if given.evaluate and bool(given.checkpoints) == bool(given.weights):
        made.error("--evaluate: give either --checkpoints DIR or --weights FILE")
    for name in ("label_smoothing", "erase", "ema"):
        if not 0 <= (getattr(given, name) or 0) < 1:
            made.error(f"--{name.replace('_', '-')} {getattr(given, name)}: give 0 or more, less than 1")
    for name in _POSITIVE:
        if getattr(given, name, None) is not None and getattr(given, name) < 1:
            made.error(f"--{name.replace('_', '-')} {getattr(given, name)}: give 1 or more")
    return given


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
    data = Dataset.open(given.data, "train")
    if (Path(given.data) / "validation.json").exists():
        return data, Dataset.open(given.data, "validation"), "validation"
    return data, data, TRAINED_ON


def ranks_of(count: int) -> tuple[int, ...]:
    """Return which k of the top k tell something about so many classes."""
    return (1, 5) if count > 5 else (1,)


def described(at: Position, found: dict[str, float]) -> str:
    """Return the text of an evaluation."""
    shares = (f"top-{name[3:]} {share:.2%}" for name, share in found.items() if name.startswith("top"))
    when = f"after {at.epoch} epochs" if at.step else "before any training"
    return f"{when}: {', '.join(shares)} of {found['count']:,} images"


def begin_with(file: str, model: Any, classes: int) -> str:
    """Load weights on rank 0, but for a head of other classes; return what is to be said about it."""
    try:
        fresh, problem = (model.load_weights(file) if hvd.rank() == 0 else []), ""
    except Exception as error:  # of files of any kind
        fresh, problem = [], f"--weights {file}: not of this model: {error}".splitlines()[0]
    fresh, problem = hvd.broadcast_object((fresh, problem))
    if problem:
        raise SystemExit(problem)
    head = f", but {', '.join(fresh)} fresh: it has not {classes} classes" if fresh else ""
    return f"weights of {file}{head}"


def train(
    given: argparse.Namespace, preset: Preset, model: Any, data: Any, loader: Any, split: str,
    framework: str,
) -> None:
    """Train from the newest checkpoint to the last epoch, or only evaluate; then export.

    Args:
        given: what the command line says.
        preset: with what the command line sets.
        model: of this rank: the ``Model`` of a training, with ``step``, ``figures``, ``load_weights`` and
            ``equal``, which gives all ranks that of rank 0.
        data: to train on.
        loader: of that.
        split: what evaluations are of.
        framework: that is at work, to be shown.
    """
    same = {"model": given.model or f"ResNet-50 of width {given.width}", "classes": len(data.classes)}
    same |= {"images": len(data), "preset": given.preset, "optimizer": preset.optimizer}
    same |= {"precision": preset.precision, "ema": preset.ema, "seed": given.seed}
    training = Training(given, model, same, split, "top1", described)
    if hvd.rank() == 0:
        batch = loader.plan.batch_size * hvd.size()
        print(
            f"{same['model']} by {framework}: {hvd.size()} ranks, batch {batch:,}, {preset.optimizer}, "
            f"{preset.precision}, {len(data):,} images of {len(data.classes)} classes, {preset.epochs:g} "
            f"epochs\npreset {given.preset} ({preset.source}): {preset.expected}", flush=True,
        )  # fmt: skip
    found = (given.evaluate and training.restore(training.best)) or training.restore(training.files)
    if given.evaluate and given.checkpoints and not found:
        raise SystemExit(f"--evaluate: there is no checkpoint in {given.checkpoints}")
    log = TrainingLog(given, "images", len(data), preset.epochs, training.at.seconds)
    if not found:
        if given.weights:
            log.print(begin_with(given.weights, model, len(data.classes)))
        model.equal()
    if given.evaluate:
        training.best = None
        training.evaluate(log)
    else:
        schedule = schedule_of(preset, given, len(data), loader.plan.batch_size * hvd.size())

        def step(batch: Any, at: Position) -> tuple[float, Callable[[], dict[str, float]]]:
            epoch = at.epoch + at.done / len(data)
            rate = schedule(epoch)
            model.step(batch, rate, at.step, epoch < preset.warmup_epochs)
            return rate, model.figures

        def due(at: Position, ended: bool, over: bool) -> bool:
            every = given.evaluate_every
            return ended and bool(every) and (over or at.epoch % every == 0)

        training.run(loader, log, preset.epochs, step, due)
    about = {"model": same["model"], "image_size": preset.image_size, "classes": list(data.classes)}
    training.close(log, about)
