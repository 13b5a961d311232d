"""image_loader for JAX: the NumPy loader's batches, as arrays on the device."""

from __future__ import annotations

import io
import itertools

import jax
import numpy as np
from PIL import Image

import ringdance.jax as hvd
import ringdance.numpy

hvd.init()
SIZE = hvd.size()


class Memory:
    """Images of one color each: ten times their number."""

    rows = {"label": np.arange(4 * SIZE + 1)}  # noqa: RUF012

    def __len__(self) -> int:
        return len(self.rows["label"])

    def read(self, number: int) -> bytes:
        file = io.BytesIO()
        Image.new("RGB", (30, 20), (number * 10, 0, 0)).save(file, "PNG")
        return file.getvalue()


def test_batches_are_arrays_and_each_sample_comes_once() -> None:
    loader = hvd.image_loader(Memory(), 2, image_size=8, seed=4)
    plain = ringdance.numpy.image_loader(Memory(), 2, image_size=8, seed=4)
    seen = []
    for batch, other in zip(loader, plain, strict=True):
        assert isinstance(batch.images, jax.Array)
        assert batch.images.dtype == "uint8"
        assert (np.asarray(batch.images) == other.images).all()
        assert (np.asarray(batch.images)[:, 0, 0, 0] == np.asarray(batch.labels) * 10).all()
        assert (batch.weight, batch.position) == (other.weight, other.position)
        seen += batch.indices[batch.indices >= 0].tolist()
    assert sorted(itertools.chain(*hvd.allgather_object(seen))) == list(range(4 * SIZE + 1))
