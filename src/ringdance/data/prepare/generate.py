"""``ringdance data generate``: write synthetic click logs with known click probabilities."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from ringdance.data.prepare.plan import state
from ringdance.data.tables import criteo
from ringdance.data.tables.auc import auc
from ringdance.data.tables.planted import planted
from ringdance.data.tables.writing import TableWriter, write_index
from ringdance.errors import ArgumentError


def generate(given: argparse.Namespace) -> int:
    """Write a data set, and print each split's AUC of the true click probabilities.

    Raises:
        ArgumentError: The directory already contains a data set, and ``overwrite`` is False.
    """
    destination, held = given.destination, round(given.rows * given.validation)
    destination.mkdir(parents=True, exist_ok=True)
    if (destination / "train.json").exists() and not given.overwrite:
        raise ArgumentError(
            f"{destination} already has a data set (train.json). Use --overwrite to replace it."
        )
    if given.overwrite:
        for path in (*destination.glob("*-[0-9]*-of-*"), *state(destination).glob("*")):
            path.unlink()
    for split, start, count in ("train", 0, given.rows - held), ("validation", given.rows - held, held):
        (destination / f"{split}.json").unlink(missing_ok=True)
        if count:
            _write(destination, split, start, count, given)
    return 0


def _write(destination: Path, split: str, start: int, count: int, given: argparse.Namespace) -> None:
    labels, probabilities = [], []
    with TableWriter(destination / f"{split}-00000-of-00001.npy", "rows", count, criteo.FIELDS) as file:
        for part in planted(count, day=given.day, start=start):
            file.write(part.rows(given.table_size))
            labels.append(part.labels)
            probabilities.append(part.probabilities)
    write_index(destination, split, "rows", criteo.FIELDS, given.table_size, [file.written])
    clicks = np.concatenate(labels)
    best = auc(np.concatenate(probabilities), clicks)
    print(f"{split}: {count} rows; {clicks.mean():.1%} clicks; AUC of the true probabilities {best:.5f}")
