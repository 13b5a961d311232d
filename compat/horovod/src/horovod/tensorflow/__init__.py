"""``import horovod.tensorflow as hvd``: the names of ``ringdance.tensorflow``."""

from ringdance.tensorflow import *
from ringdance.tensorflow import __all__ as _names

# Last, so that these names are the modules of this package, not Ringdance's.
from horovod.tensorflow import (  # isort: skip
    compression as compression,
    elastic as elastic,
    functions as functions,
    mpi_ops as mpi_ops,
    sync_batch_norm as sync_batch_norm,
    util as util,
)
from horovod.tensorflow.util import _executing_eagerly as _executing_eagerly  # isort: skip  # scripts use it

__all__ = list(_names)
