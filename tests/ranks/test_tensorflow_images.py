"""Images for TensorFlow: the loader's batches, the same as a tf.data.Dataset, and the native pipeline."""

from __future__ import annotations

import io
import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import ringdance.tensorflow as hvd
from ringdance.data import Dataset, write
from ringdance.errors import ArgumentError

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
LENGTH = 6 * SIZE + 1


@pytest.fixture(scope="module")
def directory() -> Path:
    """TFRecords in 3 files with one-coloured JPEGs: red is ten times the number."""
    path = hvd.broadcast_object(tempfile.mkdtemp() if RANK == 0 else None, 0)
    if RANK == 0:
        samples = []
        for number in range(LENGTH):
            file = io.BytesIO()
            Image.new("RGB", (300, 200), (number * 10, 0, 0)).save(file, "JPEG")
            samples.append((file.getvalue(), number))
        write(path, samples, "train", shards=3)
    hvd.allreduce(tf.constant(0), name="written")
    return Path(path)


def test_the_loader_and_its_dataset_have_the_same(directory: Path) -> None:
    loader = hvd.image_loader(Dataset.open(directory), 4, image_size=16, device="/CPU:0")
    loader.set_epoch(2)
    batches = list(loader)
    elements = list(hvd.image_dataset(loader))
    assert len(elements) == len(batches) == len(loader)
    for batch, (images, labels, weights) in zip(batches, elements, strict=True):
        assert batch.images.shape == images.shape
        assert batch.images.device.endswith("CPU:0")
        assert (batch.images.numpy() == images.numpy()).all()
        assert (batch.labels.numpy() == labels.numpy()).all()
        assert np.allclose(weights, batch.weight)
    seen = itertools.chain(*hvd.allgather_object([int(n) for one in batches for n in one.indices if n >= 0]))
    assert sorted(seen) == list(range(LENGTH))


@pytest.mark.parametrize("shard", ["train-*", "train-00000*"])
def test_the_pipeline_evaluates_each_image_once(directory: Path, shard: str) -> None:
    """By files, and by images where there are fewer files than ranks."""
    found = []
    for images, labels in hvd.image_pipeline(directory / shard, 4, image_size=32, augment=False):
        assert images.dtype == tf.uint8
        assert images.shape[1:] == (32, 32, 3)
        assert np.abs(images.numpy()[:, 5, 5, 0] - labels.numpy() * 10.0).max() < 5
        found += labels.numpy().tolist()
    seen = itertools.chain(*hvd.allgather_object(found))
    expected = Dataset.open(directory).rows
    assert sorted(seen) == sorted(expected["label"][(expected["file"] == 0) | (shard == "train-*")].tolist())


def test_the_pipeline_trains_without_end(directory: Path) -> None:
    data = hvd.image_pipeline(directory / "train-*", 8, image_size=32, cache=True, shuffle=5)
    for images, labels in data.take(4):
        assert images.shape == (8, 32, 32, 3)
        assert np.abs(images.numpy()[:, 5, 5, 0] - labels.numpy() * 10.0).max() < 5
    with pytest.raises(ArgumentError, match="no file"):
        hvd.image_pipeline(directory / "other-*", 8)
