"""Start, stop, and where this process stands in the job."""

from __future__ import annotations

from ringdance.core.request import ReduceOp
from ringdance.training import basics, process_sets

__all__ = ["HorovodBasics"]


class HorovodBasics:
    """The functions that every framework's module has, as methods. The arguments have no effect."""

    Average = int(ReduceOp.AVERAGE)
    Sum = int(ReduceOp.SUM)
    Adasum = int(ReduceOp.ADASUM)
    Min = int(ReduceOp.MIN)
    Max = int(ReduceOp.MAX)
    Product = int(ReduceOp.PRODUCT)

    init = staticmethod(basics.init)
    shutdown = staticmethod(basics.shutdown)
    is_initialized = staticmethod(basics.is_initialized)
    rank = staticmethod(basics.rank)
    size = staticmethod(basics.size)
    local_rank = staticmethod(basics.local_rank)
    local_size = staticmethod(basics.local_size)
    cross_rank = staticmethod(basics.cross_rank)
    cross_size = staticmethod(basics.cross_size)
    is_homogeneous = staticmethod(basics.is_homogeneous)
    mpi_threads_supported = staticmethod(basics.mpi_threads_supported)
    mpi_enabled = staticmethod(basics.mpi_enabled)
    mpi_built = staticmethod(basics.mpi_built)
    gloo_enabled = staticmethod(basics.gloo_enabled)
    gloo_built = staticmethod(basics.gloo_built)
    nccl_built = staticmethod(basics.nccl_built)
    ddl_built = staticmethod(basics.ddl_built)
    ccl_built = staticmethod(basics.ccl_built)
    cuda_built = staticmethod(basics.cuda_built)
    rocm_built = staticmethod(basics.rocm_built)
    start_timeline = staticmethod(basics.start_timeline)
    stop_timeline = staticmethod(basics.stop_timeline)

    def __init__(self, pkg_path: str, *args: str) -> None:
        pass

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """Return the members of every registered set, by id."""
        return process_sets.ids_and_ranks()
