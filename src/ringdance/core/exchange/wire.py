"""Exchange through the transport's collectives: between hosts, and where a host has no window."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ringdance.core.arithmetic import Reduction
from ringdance.core.exchange.base import Array, Exchange, Progress, Steps, as_bytes
from ringdance.core.pieces import even_rows, pieces
from ringdance.transport.base import Pending, Transport

__all__ = ["WireExchange"]

_IN_FLIGHT = 4  # pieces: enough that packing, the wire and unpacking overlap
_AHEAD = 2  # of them are sent before the first is summed: meanwhile the wire has something to do
_ASKED = 8  # times in a row whether data has come: each time the library moves some
_FEW = 16  # members among whom all send their parts of a piece to all; for more MPI's own way is better


class _Flight:
    """One piece on its way: reduced over the members of a transport, in rank order where they are few.

    Parts go to their owners, who reduce them, and the results to all: each member sends and receives the
    piece not quite twice, whatever their number. All members must call the steps of all flights in one order.

    Args:
        transport: of those who reduce.
        small_bytes: up to this length MPI's own way, of one round, is quicker.
        progress: told when it waits.
        piece, scratch: memory; the latter has room for a row more than a piece.
    """

    def __init__(
        self, transport: Transport, small_bytes: int, progress: Progress, piece: Array, scratch: Array
    ) -> None:
        self._transport, self._small, self._progress = transport, small_bytes, progress
        self.piece, self._scratch = piece, scratch
        self._pending: Pending | None = None

    def start(self, buffer: Array, how: Reduction) -> None:
        """Send what ``buffer`` holds, a part of ``piece``; it will hold the result."""
        self.buffer, self._how = buffer, how
        size = self._transport.size
        self._whole = how.wire is not None and (size > _FEW or buffer.nbytes <= self._small)
        if not buffer.size:
            return
        if self._whole:
            assert how.wire is not None
            self._pending = self._transport.allreduce(buffer, how.wire)
            return
        item = how.dtype.itemsize
        rows = even_rows(buffer.size, size)
        own = rows[self._transport.rank]
        self._counts = [row * item for row in rows]
        self._parts = self._scratch[: own * size * item].view(how.dtype).reshape(size, own)
        self._pending = self._transport.alltoall(
            as_bytes(buffer), self._counts, as_bytes(self._parts), [own * item] * size
        )

    def turn(self) -> Steps:
        """Reduce this member's part of all and send the result."""
        if self._whole or not self.buffer.size:
            return
        yield from self._finish()
        total = self._parts[0]
        self._how.combine(list(self._parts), total)
        self._pending = self._transport.allgather(as_bytes(total), as_bytes(self.buffer), self._counts)

    def _finish(self) -> Steps:
        assert self._pending is not None
        return finished(self._pending, self._progress)

    def push(self) -> None:
        """Let it go on, if it is on its way: the library moves data only while it is asked."""
        if self._pending is not None:
            self._pending.test()

    def land(self) -> Steps:
        """Wait until the buffer holds the result, to be handed out by ``how.deliver``."""
        if not self.buffer.size:
            return
        yield from self._finish()
        if self._whole:
            self._how.complete(self.buffer)


def finished(pending: Pending, progress: Progress) -> Steps:
    """Wait for it."""
    progress.flying += 1
    try:
        while not any(pending.test() for _ in range(_ASKED)):
            yield
    finally:
        progress.flying -= 1


class Flights:
    """Pieces that follow each other closely through one transport.

    Args:
        transport: of those who reduce.
        piece_bytes: of the largest piece.
        small_bytes: of the largest that is worth one round only.
        progress: told of each piece that has arrived.
    """

    def __init__(self, transport: Transport, piece_bytes: int, small_bytes: int, progress: Progress) -> None:
        self._progress = progress
        room = piece_bytes + 16 * transport.size
        self._flights = [
            _Flight(
                transport, small_bytes, progress, np.empty(piece_bytes, np.uint8), np.empty(room, np.uint8)
            )
            for _ in range(_IN_FLIGHT)
        ]

    def run(
        self,
        lengths: Sequence[int],
        how: Reduction,
        load: Callable[[int, Array], Steps],
        unload: Callable[[int, Array], Steps],
    ) -> Steps:
        """Reduce pieces.

        Args:
            lengths: elements of each.
            how: dtype and operation.
            load: fills the array with what this member adds to the piece of that number.
            unload: takes the result, which is to be handed out by ``how.deliver``.
        """
        ring, count = self._flights, len(lengths)
        for number in range(count + _IN_FLIGHT):
            flight = ring[number % _IN_FLIGHT]
            if number >= _IN_FLIGHT:
                yield from flight.land()
                self._progress.count += 1
                yield from self._meanwhile(unload(number - _IN_FLIGHT, flight.buffer))
            if number < count:
                buffer = flight.piece[: lengths[number] * how.dtype.itemsize].view(how.dtype)
                yield from self._meanwhile(load(number, buffer))
                flight.start(buffer, how)
            if _AHEAD <= number < count + _AHEAD:
                yield from ring[(number - _AHEAD) % _IN_FLIGHT].turn()
                self._progress.count += 1

    def _meanwhile(self, steps: Steps) -> Steps:
        """Let the pieces on their way go on while ``steps`` wait for something else."""
        self._progress.flying += 1
        try:
            for _ in steps:
                for flight in self._flights:
                    flight.push()
                yield
        finally:
            self._progress.flying -= 1


class WireExchange(Exchange):
    """Exchange by non-blocking collectives on packed pieces."""

    def __init__(self, transport: Transport, piece_bytes: int, small_bytes: int, progress: Progress) -> None:
        super().__init__(transport.rank, transport.size, progress)
        self._transport = transport
        self._piece = max(64, piece_bytes, small_bytes) // 64 * 64  # whole elements of any dtype
        self._flights = Flights(transport, self._piece, small_bytes, progress)

    def _finish(self, pending: Pending) -> Steps:
        yield from finished(pending, self.progress)
        self.progress.count += 1

    def allreduce(self, inputs: Sequence[Array], outputs: Sequence[Array], how: Reduction) -> Steps:
        plan = pieces(tuple([view.size for view in inputs]), self._piece // how.dtype.itemsize, 1)

        def load(number: int, buffer: Array) -> Steps:
            for tensor, start, stop, at, end in plan[number][0]:
                how.prepare(inputs[tensor][start:stop], buffer[at:end])
            yield from ()

        def unload(number: int, buffer: Array) -> Steps:
            for tensor, start, stop, at, end in plan[number][0]:
                how.deliver(buffer[at:end], outputs[tensor][start:stop])
            yield from ()

        yield from self._flights.run([part[-1].end for (part,) in plan], how, load, unload)

    def stream(
        self, sends: Sequence[Array], lengths: Sequence[int], receives: Sequence[Sequence[Array] | None]
    ) -> Steps:
        own = np.concatenate([*sends, np.empty(0, np.uint8)])
        senders = [place for place, length in enumerate(lengths) if length]
        if len(senders) == 1:
            row = own if self.rank == senders[0] else np.empty(lengths[senders[0]], np.uint8)
            yield from self._finish(self._transport.broadcast(row, senders[0]))
            rows = {senders[0]: row}
        elif senders:
            everything = np.empty(sum(lengths), np.uint8)
            yield from self._finish(self._transport.allgather(own, everything, lengths))
            starts = np.cumsum([0, *lengths])
            rows = {place: everything[starts[place] : starts[place + 1]] for place in senders}
        else:
            rows = {}
        for place, row in rows.items():
            at = 0
            for view in (receives[place] or ()) if place != self.rank else ():
                view[...] = row[at : at + view.size]
                at += view.size

    def alltoall(self, sends: Sequence[Array], receives: Sequence[Array], longest: int) -> Steps:
        send = np.concatenate(list(sends))
        counts = [view.size for view in receives]
        receive = np.empty(sum(counts), np.uint8)
        pending = self._transport.alltoall(send, [view.size for view in sends], receive, counts)
        yield from self._finish(pending)
        at = 0
        for view in receives:
            view[...] = receive[at : at + view.size]
            at += view.size

    def reducescatter(self, source: Array, rows: Sequence[int], output: Array, how: Reduction) -> Steps:
        item = how.dtype.itemsize
        send = np.empty_like(source)
        how.prepare(source, send)
        own = rows[self.rank]
        parts = np.empty(own * self.size, how.dtype)
        pending = self._transport.alltoall(
            as_bytes(send), [count * item for count in rows], as_bytes(parts), [own * item] * self.size
        )
        yield from self._finish(pending)
        total = np.empty(own, how.dtype)
        how.combine(list(parts.reshape(self.size, own)), total)
        how.deliver(total, output)
