"""Score rows of clicks with a model that train_torch.py or train_keras.py has exported.

    python score.py model clicks --split validation --output scores.tsv
    python score.py model day_23.tsv --output scores.tsv

Writes a line for each row, in order: the probability of a click, and the row's label. With labels of both
kinds it prints AUC, log-loss and calibration too. Rows without a label get any, such as 0, first:

    sed 's/^/0\\t/' test.txt > rows.tsv

The table of embeddings is read from the disk as rows are needed: it may be greater than the memory.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ringdance.numpy as hvd
from ringdance.data import Table, TableLoader
from ringdance.errors import ArgumentError
from ringdance.recipes.files import run_scoring, text_file
from ringdance.recipes.log import scores_of

Array = np.ndarray[Any, Any]
Layers = Callable[[Array, Array, Array], Array]


def layers_of(model: Path, framework: str) -> Layers:
    """Return a function from rows (any, 1 + dim), places and factors, both (n, fields), to logits (n,)."""
    if framework == "torch":
        import torch

        program = torch.export.load(model / "layers.pt2").module()

        def by_torch(*arrays: Array) -> Array:
            with torch.inference_mode():
                logits: Array = program(*map(torch.from_numpy, arrays)).numpy()
            return logits

        return by_torch
    import tensorflow as tf

    saved = tf.saved_model.load(str(model / "layers"))
    return lambda *arrays: saved.serve(*arrays).numpy()


def score(given: argparse.Namespace, about: dict[str, Any]) -> int:
    """Score rows, and print what their labels say of it."""
    data = Table.open(given.data, given.split, table_size=about["table_size"])
    if data.fields != about["fields"]:
        raise ArgumentError(f"{given.data}: {data.fields} fields, but {given.model} has {about['fields']}")
    try:
        table = np.load(given.model / "table.npy", mmap_mode="r")[0]
        layers = layers_of(given.model, about["framework"])
    except Exception as error:  # of damaged files of any kind
        raise ArgumentError(f"{given.model} cannot be read: {error}") from None
    figures, began = hvd.BinaryScores(), time.perf_counter()
    with text_file(given.output) as output:
        for batch in TableLoader(data, given.batch_size, shuffle=False):
            keys, places = np.unique(batch.ids, return_inverse=True)
            logits = layers(table[keys], places.reshape(batch.ids.shape), batch.values)
            scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
            figures.add(scores, batch.labels)
            rows = zip(scores.tolist(), batch.labels.tolist(), strict=True)
            output.writelines(f"{score:.7g}\t{label:g}\n" for score, label in rows)
    found, seconds = figures.result(), time.perf_counter() - began
    print(f"{scores_of(found)} in {seconds:.1f} s", file=sys.stderr)
    return 0


def main() -> None:
    """Score as the command line says."""
    kinds = "a prepared directory, or a file of rows"
    run_scoring(__doc__ or "", kinds, 8192, score, "table_size", "fields", "framework")


if __name__ == "__main__":
    main()
