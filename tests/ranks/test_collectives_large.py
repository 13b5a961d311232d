"""More than 2^31 bytes in one tensor, which exceeds MPI's counts. Takes under 8 GiB of memory in total."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from by_numpy import Array

import ringdance.numpy as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()

BLOCK = 1 << 20
BLOCKS = 2052  # 2.15 GB
NEEDED = 8 << 30

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ranks(2),
    pytest.mark.parametrize("way", ["window", "messages"], indirect=True),
]


def number(rank: int, block: int) -> int:
    """Return the byte that fills a block. Sums of two stay below 256."""
    return (7 * block + 50 * rank) % 127


def filled(blocks: int, rank: int = RANK) -> Array:
    array = np.empty(blocks * BLOCK, np.uint8)
    for block, row in enumerate(array.reshape(blocks, BLOCK)):
        row[:] = number(rank, block)
    return array


def check(array: Array, blocks: int, want: Callable[[int], int]) -> None:
    """Check every byte, block by block."""
    assert array.shape == (blocks * BLOCK,)
    for block, row in enumerate(array.reshape(blocks, BLOCK)):
        assert row.min() == row.max() == want(block), f"block {block}"


@pytest.fixture(autouse=True)
def _enough_memory() -> None:
    with open("/proc/meminfo") as file:
        available = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    if hvd.broadcast_object(available, 0) < NEEDED:
        pytest.skip(f"needs {NEEDED >> 30} GiB of memory")


def test_allreduce(way: str) -> None:
    array = filled(BLOCKS)
    hvd.allreduce(array, op=hvd.Sum, out=array)
    check(array, BLOCKS, lambda block: number(0, block) + number(1, block))


def test_broadcast(way: str) -> None:
    array = filled(BLOCKS)
    hvd.broadcast(array, 1, out=array)
    check(array, BLOCKS, lambda block: number(1, block))


def test_allgather(way: str) -> None:
    first = BLOCKS // 3  # ranks have different numbers of rows
    mine = filled(first if RANK == 0 else BLOCKS - first)
    check(
        hvd.allgather(mine),
        BLOCKS,
        lambda block: number(0, block) if block < first else number(1, block - first),
    )


def test_alltoall(way: str) -> None:
    """One rank sends everything to the other, which returns one block."""
    mine = filled(BLOCKS if RANK == 0 else 1)
    got, received = hvd.alltoall(mine, [0, mine.size] if RANK == 0 else [mine.size, 0])
    assert received.tolist() == ([0, BLOCK] if RANK == 0 else [BLOCKS * BLOCK, 0])
    check(got, 1 if RANK == 0 else BLOCKS, lambda block: number(1 - RANK, block))


def test_reducescatter(way: str) -> None:
    half = BLOCKS // 2
    got = hvd.reducescatter(filled(BLOCKS), op=hvd.Sum)
    check(got, half, lambda block: sum(number(rank, block + half * RANK) for rank in range(2)))
