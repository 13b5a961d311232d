"""The vectors by which the members of a process set agree, and the members' response cache.

A round is one AND over an integer from each member, so a set bit means "all members". A condition
that a single member may signal (stop, cache miss, joined) is inverted. From the lowest bit, for n members::

    1 bit       CONTINUE: no member requests a stop
    1 bit       NO_WAITER: no member has a waiting thread (matters only in the round that stops)
    1 bit       HAS_UNNAMED: every member has an unnamed request pending
    n bits      member i has no cache miss (a request that is not in the response cache)
    n bits      member i has not joined
    256 bits    digests of the first ``UNNAMED`` unnamed requests, and their complements
    32 bits     number of the cache entry whose data are piggybacked, and its complement
    w bits      cache entry i is ready here

Note [Complements]
    A field that must be equal on all members is sent with its complement. After the AND, a bit of the field
    and its complement differ if and only if all members sent the same bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringdance.core.exchange.arithmetic import Reduction
from ringdance.core.recorder import BatchRecord
from ringdance.core.request import Description

CONTINUE, NO_WAITER, HAS_UNNAMED = 1, 2, 4
UNNAMED = 8  # maximum number of unnamed requests that a round can match
PIGGYBACK_ENTRIES = 1 << 16  # limited by the 16 bits that a vector has for an entry's number
_M16 = (1 << 16) - 1
_M32 = (1 << 32) - 1
_DIGESTS = 32 * UNNAMED
_MD = (1 << _DIGESTS) - 1


def set_bits(bits: int) -> list[int]:
    """Return the positions of the ones in ``bits``, in ascending order."""
    positions = []
    while bits:
        low = bits & -bits
        positions.append(low.bit_length() - 1)
        bits ^= low
    return positions


class VectorLayout:
    """Field positions for a set of ``size`` members."""

    def __init__(self, size: int) -> None:
        self.everyone = (1 << size) - 1
        self.misses_at = 3
        self.joined_at = 3 + size
        self.unnamed_at = 3 + 2 * size
        self.unnamed_field = ((1 << 2 * _DIGESTS) - 1) << self.unnamed_at
        self.piggyback_at = self.unnamed_at + 2 * _DIGESTS
        self.ready_at = self.piggyback_at + 32
        # If a round has only cache hits, its result equals ``plain`` in the bits selected by ``plain_mask``.
        self.plain = CONTINUE | self.everyone << self.misses_at | self.everyone << self.joined_at
        self.plain_mask = self.plain | HAS_UNNAMED
        self.neutral = (1 << self.piggyback_at) - 1  # ones in all fields before the piggyback field
        self.waiting = self.neutral ^ NO_WAITER

    def width(self, entries: int) -> int:
        """Return the size in bytes of a vector for a cache with ``entries`` entries."""
        return (self.ready_at + entries + 7) // 8

    def unnamed(self, digests: Sequence[int]) -> int:
        """Return the field for at most ``UNNAMED`` digests. See Note [Complements]."""
        field = 0
        for number, digest in enumerate(digests):
            field |= (digest | (digest ^ _M32) << _DIGESTS) << 32 * number
        return field << self.unnamed_at

    def equal_unnamed(self, agreed: int) -> int:
        """Return how many unnamed requests, starting with the first, are equal on all members."""
        field = agreed >> self.unnamed_at
        different = ~(field ^ field >> _DIGESTS) & _MD
        return ((different & -different).bit_length() - 1) // 32 if different else UNNAMED

    def piggyback(self, slot: int) -> int:
        """Return the field for the slot of the entry whose data are piggybacked. See Note [Complements].

        The AND leaves the field unchanged if and only if all members sent the same field.
        """
        return (slot | (slot ^ _M16) << 16) << self.piggyback_at


@dataclass(slots=True)
class Piggyback:
    """How the data of a cache entry travel with the vectors, next to them in the window.

    Attributes:
        bit: The entry's ready bit.
        field: The vector's piggyback field, which contains the entry's slot.
        reduction: How the data are reduced.
        buffers: Each member's buffer, by parity.
        record: Record of the all-reduce.
    """

    bit: int
    field: int
    reduction: Reduction
    buffers: list[list[np.ndarray[Any, Any]]]
    record: BatchRecord


@dataclass(slots=True)
class CacheEntry:
    """A cached request, represented by one bit in the vectors.

    Attributes:
        used: Round in which the request was last executed.
        mismatched: True if members submitted different requests under this name. The entry's bit then means
            only that a member has submitted one of them.
        piggyback: How the request's data are piggybacked, or None if they are too large.
    """

    name: str
    description: Description
    used: int
    mismatched: bool = False
    piggyback: Piggyback | None = None


class ResponseCache:
    """The requests that have been sent to all members, so that a bit suffices to announce them again.

    Only agreed events change the cache, so it is identical on all members.

    Args:
        capacity: Maximum number of entries. If the cache is full, a new entry replaces the least recently
            used one (by round number).
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = max(1, capacity)
        self.entries: list[CacheEntry | None] = []
        self.slots: dict[str, int] = {}
        self._free: list[int] = []

    def find(self, name: str, description: Description) -> int | None:
        """Return the slot of this request, or None if it is a cache miss."""
        slot = self.slots.get(name)
        if slot is None:
            return None
        entry = self.entries[slot]
        assert entry is not None
        if entry.description is description or entry.mismatched:
            return slot
        if entry.description == description:
            entry.description = description  # keep the caller's object, so that ``is`` matches next time
            return slot
        return None

    def install(self, entry: CacheEntry) -> int:
        """Add or replace an entry and return its slot. May evict another entry."""
        slot = self.slots.get(entry.name)
        if slot is None:
            if not self._free and len(self.entries) < self.capacity:
                self.entries.append(None)
                self._free.append(len(self.entries) - 1)
            elif not self._free:
                used = [(other.used, slot) for slot, other in enumerate(self.entries) if other is not None]
                self.remove(min(used)[1])
            slot = self.slots[entry.name] = self._free.pop()
        self.entries[slot] = entry
        return slot

    def remove(self, slot: int) -> None:
        """Remove an entry."""
        entry = self.entries[slot]
        if entry is not None:
            del self.slots[entry.name]
            self.entries[slot] = None
            self._free.append(slot)
