"""Exchanges that a graph has started and not yet waited for, and what becomes of them if its run fails.

Note [Failed runs]: any operation of a graph may fail after some exchanges have been started, and then nobody
waits for them. They cannot be taken back, since other ranks may have been told of them: they are carried out,
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
from ringdance.tensorflow.capi import drop
from ringdance.training.collectives import Call

__all__ = ["Group", "Started", "abandon", "add", "begin", "freed", "leave", "pending", "take"]

_FAILED = "the run of its graph ended in an error before it came to the call; see the output of that rank."


@dataclass(slots=True, eq=False)
class Group:
    """Calls that one operation waits for: those not started in this run yet, and the others' numbers."""

    engine: Engine
    calls: set[Call]
    numbers: list[int]


@dataclass(slots=True, eq=False)
class Started:
    """A call under way, and the references to tensors whose memory the engine reads and writes."""

    call: Call
    work: Work
    kept: list[Any]
    group: Group


_numbers = itertools.count(1)
_started: dict[int, Started] = {}
_unstarted: dict[Call, Group] = {}
_leftover: list[Started] = []


def begin(engine: Engine, call: Call, others: Sequence[Call]) -> Group:
    """Return the group of a call that is about to be started; wait until an earlier run's is complete.

    Args:
        engine: carries it out.
        call: the call.
        others: if it is the first of its group, the others.
    """
    for one in list(_leftover):
        if one.call == call and not one.work.done():
            with contextlib.suppress(RingdanceError):
                one.work.wait()
        if one.work.done():
            _leftover.remove(one)
            _release(one)
    group = _unstarted.pop(call, None)
    if group is None:
        group = Group(engine, set(others), [])
        _unstarted.update(dict.fromkeys(others, group))
    group.calls.discard(call)
    return group


def add(one: Started) -> int:
    """Note that a call has been started; return its number."""
    number = next(_numbers)
    _started[number] = one
    one.group.numbers.append(number)
    return number


def take(number: int) -> Started:
    """Return what was started under a number, which is to be waited for and then to be given to ``leave``."""
    return _started.pop(number)


def pending() -> list[Work]:
    """Return what has been started and not been waited for."""
    return [one.work for one in list(_started.values())]


def freed(number: int) -> None:
    """Nobody can wait any more for the group that began with this number. See Note [Failed runs]."""
    first = _started.get(number)
    if first is None:
        return
    abandon(first.group)
    for one in [_started.pop(each, None) for each in first.group.numbers]:
        if one is not None:
            leave(one)


def leave(one: Started) -> None:
    """Give the memory of a call back, at once if it is complete."""
    if one.work.done():
        _release(one)
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


def _release(one: Started) -> None:
    kept, one.kept = one.kept, []
    for tensor in kept:
        drop(tensor)
