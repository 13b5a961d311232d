"""Ringdance for Keras 3, on the backends tensorflow, torch and jax: ``import ringdance.keras as hvd``.

::

    hvd.init()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()))
    model.compile(optimizer, "sparse_categorical_crossentropy")
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.ProgressBar(),
    ]
    if hvd.rank() == 0:
        callbacks.append(keras.callbacks.ModelCheckpoint("model.keras"))
    x, y = hvd.shard(len(x), ends="pad").take(x, y)  # this rank's share, equally many on all
    model.fit(x, y, callbacks=callbacks)
"""

from ringdance.training.exports import *  # isort: skip  # first: some names are replaced below

from ringdance.keras import callbacks as callbacks
from ringdance.keras import elastic as elastic
from ringdance.keras.lars import LARS
from ringdance.keras.library import Compression
from ringdance.keras.loaders import image_loader, pipe_loader, table_loader
from ringdance.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer, load_model
from ringdance.keras.reduction import init
from ringdance.keras.values import *
from ringdance.training.gradients.compression import Compressor
from ringdance.training.sharding import Shard, shard

__all__ = [
    "LARS", "Average", "BinaryScores", "CheckpointError", "Checkpoints", "CollectiveError",
    "Compression", "Compressor", "DistributedOptimizer", "EmbeddingTable",
    "PartialDistributedOptimizer", "ProcessSet", "Schedule", "Shard", "Sum", "TopK", "add_process_set",
    "allgather", "allgather_object", "allreduce", "broadcast", "broadcast_global_variables",
    "broadcast_object", "broadcast_variables", "callbacks", "ccl_built", "cross_rank", "cross_size",
    "cuda_built", "ddl_built", "elastic", "global_process_set", "gloo_built", "gloo_enabled",
    "image_loader", "init", "is_homogeneous", "is_initialized", "load_model", "local_rank",
    "local_size", "mark_step", "metrics", "mpi_built", "mpi_enabled", "mpi_threads_supported",
    "nccl_built", "pause_stall_check", "pipe_loader", "rank", "reducescatter", "remove_process_set",
    "rocm_built", "shard", "shutdown", "size", "start_timeline", "stop_timeline", "table_loader",
    "watch_input",
]
