"""The options of train_torch.py and train_keras.py."""

from __future__ import annotations

import argparse

from presets import PRESETS  # type: ignore[import-not-found]  # beside this file

from ringdance.recipes.options import Options, amount, count, number


def parser(manual: str) -> Options:
    """Return a parser of the options that both have; a script may add its own."""
    made = Options(description=manual)
    add, share = made.add_argument, number(float, 0, 1)
    names = f"default: 8xV100; {', '.join(PRESETS)}"
    add("--preset", default="8xV100", choices=PRESETS, metavar="NAME", help=names)
    add("--data", metavar="DIR", help="a data set that `ringdance data prepare` has written")
    add("--synthetic", action="store_true", help="random pixels instead of data")
    add("--synthetic-images", type=count, default=1_281_167, metavar="N", help="default: 1,281,167")
    add("--epochs", type=count, metavar="N", help="length of the schedule")
    add("--warmup-epochs", type=number(int, 0), metavar="N", help="of these, in which the rate rises")
    add("--batch-size", type=count, metavar="N", help="images for each rank and pass; the rate goes with it")
    add("--accumulate", type=count, default=1, metavar="N", help="passes in each step; default: 1")
    add("--model", metavar="NAME", help="of the library instead of our ResNet-50: see above")
    add("--width", type=count, help="channels of our ResNet-50's first stage; default: 64")
    text = "begin with these, or with those of an exported model; a head of other classes is left fresh"
    add("--weights", metavar="FILE", help=text)
    add("--optimizer", choices=("sgd", "lars"))
    add("--rate", type=amount, metavar="R", help="peak learning rate of the whole batch, not scaled further")
    add("--precision", choices=("float32", "float16", "bfloat16"))
    add("--image-size", type=count, metavar="PIXELS")
    add("--evaluation-size", type=count, metavar="PIXELS", help="default: that of the training")
    text = "change each image by an operation by chance: TrivialAugmentWide"
    add("--trivial-augment", action=argparse.BooleanOptionalAction, help=text)
    add("--label-smoothing", type=share, metavar="S", help="share of a target that all classes get")
    add("--mixup", type=amount, metavar="ALPHA", help="mix pairs of images; 0: do not")
    add("--cutmix", type=amount, metavar="ALPHA", help="put parts of images into others; 0: do not")
    add("--erase", type=share, metavar="P", help="probability that a part of an image becomes grey")
    add("--ema", type=share, metavar="D", help="evaluate averaged weights, of which a step keeps D: 0.9999")
    add("--threads", type=count, metavar="N", help="that decode images; default: the cores of each rank")
    add("--evaluate-every", type=int, default=1, metavar="EPOCHS", help="and after the last (1); 0: never")
    text = "only evaluate: the best model of --checkpoints, else its newest, or --weights"
    add("--evaluate", action="store_true", help=text)
    add("--sample-log", metavar="DIR", help="write there which images each rank used in each step")
    made.add_shared(keep=3, log_every=20)
    return made


def read(made: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line, and check what it says."""
    given = made.parse_args()
    if bool(given.data) == given.synthetic:
        made.error("give either --data DIR or --synthetic")
    if given.evaluate and bool(given.checkpoints) == bool(given.weights):
        made.error("--evaluate: give either --checkpoints DIR or --weights FILE")
    if given.model and given.width:
        made.error(f"--width {given.width} is of our ResNet-50: leave it out, or --model {given.model}")
    given.width = given.width or 64
    preset = PRESETS[given.preset].overridden(given)
    if preset.epochs < preset.warmup_epochs:
        warmup = f"{preset.warmup_epochs:g} of warm-up"
        made.error(f"{preset.epochs:g} epochs, but {warmup}: give --epochs or --warmup-epochs")
    return given
