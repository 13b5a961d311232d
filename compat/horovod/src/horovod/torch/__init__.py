"""``import horovod.torch as hvd``: the names of ``ringdance.torch``."""

from ringdance.torch import *
from ringdance.torch import __all__ as _names

# Last: the modules of this package, not Ringdance's.
from horovod.torch import (  # isort: skip
    compression as compression,
    elastic as elastic,
    functions as functions,
    mpi_ops as mpi_ops,
    optimizer as optimizer,
    sync_batch_norm as sync_batch_norm,
)

from horovod.torch.mpi_ops import synchronize as synchronize  # isort: skip  # gives None where Horovod does

__all__ = list(_names)
