"""The window: memory shared by the members of a communicator that are on the same host.

Layout, for m members::

    m control lines   64 bytes: signaled (int64), event counter (int32), waiting (int32)
    m x 2 vectors     agreement vectors; after each, 4096 bytes for piggybacked data
    m x 2 buffers     data

A member publishes its writes by incrementing its ``signaled`` counter (``signal``). It may read the data of
the other members once all their counters have reached the same value (``reached``).

Note [Parity]
    Vectors and buffers exist twice and are used alternately (parity 0 and 1). A member writes to one again
    only after a later ``reached``, which shows that all other members have finished reading it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringdance.core.transport.eventcount import NEEDS_FENCE, EventCount

PIGGYBACK_BYTES = 4096

_LINE = 64
_PAGE = 4096


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def window_size(members: int, vector_bytes: int, buffer_bytes: int) -> int:
    """Return the size, in bytes, of a window with this number of members."""
    control = _round_up(members * (_LINE + 2 * (_round_up(vector_bytes, _LINE) + PIGGYBACK_BYTES)), _PAGE)
    return control + members * 2 * _round_up(buffer_bytes, _PAGE)


class Window:
    """One member's view of the shared memory.

    Args:
        memory: A uint8 array of ``window_size`` bytes, initially zero. All members share it.
        index: This member's local index, 0 to ``members`` - 1.
        members: Number of members that share the memory.
        vector_bytes: Length of the longest vector.
        buffer_bytes: Size of each of a member's two buffers.
        fence: Makes this member's stores visible to the others. Called only on CPUs that require it.
        shared: Event count that wakes the members, and their local indices in it. None to create one.

    Attributes:
        vectors, piggybacks, buffers: Memory by parity, then by member. See Note [Parity].
        vector_parity, buffer_parity: Parities used last.
        event_count: Wakes members.
        count: Number of times this member has signaled.
    """

    def __init__(
        self, memory: np.ndarray[Any, Any], index: int, members: int, vector_bytes: int, buffer_bytes: int,
        fence: Callable[[], None], shared: tuple[EventCount, Sequence[int]] | None = None,
    ) -> None:
        self.index = index
        self.members = members
        self.buffer_bytes = buffer_bytes
        self.memory = memory
        self._fence = fence if NEEDS_FENCE else None
        raw = memoryview(memory).cast("B")
        self._counters = raw.cast("q")
        self._own = index * (_LINE // 8)
        self._peers = [i * (_LINE // 8) for i in range(members) if i != index]
        self.count = 0
        self._seen = 0  # number of leading _peers known to have signaled
        room = _round_up(vector_bytes, _LINE) + PIGGYBACK_BYTES
        starts = [[members * _LINE + (2 * m + parity) * room for m in range(members)] for parity in (0, 1)]
        self.vectors = [[raw[at : at + room] for at in row] for row in starts]
        self.piggybacks = [[memory[at + room - PIGGYBACK_BYTES : at + room] for at in row] for row in starts]
        start = _round_up(members * (_LINE + 2 * room), _PAGE)
        room = _round_up(buffer_bytes, _PAGE)
        self.buffers = [
            [memory[start + (2 * m + parity) * room :][:buffer_bytes] for m in range(members)]
            for parity in (0, 1)
        ]
        self.vector_parity = 0
        self.buffer_parity = 0
        if shared is None:
            words = raw.cast("i")[2:]
            shared = EventCount(words, memory.ctypes.data + 8, _LINE // 4, index), range(members)
        self.event_count, indices = shared
        self._notified = [(i, self.event_count.flag_position(i)) for m, i in enumerate(indices) if m != index]

    def touch(self) -> None:
        """Write to every page of this member's buffers, so that they are allocated near its core."""
        for parity in (0, 1):
            self.buffers[parity][self.index][::_PAGE] = 0

    def signal(self) -> None:
        """Publish this member's writes. ``reached`` returns True once all members have published theirs."""
        if self._fence:
            self._fence()
        self.count += 1
        self._counters[self._own] = self.count
        self._seen = 0
        event_count = self.event_count
        for index, flag in self._notified:
            if event_count.words[flag]:
                event_count.notify(index)

    def reached(self) -> bool:
        """Return True if all members have signaled at least as often as this one."""
        counters, peers, count = self._counters, self._peers, self.count
        for at in range(self._seen, len(peers)):
            if counters[peers[at]] < count:
                self._seen = at
                return False
        self._seen = len(peers)
        if self._fence:
            self._fence()
        return True

    def peer_ahead(self) -> bool:
        """Return True if any member has already signaled more often than this one."""
        count = self.count
        return any(self._counters[at] > count for at in self._peers)

    def missing(self) -> list[int]:
        """Return the local indices of the members that have signaled less often than this one."""
        count = self.count
        return [at // (_LINE // 8) for at in self._peers if self._counters[at] < count]
