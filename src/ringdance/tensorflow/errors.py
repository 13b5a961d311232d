"""Ringdance's errors as TensorFlow's: of both kinds, with our message.

Eager calls raise a class that is derived from both, so that ``except tf.errors.FailedPreconditionError`` and
``except hvd.HorovodInternalError`` both see it. From a graph TensorFlow raises its own class, of
the same code, with the message.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import tensorflow as tf

from ringdance.errors import (
    ArgumentError,
    CollectiveError,
    MismatchError,
    NotInitializedError,
    ProcessSetRemovedError,
    RingdanceError,
)
from ringdance.training.checks import UnsupportedOperationError

__all__ = ["as_tensorflow", "code_of", "origin_of", "remember"]

# The first that fits. What is raised for a mismatch, for a wrong argument and so on: contract 3.2.
_KINDS: tuple[tuple[type[BaseException], Any], ...] = (
    (MismatchError, tf.errors.FailedPreconditionError),
    (NotInitializedError, tf.errors.FailedPreconditionError),
    (UnsupportedOperationError, tf.errors.AbortedError),
    (ProcessSetRemovedError, tf.errors.AbortedError),
    (ArgumentError, tf.errors.InvalidArgumentError),
    (CollectiveError, tf.errors.UnknownError),
    (KeyboardInterrupt, tf.errors.CancelledError),
    (BaseException, tf.errors.InternalError),
)


def _kind(error: BaseException) -> Any:
    return next(theirs for ours, theirs in _KINDS if isinstance(error, ours))


_CODES = {
    tf.errors.FailedPreconditionError: tf.errors.FAILED_PRECONDITION,
    tf.errors.AbortedError: tf.errors.ABORTED,
    tf.errors.InvalidArgumentError: tf.errors.INVALID_ARGUMENT, tf.errors.UnknownError: tf.errors.UNKNOWN,
    tf.errors.CancelledError: tf.errors.CANCELLED, tf.errors.InternalError: tf.errors.INTERNAL,
}  # fmt: skip


def code_of(error: BaseException) -> int:
    """Return TensorFlow's number for this kind of error."""
    return int(_CODES[_kind(error)])


# What the last failed operation of a graph raised here: TensorFlow passes on its message only.
_last: list[BaseException] = []


def remember(error: BaseException) -> None:
    """Keep the error with which an operation of a graph fails."""
    _last[:] = [error]


def origin_of(error: Any) -> BaseException | None:
    """Return the error of ours for which a graph raised this one, or ``None``."""
    return next((ours for ours in _last if str(ours) and str(ours) in str(error)), None)


@lru_cache
def _joined(ours: Any, theirs: Any) -> Any:
    return type(ours.__name__, (ours, theirs), {"__module__": ours.__module__, "__init__": theirs.__init__})


@contextmanager
def as_tensorflow() -> Iterator[None]:
    """Raise Ringdance's errors from within as TensorFlow's, too."""
    try:
        yield
    except RingdanceError as error:
        ours: Any = type(error)
        raise _joined(ours, _kind(error))(None, None, str(error)) from error
