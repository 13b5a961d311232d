"""Exchanges that a graph has started and not yet waited for.

Note [Failed runs]: any operation of a graph may fail after some exchanges have been started, and then no
operation waits for them. They cannot be withdrawn, since other ranks may know of them: they are executed,
their memory is kept until then, and the same call of a later run waits for that. Calls of the same group that
have not been started are refused, so that the other ranks' runs fail too. Otherwise a later run of this rank
would be reduced with an earlier one of theirs.
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

_FAILED = "the run of its graph ended in an error before it came to the call; see the output of that rank."


@dataclass(slots=True, eq=False)
class Group:
    """Calls that one operation waits for: not yet started, or by their numbers."""

    engine: Engine
    calls: set[Call]
    numbers: list[int]


@dataclass(slots=True, eq=False)
class InFlight:
    """A started call, and the references to tensors whose memory the engine reads and writes."""

    call: Call
    work: Work
    kept: list[Any]
    group: Group


_numbers = itertools.count(1)
_started: dict[int, InFlight] = {}
_unstarted: dict[Call, Group] = {}
_leftover: list[InFlight] = []


def begin(engine: Engine, call: Call, others: Sequence[Call]) -> Group:
    """Return the group of a call before it starts; wait for the same call of an earlier run.

    Args:
        engine: the engine.
        call: the call.
        others: the other calls of the group if it is the first, else empty.
    """
    for one in list(_leftover):
        if one.call == call and not one.work.done():
            with contextlib.suppress(RingdanceError):
                one.work.wait()
        if one.work.done():
            _leftover.remove(one)
            _drop_all(one)
    group = _unstarted.pop(call, None)
    if group is None:
        group = Group(engine, set(others), [])
        _unstarted.update(dict.fromkeys(others, group))
    group.calls.discard(call)
    return group


def add(one: InFlight) -> int:
    """Register a started call; return its number."""
    number = next(_numbers)
    _started[number] = one
    one.group.numbers.append(number)
    return number


def take(number: int) -> InFlight:
    """Remove and return the call of a number, to wait for and then to ``release``."""
    return _started.pop(number)


def pending() -> list[Work]:
    """Return the work of calls that have been started and not been waited for."""
    return [one.work for one in list(_started.values())]


def on_freed(number: int) -> None:
    """Release a group for which no operation can wait any more. See Note [Failed runs]."""
    first = _started.get(number)
    if first is None:
        return
    abandon(first.group)
    for one in [_started.pop(each, None) for each in first.group.numbers]:
        if one is not None:
            release(one)


def release(one: InFlight) -> None:
    """Release the memory of a call, at once if it is complete, else later."""
    if one.work.done():
        _drop_all(one)
        return
    _leftover.append(one)
    with contextlib.suppress(RingdanceError):
        one.group.engine.flush(one.call.set_id)


def abandon(group: Group) -> None:
    """Refuse the calls of a group that have not been started."""
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
