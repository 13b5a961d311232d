"""pipe_loader for torch: tensors of the rows of a real FIFO for each rank."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from criteo_lines import libsvm_lines

import ringdance.torch as hvd
from ringdance.data import planted

pytest.importorskip("pyarrow")
hvd.init()


def test_tensors_of_the_rows():
    path = Path(hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None, 0))
    own = path / f"train_{hvd.local_rank()}_0"
    (part,) = planted(100, seed=hvd.rank())
    rows = part.rows()
    os.mkfifo(own)
    writer = threading.Thread(target=own.write_bytes, args=(libsvm_lines(rows),))
    writer.start()
    batches = list(hvd.pipe_loader("train", 32, directory=path, timeout=10))
    writer.join()
    assert [len(batch.labels) for batch in batches] == [32, 32, 32, 4]
    assert all(batch.weight == 1 for batch in batches)
    assert torch.equal(torch.cat([batch.ids for batch in batches]), torch.from_numpy(rows.ids))
    assert torch.equal(torch.cat([batch.values for batch in batches]), torch.from_numpy(rows.values))
