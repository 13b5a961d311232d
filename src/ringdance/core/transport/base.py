"""The interface of a transport: one communicator, its ranks, and its collectives.

All collectives are non-blocking: started, then tested, so that one thread can step several communicators::

    pending = transport.allreduce(buffer, "sum")
    while not pending.test():
        yield

Collectives of one communicator match between ranks by the order in which they are started. ``messages`` and
``post`` do not take part in that order: notes to single ranks, for what no agreement can carry.

Note [Buffer lifetime]
    A collective uses the arrays that it was given, uncopied, until ``test`` has returned True: until then the
    caller must keep them alive, not write to those that are sent, and not read those that are received.
    (A ``Pending`` holds references; dropping it does not stop the collective.) The counts are read at once.
    A window's memory lives until ``close``.
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
    """A collective that has been started."""

    def test(self) -> bool:
        """Return whether it is complete here; advances it. Never blocks."""
        ...


class Transfer(Pending, Protocol):
    """Data on their way between two ranks; ``source``: the sender's rank, once they are there."""

    source: int


@dataclass(frozen=True, slots=True)
class Identity:
    """A rank of the job, for messages and to check whether its process lives."""

    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} on host {self.host} (pid {self.pid})"


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """The members on several hosts, for reductions inside each host, then across hosts.

    Attributes:
        host_sizes: members on each host; hosts in the order of their lowest members.
        buffer_bytes: size of a member's buffers in the window of each host, the smallest of them.
        cross: cross-host communicator of the members with this local index, one of each host in that order;
            None where the local index is not below ``min(host_sizes)``.
    """

    host_sizes: tuple[int, ...]
    buffer_bytes: int
    cross: Transport | None


class Transport(abc.ABC):
    """One communicator.

    Attributes:
        rank, size: in this communicator; ``members`` are the ranks in the whole job.
        identities: one for each member, ``Identity.rank`` being the rank in the whole job.
        host_group: ranks (in this communicator) of the members on this host, ascending.
        window: the memory shared by this host's members, or None.
        event_count: wakes members on this host, or None.
        several_threads: whether the transport's library may be called from any thread.
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
        """Return the parent's event count and this host's members' indices in it, or None."""
        if parent is None or parent.event_count is None:
            return None
        group = [parent.identities[i].rank for i in parent.host_group]
        return parent.event_count, [group.index(self.identities[i].rank) for i in self.host_group]

    def ranks_of(self, comm: Any) -> tuple[int, ...]:
        """Return the ranks here, ascending, of the members of a communicator that the user has made.

        Raises ArgumentError if it is of another kind, or has members that are not here.
        """
        raise ArgumentError(f"{comm!r} cannot be used: this process is not in an MPI job.")

    @abc.abstractmethod
    def allreduce(self, buffer: Array, operation: str, receive: Array | None = None) -> Pending:
        """Reduce ``buffer`` over all members into ``receive``, or in place. See Note [Buffer lifetime].

        Operations are "sum", "min", "max", "product" and "and".
        """

    @abc.abstractmethod
    def broadcast(self, buffer: Array, root: int) -> Pending:
        """Copy rank ``root``'s uint8 ``buffer`` into the others'. See Note [Buffer lifetime]."""

    @abc.abstractmethod
    def allgather(self, send: Array, receive: Array, counts: Sequence[int]) -> Pending:
        """Concatenate uint8 ``send`` of all ranks in ``receive``; ``counts``: bytes from each.

        See Note [Buffer lifetime].
        """

    @abc.abstractmethod
    def alltoall(
        self, send: Array, send_counts: Sequence[int], receive: Array, receive_counts: Sequence[int]
    ) -> Pending:
        """Send the i-th part of uint8 ``send`` to rank i, receive in rank order; counts in bytes.

        See Note [Buffer lifetime].
        """

    @abc.abstractmethod
    def split(self, members: Sequence[int], window_bytes: int) -> Transport | None:
        """Make the communicator of these ranks; collective over all ranks, may block.

        Returns None on ranks that are not in ``members``. ``window_bytes``: size of each member's buffers
        in a shared-memory window, 0 for no window.
        """

    def subset(self, members: Sequence[int], window_bytes: int) -> Transport:
        """Make the communicator of these ranks; collective over them alone, blocks. See ``split``."""
        raise NotImplementedError(f"{type(self).__name__} makes communicators of all ranks only.")

    def send(self, buffer: Array, rank: int, tag: int) -> Transfer:
        """Send a uint8 ``buffer`` to one member, which receives it with the same tag."""
        raise NotImplementedError(f"{type(self).__name__} does not send to single ranks.")

    def receive(self, buffer: Array, rank: int | None, tag: int) -> Transfer:
        """Receive as many bytes as fill uint8 ``buffer`` from one member, or from any (None)."""
        raise NotImplementedError(f"{type(self).__name__} does not receive from single ranks.")

    @abc.abstractmethod
    def hierarchy(self) -> Hierarchy | None:
        """Make what reducing in two stages needs; collective over all members, may block.

        Returns None, on all members alike, if that gains nothing (one host, or one member on each) or
        the members of some host share no memory.
        """

    @abc.abstractmethod
    def post(self, rank: int, message: bytes) -> None:
        """Send a note to one member, without waiting for its arrival."""

    @abc.abstractmethod
    def messages(self) -> list[tuple[int, bytes]]:
        """Return the notes that have arrived: (sender's rank, message)."""

    @abc.abstractmethod
    def state(self, rank: int) -> str:
        """Return "running", "stopped", "gone" or, for a member on another host, "unknown"."""

    def lost(self, error: BaseException) -> list[int] | None:
        """Return the ranks of members known to have died if ``error`` means that, else None."""
        return None

    @abc.abstractmethod
    def close(self, agreed: bool) -> None:
        """Free everything. ``agreed``: all members do so, nothing is in flight."""
