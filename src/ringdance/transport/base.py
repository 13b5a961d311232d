"""The interface of a transport: one communicator, its ranks, and what can be started on it.

All collectives are started and then tested, never waited for, so that one thread can step
several communicators::

    pending = transport.allreduce(buffer, "sum")
    while not pending.test():
        yield

Collectives of one communicator match between ranks by the order in which they are started.
``messages`` and ``post`` are apart from that order: small notes ("events") to single ranks,
for states that no agreement can carry.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ringdance.errors import ArgumentError

if TYPE_CHECKING:
    import numpy as np

    from ringdance.transport.eventcount import EventCount
    from ringdance.transport.window import Window

__all__ = ["Buffer", "Hierarchy", "Identity", "Pending", "Transport"]

Buffer = "np.ndarray[Any, Any]"


class Pending(Protocol):
    """A collective that has been started."""

    def test(self) -> bool:
        """Return whether it is complete here; advances it. Never blocks."""
        ...


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a rank is: for messages to people, and for finding out whether it still lives."""

    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} on host {self.host} (pid {self.pid})"


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """How the members on several hosts can reduce in two stages: inside each host, then across hosts.

    Attributes:
        host_sizes: members on each host; hosts in the order of their lowest members.
        buffer_bytes: data area of a member in the window of each host, the smallest of them.
        cross: cross-host communicator of the members with this local index, one of each host in that order;
            None where the local index is not below ``min(host_sizes)``.
    """

    host_sizes: tuple[int, ...]
    buffer_bytes: int
    cross: Transport | None


class Transport(abc.ABC):
    """One communicator. ``rank`` and ``size`` are places in it; ``members`` the ranks of the whole job.

    Attributes:
        identities: one for each member, ``Identity.rank`` being the rank in the whole job.
        host_group: places (in this communicator) of the members on this host, ascending.
        window: the memory shared by this host's members, or None where there is none.
        event_count: wakes members on this host, or None.
        several_threads: whether the program may call the transport's library from any thread.
    """

    rank: int
    size: int
    identities: tuple[Identity, ...]
    host_group: tuple[int, ...]
    window: Window | None = None
    event_count: EventCount | None = None
    several_threads: bool = True

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(identity.rank for identity in self.identities)

    @property
    def one_host(self) -> bool:
        return len(self.host_group) == self.size

    def shared_events(self, parent: Transport | None) -> tuple[EventCount, list[int]] | None:
        """Return the parent's event count with the local indices of this host's members in it, or None."""
        if parent is None or parent.event_count is None:
            return None
        group = [parent.identities[i].rank for i in parent.host_group]
        return parent.event_count, [group.index(self.identities[i].rank) for i in self.host_group]

    def places_of(self, comm: Any) -> tuple[int, ...]:
        """Return the places, ascending, of the members of a communicator that the user has made.

        Raises ArgumentError where there is none of that kind, or if it has members that are not here.
        """
        raise ArgumentError(f"{comm!r} means nothing here: this process is not in an MPI job.")

    @abc.abstractmethod
    def allreduce(
        self, buffer: np.ndarray[Any, Any], operation: str, receive: np.ndarray[Any, Any] | None = None
    ) -> Pending:
        """Reduce ``buffer`` over all members into ``receive``, or in place.

        Operations are "sum", "min", "max", "product" and "and".
        """

    @abc.abstractmethod
    def broadcast(self, buffer: np.ndarray[Any, Any], root: int) -> Pending:
        """Copy the place ``root``'s uint8 ``buffer`` into everybody's."""

    @abc.abstractmethod
    def allgather(
        self, send: np.ndarray[Any, Any], receive: np.ndarray[Any, Any], counts: Sequence[int]
    ) -> Pending:
        """Concatenate uint8 ``send`` of all places in ``receive``; ``counts`` bytes from each."""

    @abc.abstractmethod
    def alltoall(
        self,
        send: np.ndarray[Any, Any],
        send_counts: Sequence[int],
        receive: np.ndarray[Any, Any],
        receive_counts: Sequence[int],
    ) -> Pending:
        """Send the i-th part of uint8 ``send`` to place i, receive in place order; counts in bytes."""

    @abc.abstractmethod
    def split(self, members: Sequence[int], window_bytes: int) -> Transport | None:
        """Make the communicator of these places; collective over all places, may block.

        Returns None on places that are not in ``members``. ``window_bytes`` is the data area of
        each member in the shared window, 0 for no window.
        """

    @abc.abstractmethod
    def hierarchy(self) -> Hierarchy | None:
        """Make what reducing in two stages needs; collective over all members, may block.

        Returns None, on all members alike, where it gains nothing (one host, or one member on each) and where
        the members of some host share no memory.
        """

    @abc.abstractmethod
    def post(self, place: int, message: bytes) -> None:
        """Send a note to one member; it arrives when that member looks."""

    @abc.abstractmethod
    def messages(self) -> list[tuple[int, bytes]]:
        """Return the notes that have arrived: (sender's place, message)."""

    @abc.abstractmethod
    def state(self, place: int) -> str:
        """Return "running", "stopped", "gone" or, for a member on another host, "unknown"."""

    def lost(self, error: BaseException) -> list[int] | None:
        """Return the places of members that have died, as far as known, if ``error`` says so, else None."""
        return None

    @abc.abstractmethod
    def close(self, agreed: bool) -> None:
        """Give everything back. ``agreed``: all members do so, nothing is in flight."""
