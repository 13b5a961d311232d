"""Bytes that move at a time between hosts: bounds, whole elements, and changes that can be undone."""

from __future__ import annotations

from itertools import product

import pytest

from ringdance.core.exchange.sizes import MIN_BLOCK_BYTES, sizes_for

KB, MB = 1 << 10, 1 << 20
BUFFER = MB
HOSTS = ((), (2, 2), (3, 2), (1, 4, 2), (1, 1), (8,) * 40)


@pytest.mark.parametrize("host_sizes", HOSTS, ids=str)
def test_sizes_stay_within_memory(host_sizes: tuple[int, ...]) -> None:
    for chunk, small in product((0, 100, 50_000, 64 * MB), (-1, 0, 50, 4 * KB)):
        first = sizes_for(sum(host_sizes) or 4, min(chunk, BUFFER), small, BUFFER, host_sizes)
        wanted = product((0, 100, 128 * KB, 16 * MB), (0, 70, 128 * KB, 16 * MB))
        for sizes in (first, *(first.changed(*pair) for pair in wanted)):
            assert sizes.flat_chunk % 64 == 0
            assert max(1, small // 64) * 64 <= sizes.flat_chunk <= sizes.max_flat_chunk
            assert sizes.chunks_per_wire >= 1
            if host_sizes:
                block = sizes.chunk // min(host_sizes) + MIN_BLOCK_BYTES
                assert MIN_BLOCK_BYTES * max(host_sizes) <= sizes.chunk <= BUFFER
                assert sizes.chunks_per_wire == 1 or sizes.chunks_per_wire * block <= sizes.max_wire
            else:
                assert (sizes.chunk, sizes.chunks_per_wire, sizes.wire) == (0, 1, sizes.flat_chunk)


@pytest.mark.parametrize("host_sizes", HOSTS, ids=str)
def test_a_change_can_be_undone(host_sizes: tuple[int, ...]) -> None:
    first = sizes_for(sum(host_sizes) or 4, 256 * KB, 16 * KB, BUFFER, host_sizes)
    other = first.changed(128 * KB, 512 * KB)
    assert other != first
    assert other.changed(other.chunk, other.wire) == other
    assert other.changed(first.chunk, first.wire) == first


def test_many_members_send_no_short_messages() -> None:
    assert sizes_for(4, 256 * KB, 0).flat_chunk == 256 * KB
    assert sizes_for(64, 256 * KB, 0).flat_chunk == 64 * 16 * KB
    assert sizes_for(4096, 256 * KB, 0).flat_chunk == 16 * MB
    one, many = (sizes_for(8 * hosts, 256 * KB, 0, BUFFER, (8,) * hosts) for hosts in (2, 40))
    assert (one.chunks_per_wire, many.chunks_per_wire) == (1, 40 * 16 * KB // (32 * KB + MIN_BLOCK_BYTES))


def test_rows_of_a_round_are_whole_elements() -> None:
    sizes = sizes_for(4, 64 * KB, 0)
    assert sizes.row(1) == 32 * 64 * KB
    assert sizes.row(3) == 32 * 64 * KB // 3 // 64 * 64
    assert sizes.row(0) == sizes.row(1)
    assert sizes.row(1 << 30) == 64
    assert sizes_for(4, 64 * MB, 0).row(1) == 16 * MB
