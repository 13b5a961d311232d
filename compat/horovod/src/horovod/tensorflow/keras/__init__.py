"""``import horovod.tensorflow.keras as hvd``: the names of ``ringdance.keras``."""

from ringdance.keras import *
from ringdance.keras import __all__ as _names

# Last, so that these names are the modules of this package, not Ringdance's.
from horovod.tensorflow.keras import (  # type: ignore[no-redef]  # isort: skip
    callbacks as callbacks,
    elastic as elastic,
)

__all__ = list(_names)
