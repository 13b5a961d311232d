"""Ringdance for MXNet 1.9: ``import ringdance.mxnet as hvd``.

Each rank is one process with one device. Collectives accept ``mx.nd`` and ``mx.np`` arrays::

    hvd.init()
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1 * hvd.size()})
"""

from ringdance.training.exports import *  # isort: skip  # Must come first: some names are redefined below.

from ringdance.mxnet import operations
from ringdance.mxnet.memory import Compression
from ringdance.mxnet.operations import *
from ringdance.mxnet.optimizer import DistributedOptimizer, DistributedTrainer
from ringdance.mxnet.state import broadcast_parameters
from ringdance.training.exports import __all__ as __all__
from ringdance.training.gradients.compression import Compressor

__all__ = [
    *__all__, *operations.__all__, "Compression", "Compressor", "DistributedOptimizer", "DistributedTrainer",
    "broadcast_parameters",
]
