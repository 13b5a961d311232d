"""The window: memory shared by the members of a communicator that are on one host.

Layout, for m members::

    m control lines   64 bytes: arrived (int64), bell (int32), sleeping (int32)
    m x 2 vectors     what is agreed upon, written in turn; behind each 256 bytes for data that ride along
    m x 2 areas       data, written in turn

A member publishes what it wrote by counting up its ``arrived`` (``signal``) and may read
what the others wrote once all their counters have come as far (``reached``). Vectors and
areas exist twice, used in turn: a member writes one again only after a later ``reached``,
which shows that all others have finished reading it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringdance.transport.eventcount import NEEDS_FENCE, Doorbell

__all__ = ["RIDER_BYTES", "Window", "window_size"]

RIDER_BYTES = 256

_LINE = 64
_PAGE = 4096


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def window_size(members: int, vector_bytes: int, area_bytes: int) -> int:
    """Return the bytes a window of ``members`` needs."""
    control = _round_up(members * (_LINE + 2 * (_round_up(vector_bytes, _LINE) + RIDER_BYTES)), _PAGE)
    return control + members * 2 * _round_up(area_bytes, _PAGE)


class Window:
    """One member's hold on the shared memory.

    Args:
        memory: uint8 array, ``window_size`` bytes, zero at the start, the same for all members.
        index: this member's place on the host, 0 to ``members`` - 1.
        members: how many share the memory.
        vector_bytes: longest vector.
        area_bytes: size of each half of a member's data area.
        fence: makes this member's stores visible, on machines that need telling.
        bells: the doorbell to wake members with and their places at it; None for this window's own.
    """

    def __init__(
        self,
        memory: np.ndarray[Any, Any],
        index: int,
        members: int,
        vector_bytes: int,
        area_bytes: int,
        fence: Callable[[], None],
        bells: tuple[Doorbell, Sequence[int]] | None = None,
    ) -> None:
        self.index = index
        self.members = members
        self.area_bytes = area_bytes
        self.vector_bytes = vector_bytes
        self.memory = memory
        self._fence = fence if NEEDS_FENCE else None
        self._counters = memoryview(memory).cast("B").cast("q")
        self._own = index * (_LINE // 8)
        self._peers = [i * (_LINE // 8) for i in range(members) if i != index]
        self._count = 0
        self._late = 0  # how many of _peers are known to have arrived
        self._ring: list[tuple[Doorbell, int, int]] = []  # the peers' places, and where their flags are
        vector_room = _round_up(vector_bytes, _LINE) + RIDER_BYTES
        start = members * _LINE
        raw = memoryview(memory).cast("B")
        self.vectors = [
            [raw[start + (2 * m + turn) * vector_room :][:vector_room] for m in range(members)]
            for turn in (0, 1)
        ]
        self.riders = [
            [
                memory[start + (2 * m + turn + 1) * vector_room - RIDER_BYTES :][:RIDER_BYTES]
                for m in range(members)
            ]
            for turn in (0, 1)
        ]
        start = _round_up(start + members * 2 * vector_room, _PAGE)
        room = _round_up(area_bytes, _PAGE)
        self.areas = [
            [memory[start + (2 * m + turn) * room :][:area_bytes] for m in range(members)] for turn in (0, 1)
        ]
        self.vector_turn = 0
        self.area_turn = 0
        self.doorbell = self._find_doorbell(bells)

    def _find_doorbell(self, bells: tuple[Doorbell, Sequence[int]] | None) -> Doorbell:
        if bells is None:
            words = memoryview(self.memory).cast("B").cast("i")[2:]
            address = self.memory.ctypes.data + 8
            bells = (Doorbell(words, address, _LINE // 4, self.index), range(self.members))
        doorbell, places = bells
        self._ring = [
            (doorbell, place, doorbell.flag_of(place)) for m, place in enumerate(places) if m != self.index
        ]
        return doorbell

    @property
    def count(self) -> int:
        """How often this member has signalled."""
        return self._count

    def touch(self) -> None:
        """Write every page of this member's areas, so that they lie near it and exist."""
        for turn in (0, 1):
            self.areas[turn][self.index][::_PAGE] = 0

    def signal(self) -> None:
        """Publish what this member wrote; the next ``reached`` waits for the others to do the same."""
        if self._fence:
            self._fence()
        self._count += 1
        self._counters[self._own] = self._count
        self._late = 0
        for doorbell, place, flag in self._ring:
            if doorbell.words[flag]:
                doorbell.ring(place)

    def reached(self) -> bool:
        """Return whether all members have signalled as often as this one."""
        counters, peers, count = self._counters, self._peers, self._count
        for at in range(self._late, len(peers)):
            if counters[peers[at]] < count:
                self._late = at
                return False
        self._late = len(peers)
        if self._fence:
            self._fence()
        return True

    def peer_ahead(self) -> bool:
        """Return whether some member has already signalled once more than this one."""
        count = self._count
        return any(self._counters[at] > count for at in self._peers)

    def missing(self) -> list[int]:
        """Return the places of the members that have not signalled as often as this one."""
        count = self._count
        return [at // (_LINE // 8) for at in self._peers if self._counters[at] < count]
