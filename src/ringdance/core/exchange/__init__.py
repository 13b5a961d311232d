"""How the members of a process set move and reduce the tensors of an agreed batch.

One interface: ``SharedMemoryExchange`` on one host, ``MpiExchange`` by the transport's collectives,
``HierarchicalExchange`` by both. ``exchange_for`` chooses.
"""

from __future__ import annotations

from ringdance.core.exchange.base import Context, Exchange, Steps, aligned_empty
from ringdance.core.exchange.hierarchical import HierarchicalExchange
from ringdance.core.exchange.mpi import MpiExchange
from ringdance.core.exchange.shared_memory import SharedMemoryExchange
from ringdance.core.transport.base import Transport

_MAX_CHUNK = 64 << 20  # bytes: what is reduced at a time stays far below the 2^31 of MPI's counts

__all__ = ["Context", "Exchange", "Steps", "aligned_empty", "exchange_for"]


def exchange_for(
    transport: Transport, chunk_bytes: int, small_bytes: int, context: Context, fixed_order: bool = False,
    room: int = 0,
) -> Exchange:
    """Return the exchange for a communicator. May be collective: call it on all members alike.

    Args:
        transport: the communicator.
        chunk_bytes: of the largest chunk that is reduced at a time.
        small_bytes: up to this size a batch is exchanged with the lowest latency.
        context: counts what is achieved.
        fixed_order: reduce each element in one order (within a host by rank, then host by host); if not,
            small batches and many members are reduced in MPI's order, which may depend on the batch.
        room: of the largest chunk that ``set_chunks`` may be asked for.
    """
    chunk_bytes, small_bytes = min(chunk_bytes, _MAX_CHUNK), min(small_bytes, _MAX_CHUNK)
    if transport.window is not None and transport.one_host:
        return SharedMemoryExchange(
            transport.window, transport.rank, transport.size, chunk_bytes, small_bytes, context
        )
    if fixed_order:
        small_bytes = -1  # no batch is small
    hierarchy = None if transport.one_host else transport.hierarchy()
    if hierarchy is not None:
        return HierarchicalExchange(transport, hierarchy, chunk_bytes, small_bytes, context)
    return MpiExchange(transport, chunk_bytes, small_bytes, context, room)
