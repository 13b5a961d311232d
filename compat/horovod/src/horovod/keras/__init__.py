"""``import horovod.keras as hvd``: the names of ``ringdance.keras``, for Keras 3 on any of its backends."""

from typing import Any

from ringdance import keras as _ringdance
from ringdance.keras import *
from ringdance.keras import Average, Compression
from ringdance.keras import __all__ as _names

# Last, so that these names are the modules of this package, not Ringdance's.
from horovod.keras import (  # type: ignore[no-redef]  # isort: skip
    callbacks as callbacks,
    elastic as elastic,
)

__all__ = list(_names)


def DistributedOptimizer(  # type: ignore[no-redef]
    optimizer: Any, name: str | None = None, device_dense: str = "", device_sparse: str = "",
    compression: Any = Compression.none, sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0, op: int = Average, num_groups: int = 0, groups: Any = None,
) -> Any:
    """Call ``ringdance.keras.DistributedOptimizer``, with the arguments of Horovod's function."""
    return _ringdance.DistributedOptimizer(
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense,
        gradient_predivide_factor, op, num_groups=num_groups, groups=groups,
    )


def allreduce(
    value: Any, name: str | None = None, average: bool | None = True, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, op: int | None = None, compression: Any = Compression.none,
) -> Any:
    """Call ``ringdance.keras.allreduce``. To pass ``op``, pass ``average=None`` too."""
    if average is True and op is None:
        average = None  # The default. It should not cause a warning.
    return _ringdance.allreduce(value, name, average, prescale_factor, postscale_factor, op, compression)
