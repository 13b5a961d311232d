"""MPI through mpi4py: Open MPI, MPICH or Intel MPI, whichever library mpi4py loads."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ringdance.core.transport.base import Array, Hierarchy, Identity, Pending, Transfer, Transport
from ringdance.core.transport.eventcount import process_state
from ringdance.core.transport.library import library_version
from ringdance.core.transport.mpi_requests import Incoming, MpiPending, MpiTransfer
from ringdance.core.transport.window import Window, window_size
from ringdance.errors import ArgumentError, RankLostError
from ringdance.host.system import linux

_log = logging.getLogger("ringdance")
_FAILED_S = 0.3
_MOST_BYTES = (1 << 31) - 1  # maximum size of a message between two ranks: the limit of MPI's counts
_FIRST_TAG = 2  # lowest tag for messages between two ranks; the engine's notes have tag 1


class MpiTransport(Transport):
    """One MPI communicator, which this object owns."""

    def __init__(
        self, mpi: Any, comm: Any, ranks: Sequence[int], window_bytes: int, vector_bytes: int,
        parent: MpiTransport | None = None,
    ) -> None:
        self._mpi = mpi
        self._operations = {
            "sum": mpi.SUM, "min": mpi.MIN, "max": mpi.MAX, "product": mpi.PROD, "and": mpi.BAND,
        }  # fmt: skip
        self._intel = library_version().startswith("Intel")
        self._comm = comm
        self._notes = comm.Dup()
        self._sent: list[Any] = []
        self.several_threads = mpi.Query_thread() == mpi.THREAD_MULTIPLE
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        own = Identity(ranks[self.rank], socket.gethostname(), os.getpid())
        self.identities = tuple(Identity(*who) for who in gather(comm, [own.rank, own.host, own.pid]))
        self._node = comm.Split_type(mpi.COMM_TYPE_SHARED)
        self.host_group = tuple(gather(self._node, self.rank))
        self._vector_bytes = vector_bytes
        self._memory: Any = None
        self._cross: MpiTransport | None = None
        if window_bytes and self._node.Get_size() > 1:
            self._make_window(window_bytes, vector_bytes, parent)

    def _make_window(self, window_bytes: int, vector_bytes: int, parent: MpiTransport | None) -> None:
        node = self._node
        count = node.Get_size()
        size = window_size(count, vector_bytes, window_bytes)
        # Touching a page while /dev/shm is full raises SIGBUS, so all ranks on the host check this first.
        if not all(gather(node, has_room(free_shared_memory(), count, vector_bytes, window_bytes))):
            if node.Get_rank() == 0:
                _log.warning(
                    "ringdance: /dev/shm on %s has less than %d MiB of free space. The ranks on this host "
                    "therefore exchange data in MPI messages, which is slower than shared memory. Enlarge "
                    "/dev/shm. For a container, use --shm-size.",
                    socket.gethostname(),
                    -(-2 * size >> 20),
                )
            return
        self._memory = self._mpi.Win.Allocate_shared(size if node.Get_rank() == 0 else 0, 1, comm=node)
        memory = np.frombuffer(self._memory.Shared_query(0)[0], np.uint8)
        if node.Get_rank() == 0:
            memory[:] = 0
        node.Barrier()
        shared = self.shared_events(parent)
        self._own_events = shared is None
        self.window = Window(
            memory, node.Get_rank(), count, vector_bytes, window_bytes, self._memory.Sync, shared
        )
        self.window.touch()
        self.event_count = self.window.event_count
        node.Barrier()

    def ranks_of(self, comm: Any) -> tuple[int, ...]:
        mpi = self._mpi
        if comm == mpi.COMM_NULL:
            raise ArgumentError(
                "MPI.COMM_NULL has no ranks. On ranks that are not members, pass a list of member ranks."
            )
        ranks = translated(comm.Get_group(), self._comm)
        if mpi.UNDEFINED in ranks:
            raise ArgumentError(
                f"{comm!r} contains processes that are not ranks of this job. Use a communicator of ranks."
            )
        return tuple(sorted(ranks))

    def allreduce(self, buffer: Array, operation: str, receive: Array | None = None) -> Pending:
        op = self._operations[operation]
        if receive is None:
            return MpiPending(self._comm.Iallreduce(self._mpi.IN_PLACE, buffer, op=op), buffer)
        return MpiPending(self._comm.Iallreduce(buffer, receive, op=op), buffer, receive)

    def broadcast(self, buffer: Array, root: int) -> Pending:
        return MpiPending(self._comm.Ibcast([buffer, self._mpi.BYTE], root=root), buffer)

    def allgather(self, send: Array, receive: Array, counts: Sequence[int]) -> Pending:
        byte = self._mpi.BYTE
        if 0 in counts and self._intel:
            # Intel MPI (2021.18) never completes an Iallgatherv of a few KB if a rank contributes nothing.
            same = ([send.nbytes] * self.size, [0] * self.size)
            request = self._comm.Ialltoallv([send, same, byte], [receive, (list(counts), None), byte])
        else:
            request = self._comm.Iallgatherv([send, byte], [receive, (list(counts), None), byte])
        return MpiPending(request, send, receive)

    def alltoall(
        self, send: Array, send_counts: Sequence[int], receive: Array, receive_counts: Sequence[int]
    ) -> Pending:
        byte = self._mpi.BYTE
        request = self._comm.Ialltoallv(
            [send, (list(send_counts), None), byte], [receive, (list(receive_counts), None), byte]
        )
        return MpiPending(request, send, receive)

    def split(self, members: Sequence[int], window_bytes: int) -> Transport | None:
        mpi = self._mpi
        inside = self.rank in members
        comm = self._comm.Split(0 if inside else mpi.UNDEFINED, self.rank)
        return self._of(comm, members, window_bytes) if inside else None

    def subset(self, members: Sequence[int], window_bytes: int) -> Transport:
        everyone = self._comm.Get_group()
        group = everyone.Incl(sorted(members))
        comm = self._comm.Create_group(group)
        group.Free()
        everyone.Free()
        return self._of(comm, members, window_bytes)

    def _of(self, comm: Any, members: Sequence[int], window_bytes: int) -> Transport:
        ranks = [self.identities[rank].rank for rank in sorted(members)]
        return MpiTransport(self._mpi, comm, ranks, window_bytes, self._vector_bytes, self)

    def send(self, buffer: Array, rank: int, tag: int) -> Transfer:
        _check_length(buffer)
        request = self._notes.Isend([buffer, self._mpi.BYTE], dest=rank, tag=tag + _FIRST_TAG)
        return MpiTransfer(request, self._mpi.Status(), buffer)

    def receive(self, buffer: Array, rank: int | None, tag: int) -> Transfer:
        _check_length(buffer)
        source = self._mpi.ANY_SOURCE if rank is None else rank
        incoming = Incoming(self._mpi, self._notes, buffer, source, tag + _FIRST_TAG)
        return MpiTransfer(incoming, self._mpi.Status(), buffer)

    def hierarchy(self) -> Hierarchy | None:
        own = self.host_group[0]
        buffer_bytes = 0 if self.window is None else self.window.buffer_bytes
        with lost_in_start(self._comm):
            everyone = gather(self._comm, [own, len(self.host_group), buffer_bytes])
            lowest = sorted({first for first, _, _ in everyone})
            sizes = tuple(everyone[first][1] for first in lowest)
            buffers = [nbytes for _, size, nbytes in everyone if size > 1]
            if len(sizes) == 1 or max(sizes) == 1 or not all(buffers):
                return None
            index = self.host_group.index(self.rank)
            inside = index < min(sizes)
            comm = self._comm.Split(index if inside else self._mpi.UNDEFINED, lowest.index(own))
            if inside:
                ranks = [self.identities[rank].rank for rank in gather(comm, self.rank)]
                self._cross = MpiTransport(self._mpi, comm, ranks, 0, self._vector_bytes)
        return Hierarchy(sizes, min(buffers), self._cross)

    def post(self, rank: int, message: bytes) -> None:
        self._sent = [pair for pair in self._sent if not self._is_sent(pair[0])]
        data = np.frombuffer(message, np.uint8)
        self._sent.append((self._notes.Isend([data, self._mpi.BYTE], dest=rank, tag=1), data))

    def _is_sent(self, request: Any) -> bool:
        """Return True if a note has been sent, or cannot be sent because its receiver has died."""
        try:
            return bool(request.Test())
        except self._mpi.Exception as error:
            if self.lost(error) is None:
                raise
            return True

    def messages(self) -> list[tuple[int, bytes]]:
        notes: list[tuple[int, bytes]] = []
        status = self._mpi.Status()
        while True:
            try:
                Incoming.match_all()  # unblocks senders while this rank is waiting for another rank
                message = self._notes.Improbe(tag=1, status=status)
            except self._mpi.Exception as error:
                if self.lost(error) is None:
                    raise
                return notes  # let the caller handle these notes before reporting the loss
            if message is None:
                return notes
            data = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
            message.Recv([data, self._mpi.BYTE])
            notes.append((status.Get_source(), data.tobytes()))

    def lost(self, error: BaseException) -> list[int] | None:
        mpi = self._mpi
        if not isinstance(error, mpi.Exception) or len(self.host_group) == self.size:
            return None
        lost = (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED)
        certain = error.Get_error_class() in lost
        until = time.monotonic() + _FAILED_S
        while True:  # a send may fail before MPI reports that its receiver has died
            with contextlib.suppress(mpi.Exception):
                self._notes.Iprobe(tag=1)  # MPI detects failures during calls
            ranks = _failed(self._comm)
            if ranks or certain or time.monotonic() > until:
                return ranks if ranks or certain else None
            time.sleep(1e-3)

    def state(self, rank: int) -> str:
        if rank not in self.host_group:
            return "unknown"
        return process_state(self.identities[rank].pid)

    def close(self, agreed: bool) -> None:
        if not agreed:
            return  # free nothing, because posted collectives cannot be canceled
        if self._cross is not None:
            self._cross.close(True)
        if self._memory is not None:
            # Views of the window may still exist, but must not be used after this point.
            if self.event_count is not None and self._own_events:
                self.event_count.close()
            self.window = self.event_count = None
            self._memory.Free()
        self.messages()
        Incoming.forget(self._notes)
        for comm in (self._node, self._notes, self._comm):
            comm.Free()


def gather(comm: Any, value: Any) -> list[Any]:
    """Return every rank's value, in rank order. Collective over ``comm``.

    Args:
        comm: An mpi4py communicator. (mpi4py's own ``allgather`` would unpickle what other ranks send.)
        value: A value that JSON can represent. Tuples become lists.
    """
    own = np.frombuffer(json.dumps(value).encode(), np.uint8)
    counts = np.empty(comm.Get_size(), np.int64)
    comm.Allgather(np.array([own.size]), counts)
    everyone = np.empty(int(counts.sum()), np.uint8)
    comm.Allgatherv(own, [everyone, (counts.tolist(), None)])
    ends = np.cumsum(counts)
    return [
        json.loads(everyone[end - count : end].tobytes()) for count, end in zip(counts, ends, strict=True)
    ]


def _check_length(buffer: Array) -> None:
    """Raise ArgumentError if a message is too large for MPI."""
    if buffer.size > _MOST_BYTES:
        raise ArgumentError(
            f"A message between two ranks can have at most {_MOST_BYTES} bytes, but this message has "
            f"{buffer.size}. Send it in parts."
        )


def has_room(free: int, count: int, vector_bytes: int, window_bytes: int) -> bool:
    """Return True if ``free`` bytes suffice for the window of ``count`` ranks and for MPI itself."""
    return free > 2 * window_size(count, vector_bytes, window_bytes)


def free_shared_memory() -> int:
    """Return the number of free bytes in this host's /dev/shm."""
    free = linux.shared_memory()
    return free if free >= 0 else 1 << 62  # no /dev/shm: MPI allocates shared memory elsewhere


@contextlib.contextmanager
def lost_in_start(comm: Any) -> Iterator[None]:
    """Raise RankLostError if a blocking call in this context fails because a peer has died."""
    try:
        yield
    except Exception as error:
        lost = _failed(comm)
        if not lost:
            raise
        who = f"rank {lost[0]}" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))}"
        raise RankLostError(f"{who} died during startup. Check the last output of {who}.") from error


def _failed(comm: Any) -> list[int]:
    """Return the ranks in ``comm`` that MPI has reported as dead."""
    try:
        failed = comm.Get_failed()
    except NotImplementedError:  # this MPI library does not support fault tolerance
        return []
    return translated(failed, comm)


def translated(group: Any, comm: Any) -> list[int]:
    """Return the ranks, in ``comm``, of an MPI group's members, and free the group."""
    own = comm.Get_group()
    ranks = list(group.Translate_ranks(list(range(group.Get_size())), own))
    group.Free()
    own.Free()
    return ranks
