"""``import horovod.torch as hvd``: the names of ``ringdance.torch``."""

import importlib

from horovod.torch import compression, functions, mpi_ops, optimizer, sync_batch_norm
from ringdance.torch import *  # noqa: F403
from ringdance.torch import __all__ as _names

__all__ = [*_names, "compression", "functions", "mpi_ops", "optimizer", "sync_batch_norm"]


def __getattr__(name: str) -> object:
    # hvd.elastic without an import of its own, as scripts write it.
    if name == "elastic":
        return importlib.import_module("horovod.torch.elastic")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
