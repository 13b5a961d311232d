"""Ringdance for PyTorch: ``import ringdance.torch as hvd``.

Names, signatures and results match Horovod's torch module. See the docstring of each function.
"""

from ringdance.training.exports import *  # isort: skip  # Must come first: some names are redefined below.

from ringdance.torch import elastic as elastic
from ringdance.torch import operations
from ringdance.torch._private import compiler_disable
from ringdance.torch.batch_norm import SyncBatchNorm
from ringdance.torch.device.communicators import nccl_built as nccl_built
from ringdance.torch.loaders import image_loader, table_loader
from ringdance.torch.memory import Compression
from ringdance.torch.operations import *
from ringdance.torch.optimizer import DistributedOptimizer
from ringdance.torch.state import broadcast_optimizer_state, broadcast_parameters, snapshot
from ringdance.training import basics, objects
from ringdance.training.exports import __all__ as __all__
from ringdance.training.gradients.compression import Compressor
from ringdance.training.torch_entry_point import register

register()
HorovodInternalError = CollectiveError
allgather_object = compiler_disable(objects.allgather_object)
broadcast_object = compiler_disable(objects.broadcast_object)
mark_step = compiler_disable(basics.mark_step)

__all__ = [
    *__all__, *operations.__all__, "Compression", "Compressor", "DistributedOptimizer",
    "HorovodInternalError", "SyncBatchNorm", "broadcast_optimizer_state", "broadcast_parameters",
    "image_loader", "snapshot", "table_loader",
]
