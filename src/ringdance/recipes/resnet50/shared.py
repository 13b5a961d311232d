"""Code shared by train_torch.py and train_keras.py: options, data, learning rate and the training run."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from presets import PRESETS, Preset  # type: ignore[import-not-found]  # in this directory

import ringdance.numpy as hvd
from ringdance.data import Dataset, Synthetic
from ringdance.errors import ArgumentError
from ringdance.recipes.options import Options, count, number
from ringdance.recipes.training import TRAINED_ON, Position, Training


def parser(manual: str) -> Options:
    """Return a parser with the options of both scripts. A script may add more."""
    made = Options(description=manual)
    add, share = made.add_argument, number(float, 0, 1)
    add("--data", metavar="DIR", help="data set written by `ringdance data prepare`")
    add("--synthetic", action="store_true", help="use random pixels instead of data")
    add("--synthetic-images", type=count, default=1_281_167, metavar="N", help="default: 1,281,167")
    add("--warmup-epochs", type=number(int, 0), metavar="N", help="epochs of linear warm-up")
    add("--accumulate", type=count, default=1, metavar="N", help="passes per step; default: 1")
    add("--model", metavar="NAME", help="classifier to train instead of the built-in ResNet-50 (see above)")
    add("--width", type=count, help="channels in the first stage of the built-in ResNet-50; default: 64")
    text = "start from the weights in FILE, except a head of another size"
    add("--weights", metavar="FILE", help=text)
    add("--image-size", type=count, metavar="PIXELS")
    add("--label-smoothing", type=share, metavar="S", help="share of the target to spread over all classes")
    made.add_images(PRESETS, ("sgd", "lars"))
    return made


def read(made: Options) -> argparse.Namespace:
    """Parse and check the command line."""
    given = made.read()
    if bool(given.data) == given.synthetic:
        made.error("either --data DIR or --synthetic is required, but not both")
    if given.model and given.width:
        made.error(f"--width {given.width} is for the built-in ResNet-50. Omit it or --model {given.model}.")
    given.width = given.width or 64
    preset = PRESETS[given.preset].overridden(given)
    if preset.epochs < preset.warmup_epochs:
        warmup = f"the warm-up takes {preset.warmup_epochs:g} epochs"
        made.error(f"{warmup}, but training only {preset.epochs:g}. Change --epochs or --warmup-epochs.")
    return given


def schedule_of(preset: Preset, given: argparse.Namespace, images: int, batch: int) -> hvd.Schedule:
    """Return the learning rate schedule, given the images per epoch and the global batch size."""
    peak = preset.rate_for(batch) if given.rate is None else given.rate
    # If the preset has no start rate, begin with one increment of the warm-up, because a first step with a
    # rate of 0 would be wasted.
    start = preset.warmup_start or peak * batch / max(preset.warmup_epochs * images, batch)
    return hvd.Schedule(
        peak, preset.epochs, preset.schedule, preset.warmup_epochs, min(start, peak), preset.milestones
    )


def datasets(given: argparse.Namespace) -> tuple[Any, Any, str]:
    """Open the data sets for training and evaluation. Also returns the name of the evaluated split."""
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


def loaders(
    given: argparse.Namespace, preset: Preset, load: Callable[..., Any], data: Any, check: Any, **options: Any
) -> tuple[Any, Any]:
    """Return the loaders for training and evaluation. ``load`` is a framework's ``image_loader``."""
    options |= {"image_size": preset.image_size, "threads": given.threads, "seed": given.seed}
    size = preset.batch_size * given.accumulate
    loader = load(data, size, augment=preset.augment, shuffle=True, drop_last=True, **options)
    return loader, load(check, preset.batch_size, augment=False, **options)


def ranks_of(count: int) -> tuple[int, ...]:
    """Return the values of k for top-k accuracy: 1, and also 5 if there are more than 5 classes."""
    return (1, 5) if count > 5 else (1,)


def described(at: Position, found: dict[str, float]) -> str:
    """Format the metrics of an evaluation."""
    shares = (f"top-{name[3:]} {share:.2%}" for name, share in found.items() if name.startswith("top"))
    when = f"after epoch {at.epoch}" if at.step else "before any training"
    return f"{when}: {', '.join(shares)}"


def begin_with(given: argparse.Namespace, model: Any, classes: int) -> str:
    """Load ``--weights`` on rank 0. Returns a message for the user, which names skipped parameters."""
    file, fresh, problem = given.weights, list[str](), ""
    try:
        if hvd.rank() == 0:
            fresh = model.load_weights(file)
    except OSError as error:
        problem = f"--weights {file}: {error.strerror or error}"
    except Exception as error:  # frameworks raise many kinds of exceptions
        problem = f"--weights {file}: not for this model: {error}".splitlines()[0]
    if fresh and given.evaluate:
        problem = f"--weights {file} cannot be evaluated, because its head is not for {classes} classes"
    fresh, problem = hvd.broadcast_object((fresh, problem))
    if problem:
        raise SystemExit(problem)
    head = f", except {', '.join(fresh)}, because its head is not for {classes} classes" if fresh else ""
    return f"starting with the weights in {file}{head}"


def train(
    given: argparse.Namespace, preset: Preset, model: Any, data: Any, loader: Any, split: str, framework: str,
) -> None:
    """Train, or only evaluate, starting from the newest checkpoint if there is one. Then export the model.

    Args:
        given: Options from the command line.
        preset: The preset with overrides from the command line.
        model: This rank's model. See Note [Models of recipes]. It also needs ``step``, ``load_weights``, and
            ``equal``, which broadcasts rank 0's model.
        data: Data set to train on.
        loader: Loader for ``data``.
        split: Name of the split that is evaluated.
        framework: Name of the framework, for display.
    """
    same = {"model": given.model or f"ResNet-50 of width {given.width}", "classes": len(data.classes)}
    same |= {"optimizer": preset.optimizer, "precision": preset.precision}
    if model.framework == "keras":  # accumulation adds variables to the optimizer
        same["accumulate"] = given.accumulate
    if not given.evaluate:
        same |= {"images": len(data), "preset": given.preset, "seed": given.seed}
    if given.evaluate and given.checkpoints and not hvd.broadcast_object(Path(given.checkpoints).is_dir()):
        raise SystemExit(f"--evaluate: the directory --checkpoints {given.checkpoints} does not exist")
    training = Training(given, model, same, "images", len(data), preset.epochs, split, "top1")
    batch = loader.plan.batch_size * hvd.size()
    epochs = f", {preset.epochs:g} epochs\npreset {given.preset} ({preset.source}): {preset.expected}"
    training.print(
        f"{same['model']} by {framework}: {hvd.size()} ranks, batch {batch:,}, {preset.optimizer}, "
        f"{preset.precision}, {len(data):,} images of {len(data.classes)} classes"
        f"{'' if given.evaluate else epochs}"
    )

    def begin() -> None:
        if given.weights:
            training.print(begin_with(given, model, len(data.classes)))
        model.equal()

    training.train_or_evaluate(loader, schedule_of(preset, given, len(data), batch), begin)
    about = {"model": same["model"], "image_size": preset.image_size, "classes": list(data.classes)}
    if model.framework == "keras":
        about["backend"] = os.environ["KERAS_BACKEND"]
    training.close(about)
