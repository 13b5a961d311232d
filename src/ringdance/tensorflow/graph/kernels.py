"""The operations of a graph: a collective call, its parts for overlapping, and numbers known at run time.

``RingdanceCall`` waits for its result. ``RingdanceStart`` submits a reduction and hands on the
memory in which the result will be; ``RingdanceWait`` waits for several of them, and only what depends on it
may look at their results. A function runs these
operations in the order in which it was written (they are stateful), so all ranks start in one
order, and a wait comes when all it waits for has been started: one thread is enough.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ringdance import session
from ringdance.core.engine import Engine
from ringdance.core.request import Collective
from ringdance.tensorflow import capi, started
from ringdance.tensorflow.capi import Context, Slot, drop
from ringdance.tensorflow.errors import code_of, remember
from ringdance.tensorflow.threads import computing_threads
from ringdance.training import basics, collectives
from ringdance.training.collectives import Call
from ringdance.training.options import wants_overlap
from ringdance.training.sparse import submit

__all__ = ["NUMBERS", "calls_text", "memory_text", "register_all"]

NUMBERS: dict[str, Callable[[int], int]] = {
    "size": lambda set_id: len(session.engine().members(set_id)),
    "rank": lambda _: basics.rank(),
    "local_size": lambda _: basics.local_size(),
    "local_rank": lambda _: basics.local_rank(),
    "place": lambda set_id: session.engine().members(set_id).index(basics.rank()),
    "included": lambda set_id: int(basics.rank() in session.engine().members(set_id)),
    "join": lambda _: collectives.join(session.engine()),
}


def _telling(compute: Callable[[Any, Context], None]) -> Callable[[Any, Context], None]:
    def told(prepared: Any, context: Context) -> None:
        try:
            compute(prepared, context)
        except BaseException as error:
            remember(error)
            context.fail(code_of(error), str(error) or type(error).__name__)

    return told


def memory_text(tensors: Sequence[Any]) -> str:
    """Return what the graph knows of the tensors' memory, for the attribute ``memory`` of an operation."""
    return json.dumps([
        [one.dtype.as_datatype_enum, one.shape.as_list() if one.shape.is_fully_defined() else None]
        for one in tensors
    ])


def calls_text(calls: Sequence[Call]) -> str:
    """Return calls as text, for the attribute ``others`` of an operation."""
    return json.dumps([call.text() for call in calls])


def _prepared(text: str, memory: str, others: str = "[]") -> tuple[Call, list[Slot], list[Call]]:
    slots = [Slot(index, *known) for index, known in enumerate(json.loads(memory))]
    return Call.from_text(text), slots, [Call.from_text(one) for one in json.loads(others)]


def _call(prepared: tuple[Call, list[Slot], list[Call]], context: Context) -> None:
    (call, slots, _), engine = prepared, session.engine()
    if call.keeps_shapes:
        one = _submit(call, slots, [], engine, context, wake=False)
        try:
            one.work.wait()
        finally:
            started.leave(one)
        return
    inputs = context.inputs()
    if call.kind is Collective.ALLTOALL:
        splits = None if call.equal_splits else inputs[1]
        work = call.submit(engine, (inputs[0],), splits=(splits,))
        context.put(0, work.wait()[0])
        assert work.received_splits is not None
        context.put(1, work.received_splits[0].astype(np.int32))
        return
    for index, array in enumerate(submit(call, engine, inputs).wait()):
        context.put(index, array)


@lru_cache(maxsize=1)  # TensorFlow's threads do not change once it computes, and to ask for them takes long
def _overlaps(engine: Engine) -> bool:
    return wants_overlap(engine, computing_threads())


def _submit(
    call: Call, slots: list[Slot], others: list[Call], engine: Engine, context: Context, wake: bool
) -> started.Started:
    """Submit a call on the memory of the operation's tensors."""
    group = started.begin(engine, call, others)
    kept: list[Any] = []
    try:
        inputs, outputs, kept = context.lend(slots)
        work = call.submit(engine, tuple(inputs), tuple(outputs), wake=wake)
    except BaseException:
        for tensor in kept:
            drop(tensor)
        started.abandon(group)
        raise
    return started.Started(call, work, kept, group)


def _start(prepared: tuple[Call, list[Slot], list[Call]], context: Context) -> None:
    """Submit; outputs: the results' memory, then a number for ``_wait``."""
    (call, slots, others), engine = prepared, session.engine()
    number = started.add(_submit(call, slots, others, engine, context, _overlaps(engine)))
    if others:  # the first of its group: all their numbers are given up together
        context.put_number(len(slots), number, started.freed)
    else:
        context.put(len(slots), np.array(number, np.int64))


def _wait(_: None, context: Context) -> None:
    """Wait for what was started; inputs: the numbers."""
    error: BaseException | None = None
    for number in context.inputs():
        one = started.take(int(number))
        try:
            one.work.wait()
        except BaseException as problem:
            error = error or problem
        started.leave(one)
    if error is not None:
        raise error


def _number(text: str, context: Context) -> None:
    what, _, set_id = text.partition(":")
    context.put(0, np.array(NUMBERS[what](int(set_id)), np.int32))


def register_all() -> None:
    """Make the operations known to TensorFlow; once in a process."""
    capi.register(
        "RingdanceCall", ["call", "memory"], ["tensors: Tin"], ["results: Tout"],
        ["Tin: list(type) >= 1", "Tout: list(type) >= 1"], _prepared, _telling(_call),
    )
    capi.register(
        "RingdanceStart", ["call", "memory", "others"], ["tensors: T"], ["results: T", "number: int64"],
        ["T: list(type) >= 1"], _prepared, _telling(_start),
    )
    capi.register(
        "RingdanceWait", [], ["numbers: N * int64"], [], ["N: int >= 1"], lambda: None, _telling(_wait)
    )
    capi.register("RingdanceNumber", ["what"], [], ["number: int32"], [], str, _telling(_number))
