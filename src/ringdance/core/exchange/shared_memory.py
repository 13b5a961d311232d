"""Exchange through the window: each rank reads the others' memory, nothing is sent.

All-reduce of a piece ("direct"): every rank copies in the slices that others own; each rank
adds its own slice from all peers' areas and, uncopied, from its own tensor; all copy the
result out, scaling as they copy. Two passes over memory in all. Pieces are small enough
to stay in the cache between these steps; while one is reduced the next is copied in, so that n pieces
take n + 1 meetings. What fits in ``small_bytes`` is summed by everybody: one meeting instead of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringdance.core.exchange.arithmetic import Reduction
from ringdance.core.exchange.base import Array, Exchange, Progress, Steps, copy_range
from ringdance.core.exchange.chunks import Segment, pieces
from ringdance.transport.window import Window

__all__ = ["LEAST_SHARE", "WindowExchange"]

LEAST_SHARE = 256  # bytes of a piece for each member: 16 elements of any dtype


class WindowExchange(Exchange):
    """Exchange between ranks of one host."""

    def __init__(
        self,
        window: Window,
        rank: int,
        size: int,
        chunk_bytes: int,
        small_bytes: int,
        progress: Progress,
    ) -> None:
        super().__init__(rank, size, progress)
        self._window = window
        self.chunk_bytes = self._piece = min(max(chunk_bytes, LEAST_SHARE * size), window.area_bytes)
        self._small = min(small_bytes, self._piece)
        self._typed: dict[int, list[list[Array]]] = {}

    def _areas(self, dtype: np.dtype[Any]) -> list[Array]:
        """Return all members' areas, as ``dtype``, of the turn that begins."""
        kind = dtype.num  # quicker to hash than the dtype
        if kind not in self._typed:
            cut = self._window.area_bytes // dtype.itemsize * dtype.itemsize
            self._typed[kind] = [[area[:cut].view(dtype) for area in turn] for turn in self._window.areas]
        window = self._window
        window.area_turn ^= 1
        return self._typed[kind][window.area_turn]

    def _meet(self) -> Steps:
        window = self._window
        window.signal()
        while not window.reached():
            yield
        self.progress.count += 1

    def allreduce(self, inputs: Sequence[Array], outputs: Sequence[Array], how: Reduction) -> Steps:
        if len(inputs) == 1:
            if inputs[0].nbytes <= self._small:
                return self._lone_allreduce(inputs[0], outputs[0], how)
        elif sum([view.nbytes for view in inputs]) <= self._small:
            return self._small_allreduce(inputs, outputs, how)
        return self._large_allreduce(tuple([view.size for view in inputs]), inputs, outputs, how)

    def _lone_allreduce(self, source: Array, target: Array, how: Reduction) -> Steps:
        size = source.size
        areas = [area[:size] for area in self._areas(how.dtype)]
        window = self._window
        how.prepare(source, areas[window.index])
        window.signal()
        while not window.reached():
            yield
        self.progress.count += 1
        how.combine(areas, target)
        if how.late:
            how.deliver(target, target)

    def _small_allreduce(self, inputs: Sequence[Array], outputs: Sequence[Array], how: Reduction) -> Steps:
        areas = self._areas(how.dtype)
        mine = areas[self._window.index]
        bounds = self.bounds(inputs)
        for view, at in zip(inputs, bounds, strict=False):
            how.prepare(view, mine[at : at + view.size])
        yield from self._meet()
        total = np.empty(bounds[-1], how.dtype)
        how.combine([area[: bounds[-1]] for area in areas], total)
        for view, at in zip(outputs, bounds, strict=False):
            how.deliver(total[at : at + view.size], view)

    def _large_allreduce(
        self, sizes: tuple[int, ...], inputs: Sequence[Array], outputs: Sequence[Array], how: Reduction
    ) -> Steps:
        window, progress = self._window, self.progress
        own, deliver = window.index, how.deliver
        # Up to a thousand segments pass here in a step, so the usual cases are written out.
        reduce_slice = self._add_slice if how.simple and window.members == 2 else self._reduce_slice
        plan = pieces(sizes, self._piece // how.dtype.itemsize, window.members)
        areas = self._areas(how.dtype)
        self._copy_in(plan[0], areas[own], inputs, how)
        last = None
        for number, slices in enumerate(plan, 1):
            window.signal()
            while not window.reached():
                yield
            progress.count += 1
            if last is not None:
                self._copy_out(*last, outputs, how)
            reduce_slice(slices[own], areas, inputs, how)
            mine, last = areas[own], (slices, areas)
            for tensor, start, stop, at, end in slices[own]:  # now, while it is in this core's cache
                deliver(mine[at:end], outputs[tensor][start:stop])
            if number < len(plan):  # one meeting for each piece: this one's results and the next one's parts
                areas = self._areas(how.dtype)
                self._copy_in(plan[number], areas[own], inputs, how)
        yield from self._meet()
        assert last is not None
        self._copy_out(*last, outputs, how)

    def _copy_in(
        self, slices: Sequence[Sequence[Segment]], area: Array, inputs: Sequence[Array], how: Reduction
    ) -> None:
        """Put what others own into this rank's area."""
        own = self._window.index
        for place, part in enumerate(slices):
            if place == own:
                continue
            if how.identity:
                for tensor, start, stop, at, end in part:
                    area[at:end] = inputs[tensor][start:stop]
            else:
                for tensor, start, stop, at, end in part:
                    how.prepare(inputs[tensor][start:stop], area[at:end])

    def _copy_out(
        self,
        slices: Sequence[Sequence[Segment]],
        areas: Sequence[Array],
        outputs: Sequence[Array],
        how: Reduction,
    ) -> None:
        """Take what others have reduced from their areas."""
        own, deliver = self._window.index, how.deliver
        for place, part in enumerate(slices):
            if place == own:
                continue
            result = areas[place]
            for tensor, start, stop, at, end in part:
                deliver(result[at:end], outputs[tensor][start:stop])

    def reduce_in_host(
        self,
        blocks: Sequence[Sequence[Segment]],
        owned: Sequence[Segment],
        inputs: Sequence[Array],
        how: Reduction,
        total: Array,
    ) -> Steps:
        """Reduce a chunk over this host alone: the block that this rank owns, if any, into ``total``."""
        areas = self._areas(how.dtype)
        self._copy_in(blocks, areas[self._window.index], inputs, how)
        yield from self._meet()
        self._reduce_slice(owned, areas, inputs, how, total, owned[0].at if owned else 0)

    def gather_in_host(
        self,
        blocks: Sequence[Sequence[Segment]],
        owned: Sequence[Segment],
        total: Array,
        outputs: Sequence[Array],
        how: Reduction,
    ) -> Steps:
        """Copy a reduced chunk to all ranks of this host; ``total`` is the block that this rank owns."""
        areas, own = self._areas(how.dtype), self._window.index
        for tensor, start, stop, at, end in owned:
            first = owned[0].at
            areas[own][at:end] = total[at - first : end - first]
            how.deliver(total[at - first : end - first], outputs[tensor][start:stop])
        yield from self._meet()
        self._copy_out(blocks, areas, outputs, how)

    def _add_slice(
        self, part: Sequence[Segment], areas: Sequence[Array], inputs: Sequence[Array], how: Reduction
    ) -> None:
        """As ``_reduce_slice``, for two members and nothing to scale before the sum."""
        first, second = areas
        ufunc = how.ufunc
        if self._window.index == 0:
            for tensor, start, stop, at, end in part:
                ufunc(inputs[tensor][start:stop], second[at:end], out=first[at:end])
        else:
            for tensor, start, stop, at, end in part:
                ufunc(first[at:end], inputs[tensor][start:stop], out=second[at:end])

    def _reduce_slice(
        self,
        part: Sequence[Segment],
        areas: Sequence[Array],
        inputs: Sequence[Array],
        how: Reduction,
        out: Array | None = None,
        first: int = 0,
    ) -> None:
        """Reduce the slice this rank owns, in rank order, its own tensors uncopied.

        Into its own area, or into ``out``, which begins at ``first``.
        """
        own = self._window.index
        target = areas[own] if out is None else out
        for tensor, start, stop, at, end in part:
            source = inputs[tensor][start:stop]
            if not how.identity:
                scaled = np.empty_like(source)
                how.prepare(source, scaled)
                source = scaled
            how.combine(
                [source if place == own else area[at:end] for place, area in enumerate(areas)],
                target[at - first : end - first],
            )

    def stream(
        self, sends: Sequence[Array], lengths: Sequence[int], receives: Sequence[Sequence[Array] | None]
    ) -> Steps:
        room, window = self._piece, self._window
        send_bounds = self.bounds(sends)
        receive_bounds = [self.bounds(views) if views is not None else [] for views in receives]
        byte = np.dtype(np.uint8)
        for start in range(0, max(lengths), room):
            areas = self._areas(byte)
            stop = min(start + room, lengths[self.rank])
            if start < stop:
                copy_range(sends, send_bounds, start, stop, areas[window.index], outward=False)
            yield from self._meet()
            for place, views in enumerate(receives):
                stop = min(start + room, lengths[place])
                if views is not None and place != self.rank and start < stop:
                    copy_range(views, receive_bounds[place], start, stop, areas[place], outward=True)

    def alltoall(self, sends: Sequence[Array], receives: Sequence[Array], longest: int) -> Steps:
        room = self._piece // self.size // 64 * 64
        own = self.rank
        yield from self.copy(sends[own], receives[own])
        byte = np.dtype(np.uint8)
        for start in range(0, longest, room):
            areas = self._areas(byte)
            for place, view in enumerate(sends):
                part = view[start : start + room]
                if place != own and part.size:
                    areas[own][place * room : place * room + part.size] = part
            yield from self._meet()
            for place, view in enumerate(receives):
                part = view[start : start + room]
                if place != own and part.size:
                    part[...] = areas[place][own * room : own * room + part.size]

    def reducescatter(self, source: Array, rows: Sequence[int], output: Array, how: Reduction) -> Steps:
        room = self._piece // how.dtype.itemsize // self.size // 16 * 16
        own = self.rank
        bounds = [0]
        for count in rows:
            bounds.append(bounds[-1] + count)
        for start in range(0, max(rows), room):
            areas = self._areas(how.dtype)
            spans = [
                (bounds[i] + start, min(bounds[i] + start + room, bounds[i + 1])) for i in range(self.size)
            ]
            for place, (low, high) in enumerate(spans):
                if place != own and low < high:
                    how.prepare(source[low:high], areas[own][place * room : place * room + high - low])
            yield from self._meet()
            low, high = spans[own]
            if low < high:
                part = output[start : start + high - low]
                scaled = np.empty_like(part)
                how.prepare(source[low:high], scaled)
                total = np.empty_like(part)
                at = own * room
                how.combine(
                    [scaled if p == own else area[at : at + high - low] for p, area in enumerate(areas)],
                    total,
                )
                how.deliver(total, part)
