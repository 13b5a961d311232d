"""image_loader for torch: each sample once over all ranks, tensors without copies, arguments compared."""

from __future__ import annotations

import io
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import ringdance.torch as hvd
from ringdance.data import Synthetic
from ringdance.errors import MismatchError

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


class Memory:
    """Images of one color each, which encodes the image's number."""

    def __init__(self, length: int) -> None:
        self.data = []
        for number in range(length):
            file = io.BytesIO()
            Image.new("RGB", (30, 20), (number * 10, 0, 0)).save(file, "PNG")
            self.data.append(file.getvalue())
        self.rows = {"label": np.arange(length)}

    def __len__(self) -> int:
        return len(self.data)

    def read(self, number: int) -> bytes:
        return self.data[number]


def seen(loader: Any) -> list[tuple[int, list[int]]]:
    """Return the position and all ranks' samples of each batch."""
    mine = [(item.position, item.indices[item.indices >= 0].tolist()) for item in loader]
    steps = zip(*hvd.allgather_object(mine), strict=True)
    return [(parts[0][0], [*itertools.chain(*[part[1] for part in parts])]) for parts in steps]


def test_each_sample_once_also_when_resumed() -> None:
    length = 4 * SIZE + 1
    loader = hvd.image_loader(Memory(length), 2, image_size=8, seed=7)
    loader.set_epoch(1)
    steps = seen(loader)
    order = [number for _, numbers in steps for number in numbers]
    assert sorted(order) == list(range(length))
    assert steps[-1] == (length, order[-1:])
    loader.set_epoch(1, steps[0][0])
    assert loader.position_after(1) == steps[1][0]
    assert seen(loader) == steps[1:]


def test_tensors_share_the_memory_that_was_decoded() -> None:
    loader = hvd.image_loader(Memory(2 * SIZE), 2, image_size=8, augment=False)
    (batch,) = loader
    assert batch.images.shape == (2, 3, 8, 8)
    assert batch.images.dtype == torch.uint8
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert batch.images[:, 0, 0, 0].tolist() == (batch.labels * 10).tolist()
    assert not batch.images[:, 1:].any()
    assert batch.weight == 1
    plain = next(loader.batches())
    assert loader.convert(plain).images.data_ptr() == plain.images.ctypes.data
    # As for a GPU, images are decoded into memory that PyTorch has allocated and owns.
    loader.memory = lambda shape: torch.empty(shape, dtype=torch.uint8).numpy()
    (again,) = loader
    assert (again.images == batch.images).all()


def test_weighted_losses_average_to_that_of_all_samples() -> None:
    loader = hvd.image_loader(Memory(4 * SIZE + 1), 3, image_size=8)
    total = 0.0
    for batch in loader:
        loss = batch.labels.double().mean() * batch.weight
        total += float(hvd.allreduce(loss, name="loss")) * batch.count
    assert total == pytest.approx(sum(range(4 * SIZE + 1)))


def test_synthetic_batches() -> None:
    loader = hvd.image_loader(Synthetic(8 * SIZE, range(5)), 4, image_size=8)
    batches = list(loader)
    assert [batch.images.shape for batch in batches] == [(4, 3, 8, 8)] * 2
    assert all((batch.labels < 5).all() for batch in batches)


@pytest.mark.ranks(2, 3, 4)
def test_other_arguments_on_a_rank_are_refused() -> None:
    copy: Any = Memory(8)
    copy.files, copy.will_need = [SimpleNamespace(size=700 + 300 * RANK)], print
    with pytest.raises(MismatchError, match="read_bytes, in samples of the files' mean size, differs"):
        hvd.image_loader(copy, 2, read_bytes=300)
    with pytest.raises(MismatchError, match="batch_size differs"):
        hvd.image_loader(Synthetic(8), 4 + (RANK == 1))
