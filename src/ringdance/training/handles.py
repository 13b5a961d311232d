"""Integer handles for operations in flight, like those returned by Horovod's asynchronous functions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from ringdance.core.request import Work
from ringdance.errors import ArgumentError
from ringdance.training import session

Finish = Callable[[Work], Any]

# Shared by all loopback ranks in a process. Handles are unique, and each belongs to one rank.
_pending: dict[int, tuple[Work, Finish]] = {}
_numbers = itertools.count()


def hold(work: Work, finish: Finish) -> int:
    """Store a ``Work``, and return its handle. ``synchronize`` then returns the result of ``finish``."""
    handle = next(_numbers)
    _pending[handle] = (work, finish)
    return handle


def known(handle: Any) -> bool:
    """Return True if ``handle`` is valid and has not been synchronized yet."""
    return isinstance(handle, int) and handle in _pending


def _check(handle: Any) -> None:
    if not known(handle):
        raise ArgumentError(
            f"{handle!r} is not a handle, or it has already been synchronized. Functions with _async in "
            "their names return handles. Each handle can be synchronized only once."
        )


def poll(handle: int) -> bool:
    """Return True if the operation is complete. Does not wait.

    Raises:
        ArgumentError: The handle is unknown or has been synchronized.
    """
    _check(handle)
    done = _pending[handle][0].done()
    if not done:  # The caller may poll in a loop, which the summary does not count as waiting.
        session.engine().summary.polled = True
    return done


def synchronize(handle: int) -> Any:
    """Wait for the operation and return its result.

    Raises:
        ArgumentError: The handle is unknown or has been synchronized.
        CollectiveError: The operation failed.
    """
    _check(handle)
    work, finish = _pending.pop(handle)
    work.wait()
    return finish(work)


def clear() -> None:
    """Discard all handles from the previous job."""
    _pending.clear()
