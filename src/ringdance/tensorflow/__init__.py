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
from ringdance.tensorflow.threads import init as init
from ringdance.training.exports import __all__ as __all__
from ringdance.training.gradients.compression import Compressor
from ringdance.training.gradients.sparse import sparse_routes

__all__ = [
    *__all__, "BroadcastGlobalVariablesHook", "Compression", "Compressor", "DistributedGradientTape",
    "DistributedOptimizer", "PartialDistributedGradientTape", "SyncBatchNormalization", "allgather",
    "allreduce", "alltoall", "broadcast", "broadcast_", "broadcast_global_variables", "broadcast_object_fn",
    "broadcast_variables", "grouped_allgather", "grouped_allreduce", "grouped_reducescatter",
    "image_dataset", "image_loader", "image_pipeline", "join", "local_rank_op", "local_size_op",
    "pipe_loader", "process_set_included_op", "rank_op", "reducescatter", "shard", "size_op",
    "sparse_routes", "table_dataset", "table_loader", "table_pipeline",
]
