"""Transports without peers: of a job of one process, and of a process outside a job."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from ringdance.transport.base import Array, Hierarchy, Identity, Pending, Transport


class _Done:
    def test(self) -> bool:
        return True


class SingleTransport(Transport):
    """The communicator of one process: what it sends is what it receives, at once."""

    rank, size = 0, 1
    host_group: tuple[int, ...] = (0,)

    def __init__(self) -> None:
        self.identities = (Identity(0, socket.gethostname(), os.getpid()),)
        self._notes: list[tuple[int, bytes]] = []

    def allreduce(self, buffer: Array, operation: str, receive: Array | None = None) -> Pending:
        if receive is not None:
            receive[...] = buffer
        return _Done()

    def broadcast(self, buffer: Array, root: int) -> Pending:
        return _Done()

    def allgather(self, send: Array, receive: Array, counts: Sequence[int]) -> Pending:
        receive[: counts[0]] = send
        return _Done()

    def alltoall(
        self, send: Array, send_counts: Sequence[int], receive: Array, receive_counts: Sequence[int]
    ) -> Pending:
        receive[: receive_counts[0]] = send[: send_counts[0]]
        return _Done()

    def split(self, members: Sequence[int], window_bytes: int) -> Transport | None:
        return SingleTransport() if members else None

    def hierarchy(self) -> Hierarchy | None:
        return None

    def post(self, rank: int, message: bytes) -> None:
        self._notes.append((rank, message))

    def messages(self) -> list[tuple[int, bytes]]:
        notes, self._notes = self._notes, []
        return notes

    def state(self, rank: int) -> str:
        return "running"

    def close(self, agreed: bool) -> None:
        pass


class OutsideTransport(SingleTransport):
    """What a process that is not a rank knows of a job: one of the ranks, and how many there are.

    Args:
        rank, size: of that rank's communicator.
        pid: of that rank, which is on this host.
    """

    def __init__(self, rank: int, size: int, pid: int) -> None:
        super().__init__()
        self.rank, self.size, self.host_group = rank, size, tuple(range(size))
        host = socket.gethostname()
        self.identities = tuple(Identity(one, host, pid if one == rank else 0) for one in range(size))
