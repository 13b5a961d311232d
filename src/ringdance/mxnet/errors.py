"""Raise Ringdance's errors so that they are also MXNet errors, which ``except mx.MXNetError`` catches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from ringdance.errors import RingdanceError, optional

MXNetError = optional(
    "mxnet.base", ImportError, "MXNet is not installed", "mxnet>=1.9.1",
    ". Ringdance supports MXNet 1.9.1, which needs Python 3.11 and NumPy below 1.24: use the extra `mxnet`",
).MXNetError  # fmt: skip


@lru_cache
def _joined(ours: Any) -> Any:
    # By default, pickle would look up the class by name and find ``ours``, which is not an MXNetError.
    def reduce(self: Any) -> Any:
        return _made, (ours, self.args)

    return type(ours.__name__, (ours, MXNetError), {"__module__": ours.__module__, "__reduce__": reduce})


def _made(ours: Any, args: Any) -> Any:
    return _joined(ours)(*args)


@contextmanager
def as_mxnet() -> Iterator[None]:
    """Convert each Ringdance error raised in the block, so that it is also an MXNet error."""
    try:
        yield
    except RingdanceError as error:
        if isinstance(error, MXNetError):
            raise
        ours: Any = type(error)
        raise _made(ours, (str(error),)) from error
