"""The free space in /dev/shm on all hosts, from which all ranks choose the same window size."""

from __future__ import annotations

import pytest

from ringdance.core.transport.window import window_size
from ringdance.core.transport.world import window_fits

MIB = 1 << 20


@pytest.mark.parametrize(("free", "fits"), [((64, 64), False), ((999, 64), False), ((999, 999), True)])
def test_one_host_without_room_decides_for_all(free: tuple[int, int], fits: bool) -> None:
    ranks = [("a", free[0] * MIB)] * 8 + [("b", free[1] * MIB)] * 8
    assert window_fits(ranks, 1000, 2 * MIB) is fits
    assert window_fits(ranks, 1000, MIB // 2)
    assert 2 * window_size(8, 1000, 2 * MIB) > 64 * MIB
