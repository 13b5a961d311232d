"""Score click-log rows or images with a model exported by train_torch.py or train_keras.py.

    python score.py model clicks --split validation --output scores.tsv
    python score.py model photos --output scores.tsv

For click logs, the output has one line per input row, in the order of the rows, with the probability of a
click and the row's label. If both labels occur, AUC, log-loss and calibration are also printed. The input
format requires a label. If your rows have no labels, prepend any valid value, such as 0:

    sed 's/^/0\\t/' test.txt > rows.tsv

Rows of the embedding table are read from disk as needed, so the table may be larger than memory.

A directory is searched recursively for images. The output has a header and one line per image: the image's
path (for prepared data, its number), its label, and the probability of each class. In prepared data, the
label is the image's class. Otherwise, it is the name of the image's directory, or "-" if the model has no
class with that name. If there are labels, top-1 and top-5 accuracy are also printed. As in evaluation, each
image is cropped around its center. If images are broken, they are skipped and listed, and the exit code is 3.
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

import ringdance.numpy as hvd
from ringdance.data import Dataset, Loader, Table, TableLoader
from ringdance.data.prepare.clean import BrokenImage, clean
from ringdance.errors import ArgumentError, optional
from ringdance.recipes.models import scores_of, text_file, whole_model
from ringdance.recipes.options import Options

Array = np.ndarray[Any, Any]
ENDINGS = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")


def program_of(model: Path, about: dict[str, Any]) -> Callable[..., Array]:
    """Load the exported program as a function that takes and returns NumPy arrays.

    Raises:
        ArgumentError: The program cannot be read.
    """
    try:
        if about["framework"] == "torch":
            import torch

            program = torch.export.load(model / "program.pt2").module()

            def by_torch(*arrays: Array) -> Array:
                with torch.inference_mode():
                    outputs: Array = program(*map(torch.from_numpy, arrays)).numpy()
                return outputs

            return by_torch
        if about["framework"] == "tensorflow":
            import tensorflow as tf

            saved = tf.saved_model.load(str(model / "layers"))
            return lambda *arrays: saved.serve(*arrays).numpy()
        os.environ.setdefault("KERAS_BACKEND", about["backend"])
        import keras

        return keras.models.load_model(model / "model.keras", compile=False).predict_on_batch
    except Exception as error:  # frameworks raise many kinds of exceptions for damaged files
        raise ArgumentError(f"{model} cannot be loaded: {error}") from None


def score_rows(given: argparse.Namespace, about: dict[str, Any]) -> int:
    """Score click-log rows, and print metrics. Returns 0, because no rows are skipped."""
    data = Table.open(given.data, given.split, table_size=about["table_size"])
    if data.fields != about["fields"]:
        raise ArgumentError(
            f"{given.data} has {data.fields} fields, but {given.model} requires {about['fields']}."
        )
    layers, table = program_of(given.model, about), np.load(given.model / "table.npy", mmap_mode="r")[0]
    metrics, began = hvd.BinaryScores(), time.perf_counter()
    with text_file(given.output) as output:
        for batch in TableLoader(data, given.batch_size or 8192, shuffle=False):
            keys, places = np.unique(batch.ids, return_inverse=True)
            logits = layers(table[keys], places.reshape(batch.ids.shape), batch.values)
            scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
            metrics.add(scores, batch.labels)
            rows = zip(scores.tolist(), batch.labels.tolist(), strict=True)
            output.writelines(f"{score:.7g}\t{label:g}\n" for score, label in rows)
    result, seconds = metrics.result(), time.perf_counter() - began
    print(f"{scores_of(result)} on {result['count']:,} rows in {seconds:.1f} s", file=sys.stderr)
    return 0


class Photographs:
    """A data set for ``Loader`` with all image files below a directory. Unknown labels are -1."""

    def __init__(self, place: Path, classes: list[str]) -> None:
        candidates, directory = ([place], place.parent) if place.is_file() else (place.rglob("*"), place)
        self.paths = sorted(path for path in candidates if path.suffix.lower() in ENDINGS and path.is_file())
        labels = {name: number for number, name in enumerate(classes)}
        self.rows = np.zeros(len(self.paths), [("label", np.int64)])
        self.rows["label"] = [labels.get(path.parent.name, -1) for path in self.paths]
        self.names = [str(path.relative_to(directory)) for path in self.paths]
        self.broken: dict[int, str] = {}  # error messages by image number
        self._black: bytes = optional("simplejpeg", ArgumentError).encode_jpeg(np.zeros((8, 8, 3), np.uint8))

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, number: int) -> bytes:
        """Return an image, converted like by ``ringdance data prepare`` to upright 8-bit RGB if necessary.

        If the image is broken, record the error, and return a black image instead.
        """
        try:
            return clean(self.paths[number].read_bytes()).image
        except (BrokenImage, OSError) as error:
            self.broken[number] = f"{self.paths[number]}: {getattr(error, 'strerror', None) or error}"
            return self._black


def images_of(given: argparse.Namespace, classes: list[str]) -> Any:
    """Open the images to score: a split of a prepared data set, or the image files below a directory."""
    data = Photographs(given.data, classes)
    if len(data) and not (given.data / f"{given.split}.json").exists():
        return data
    try:
        prepared = Dataset.open(given.data, given.split)
    except ArgumentError as error:
        raise ArgumentError(f"{error} It does not contain images either ({', '.join(ENDINGS)}).") from None
    except NotADirectoryError:
        raise ArgumentError(f"{given.data} does not end in {', '.join(ENDINGS)}.") from None
    if list(map(str, prepared.classes)) != classes:
        raise ArgumentError(f"the classes of {given.data} differ from the classes of {given.model}.")
    return prepared


def score_images(given: argparse.Namespace, about: dict[str, Any]) -> int:
    """Score images, and print metrics if they have labels. Returns the number of skipped images."""
    classes = list(map(str, about["classes"]))
    data, program = images_of(given, classes), program_of(given.model, about)
    broken: dict[int, str] = getattr(data, "broken", {})
    metrics, began = hvd.TopK((1, 5) if len(classes) > 5 else (1,)), time.perf_counter()
    loader = Loader(data, given.batch_size or 32, image_size=about["image_size"], augment=False)
    with text_file(given.output) as output:
        print("file", "label", *classes, sep="\t", file=output)
        for batch in loader:
            shares = program(batch.images)
            whole = [number not in broken for number in batch.indices]
            numbers, labels, shares = batch.indices[whole], batch.labels[whole], shares[whole]
            metrics.add(shares, labels)
            for number, label, row in zip(numbers, labels, shares, strict=True):
                name = data.names[number].replace("\t", "\\t") if hasattr(data, "names") else number
                print(name, classes[label] if label >= 0 else "-", *map("{:.6g}".format, row),
                      sep="\t", file=output)  # fmt: skip
    result, seconds = metrics.result(), time.perf_counter() - began
    tops = ", ".join(f"top-{name[3:]} {share:.2%}" for name, share in result.items() if name != "count")
    shown = f"{tops} on {result['count']:,} labeled images" if result["count"] else "no image has a label"
    print(f"{len(data) - len(broken):,} images in {seconds:.1f} s: {shown}", file=sys.stderr)
    for _, why in sorted(broken.items()):
        print(f"skipped: {why}", file=sys.stderr)
    return len(broken)


def main() -> None:
    """Score the data given on the command line.

    Raises:
        SystemExit: The exit code is 2 after an error, and 3 if images were skipped.
    """
    parser = Options(description=__doc__)
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="directory written by --export")
    add("data", type=Path, metavar="DATA", help="prepared data, file of rows, or images")
    add("--split", default="train", help="split of prepared data; default: train")
    add("--output", metavar="FILE", help="file for the scores; default: print only metrics")
    add("--batch-size", type=int, metavar="N", help="default: 8192 rows, 32 images")
    given = parser.parse_args()
    try:
        hvd.init()
        if hvd.size() > 1:
            raise ArgumentError(f"{sys.argv[0]} runs as one process. Start it without `ringdance run`.")
        about = whole_model(given.model)
        if not {"table_size", "classes"} & about.keys():
            raise ArgumentError(f"{given.model} is not a model for click logs or image classes.")
        left_out = (score_rows if "table_size" in about else score_images)(given, about)
    except (ArgumentError, OSError) as error:
        parser.error(str(error))
    if left_out:
        sys.exit(3)


if __name__ == "__main__":
    main()
