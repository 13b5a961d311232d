"""MPI operations that are in flight, and receives that are not posted until their messages arrive."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import numpy as np

from ringdance.core.transport.base import Array

_in_flight: set[MpiPending] = set()
"""Posted and incomplete operations, with their buffers, of all engines in this process.

MPI cannot cancel a collective. It may write to the buffers even after the engine that posted the collective
has failed and nothing else refers to them.
"""


class MpiPending:
    """A posted operation. Keeps itself and its buffers (``keep``) alive until it is complete."""

    __slots__ = ("_keep", "_request")

    def __init__(self, request: Any, *keep: Any) -> None:
        self._request = request
        self._keep = keep
        _in_flight.add(self)

    def test(self) -> bool:
        if self._request.Test():
            _in_flight.discard(self)
            return True
        return False


class MpiTransfer(MpiPending):
    """A message between two ranks. MPI fills in ``status`` when the message is complete."""

    __slots__ = ("_status", "source")

    def __init__(self, request: Any, status: Any, buffer: Array) -> None:
        super().__init__(request, buffer)
        self._status, self.source = status, -1

    def test(self) -> bool:
        if self in _in_flight and self._request.Test(self._status):
            self.source = self._status.Get_source()
            _in_flight.discard(self)
        return self not in _in_flight


class Incoming:
    """A receive that is posted only after its message has arrived, when the message's size is known.

    Between two processes on a host, Open MPI copies the whole message before it raises an error. A message
    that is too long for the buffer would overwrite the memory after the buffer.

    Args:
        mpi: The module ``mpi4py.MPI``.
        comm: The communicator.
        buffer: Memory for the message.
        source: A rank, or ``MPI.ANY_SOURCE``.
        tag: Tag of the message.
    """

    _unmatched: ClassVar[list[Incoming]] = []  # in call order, because MPI matches messages in that order
    _matching = threading.Lock()

    def __init__(self, mpi: Any, comm: Any, buffer: Array, source: int, tag: int) -> None:
        self.comm, self._mpi, self._buffer = comm, mpi, buffer
        self._source, self._tag, self._request, self._error = source, tag, None, ""
        self._unmatched.append(self)

    def match(self) -> None:
        """If a message for this receive has arrived, post the first receive that matches the message.

        This may be an earlier receive than this one. Lock: the caller holds ``_matching``.
        """
        status = self._mpi.Status()
        if self.comm.Iprobe(source=self._source, tag=self._tag, status=status):
            sender, anyone = status.Get_source(), self._mpi.ANY_SOURCE
            first = next(
                recv for recv in self._unmatched
                if recv.comm is self.comm and recv._tag == self._tag and recv._source in (sender, anyone)
            )  # fmt: skip
            first._post(sender)
            self._unmatched.remove(first)

    def _post(self, sender: int) -> None:
        status = self._mpi.Status()
        message = self.comm.Improbe(source=sender, tag=self._tag, status=status)
        sent, size = status.Get_count(self._mpi.BYTE), self._buffer.size
        if sent > size:
            self._error = f"rank {sender} has sent {sent} bytes, but the buffer has only {size}"
            self._buffer = np.empty(sent, np.uint8)
        self._request = message.Irecv([self._buffer, self._mpi.BYTE])

    def Test(self, status: Any) -> bool:
        Incoming.match_all()
        if self._request is None or not self._request.Test(status):
            return False
        if self._error:
            raise RuntimeError(self._error)
        return True

    @classmethod
    def match_all(cls) -> None:
        """Post the receives whose messages have arrived, for all communicators.

        Threads: any. If another thread is already doing this, the call does nothing.
        """
        if cls._unmatched and cls._matching.acquire(blocking=False):
            try:
                for incoming in list(cls._unmatched):
                    if incoming in cls._unmatched:  # not yet posted in this pass
                        incoming.match()
            finally:
                cls._matching.release()

    @classmethod
    def forget(cls, comm: Any) -> None:
        """Drop the receives of a communicator that is about to be freed."""
        with cls._matching:
            cls._unmatched[:] = [incoming for incoming in cls._unmatched if incoming.comm is not comm]
