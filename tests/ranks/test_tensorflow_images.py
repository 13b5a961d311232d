"""Images for TensorFlow: the loader's batches, and the same batches as a tf.data.Dataset."""

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

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
LENGTH = 6 * SIZE + 1


@pytest.fixture(scope="module")
def directory() -> Path:
    """Return TFRecords in 3 files with single-color JPEGs, whose red value is ten times their number."""
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
