"""``import horovod.mxnet as hvd``: the names of ``ringdance.mxnet``."""

from ringdance.mxnet import *
from ringdance.mxnet import __all__ as _names

# Last, so that these names are the modules of this package, not Ringdance's.
from horovod.mxnet import (  # isort: skip
    compression as compression,
    functions as functions,
    mpi_ops as mpi_ops,
)

__all__ = list(_names)
