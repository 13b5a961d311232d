"""Ringdance for TensorFlow: ``import ringdance.tensorflow as hvd``.

Names, signatures and results match Horovod's tensorflow module. See the docstring of each function.
"""

from ringdance.training.exports import *  # isort: skip  # Must come first: some names are redefined below.

from ringdance.tensorflow import elastic as elastic
from ringdance.tensorflow import operations, state
from ringdance.tensorflow.batch_norm import SyncBatchNormalization
from ringdance.tensorflow.compression import Compression
from ringdance.tensorflow.data import loaders
from ringdance.tensorflow.data.loaders import *
from ringdance.tensorflow.data.sharding import shard as shard
from ringdance.tensorflow.operations import *
from ringdance.tensorflow.optimizer import DistributedOptimizer
from ringdance.tensorflow.state import *  # type: ignore[assignment]
from ringdance.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from ringdance.training.exports import __all__ as __all__
from ringdance.training.gradients.compression import Compressor

__all__ = [
    *__all__, *loaders.__all__, *operations.__all__, *state.__all__, "Compression", "Compressor",
    "DistributedGradientTape", "DistributedOptimizer", "PartialDistributedGradientTape",
    "SyncBatchNormalization",
]
