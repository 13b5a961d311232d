"""How the members of a process set move and reduce the tensors of an agreed batch.

All exchanges share one interface. ``SharedMemoryExchange`` works within a host, ``MpiExchange`` uses the
transport's collectives, and ``HierarchicalExchange`` combines them. ``exchange_for`` chooses one.
"""

from __future__ import annotations

from ringdance.core.exchange.base import Context, Exchange, Steps, aligned_empty
from ringdance.core.exchange.hierarchical import HierarchicalExchange
from ringdance.core.exchange.mpi import MpiExchange
from ringdance.core.exchange.shared_memory import SharedMemoryExchange
from ringdance.core.exchange.sizes import sizes_for
from ringdance.core.transport.base import Transport

_MAX_CHUNK = 64 << 20  # maximum bytes per reduction; MPI's counts are limited to 2^31

__all__ = ["Context", "Exchange", "Steps", "aligned_empty", "exchange_for"]


def exchange_for(
    transport: Transport, chunk_bytes: int, small_bytes: int, context: Context, fixed_order: bool = False,
    largest_chunk: int = 0,
) -> Exchange:
    """Return the exchange for a communicator. This call may be collective, so all members must make it.

    Args:
        transport: The communicator.
        chunk_bytes: Maximum size, in bytes, of the chunk that is reduced at a time.
        small_bytes: Maximum size, in bytes, of a batch that takes the path with the lowest latency.
        context: State that the engine's exchanges share.
        fixed_order: If True, reduce every element in the same order (within a host by rank, then host by
            host). Otherwise small batches, and batches of many members, are reduced in MPI's order, which may
            depend on the batch.
        largest_chunk: Upper bound, in bytes, for later calls to ``set_chunks``.
    """
    chunk_bytes, small_bytes = min(chunk_bytes, _MAX_CHUNK), min(small_bytes, _MAX_CHUNK)
    if transport.window is not None and transport.one_host:
        return SharedMemoryExchange(
            transport.window, transport.rank, transport.size, chunk_bytes, small_bytes, context
        )
    if fixed_order:
        small_bytes = -1  # do not treat any batch as small
    hierarchy = None if transport.one_host else transport.hierarchy()
    members = transport.size
    if hierarchy is None:
        return MpiExchange(transport, sizes_for(members, chunk_bytes, small_bytes, largest_chunk), context)
    sizes = sizes_for(members, chunk_bytes, small_bytes, hierarchy.buffer_bytes, hierarchy.host_sizes)
    return HierarchicalExchange(transport, hierarchy, sizes, context)
