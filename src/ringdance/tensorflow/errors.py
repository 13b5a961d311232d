"""Raise Ringdance's errors so that they are also TensorFlow errors.

In an eager call, the class of an error derives from a Ringdance class and a TensorFlow class, so both
``except tf.errors.FailedPreconditionError`` and ``except hvd.HorovodInternalError`` catch it. In a graph,
TensorFlow raises its own error class with the same error code and message.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import tensorflow as tf

from ringdance import errors
from ringdance.training.checks import UnsupportedOperationError

# The first match is used. Horovod raises the same TensorFlow classes for mismatches, invalid arguments, etc.
_KINDS: tuple[tuple[type[BaseException], Any], ...] = (
    (errors.MismatchError, tf.errors.FailedPreconditionError),
    (errors.NotInitializedError, tf.errors.FailedPreconditionError),
    (UnsupportedOperationError, tf.errors.AbortedError),
    (errors.ProcessSetRemovedError, tf.errors.AbortedError),
    (errors.ArgumentError, tf.errors.InvalidArgumentError),
    (errors.CollectiveError, tf.errors.UnknownError),
    (KeyboardInterrupt, tf.errors.CancelledError),
    (BaseException, tf.errors.InternalError),
)


def _kind(error: BaseException) -> Any:
    return next(theirs for ours, theirs in _KINDS if isinstance(error, ours))


def code_of(error: BaseException) -> int:
    """Return TensorFlow's error code for this kind of error."""
    return int(_kind(error)(None, None, "").error_code)


@lru_cache
def _joined(ours: Any, theirs: Any) -> Any:
    return type(ours.__name__, (ours, theirs), {"__module__": ours.__module__, "__init__": theirs.__init__})


@contextmanager
def as_tensorflow() -> Iterator[None]:
    """Convert each Ringdance error raised in the block, so that it is also a TensorFlow error."""
    try:
        yield
    except errors.RingdanceError as error:
        ours: Any = type(error)
        raise _joined(ours, _kind(error))(None, None, str(error)) from error
