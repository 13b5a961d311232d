"""Ringdance for PyTorch: ``import ringdance.torch as hvd``.

Names, signatures and results are those of Horovod's torch module; see the functions.
"""

from ringdance.training.exports import *  # isort: skip  # first: some names are replaced below

from ringdance.torch import elastic as elastic
from ringdance.torch._private import compiler_disable
from ringdance.torch.batch_norm import SyncBatchNorm
from ringdance.torch.lars import LARS, parameter_groups
from ringdance.torch.loaders import image_loader, pipe_loader, table_loader
from ringdance.torch.memory import Compression
from ringdance.torch.operations import *
from ringdance.torch.optimizer import DistributedOptimizer
from ringdance.torch.sharding import shard
from ringdance.torch.state import broadcast_optimizer_state, broadcast_parameters, snapshot
from ringdance.training import basics, objects
from ringdance.training.gradients.compression import Compressor
from ringdance.training.gradients.sparse import sparse_routes

HorovodInternalError = CollectiveError
allgather_object = compiler_disable(objects.allgather_object)
broadcast_object = compiler_disable(objects.broadcast_object)
mark_step = compiler_disable(basics.mark_step)

__all__ = [
    "LARS", "Adasum", "Average", "BinaryScores", "CheckpointError", "Checkpoints", "CollectiveError",
    "Compression", "Compressor", "DistributedOptimizer", "EmbeddingTable", "HorovodInternalError",
    "Max", "Min", "ProcessSet", "Product", "Schedule", "Sum", "SyncBatchNorm", "TopK",
    "add_process_set", "allgather", "allgather_async", "allgather_object", "allreduce", "allreduce_",
    "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async", "barrier", "broadcast",
    "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_object",
    "broadcast_optimizer_state", "broadcast_parameters", "ccl_built", "cross_rank", "cross_size",
    "cuda_built", "ddl_built", "global_process_set", "gloo_built", "gloo_enabled", "grouped_allgather",
    "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "image_loader",
    "init", "is_homogeneous", "is_initialized", "join", "local_rank", "local_size", "mark_step",
    "metrics", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "parameter_groups",
    "pause_stall_check", "pipe_loader", "poll", "rank", "reducescatter", "reducescatter_async",
    "remove_process_set", "rocm_built", "shard", "shutdown", "size", "snapshot", "sparse_allreduce_async",
    "sparse_routes", "start_timeline", "stop_timeline", "synchronize", "table_loader", "watch_input",
]
