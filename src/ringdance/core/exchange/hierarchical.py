"""Reduce across several hosts: intra-host reduce, all-reduce across hosts, intra-host all-gather."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ringdance.core.exchange.arithmetic import Reduction, two_stages
from ringdance.core.exchange.base import Array, Context, Steps
from ringdance.core.exchange.chunks import chunks
from ringdance.core.exchange.mpi import ChunkPipeline, MpiExchange, sends_to_few
from ringdance.core.exchange.shared_memory import SharedMemoryExchange
from ringdance.core.exchange.sizes import Sizes
from ringdance.core.transport.base import Hierarchy, Transport
from ringdance.core.transport.window import Window, window_size


class HierarchicalExchange(MpiExchange):
    """Like ``MpiExchange``, but large tensors are reduced in two stages: inside each host, then across hosts.

    Each block of a chunk has one owner per host. There are as many blocks as the smallest host has members.
    The remaining members own no block, but take part in the intra-host reduce and all-gather. If there are
    many hosts, the blocks of several chunks are sent together (see ``Sizes``).

    Args:
        transport: Connects all members.
        hierarchy: Hosts of the members, and the cross-host communicator.
        sizes: How many bytes to send at a time.
        context: State that the engine's exchanges share.
    """

    def __init__(self, transport: Transport, hierarchy: Hierarchy, sizes: Sizes, context: Context) -> None:
        super().__init__(transport, sizes, context)
        self._host_sizes, small = hierarchy.host_sizes, sizes.small
        self.flat = None if max(self._host_sizes) == 1 else False
        index, count = transport.host_group.index(transport.rank), len(transport.host_group)
        window = transport.window or _private_window(hierarchy.buffer_bytes)
        self._inside = SharedMemoryExchange(window, index, count, sizes.chunk, small, context)
        cross = hierarchy.cross
        self._across = ChunkPipeline(cross or transport, sizes.max_wire if cross else 0, small, context)

    def allreduce(self, inputs: Sequence[Array], outputs: Sequence[Array], how: Reduction) -> Steps:
        if self.flat or how.one_stage or sum(view.nbytes for view in inputs) <= self._sizes.small:
            return super().allreduce(inputs, outputs, how)
        return self._large_allreduce(inputs, outputs, how)

    def _large_allreduce(self, inputs: Sequence[Array], outputs: Sequence[Array], how: Reduction) -> Steps:
        """Reduce later chunks and gather earlier ones inside the host while chunks travel between hosts."""
        inside, index, sizes = self._inside, self._inside.rank, self._sizes
        in_host, across = two_stages(how, inside.size, self._host_sizes)
        elements = tuple([view.size for view in inputs])
        plan = chunks(elements, sizes.chunk // how.dtype.itemsize, sizes.blocks)
        owned = [blocks[index] if index < sizes.blocks else () for blocks in plan]
        lengths = [block[-1].end - block[0].at if block else 0 for block in owned]
        whole = sizes.small >= 0 and across.mpi_op is not None and sends_to_few(len(self._host_sizes))
        together = 1 if whole else sizes.chunks_per_wire
        groups = [range(len(plan))[at : at + together] for at in range(0, len(plan), together)]

        def parts(number: int, buffer: Array) -> Iterator[tuple[int, Array]]:
            at = 0
            for chunk in groups[number]:
                yield chunk, buffer[at : at + lengths[chunk]]
                at += lengths[chunk]

        def load(number: int, buffer: Array) -> Steps:
            for chunk, total in parts(number, buffer):
                yield from inside.reduce_in_host(plan[chunk], owned[chunk], inputs, in_host, total)

        def unload(number: int, buffer: Array) -> Steps:
            for chunk, total in parts(number, buffer):
                yield from inside.gather_in_host(plan[chunk], owned[chunk], total, outputs, across)

        wires = [sum(lengths[chunk] for chunk in group) for group in groups]
        yield from self._across.run(wires, across, load, unload)


def _private_window(buffer_bytes: int) -> Window:
    """Return a window for a member that is alone on its host. Its memory is private."""
    memory = np.zeros(window_size(1, 0, buffer_bytes) // 8, np.int64).view(np.uint8)
    return Window(memory, 0, 1, 0, buffer_bytes, lambda: None)
