"""Exchange through the transport's collectives: between hosts, and where a host has no window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringdance.core.arithmetic import Reduction
from ringdance.core.exchange.base import Array, Exchange, Progress, Steps, as_bytes
from ringdance.core.pieces import Segment, even_rows, pieces
from ringdance.transport.base import Pending, Transport

__all__ = ["WireExchange"]

_IN_FLIGHT = 4  # pieces: enough that packing, the wire and unpacking overlap


class WireExchange(Exchange):
    """Exchange by non-blocking collectives on packed pieces."""

    def __init__(self, transport: Transport, piece_bytes: int, small_bytes: int, progress: Progress) -> None:
        super().__init__(transport.rank, transport.size, progress)
        self._transport = transport
        self._piece = max(64, piece_bytes, small_bytes) // 64 * 64  # whole elements of any dtype
        self._buffers = [np.empty(self._piece, np.uint8) for _ in range(_IN_FLIGHT)]

    def _finish(self, pending: Pending) -> Steps:
        while not pending.test():
            yield
        self.progress.count += 1

    def allreduce(self, inputs: Sequence[Array], outputs: Sequence[Array], how: Reduction) -> Steps:
        plan = pieces(tuple([view.size for view in inputs]), self._piece // how.dtype.itemsize, 1)
        flying: list[tuple[Pending, Array, tuple[Segment, ...]]] = []
        for number, (part,) in enumerate(plan):
            if len(flying) == _IN_FLIGHT:
                yield from self._land(flying.pop(0), outputs, how)
            buffer = self._buffers[number % _IN_FLIGHT].view(how.dtype)[: part[-1].end]
            for tensor, start, stop, at, end in part:
                how.prepare(inputs[tensor][start:stop], buffer[at:end])
            if how.wire is None:
                yield from self._reduce_in_order(buffer, how)
                self._deliver(buffer, part, outputs, how.deliver)
            else:
                flying.append((self._transport.allreduce(buffer, how.wire), buffer, part))
        while flying:
            yield from self._land(flying.pop(0), outputs, how)

    def _land(
        self, flight: tuple[Pending, Array, tuple[Segment, ...]], outputs: Sequence[Array], how: Reduction
    ) -> Steps:
        pending, buffer, part = flight
        yield from self._finish(pending)
        self._deliver(buffer, part, outputs, how.finish)

    @staticmethod
    def _deliver(buffer: Array, part: Sequence[Segment], outputs: Sequence[Array], copy: Any) -> None:
        for tensor, start, stop, at, end in part:
            copy(buffer[at:end], outputs[tensor][start:stop])

    def _reduce_in_order(self, buffer: Array, how: Reduction) -> Steps:
        """Reduce what MPI cannot (16-bit floats, bool): slices to their owners, then back to all."""
        item = how.dtype.itemsize
        shares = even_rows(buffer.size, self.size)
        own = shares[self.rank]
        parts = np.empty(own * self.size, how.dtype)
        pending = self._transport.alltoall(
            as_bytes(buffer), [share * item for share in shares], as_bytes(parts), [own * item] * self.size
        )
        yield from self._finish(pending)
        total = np.empty(own, how.dtype)
        how.combine(list(parts.reshape(self.size, own)), total)
        pending = self._transport.allgather(
            as_bytes(total), as_bytes(buffer), [share * item for share in shares]
        )
        yield from self._finish(pending)

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
