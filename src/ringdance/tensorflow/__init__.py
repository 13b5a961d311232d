"""Ringdance for TensorFlow: ``import ringdance.tensorflow as hvd``.

Names, signatures and results are those of Horovod's tensorflow module; see the functions.
"""

from ringdance.errors import CollectiveError
from ringdance.tensorflow import elastic as elastic
from ringdance.tensorflow.batch_norm import SyncBatchNormalization
from ringdance.tensorflow.compression import Compression, Compressor
from ringdance.tensorflow.data.sharding import shard
from ringdance.tensorflow.operations import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allreduce,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)
from ringdance.tensorflow.optimizer import DistributedOptimizer
from ringdance.tensorflow.state import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from ringdance.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from ringdance.tensorflow.threads import init
from ringdance.training.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from ringdance.training.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from ringdance.training.sparse import sparse_routes

__all__ = [
    "Adasum", "Average", "BroadcastGlobalVariablesHook", "CollectiveError", "Compression", "Compressor",
    "DistributedGradientTape", "DistributedOptimizer", "Max", "Min", "PartialDistributedGradientTape",
    "ProcessSet", "Product", "Sum", "SyncBatchNormalization", "add_process_set", "allgather",
    "allgather_object", "allreduce", "alltoall", "broadcast", "broadcast_", "broadcast_global_variables",
    "broadcast_object", "broadcast_object_fn", "broadcast_variables", "ccl_built", "cross_rank",
    "cross_size", "cuda_built", "ddl_built", "global_process_set", "gloo_built", "gloo_enabled",
    "grouped_allgather", "grouped_allreduce", "grouped_reducescatter", "init", "is_homogeneous",
    "is_initialized", "join", "local_rank", "local_rank_op", "local_size", "local_size_op", "mpi_built",
    "mpi_enabled", "mpi_threads_supported", "nccl_built", "process_set_included_op", "rank", "rank_op",
    "reducescatter", "remove_process_set", "rocm_built", "shard", "shutdown", "size", "size_op",
    "sparse_routes", "start_timeline", "stop_timeline",
]
