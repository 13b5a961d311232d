"""What a training has beside its steps: top-k counts and checkpoints over several ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ringdance.numpy as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


def test_counts_of_all_ranks_are_exact() -> None:
    metric = hvd.TopK((1,))
    for _ in range(RANK):  # rank 0 has none
        metric.add(np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]), [0, 0, 0])
    total = 3 * sum(range(SIZE))
    assert metric.result() == {"count": total, "top1": (2 * total / 3) / max(total, 1)}


def test_rank_zero_writes_and_all_read(tmp_path: Path) -> None:
    directory = hvd.broadcast_object(str(tmp_path)) if RANK == 0 else hvd.broadcast_object(None)
    own = directory if RANK == 0 else f"/nowhere/{RANK}"  # other hosts may not have it
    saved = hvd.Checkpoints(own)
    saved.save(3, lambda path: path.write_text(f"by {RANK}"))
    assert saved.read() == (3, b"by 0")
    saved.save(4, lambda path: path.write_text("x") / 0)
    with pytest.raises(hvd.CheckpointError, match=r"rank 0 on .*ZeroDivisionError"):
        saved.wait()
    assert saved.numbers() == [3]
    saved.close()
    with pytest.raises(hvd.CheckpointError, match="Not a directory"):
        hvd.Checkpoints(f"{own}/checkpoint-00000003/below")
