"""Ringdance for TensorFlow: ``import ringdance.tensorflow as hvd``.

Names, signatures and results are those of Horovod's tensorflow module; see the functions.
"""

from ringdance.training.exports import *  # isort: skip  # first: some names are replaced below

from ringdance.tensorflow import elastic as elastic
from ringdance.tensorflow.batch_norm import SyncBatchNormalization
from ringdance.tensorflow.compression import Compression
from ringdance.tensorflow.data.loaders import *
from ringdance.tensorflow.data.pipeline import image_pipeline, table_pipeline
from ringdance.tensorflow.data.sharding import shard
from ringdance.tensorflow.operations import *
from ringdance.tensorflow.optimizer import DistributedOptimizer
from ringdance.tensorflow.state import *  # type: ignore[assignment]
from ringdance.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from ringdance.tensorflow.threads import init
from ringdance.training.gradients.compression import Compressor
from ringdance.training.gradients.sparse import sparse_routes

__all__ = [
    "Adasum", "Average", "BinaryScores", "BroadcastGlobalVariablesHook", "CheckpointError",
    "Checkpoints", "CollectiveError", "Compression", "Compressor", "DistributedGradientTape",
    "DistributedOptimizer", "EmbeddingTable", "Max", "Min", "PartialDistributedGradientTape",
    "ProcessSet", "Product", "Schedule", "Sum", "SyncBatchNormalization", "TopK", "add_process_set",
    "allgather", "allgather_object", "allreduce", "alltoall", "broadcast", "broadcast_",
    "broadcast_global_variables", "broadcast_object", "broadcast_object_fn", "broadcast_variables",
    "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "global_process_set",
    "gloo_built", "gloo_enabled", "grouped_allgather", "grouped_allreduce", "grouped_reducescatter",
    "image_dataset", "image_loader", "image_pipeline", "init", "is_homogeneous", "is_initialized",
    "join", "local_rank", "local_rank_op", "local_size", "local_size_op", "mark_step", "metrics",
    "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "pause_stall_check", "pipe_loader",
    "process_set_included_op", "rank", "rank_op", "reducescatter", "remove_process_set", "rocm_built",
    "shard", "shutdown", "size", "size_op", "sparse_routes", "start_timeline", "stop_timeline",
    "table_dataset", "table_loader", "table_pipeline", "watch_input",
]
