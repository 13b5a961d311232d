"""What the members of a process set agree on: the table of known tensors, and a round's vector.

A vector is one integer whose bits are AND-ed over all members, so a bit means "all say so";
what any single member may raise (stop, news, joined) is written inverted. From the lowest
bit, for n members::

    go          no member wants to stop
    calm        no member has a thread that waits (matters only in the round that stops)
    head        every member has an unnamed request pending
    n bits      place i has no news (a request that is not in the table)
    n bits      place i has not joined
    64 bits     number of the first unnamed request, and its complement
    128 bits    digest of its description, and the complement
    128 bits    digest of the first ``RUN`` of them, and the complement
    32 bits     table entry whose data ride along with the vector, and its complement
    w bits      table entry i is ready here
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringdance.core.exchange.arithmetic import Reduction
from ringdance.core.request import Description

__all__ = ["RIDER_SLOTS", "RUN", "Entry", "KnownTensors", "VectorLayout", "run_digest", "set_bits"]

RUN = 16
RIDER_SLOTS = 1 << 16  # data of the entries below ride along: the number of one has 16 bits in a vector
# For data that are few enough to ride along with a vector: how they are reduced, and each member's place
# for them in the window, for both turns.
Rides = tuple[Reduction, list[list[np.ndarray[Any, Any]]]]
_M16 = (1 << 16) - 1
_M32 = (1 << 32) - 1
_M64 = (1 << 64) - 1
GO, CALM, HEAD = 1, 2, 4


def set_bits(bits: int) -> list[int]:
    """Return the positions of the ones in ``bits``, ascending."""
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found


def run_digest(descriptions: Sequence[Description]) -> int:
    """Return a 64-bit number for a sequence of descriptions."""
    joined = b"".join(d.digest().to_bytes(8, "little") for d in descriptions)
    return int.from_bytes(hashlib.blake2b(joined, digest_size=8).digest(), "little")


class VectorLayout:
    """Positions of the fields for a set of ``size`` members."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.everyone = (1 << size) - 1
        self.news_at = 3
        self.joined_at = 3 + size
        self.unnamed_at = 3 + 2 * size
        self.rider_at = self.unnamed_at + 64 + 128 + 128
        self.ready_at = self.rider_at + 32
        self.unnamed_mask = (1 << 320) - 1
        # What a round looks like in which nobody has anything but known tensors, and the bits that show it.
        self.plain = GO | self.everyone << self.news_at | self.everyone << self.joined_at
        self.plain_mask = self.plain | HEAD
        self.all_quiet = (1 << self.rider_at) - 1  # every header field neutral, and nothing rides

    def width(self, entries: int) -> int:
        """Return the bytes of a vector for a table of ``entries``."""
        return (self.ready_at + entries + 7) // 8

    def unnamed(self, number: int, first: int, run: int) -> int:
        """Return the field of unnamed requests; ``run`` 0 for fewer than ``RUN`` of them."""
        number &= _M32
        field = number | (number ^ _M32) << 32
        field |= (first | (first ^ _M64) << 64) << 64
        # Without a run both halves are zero: no agreement with anybody.
        return field | ((run | (run ^ _M64) << 64) << 192 if run else 0)

    def rider(self, slot: int) -> int:
        """Return the field that says which entry's data ride along."""
        return (slot | (slot ^ _M16) << 16) << self.rider_at

    def same_rider(self, agreed: int) -> bool:
        """Return whether all members' data are of the same entry."""
        field = agreed >> self.rider_at
        return (field ^ field >> 16) & _M16 == _M16

    def read_unnamed(self, agreed: int) -> tuple[bool, bool, bool]:
        """Return whether all have the same number, the same first description, the same run."""
        field = (agreed >> self.unnamed_at) & self.unnamed_mask

        def same(at: int, bits: int) -> bool:
            mask = (1 << bits) - 1
            return ((field >> at) & mask) ^ ((field >> (at + bits)) & mask) == mask

        return same(0, 32), same(64, 64), same(192, 64)


@dataclass(slots=True)
class Entry:
    """A known tensor (or group): one bit in the vectors."""

    name: str
    description: Description
    used: int
    disputed: bool = False
    rides: Rides | None = None


class KnownTensors:
    """The table. Only agreed events change it, so it is the same on all members.

    Args:
        capacity: most entries; the one used longest ago makes room (by round number).
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = max(1, capacity)
        self.entries: list[Entry | None] = []
        self.slots: dict[str, int] = {}
        self._free: list[int] = []

    def find(self, name: str, description: Description) -> int | None:
        """Return the slot under which this request counts as ready, or None if it is news."""
        slot = self.slots.get(name)
        if slot is None:
            return None
        entry = self.entries[slot]
        assert entry is not None
        if entry.description is description or entry.disputed:
            return slot
        if entry.description == description:
            entry.description = description  # the caller's own object: the next look is one comparison
            return slot
        return None

    def install(
        self, name: str, description: Description, used: int, disputed: bool, rides: Rides | None = None
    ) -> int:
        """Enter or replace a name; may evict another. Return its slot."""
        slot = self.slots.get(name)
        if slot is None:
            slot = self._room()
            self.slots[name] = slot
        self.entries[slot] = Entry(name, description, used, disputed, rides)
        return slot

    def remove(self, slot: int) -> None:
        """Forget an entry."""
        entry = self.entries[slot]
        if entry is not None:
            del self.slots[entry.name]
            self.entries[slot] = None
            self._free.append(slot)

    def _room(self) -> int:
        if self._free:
            return self._free.pop()
        if len(self.entries) < self.capacity:
            self.entries.append(None)
            return len(self.entries) - 1
        oldest = min(range(self.capacity), key=lambda i: (self.entries[i].used, i))  # type: ignore[union-attr]
        self.remove(oldest)
        return self._free.pop()
