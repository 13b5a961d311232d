"""Collective functions and related helpers."""

from typing import Any

from horovod.common.basics import HorovodBasics
from ringdance.torch import *
from ringdance.torch import __all__ as _names
from ringdance.torch import synchronize as _synchronize
from ringdance.torch._private import compiler_disable
from ringdance.training import handles

_basics = HorovodBasics(__file__)

__all__ = list(_names)


@compiler_disable
def synchronize(handle: int) -> Any:
    """Wait for the operation and return its result. Return ``None`` if the handle is unknown or already used.

    Raises:
        HorovodInternalError: The operation failed.
    """
    return _synchronize(handle) if handles.known(handle) else None
