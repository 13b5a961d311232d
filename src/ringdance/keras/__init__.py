"""Ringdance for Keras 3 on the TensorFlow, torch and JAX backends: ``import ringdance.keras as hvd``.

::

    hvd.init()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()))
    model.compile(optimizer, "sparse_categorical_crossentropy")
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(),
    ]
    if hvd.rank() == 0:
        callbacks.append(keras.callbacks.ModelCheckpoint("model.keras"))
    x, y = hvd.shard(len(x), ends="pad").take(x, y)  # This rank's share, of equal length on all ranks.
    model.fit(x, y, callbacks=callbacks, verbose=int(hvd.rank() == 0))
"""

from ringdance.training.exports import *  # isort: skip  # Must come first: some names are redefined below.

from ringdance.keras import callbacks as callbacks
from ringdance.keras import elastic as elastic
from ringdance.keras import values
from ringdance.keras.library import Compression
from ringdance.keras.loaders import image_loader, table_loader
from ringdance.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer, load_model
from ringdance.keras.rates import set_learning_rate
from ringdance.keras.values import *
from ringdance.numpy import barrier
from ringdance.training.exports import __all__ as __all__
from ringdance.training.gradients.compression import Compressor

__all__ = [
    *__all__, *values.__all__, "Compression", "Compressor", "DistributedOptimizer",
    "PartialDistributedOptimizer", "barrier", "callbacks", "elastic", "image_loader", "load_model",
    "set_learning_rate", "table_loader",
]
