"""Parts of a training other than its steps: top-k counts and checkpoints over several ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ringdance.numpy as hvd
from ringdance.errors import ArgumentError

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


def test_counts_of_all_ranks_are_exact() -> None:
    metric = hvd.TopK((1,))
    for _ in range(RANK):  # rank 0 has no batches
        metric.add(np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]), [0, 0, 0])
    total = 3 * sum(range(SIZE))
    assert metric.result() == {"count": total, "top1": (2 * total / 3) / max(total, 1)}


def area(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the fraction of pairs in which the positive sample has the higher score. A tie counts half."""
    positive, negative = scores[labels == 1], np.sort(scores[labels == 0])
    lower, not_higher = (np.searchsorted(negative, positive, side) for side in ("left", "right"))
    return float((lower + not_higher).sum() / (2 * len(positive) * len(negative)))


@pytest.mark.parametrize("digits", [1, 3, 17])
def test_the_area_under_the_curve_is_that_of_all_samples(digits: int) -> None:
    """The metrics match their definitions, with many ties and with a rank without samples."""
    random = np.random.default_rng(3)
    scores = np.round(random.random(5_000), digits)
    labels = (random.random(5_000) < scores).astype(np.float32)
    metric = hvd.BinaryScores()
    owner = random.integers(0, max(SIZE - 1, 1), 5_000)  # the last rank has no samples
    for part in np.array_split(np.flatnonzero(owner == RANK), 3):
        metric.add(scores[part], labels[part])
    result = metric.result()
    near = np.clip(scores, 1e-15, 1 - 2.0**-53)
    logloss = -np.where(labels == 1, np.log(near), np.log1p(-near)).mean()
    assert result["auc"] == pytest.approx(area(scores, labels), abs=1e-12)
    assert result["logloss"] == pytest.approx(logloss, rel=1e-9)
    assert result["calibration"] == pytest.approx(scores.sum() / labels.sum(), rel=1e-12)
    assert (result["count"], result["positives"]) == (5_000, int(labels.sum()))


def test_scores_that_are_no_probabilities_are_an_error_on_all_ranks() -> None:
    metric = hvd.BinaryScores()
    assert np.isnan(metric.result()["auc"])
    metric.add([np.nan if RANK == SIZE - 1 else 0.5, 0.25], [1, 0])
    with pytest.raises(ArgumentError, match=rf"not between 0 and 1 \(1 on rank {SIZE - 1}\)\."):
        metric.result()
    with pytest.raises(ArgumentError, match=r"labels such as \[2\]"):
        metric.add([0.5], [2])


def test_rank_zero_writes_and_all_read(tmp_path: Path) -> None:
    directory = hvd.broadcast_object(str(tmp_path)) if RANK == 0 else hvd.broadcast_object(None)
    own = directory if RANK == 0 else f"/nowhere/{RANK}"  # other hosts might not have it
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


@pytest.mark.parametrize("sharded", [False, True])
def test_errors_with_a_table_are_on_all_ranks(sharded: bool, tmp_path: Path) -> None:
    directory = Path(hvd.broadcast_object(str(tmp_path)))
    saved = hvd.Checkpoints(directory)
    table = hvd.EmbeddingTable(7, 2, sharded=sharded)
    table.values[:] = 3
    saved.save(3, lambda path: path.write_text("three"), table)
    with pytest.raises(ArgumentError, match=r"shape \(7, 2\) instead of \(8, 2\)"):
        saved.read(table=hvd.EmbeddingTable(8, 2))
    table.values[:] = 0
    assert saved.read(table=table) == (3, b"three")
    assert (table.values == 3).all()
    saved.save(2, lambda path: path.write_text("two"))
    with pytest.raises(hvd.CheckpointError, match="checkpoint 2 has no table"):
        saved.read(table=table)
    hvd.barrier()
    if RANK == 0:
        (directory / "checkpoint-00000003.npy").write_bytes(b"")
    with pytest.raises(hvd.CheckpointError, match=r"checkpoint-00000003\.npy has 0 bytes instead of"):
        saved.read(3, table)
    with pytest.raises(hvd.CheckpointError, match=r"no complete checkpoint 5\. Complete: 2\. Damaged: 3"):
        saved.read(5)
    if RANK == 0:
        directory.rename(directory.with_suffix(".moved"))
    with pytest.raises(hvd.CheckpointError, match="No such file or directory"):  # noqa: PT012
        saved.save(4, lambda path: path.write_text("four"), table)  # a sharded table is written here
        saved.wait()
    saved.close()
