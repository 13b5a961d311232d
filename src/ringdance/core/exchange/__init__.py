"""How the members of a process set move and reduce the tensors of an agreed batch.

Two ways with one interface: ``WindowExchange`` through the memory that the ranks of a host
share, ``WireExchange`` through the transport's collectives. ``exchange_for`` chooses.
"""

from __future__ import annotations

from ringdance.core.exchange.base import Exchange, Progress, Steps, aligned_empty
from ringdance.core.exchange.hierarchical import ClusterExchange
from ringdance.core.exchange.mpi import WireExchange
from ringdance.core.exchange.shared_memory import WindowExchange
from ringdance.transport.base import Transport

_LARGEST = 64 << 20  # bytes of a piece: what is summed at a time stays far below the 2^31 of MPI's counts

__all__ = ["Exchange", "Progress", "Steps", "aligned_empty", "exchange_for"]


def exchange_for(
    transport: Transport, chunk_bytes: int, small_bytes: int, progress: Progress, fixed_order: bool = False
) -> Exchange:
    """Return the exchange for a communicator. May be collective: call it on all members alike.

    Args:
        transport: the communicator.
        chunk_bytes: of the largest chunk that is reduced at a time.
        small_bytes: up to this size a batch goes the way with the lowest latency.
        progress: told of what is achieved.
        fixed_order: sum each element in one order (within a host by rank, then host by host), whatever else
            is in its batch; without, MPI's order for small batches and many members, which may depend on it.
    """
    chunk_bytes, small_bytes = min(chunk_bytes, _LARGEST), min(small_bytes, _LARGEST)
    if transport.window is not None and transport.one_host:
        return WindowExchange(
            transport.window, transport.rank, transport.size, chunk_bytes, small_bytes, progress
        )
    if fixed_order:
        small_bytes = -1  # no batch is small
    hierarchy = None if transport.one_host else transport.hierarchy()
    if hierarchy is not None:
        return ClusterExchange(transport, hierarchy, chunk_bytes, small_bytes, progress)
    return WireExchange(transport, chunk_bytes, small_bytes, progress)
