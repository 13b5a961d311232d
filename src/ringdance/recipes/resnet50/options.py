"""The options of train_torch.py and train_keras.py."""

from __future__ import annotations

import argparse

from presets import PRESETS, Preset  # type: ignore[import-not-found]  # beside this file

from ringdance.training.schedules import Schedule

_POSITIVE = ("epochs", "steps", "batch_size", "accumulate", "checkpoint_every", "log_every", "width")


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
    add("--optimizer", choices=("sgd", "lars"))
    add("--rate", type=float, metavar="R", help="peak learning rate of the whole batch, not scaled further")
    add("--precision", choices=("float32", "float16", "bfloat16"))
    add("--image-size", type=int, metavar="PIXELS")
    add("--seed", type=int, default=0)
    add("--checkpoints", metavar="DIR", help="write them there, also after each epoch; go on from the newest")
    add("--checkpoint-every", type=int, default=1000, metavar="STEPS", help="default: 1000")
    add("--keep", type=int, default=3, metavar="N", help="checkpoints; default: 3")
    add("--evaluate-every", type=int, default=1, metavar="EPOCHS", help="and at the end (1); 0: never")
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
