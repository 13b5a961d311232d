"""``import horovod.torch as hvd``: the names of ``ringdance.torch``."""

from ringdance.torch import *
from ringdance.torch import __all__ as _names

# Last, so that these names are the modules of this package, not Ringdance's.
from horovod.torch import (  # isort: skip
    compression as compression,
    elastic as elastic,
    functions as functions,
    mpi_ops as mpi_ops,
    optimizer as optimizer,
    sync_batch_norm as sync_batch_norm,
)

from horovod.torch.mpi_ops import synchronize as synchronize  # isort: skip  # Returns None as in Horovod.

__all__ = list(_names)
