"""Exchanges that a graph has started but not yet waited for.

Note [Failed runs]: Any operation of a graph may fail after some exchanges have started. Then no operation
waits for these exchanges. They cannot be cancelled, because other ranks may already have agreed to execute
them. Therefore, they are executed, their memory is kept until they are complete, and a later run waits for
them before it makes the same call. Calls of the same group that have not started are refused, so that the
runs of the other ranks also fail. Otherwise, gradients of a later run on this rank would be reduced with
gradients of an earlier run on other ranks.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringdance.core.engine import Engine
from ringdance.core.request import Work
from ringdance.errors import RingdanceError
from ringdance.tensorflow.graph.capi import drop
from ringdance.training.collectives import Call

_FAILED = "the run of its graph failed before it reached the call. See that rank's output."


@dataclass(slots=True, eq=False)
class Group:
    """Calls for which one operation waits.

    Attributes:
        engine: The engine.
        calls: Calls that have not started yet.
        numbers: Numbers of the calls that have started.
    """

    engine: Engine
    calls: set[Call]
    numbers: list[int]


@dataclass(slots=True, eq=False)
class InFlight:
    """A started call, with references to the tensors whose memory the engine reads and writes."""

    call: Call
    work: Work
    kept: list[Any]
    group: Group


_numbers = itertools.count(1)
_started: dict[int, InFlight] = {}
_unstarted: dict[Call, Group] = {}
_leftover: list[InFlight] = []


def begin(engine: Engine, call: Call, others: Sequence[Call]) -> Group:
    """Wait for the same call of an earlier run, then return the group of the call that is about to start.

    Args:
        engine: The engine.
        call: The call that is about to start.
        others: The other calls of the group if this is its first call, otherwise empty.
    """
    for leftover in list(_leftover):
        if leftover.call == call and not leftover.work.done():
            with contextlib.suppress(RingdanceError):
                leftover.work.wait()
        if leftover.work.done():
            _leftover.remove(leftover)
            _drop_all(leftover)
    group = _unstarted.pop(call, None)
    if group is None:
        group = Group(engine, set(others), [])
        _unstarted.update(dict.fromkeys(others, group))
    group.calls.discard(call)
    return group


def add(one: InFlight) -> int:
    """Register a started call and return its number."""
    number = next(_numbers)
    _started[number] = one
    one.group.numbers.append(number)
    return number


def take(number: int) -> InFlight:
    """Remove and return the call with this number. The caller must wait for it, then call ``release``."""
    return _started.pop(number)


def on_freed(number: int) -> None:
    """Release the group of a call whose number was freed, so that no operation can wait for the group.

    See Note [Failed runs].
    """
    first = _started.get(number)
    if first is None:
        return
    abandon(first.group)
    for started in [_started.pop(each, None) for each in first.group.numbers]:
        if started is not None:
            release(started)


def release(one: InFlight) -> None:
    """Release a call's memory if the call is complete. Otherwise, a later call releases it."""
    if one.work.done():
        _drop_all(one)
        return
    _leftover.append(one)
    with contextlib.suppress(RingdanceError):
        one.group.engine.flush(one.call.set_id)


def abandon(group: Group) -> None:
    """Refuse the calls of a group that have not started."""
    calls, group.calls = group.calls, set()
    for call in calls:
        if _unstarted.get(call) is group:
            del _unstarted[call]
        with contextlib.suppress(RingdanceError):
            call.refuse(group.engine, _FAILED)


def _drop_all(one: InFlight) -> None:
    kept, one.kept = one.kept, []
    for tensor in kept:
        drop(tensor)
