"""Exchange through the transport's collectives: between hosts, and where a host has no window."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from ringdance.core.exchange.arithmetic import Reduction
from ringdance.core.exchange.base import Array, Exchange, Progress, Steps, as_bytes, copy_range
from ringdance.core.exchange.chunks import even_rows, pieces
from ringdance.transport.base import Pending, Transport

__all__ = ["WireExchange"]

_IN_FLIGHT = 4  # pieces: enough that packing, the wire and unpacking overlap
_AHEAD = 2  # of them are sent before the first is summed: meanwhile the wire has something to do
_ASKED = 8  # times in a row whether data has come: each time the library moves some
_FEW = 16  # members among whom all send their parts of a piece to all; for more MPI's own way is better
# Data that are not reduced move in rounds, far below the 2^31 bytes at which MPI's counts end. From 4 MiB on
# the size hardly matters; a second round in flight keeps the network busy while one is packed and unpacked.
_ROUND_BYTES = 16 << 20
_ROUNDS = 2

# A round in flight, and what unpacks it.
_Posted = tuple[Pending, Callable[[], None] | None]


class _Flight:
    """One piece on its way: reduced over the members of a transport, in rank order where they are few.

    Parts go to their owners, who reduce them, and the results to all: each member sends and receives the
    piece not quite twice, whatever their number. All members must call the steps of all flights in one order.

    Args:
        transport: of those who reduce.
        small_bytes: up to this length MPI's own way, of one round, is quicker; negative: never.
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
        """Send what ``buffer`` holds, a part of ``piece``; ``self.buffer`` will hold the result."""
        self.buffer, self._how = buffer, how
        size = self._transport.size
        by_mpi = self._small >= 0 and (size > _FEW or buffer.nbytes <= self._small)
        self._whole = by_mpi and how.wire is not None
        if not buffer.size:
            return
        if self._whole:
            assert how.wire is not None
            # Not in place: then Open MPI's Iallreduce takes a binomial tree, whose root moves it log2(size)
            # times each way.
            self.buffer = self._scratch[: buffer.nbytes].view(how.dtype)
            self._pending = self._transport.allreduce(buffer, how.wire, self.buffer)
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
        chunk_bytes: of the largest piece.
        small_bytes: of the largest that is worth one round only; negative: see ``_Flight``.
        progress: told of each piece that has arrived.
    """

    def __init__(self, transport: Transport, chunk_bytes: int, small_bytes: int, progress: Progress) -> None:
        self._progress = progress
        room = chunk_bytes + 16 * transport.size
        self._flights = [
            _Flight(
                transport, small_bytes, progress, np.empty(chunk_bytes, np.uint8), np.empty(room, np.uint8)
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
    """Exchange by non-blocking collectives on bounded chunks: MPI's counts do not grow with tensors."""

    def __init__(self, transport: Transport, chunk_bytes: int, small_bytes: int, progress: Progress) -> None:
        super().__init__(transport.rank, transport.size, progress)
        self._transport = transport
        self._piece = max(64, chunk_bytes, small_bytes) // 64 * 64  # whole elements of any dtype
        self._round = min(_ROUND_BYTES, 32 * self._piece)
        self._flights = Flights(transport, self._piece, small_bytes, progress)

    def _room(self, parts: int) -> int:
        """Return the bytes of a chunk where a round moves ``parts`` of them: whole elements of any dtype."""
        return max(64, self._round // max(1, parts) // 64 * 64)

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

    def _rounds(self, length: int, room: int, post: Callable[[int, _Memory], _Posted]) -> Steps:
        """Move rows in rounds, some of them in flight at once.

        Args:
            length: bytes or elements of the longest row, the same on all members.
            room: as many of them as a round moves of each row.
            post: posts the round that begins at an offset; memory that it takes is its own until completed.
        """
        if length <= room:  # one round: most calls
            if length:
                yield from self._complete(post(0, _Memory()))
            return
        memory = [_Memory() for _ in range(_ROUNDS)]
        posted: deque[_Posted] = deque()
        for number, start in enumerate(range(0, length, room)):
            if len(posted) == _ROUNDS:
                yield from self._complete(posted.popleft())
            posted.append(post(start, memory[number % _ROUNDS]))
        while posted:
            yield from self._complete(posted.popleft())

    def _complete(self, posted: _Posted) -> Steps:
        pending, complete = posted
        yield from finished(pending, self.progress)
        if complete is not None:
            complete()
        self.progress.count += 1

    def stream(
        self, sends: Sequence[Array], lengths: Sequence[int], receives: Sequence[Sequence[Array] | None]
    ) -> Steps:
        own, transport = self.rank, self._transport
        send_bounds = self.bounds(sends)
        receive_bounds = [self.bounds(views or ()) for views in receives]
        room = self._room(len(lengths) - lengths.count(0))

        def post(start: int, memory: _Memory) -> _Posted:
            counts = [max(0, min(room, length - start)) for length in lengths]
            stop = start + counts[own]
            if stop <= start:
                ours = memory.take("send", 0)
            elif len(sends) == 1:
                ours = sends[0][start:stop]
            else:
                ours = memory.take("send", counts[own])
                copy_range(sends, send_bounds, start, stop, ours, outward=False)
            if counts.count(0) < self.size - 1:
                rows = memory.take("receive", sum(counts))
                return transport.allgather(ours, rows, counts), lambda: unpack(start, counts, rows)
            root = counts.index(max(counts))
            views = receives[root]
            if root == own:
                return transport.broadcast(ours, root), None
            if views is not None and len(views) == 1:
                return transport.broadcast(views[0][start : start + counts[root]], root), None
            rows = memory.take("receive", counts[root])
            return transport.broadcast(rows, root), lambda: unpack(start, counts, rows)

        def unpack(start: int, counts: Sequence[int], rows: Array) -> None:
            at = 0
            for place, count in enumerate(counts):
                views = receives[place]
                if views is not None and place != own and count:
                    row = rows[at : at + count]
                    copy_range(views, receive_bounds[place], start, start + count, row, outward=True)
                at += count

        yield from self._rounds(max(lengths), room, post)

    def alltoall(self, sends: Sequence[Array], receives: Sequence[Array], longest: int) -> Steps:
        own, size, transport = self.rank, self.size, self._transport
        yield from self.copy(sends[own], receives[own])
        room = self._room(size)

        def parts(views: Sequence[Array], start: int) -> list[Array]:
            return [view[start : start + room * (place != own)] for place, view in enumerate(views)]

        def post(start: int, memory: _Memory) -> _Posted:
            given, taken = parts(sends, start), parts(receives, start)
            send_counts, receive_counts = [part.size for part in given], [part.size for part in taken]
            send = memory.take("send", sum(send_counts))
            receive = memory.take("receive", sum(receive_counts))
            np.concatenate(given, out=send)

            def complete() -> None:
                at = 0
                for part in taken:
                    part[...] = receive[at : at + part.size]
                    at += part.size

            return transport.alltoall(send, send_counts, receive, receive_counts), complete

        yield from self._rounds(longest, room, post)

    def reducescatter(self, source: Array, rows: Sequence[int], output: Array, how: Reduction) -> Steps:
        own, size, item, transport = self.rank, self.size, how.dtype.itemsize, self._transport
        firsts = list(accumulate(rows, initial=0))
        room = self._room(size) // item

        def post(start: int, memory: _Memory) -> _Posted:
            counts = [max(0, min(room, row - start)) for row in rows]
            send = memory.take("send", sum(counts) * item).view(how.dtype)
            at = 0
            for first, count in zip(firsts, counts, strict=False):
                how.prepare(source[first + start : first + start + count], send[at : at + count])
                at += count
            count = counts[own]
            parts = memory.take("receive", size * count * item).view(how.dtype).reshape(size, count)

            def complete() -> None:
                total = parts[0]
                how.combine(list(parts), total)
                how.deliver(total, output[start : start + count])

            send_bytes = [count * item for count in counts]
            receive_bytes = [count * item] * size
            return transport.alltoall(as_bytes(send), send_bytes, as_bytes(parts), receive_bytes), complete

        yield from self._rounds(max(rows), room, post)


class _Memory:
    """Buffers of one of the rounds that are in flight: used again by later rounds of the same collective."""

    def __init__(self) -> None:
        self._buffers: dict[str, Array] = {}

    def take(self, name: str, nbytes: int) -> Array:
        """Return ``nbytes`` of the buffer called ``name``, uint8; what it held before is gone."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < nbytes:
            buffer = self._buffers[name] = np.empty(nbytes, np.uint8)
        return buffer[:nbytes]
