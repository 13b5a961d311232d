"""Raise Ringdance's errors as MXNet's too, so that ``except mx.MXNetError`` catches them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from mxnet.base import MXNetError

from ringdance.errors import RingdanceError


@lru_cache
def _joined(ours: Any) -> Any:
    return type(ours.__name__, (ours, MXNetError), {"__module__": ours.__module__})


@contextmanager
def as_mxnet() -> Iterator[None]:
    """Raise Ringdance's errors within the block as MXNet's too."""
    try:
        yield
    except RingdanceError as error:
        if isinstance(error, MXNetError):
            raise
        ours: Any = type(error)
        raise _joined(ours)(str(error)) from error
