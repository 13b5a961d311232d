"""Score images with a model that train_torch.py or train_keras.py has exported.

    python score.py model /data/imagenet --split validation --output scores.tsv
    python score.py model photos --output scores.tsv

Photographs are found in all directories below the one that is named. Writes a line for each image, under a
head: its file (of prepared data: its number), its label, and the probability of each class. The label is the
class of prepared data, or the name of the image's directory, if that is a class of the model; otherwise "-".
With labels it prints top-1 and top-5 too. Images are cut as in an evaluation: the square in the centre.
Photographs that are broken are left out and listed; the exit code is 3 then.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from shared import ranks_of  # type: ignore[import-not-found]  # beside this file

import ringdance.numpy as hvd
from ringdance.data import Dataset, Loader
from ringdance.data.files import needed
from ringdance.data.prepare.clean import BrokenImage, clean
from ringdance.errors import ArgumentError
from ringdance.recipes.files import run_scoring, text_file

Array = np.ndarray[Any, Any]
ENDINGS = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")


class Photographs:
    """Image files below a directory, as a data set for ``Loader``; label -1: not of a class."""

    def __init__(self, place: Path, classes: list[str]) -> None:
        found, directory = ([place], place.parent) if place.is_file() else (place.rglob("*"), place)
        self.paths = sorted(one for one in found if one.suffix.lower() in ENDINGS and one.is_file())
        labels = {name: number for number, name in enumerate(classes)}
        self.rows = np.zeros(len(self.paths), [("label", np.int64)])
        self.rows["label"] = [labels.get(one.parent.name, -1) for one in self.paths]
        self.names = [str(one.relative_to(directory)) for one in self.paths]
        self.broken: dict[int, str] = {}  # why, by number

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, number: int) -> bytes:
        """Return an image as ``ringdance data prepare`` would write it: upright, 8 bits, in RGB.

        Of a broken one, which is noted, a black image.
        """
        try:
            return clean(self.paths[number].read_bytes()).image
        except (BrokenImage, OSError) as error:
            self.broken[number] = f"{self.paths[number]}: {getattr(error, 'strerror', None) or error}"
            return needed("simplejpeg").encode_jpeg(np.zeros((8, 8, 3), np.uint8))


def program_of(model: Path, framework: str, backend: str) -> Callable[[Array], Array]:
    """Return a function from images, uint8, (n, size, size, 3), to probabilities, (n, classes)."""
    if framework == "torch":
        import torch

        program = torch.export.load(model / "model.pt2").module()

        def by_torch(images: Array) -> Array:
            with torch.inference_mode():
                shares: Array = program(torch.from_numpy(images)).numpy()
            return shares

        return by_torch
    os.environ.setdefault("KERAS_BACKEND", backend)
    import keras

    return keras.models.load_model(model / "model.keras", compile=False).predict_on_batch


def opened(given: argparse.Namespace, classes: list[str]) -> Any:
    """Return the photographs, or the split of prepared data."""
    data = Photographs(given.data, classes)
    if len(data) and not (given.data / f"{given.split}.json").exists():
        return data
    try:
        prepared = Dataset.open(given.data, given.split)
    except ArgumentError as error:
        raise ArgumentError(f"{error} Nor are there images ({', '.join(ENDINGS)})") from None
    except NotADirectoryError:
        raise ArgumentError(f"{given.data} is no image ({', '.join(ENDINGS)})") from None
    if list(map(str, prepared.classes)) != classes:
        raise ArgumentError(f"{given.data}: other classes than those of {given.model}")
    return prepared


def score(given: argparse.Namespace, about: dict[str, Any]) -> int:
    """Score images, and print what their labels say of it; return how many were left out."""
    classes = list(map(str, about["classes"]))
    data = opened(given, classes)
    try:
        program = program_of(given.model, about["framework"], about.get("backend", ""))
    except Exception as error:  # of damaged files of any kind
        raise ArgumentError(f"{given.model} cannot be read: {error}") from None
    broken: dict[int, str] = getattr(data, "broken", {})
    figures, began = hvd.TopK(ranks_of(len(classes))), time.perf_counter()
    loader = Loader(data, given.batch_size, image_size=about["image_size"], augment=False)
    with text_file(given.output) as output:
        print("file", "label", *classes, sep="\t", file=output)
        for batch in loader:
            shares = program(batch.images)
            whole = [number not in broken for number in batch.indices]
            numbers, labels, shares = batch.indices[whole], batch.labels[whole], shares[whole]
            figures.add(shares, labels)
            for number, label, row in zip(numbers, labels, shares, strict=True):
                name = data.names[number].replace("\t", "\\t") if hasattr(data, "names") else number
                print(name, classes[label] if label >= 0 else "-", *map("{:.6g}".format, row),
                      sep="\t", file=output)  # fmt: skip
    found, seconds = figures.result(), time.perf_counter() - began
    told = [f"top-{name[3:]} {share:.2%}" for name, share in found.items() if name.startswith("top")]
    of = f"{', '.join(told)} of {found['count']:,} with a label" if found["count"] else "none has a label"
    print(f"{len(data) - len(broken):,} images in {seconds:.1f} s: {of}", file=sys.stderr)
    for _, why in sorted(broken.items()):
        print(f"left out: {why}", file=sys.stderr)
    return len(broken)


def main() -> None:
    """Score as the command line says."""
    kinds = "a photograph, a directory of them, or prepared data"
    run_scoring(__doc__ or "", kinds, 32, score, "image_size", "classes", "framework")


if __name__ == "__main__":
    main()
