"""Numbers for operations in flight, as Horovod's asynchronous functions return them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from ringdance.core.request import Work
from ringdance.errors import ArgumentError
from ringdance.training import session

Finish = Callable[[Work], Any]

# Shared by all loopback ranks of a process: numbers are unique, and handles are local to a rank.
_pending: dict[int, tuple[Work, Finish]] = {}
_numbers = itertools.count()


def hold(work: Work, finish: Finish) -> int:
    """Keep a work, and with it its memory, until ``synchronize``; ``finish`` makes the result of it."""
    handle = next(_numbers)
    _pending[handle] = (work, finish)
    return handle


def known(handle: Any) -> bool:
    """Return whether this is a handle that has not been synchronised."""
    return isinstance(handle, int) and handle in _pending


def _check(handle: Any) -> None:
    if not known(handle):
        raise ArgumentError(
            f"{handle!r} is not a handle, or it has been synchronised: handles are what the functions with "
            "_async in their names return, and each can be synchronised once."
        )


def poll(handle: int) -> bool:
    """Return whether the operation is complete, without waiting.

    Raises:
        ArgumentError: the handle is unknown or has been synchronised.
    """
    _check(handle)
    done = _pending[handle][0].done()
    if not done:  # who polls may wait in this way, which the summary cannot see
        session.engine().summary.polled = True
    return done


def synchronize(handle: int) -> Any:
    """Wait for the operation and return its result.

    Raises:
        ArgumentError: the handle is unknown or has been synchronised.
        CollectiveError: the operation failed.
    """
    _check(handle)
    work, finish = _pending.pop(handle)
    work.wait()
    return finish(work)


def clear() -> None:
    """Forget all handles (a new job begins)."""
    _pending.clear()
