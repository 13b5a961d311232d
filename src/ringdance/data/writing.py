"""Write samples to the files of a data set."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from ringdance.data import tfrecord, webdataset
from ringdance.data.dataset import ROW, Dataset, Rows, ShardFile, joined
from ringdance.data.files import ShardWriter, needed
from ringdance.data.sample import Sample
from ringdance.errors import ArgumentError

ENDINGS = {"tfrecord": "tfrecord", "webdataset": "tar"}
"""File name extension of each format."""


def shard_name(split: str, number: int, shards: int, format: str) -> str:
    """Return the name of a shard, such as "train-00000-of-00128.tar"."""
    return f"{split}-{number:05}-of-{shards:05}.{ENDINGS[format]}"


def write_shard(path: Path, format: str, samples: Iterable[Sample]) -> tuple[ShardFile, Rows]:
    """Write one file of a data set. It appears under its name only when it is complete.

    Args:
        path: Path of the file.
        format: "tfrecord" or "webdataset".
        samples: The samples, in the order in which they are to be written.

    Returns:
        The file's entry for the index, and its index rows, in which the file number is 0.
    """
    rows: list[tuple[int, int, int, int]] = []
    keys: set[str] = set()
    with ShardWriter(path) as shard:
        for sample in samples:
            if format == "tfrecord":
                offset = tfrecord.write(shard, sample)
            else:
                key = webdataset.key_of(sample)
                # Make the keys unique, because WebDataset merges consecutive entries with equal keys.
                key = f"{key}-{len(rows)}" if key in keys else key
                keys.add(key)
                offset = webdataset.write(shard, sample, key)
            rows.append((0, len(sample.image), offset, sample.label))
        if format == "webdataset":
            webdataset.end(shard)
    return ShardFile(path.name, len(rows), shard.size, shard.crc32c), np.array(rows, ROW)


def write(
    path: str | os.PathLike[str], samples: Iterable[tuple[bytes, int]], split: str = "train", *,
    format: str = "tfrecord", shards: int = 1, classes: Sequence[str] = (),
) -> Dataset:
    """Write a small data set. For large ones, use ``ringdance data prepare``, which writes in parallel.

    Args:
        path: Directory of the data set, which is created if necessary.
        samples: Pairs of an encoded JPEG and a label. Labels start from 0.
        split: Name of the split, such as "train".
        format: "tfrecord" or "webdataset".
        shards: Number of files.
        classes: Class names, in the order of the labels. Defaults to the labels as strings.

    Raises:
        ArgumentError: An image is not a JPEG, or a package is missing.
    """
    if format not in ENDINGS:
        raise ArgumentError(f"format={format!r} is not supported. Use one of {', '.join(ENDINGS)}.")
    directory, header = Path(path), needed("simplejpeg").decode_jpeg_header
    directory.mkdir(parents=True, exist_ok=True)
    pairs = list(samples)
    classes = list(classes) or [str(n) for n in range(max((label for _, label in pairs), default=-1) + 1)]

    def sample(number: int) -> Sample:
        image, label = pairs[number]
        try:
            height, width = header(image)[:2]
        except ValueError as error:
            raise ArgumentError(f"sample {number} is not a JPEG: {error}") from None
        return Sample(image, label, classes[label], f"{number:08}.jpg", height, width)

    files = []
    for number, chosen in enumerate(np.array_split(np.arange(len(pairs)), shards)):
        target = directory / shard_name(split, number, shards, format)
        files.append(write_shard(target, format, map(sample, chosen.tolist())))
    rows = joined(rows for _, rows in files)
    shard_files = [file for file, _ in files]
    Dataset(directory, split, format, classes, shard_files, rows).write()
    return Dataset.open(directory, split)
