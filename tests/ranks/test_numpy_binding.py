"""The NumPy binding: every function once, compared with NumPy. Other tests cover collectives in depth."""

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
    assert np.array_equal(hvd.synchronize(hvd.allreduce(MINE, op=hvd.Sum, wait=False)), total)
    for wait in (True, False):
        mine, other = MINE.copy(), np.empty_like(MINE)
        for out in (other, mine):
            done = hvd.allreduce(mine, op=hvd.Sum, out=out, wait=wait)
            assert (done if wait else hvd.synchronize(done)) is out
            assert np.array_equal(out, total)
    assert hvd.allreduce(np.array([1.5], ml_dtypes.bfloat16), op=hvd.Sum)[0] == 1.5 * SIZE
    assert np.array_equal(hvd.allreduce(MINE.T, op=hvd.Max), EVERY[-1].T)
    assert hvd.allreduce(2.0, op=hvd.Product).shape == ()
    with pytest.raises(ValueError, match="contiguous"):
        hvd.allreduce(MINE.T, out=MINE.T)


def test_groups() -> None:
    pair, totals = [MINE, MINE[:1].astype(np.int32)], [sum(EVERY), sum(EVERY)[:1].astype(np.int32)]
    own = [array.copy() for array in pair]
    other = [array.copy() for array in pair]
    for results in (
        hvd.allreduce(pair, op=hvd.Sum),
        hvd.synchronize(hvd.allreduce(pair, op=hvd.Sum, wait=False)),
        hvd.allreduce(own, op=hvd.Sum, out=own), own,
        hvd.synchronize(hvd.allreduce(other, op=hvd.Sum, out=other, wait=False)), other,
    ):
        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(results, totals, strict=True))
    joined = np.concatenate(EVERY)
    assert np.array_equal(hvd.allgather([MINE])[0], joined)
    assert np.array_equal(hvd.synchronize(hvd.allgather([MINE], wait=False))[0], joined)


def test_the_others() -> None:
    assert np.array_equal(hvd.allgather(MINE), np.concatenate(EVERY))
    assert np.array_equal(hvd.synchronize(hvd.allgather(MINE[:RANK], wait=False)), np.concatenate(
        [value[:rank] for rank, value in enumerate(EVERY)]
    ))
    root = SIZE - 1
    for result in (hvd.broadcast(MINE, root), hvd.synchronize(hvd.broadcast(MINE, root, wait=False))):
        assert np.array_equal(result, EVERY[root])
    for wait in (True, False):
        mine = MINE.copy()
        done = hvd.broadcast(mine, root, out=mine, wait=wait)
        assert (done if wait else hvd.synchronize(done)) is mine
        assert np.array_equal(mine, EVERY[root])
    assert np.array_equal(hvd.broadcast([MINE, MINE[:1]], root)[1], EVERY[root][:1])
    sent = np.repeat(RANK, SIZE)
    assert np.array_equal(hvd.alltoall(sent), np.arange(SIZE))
    rows, received = hvd.alltoall(sent, [1] * SIZE)
    assert received.tolist() == [1] * SIZE
    assert np.array_equal(hvd.synchronize(hvd.alltoall(sent, wait=False)), rows)
    whole = np.concatenate([MINE] * SIZE)
    own = sum(EVERY)  # each of the SIZE equal blocks
    for result in (
        hvd.reducescatter(whole, op=hvd.Sum),
        hvd.synchronize(hvd.reducescatter(whole, op=hvd.Sum, wait=False)),
        hvd.reducescatter([whole], op=hvd.Sum)[0],
        hvd.synchronize(hvd.reducescatter([whole], op=hvd.Sum, wait=False))[0],
    ):
        assert np.array_equal(result, own)
    assert hvd.allgather_object(RANK) == list(range(SIZE))
    assert hvd.broadcast_object(RANK, root) == root
    hvd.barrier()
    assert hvd.join() in range(SIZE)
