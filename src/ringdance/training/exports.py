"""Names that every binding exports. Bindings import them with ``import *``."""

from ringdance.core.request import ReduceOp as _ReduceOp
from ringdance.errors import CollectiveError as CollectiveError
from ringdance.training.basics import *
from ringdance.training.checkpoints import *
from ringdance.training.embedding import *
from ringdance.training.evaluation import *
from ringdance.training.loaders.input_check import *
from ringdance.training.objects import *
from ringdance.training.process_sets import *
from ringdance.training.schedules import *
from ringdance.training.session import metrics, pause_stall_check, start_timeline, stop_timeline
from ringdance.training.sharding import *

__all__ = [
    "Adasum", "Average", "BinaryScores", "CheckpointError", "Checkpoints", "CollectiveError",
    "EmbeddingTable", "Max", "Min", "ProcessSet", "Product", "Schedule", "Shard", "Sum", "TopK",
    "add_process_set", "allgather_object", "broadcast_object", "ccl_built", "cross_rank", "cross_size",
    "cuda_built", "ddl_built", "global_process_set", "gloo_built", "gloo_enabled", "init", "is_homogeneous",
    "is_initialized", "local_rank", "local_size", "mark_step", "metrics", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "pause_stall_check", "rank", "remove_process_set", "rocm_built",
    "shard", "shutdown", "size", "start_timeline", "stop_timeline", "watch_input",
]

Average = int(_ReduceOp.AVERAGE)
Sum = int(_ReduceOp.SUM)
Adasum = int(_ReduceOp.ADASUM)
Min = int(_ReduceOp.MIN)
Max = int(_ReduceOp.MAX)
Product = int(_ReduceOp.PRODUCT)
