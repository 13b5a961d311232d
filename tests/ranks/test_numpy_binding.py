"""The NumPy binding: every function once, values by NumPy. The collectives' corners are tested elsewhere."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import ringdance.numpy as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
EVERY = [np.arange(6.0).reshape(3, 2) + rank for rank in range(SIZE)]
MINE = EVERY[RANK]


def test_allreduce() -> None:
    total, mean = sum(EVERY), sum(EVERY) / SIZE
    assert np.allclose(hvd.allreduce(MINE, "a"), mean)
    assert np.array_equal(hvd.synchronize(hvd.allreduce_async(MINE, op=hvd.Sum)), total)
    for call in (hvd.allreduce_, lambda array, op: hvd.synchronize(hvd.allreduce_async_(array, op=op))):
        mine = MINE.copy()
        assert call(mine, op=hvd.Sum) is mine
        assert np.array_equal(mine, total)
    assert hvd.allreduce(np.array([1.5], ml_dtypes.bfloat16), op=hvd.Sum)[0] == 1.5 * SIZE
    assert np.array_equal(hvd.allreduce(MINE.T, op=hvd.Max), EVERY[-1].T)
    assert hvd.allreduce(2.0, op=hvd.Product).shape == ()
    with pytest.raises(ValueError, match="contiguous"):
        hvd.allreduce_(MINE.T)


def test_groups() -> None:
    pair, totals = [MINE, MINE[:1].astype(np.int32)], [sum(EVERY), sum(EVERY)[:1].astype(np.int32)]
    own = [one.copy() for one in pair]
    other = [one.copy() for one in pair]
    for results in (
        hvd.grouped_allreduce(pair, op=hvd.Sum),
        hvd.synchronize(hvd.grouped_allreduce_async(pair, op=hvd.Sum)),
        hvd.grouped_allreduce_(own, op=hvd.Sum), own,
        hvd.synchronize(hvd.grouped_allreduce_async_(other, op=hvd.Sum)), other,
    ):
        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(results, totals, strict=True))
    joined = np.concatenate(EVERY)
    assert np.array_equal(hvd.grouped_allgather([MINE])[0], joined)
    assert np.array_equal(hvd.synchronize(hvd.grouped_allgather_async([MINE]))[0], joined)


def test_the_others() -> None:
    assert np.array_equal(hvd.allgather(MINE), np.concatenate(EVERY))
    assert np.array_equal(hvd.synchronize(hvd.allgather_async(MINE[:RANK])), np.concatenate(
        [one[:rank] for rank, one in enumerate(EVERY)]
    ))
    root = SIZE - 1
    for result in (hvd.broadcast(MINE, root), hvd.synchronize(hvd.broadcast_async(MINE, root))):
        assert np.array_equal(result, EVERY[root])
    for call in (hvd.broadcast_, lambda array, root: hvd.synchronize(hvd.broadcast_async_(array, root))):
        mine = MINE.copy()
        assert call(mine, root) is mine
        assert np.array_equal(mine, EVERY[root])
    sent = np.repeat(RANK, SIZE)
    assert np.array_equal(hvd.alltoall(sent), np.arange(SIZE))
    rows, received = hvd.alltoall(sent, [1] * SIZE)
    assert received.tolist() == [1] * SIZE
    assert np.array_equal(hvd.synchronize(hvd.alltoall_async(sent))[0], rows)
    whole = np.concatenate([MINE] * SIZE)
    own = sum(EVERY)  # each of the SIZE equal blocks
    for result in (
        hvd.reducescatter(whole, op=hvd.Sum), hvd.synchronize(hvd.reducescatter_async(whole, op=hvd.Sum)),
        hvd.grouped_reducescatter([whole], op=hvd.Sum)[0],
        hvd.synchronize(hvd.grouped_reducescatter_async([whole], op=hvd.Sum))[0],
    ):
        assert np.array_equal(result, own)
    assert hvd.allgather_object(RANK) == list(range(SIZE))
    assert hvd.broadcast_object(RANK, root) == root
    hvd.barrier()
    assert hvd.join() in range(SIZE)
