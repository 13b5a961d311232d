"""Errors of exchanges in programs: JAX raises them only to who reads a result, and as errors of its own."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import traceback
from typing import Any

from jax.errors import JaxRuntimeError

from ringdance import session
from ringdance.errors import CollectiveError, NotInitializedError, ShutDownError
from ringdance.training.elastic import remember

_log = logging.getLogger("ringdance")
_REPEATED = re.compile(r"(?:Error dispatching computation: )+")  # once for each program that has led to it


def failed(error: Exception) -> None:
    """Note the error of an exchange in a program."""
    if isinstance(error, CollectiveError):
        remember(error)
    if not isinstance(error, (NotInitializedError, ShutDownError)):  # a script is over
        session.note_unseen(error)


@functools.cache
def _warn(text: str) -> None:
    _log.warning("ringdance: Keras goes on although a step has failed: %s", text)


def _watch() -> None:
    """Note what JAX raises, and shorten it."""
    original = JaxRuntimeError.__init__

    def __init__(self: Any, *given: Any) -> None:
        original(self, *[_REPEATED.sub("", one) if isinstance(one, str) else one for one in given])
        callers = [frame.f_code.co_name for frame, _ in traceback.walk_stack(None)]
        if "pythonify_logs" in callers:  # of Keras, which drops all errors
            _warn(str(self))
        else:
            session.note_seen(str(self))

    with contextlib.suppress(TypeError):  # a class that cannot be changed
        JaxRuntimeError.__init__ = __init__


_watch()
