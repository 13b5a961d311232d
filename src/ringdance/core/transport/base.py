"""The interface of a transport: one communicator, its ranks, and its collectives.

All collectives are non-blocking. They are started, then tested, so that one thread can step several of them::

    pending = transport.allreduce(buffer, "sum")
    while not pending.test():
        yield

Collectives of one communicator are matched across ranks by the order in which they are started. ``messages``
and ``post`` are not part of that order. They carry notes to individual ranks, independently of any agreement.

Note [Buffer lifetime]
    A collective uses its arrays without copying them until ``test`` has returned True. Until then, the caller
    must keep them alive, must not write to arrays that are sent, and must not read arrays that are received.
    (A ``Pending`` holds references, but dropping it does not stop the collective.) Counts are read when the
    collective is started. A window's memory lives until ``close``.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ringdance.errors import ArgumentError

if TYPE_CHECKING:
    from ringdance.core.transport.eventcount import EventCount
    from ringdance.core.transport.window import Window


Array = np.ndarray[Any, Any]


class Pending(Protocol):
    """A collective that is in progress."""

    def test(self) -> bool:
        """Advance the collective. Returns True if it is complete on this rank. Never blocks."""


class Transfer(Pending, Protocol):
    """A message in transit between two ranks. After its arrival, ``source`` is the sender's rank."""

    source: int


@dataclass(frozen=True, slots=True)
class Identity:
    """Rank, host and process id of a member, for messages and to check whether its process is alive."""

    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} on host {self.host} (pid {self.pid})"


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """How the members are distributed over hosts, for reductions inside each host, then across hosts.

    Attributes:
        host_sizes: Number of members on each host. Hosts are in the order of their lowest members.
        buffer_bytes: Size of a member's buffers in a host's window: the smallest over all hosts.
        cross: Cross-host communicator of the members with this member's local index, one per host in the
            order of ``host_sizes``, or None if the local index is not below ``min(host_sizes)``.
    """

    host_sizes: tuple[int, ...]
    buffer_bytes: int
    cross: Transport | None


class Transport(abc.ABC):
    """One communicator.

    Attributes:
        rank, size: This rank in the communicator, and the number of members. ``members`` are their ranks in
            the whole job.
        identities: Identity of each member. ``Identity.rank`` is the rank in the whole job.
        host_group: Ranks (in this communicator) of the members on this host, in ascending order.
        window: Memory shared by the members on this host, or None.
        event_count: Event count that wakes the members on this host, or None.
        several_threads: True if the transport's library may be called from any thread.
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
        """Return the parent's event count and the indices of this host's members in it, or None."""
        if parent is None or parent.event_count is None:
            return None
        group = [parent.identities[i].rank for i in parent.host_group]
        return parent.event_count, [group.index(self.identities[i].rank) for i in self.host_group]

    def ranks_of(self, comm: Any) -> tuple[int, ...]:
        """Return the ranks, in this communicator and ascending, of a user communicator's members.

        Raises ArgumentError if ``comm`` cannot be used, or has members outside this communicator.
        """
        raise ArgumentError(f"Cannot use {comm!r}, because this process is not part of an MPI job.")

    @abc.abstractmethod
    def allreduce(self, buffer: Array, operation: str, receive: Array | None = None) -> Pending:
        """Reduce ``buffer`` over all members into ``receive``, or in place. See Note [Buffer lifetime].

        Operations are "sum", "min", "max", "product" and "and".
        """

    @abc.abstractmethod
    def broadcast(self, buffer: Array, root: int) -> Pending:
        """Copy rank ``root``'s uint8 ``buffer`` to the other ranks' buffers. See Note [Buffer lifetime]."""

    @abc.abstractmethod
    def allgather(self, send: Array, receive: Array, counts: Sequence[int]) -> Pending:
        """Concatenate the ranks' uint8 ``send`` in ``receive``. ``counts``: Number of bytes from each rank.

        See Note [Buffer lifetime].
        """

    @abc.abstractmethod
    def alltoall(
        self, send: Array, send_counts: Sequence[int], receive: Array, receive_counts: Sequence[int]
    ) -> Pending:
        """Send the i-th part of uint8 ``send`` to rank i, and receive in rank order. Counts are in bytes.

        See Note [Buffer lifetime].
        """

    @abc.abstractmethod
    def split(self, members: Sequence[int], window_bytes: int) -> Transport | None:
        """Make a communicator of these ranks. The call is collective over all ranks and may block.

        Returns None on ranks that are not in ``members``. ``window_bytes`` is the size of each member's
        buffers in a shared-memory window, 0 for no window.
        """

    def subset(self, members: Sequence[int], window_bytes: int) -> Transport:
        """Make a communicator of these ranks, which must all call this. Blocks. See ``split``."""
        raise NotImplementedError(f"{type(self).__name__} does not support subset(). Use split().")

    def send(self, buffer: Array, rank: int, tag: int) -> Transfer:
        """Send a uint8 ``buffer`` to one member, which must receive it with the same tag."""
        raise NotImplementedError(f"{type(self).__name__} does not send messages to individual ranks.")

    def receive(self, buffer: Array, rank: int | None, tag: int) -> Transfer:
        """Receive the bytes that fill uint8 ``buffer`` from one member, or from any member (None)."""
        raise NotImplementedError(f"{type(self).__name__} does not receive messages from individual ranks.")

    @abc.abstractmethod
    def hierarchy(self) -> Hierarchy | None:
        """Prepare two-stage reductions. The call is collective over all members and may block.

        Returns None on all members if two stages are not faster (one host, or one member per host), or if the
        members on some host do not share memory.
        """

    @abc.abstractmethod
    def post(self, rank: int, message: bytes) -> None:
        """Send a note to one member, without waiting until it arrives."""

    @abc.abstractmethod
    def messages(self) -> list[tuple[int, bytes]]:
        """Return the notes that have arrived, as pairs of the sender's rank and the message."""

    @abc.abstractmethod
    def state(self, rank: int) -> str:
        """Return "running", "stopped", "gone" or, for a member on another host, "unknown"."""

    def lost(self, error: BaseException) -> list[int] | None:
        """Return the ranks known to be dead if ``error`` means that a member has died, otherwise None."""
        return None

    @abc.abstractmethod
    def close(self, agreed: bool) -> None:
        """Free the communicator. ``agreed``: True if all members call this while nothing is in flight."""
