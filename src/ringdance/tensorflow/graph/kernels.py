"""Graph operations for collective calls, and for numbers that are not known before run time.

``RingdanceCall`` waits for its result. ``RingdanceStart`` submits a reduction and outputs the memory for its
result. ``RingdanceWait`` waits for several reductions, whose results may be read only by operations that
depend on it. All of these operations are stateful, so a function runs them in program order. Therefore, all
ranks start calls in the same order, and a wait runs only after all calls that it waits for have started, so a
single thread is sufficient.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ringdance.core.engine import Engine
from ringdance.core.recorder import StepMark
from ringdance.core.request import Collective
from ringdance.tensorflow.graph import capi, in_flight
from ringdance.tensorflow.graph.capi import Context, Slot, drop
from ringdance.tensorflow.threads import computing_threads
from ringdance.training import basics, collectives, session
from ringdance.training.collectives import Call
from ringdance.training.gradients import weights
from ringdance.training.gradients.cores import wants_overlap
from ringdance.training.gradients.sparse import submit

Array = np.ndarray[Any, Any]

NUMBERS: dict[str, Callable[[str], int]] = {
    "size": lambda set_id: len(session.engine().members(int(set_id))),
    "rank": lambda _: basics.rank(),
    "local_size": lambda _: basics.local_size(),
    "local_rank": lambda _: basics.local_rank(),
    "included": lambda set_id: int(basics.rank() in session.engine().members(int(set_id))),
    "join": lambda _: collectives.join(session.engine()),
    "step": lambda mark: _mark_step(StepMark(int(mark))),
    "weights": lambda text: _weights_are_due(*text.split(":", 1)),
}


def _weights_are_due(set_id: str, name: str) -> int:
    return int(weights.due(session.engine(), int(set_id), name))


def _mark_step(mark: StepMark) -> int:
    session.mark_step(mark)
    return 0


def run(call: Call, inputs: Sequence[Array]) -> list[Array]:
    """Run a call on arrays. For an alltoall, the second input and the second result are the splits."""
    engine = session.engine()
    if call.weights:
        weights.compare(engine, call, inputs[0])
        return [inputs[0]]
    if call.kind is not Collective.ALLTOALL:
        results: list[Array] = submit(call, engine, inputs).wait()
        call.completed()
        return results
    work = call.submit(engine, (inputs[0],), splits=(None if call.equal_splits else inputs[1],))
    output, received = work.wait(), work.received_splits
    assert received is not None
    return [*output, received[0].astype(np.int32)]


def text_of(call: Call, tensors: Sequence[Any] = (), others: Sequence[Call] = ()) -> str:
    """Return an operation's ``text`` attribute.

    Args:
        call: The collective and its options.
        tensors: The inputs. The text contains their dtypes and, if known, their shapes.
        others: The other calls of the group if this is its first call, otherwise empty.
    """
    memory = [
        [tensor.dtype.as_datatype_enum, tensor.shape.as_list() if tensor.shape.is_fully_defined() else None]
        for tensor in tensors
    ]
    return json.dumps([call.text(), memory, [other.text() for other in others]])


def call_of(text: str) -> Call:
    """Return the call in an operation's ``text`` attribute."""
    return Call.from_text(json.loads(text)[0])


def _prepared(text: str) -> tuple[Call, list[Slot], list[Call]]:
    call, memory, others = json.loads(text)
    slots = [Slot(index, *known) for index, known in enumerate(memory)]
    return Call.from_text(call), slots, [Call.from_text(other) for other in others]


def _call(prepared: tuple[Call, list[Slot], list[Call]], context: Context) -> None:
    (call, slots, _), engine = prepared, session.engine()
    if call.keeps_shapes:
        started = _submit(call, slots, [], engine, context, wake=False)
        try:
            started.work.wait()
        finally:
            in_flight.release(started)
        call.completed()
        return
    for index, array in enumerate(run(call, context.inputs())):
        context.set_output(index, array)


@lru_cache(maxsize=1)  # The number of threads does not change, and determining it is slow.
def _overlaps(engine: Engine) -> bool:
    return wants_overlap(engine, computing_threads())


def _submit(
    call: Call, slots: list[Slot], others: list[Call], engine: Engine, context: Context, wake: bool
) -> in_flight.InFlight:
    """Submit a call that uses the memory of the operation's tensors."""
    group = in_flight.begin(engine, call, others)
    kept: list[Any] = []
    try:
        inputs, outputs, kept = context.in_place(slots)
        work = call.submit(engine, tuple(inputs), tuple(outputs), wake=wake)
    except BaseException:
        for tensor in kept:
            drop(tensor)
        in_flight.abandon(group)
        raise
    return in_flight.InFlight(call, work, kept, group)


def _start(prepared: tuple[Call, list[Slot], list[Call]], context: Context) -> None:
    """Submit a call. The outputs are the memory for the results, and a number for ``_wait``."""
    (call, slots, others), engine = prepared, session.engine()
    number = in_flight.add(_submit(call, slots, others, engine, context, _overlaps(engine)))
    if others:  # This is the first call of a group, so freeing its number releases the whole group.
        context.set_number(len(slots), number, in_flight.on_freed)
    else:
        context.set_output(len(slots), np.array(number, np.int64))


def _wait(_: str, context: Context) -> None:
    """Wait for the calls whose numbers are passed as inputs."""
    error: BaseException | None = None
    for number in context.inputs():
        started = in_flight.take(int(number))
        try:
            started.work.wait()
            started.call.completed()
        except BaseException as problem:
            error = error or problem
        in_flight.release(started)
    if error is not None:
        raise error


def _number(text: str, context: Context) -> None:
    what, _, about = text.partition(":")
    context.set_output(0, np.array(NUMBERS[what](about), np.int32))


def register_all() -> None:
    """Register the operations. Must be called once per process."""
    several = ["Tin: list(type) >= 1", "Tout: list(type) >= 1"]
    capi.register("RingdanceCall", ["tensors: Tin"], ["results: Tout"], several, _prepared, _call)
    capi.register(
        "RingdanceStart", ["tensors: T"], ["results: T", "number: int64"], ["T: list(type) >= 1"], _prepared,
        _start,
    )
    capi.register("RingdanceWait", ["numbers: N * int64"], [], ["N: int >= 1"], str, _wait)
    capi.register("RingdanceNumber", [], ["number: int32"], [], str, _number)
