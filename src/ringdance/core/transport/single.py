"""Transports without peers: for a job with one process, and for a process that is not part of a job."""

from __future__ import annotations

import os
import socket
from typing import Any

from ringdance.core.transport.base import Identity, Transport


def _refuse(*arguments: Any) -> Any:
    raise NotImplementedError("A process without peers cannot start an exchange.")


_no_peers: Any = _refuse


class SingleTransport(Transport):
    """The communicator of one process. An engine without peers starts no exchange."""

    rank, size = 0, 1
    host_group: tuple[int, ...] = (0,)
    allreduce = broadcast = allgather = alltoall = split = hierarchy = post = messages = state = _no_peers

    def __init__(self) -> None:
        self.identities = (Identity(0, socket.gethostname(), os.getpid()),)

    def close(self, agreed: bool) -> None:
        pass


class OutsideTransport(SingleTransport):
    """Represents a job in a process that is not a rank: holds one of the job's ranks and the rank count.

    Args:
        rank, size: The rank in its communicator, and the number of ranks.
        pid: Process id of the rank, which must be on this host.
    """

    def __init__(self, rank: int, size: int, pid: int) -> None:
        super().__init__()
        self.rank, self.size, self.host_group = rank, size, tuple(range(size))
        host = socket.gethostname()
        self.identities = tuple(Identity(i, host, pid if i == rank else 0) for i in range(size))
