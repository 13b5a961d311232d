"""The operations of a graph: a collective call, its parts for overlapping, and numbers known at run time.

``RingdanceCall`` waits for its result. ``RingdanceStart`` submits a reduction and hands on the
memory in which the result will be; ``RingdanceWait`` waits for several of them. A function runs these
operations in the order in which it was written (they are stateful), so all ranks start in one
order, and a wait comes when all it waits for has been started: one thread is enough.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ringdance import session
from ringdance.core.request import Ticket, Verb
from ringdance.tensorflow import capi
from ringdance.tensorflow.capi import Context
from ringdance.tensorflow.errors import code_of, remember
from ringdance.training import basics, verbs
from ringdance.training.calls import Call
from ringdance.training.options import wants_overlap

__all__ = ["NUMBERS", "register_all"]

_numbers = itertools.count(1)
# Started and not yet waited for: the ticket and the references that keep its memory.
_started: dict[int, tuple[Ticket, list[int]]] = {}

NUMBERS: dict[str, Callable[[int], int]] = {
    "size": lambda set_id: len(session.engine().members(set_id)),
    "rank": lambda _: basics.rank(),
    "local_size": lambda _: basics.local_size(),
    "local_rank": lambda _: basics.local_rank(),
    "included": lambda set_id: int(basics.rank() in session.engine().members(set_id)),
    "join": lambda _: verbs.join(session.engine()),
}


def _telling(compute: Callable[[str, Context], None]) -> Callable[[str, Context], None]:
    def told(text: str, context: Context) -> None:
        try:
            compute(text, context)
        except BaseException as error:
            remember(error)
            context.fail(code_of(error), str(error) or type(error).__name__)

    return told


def _call(text: str, context: Context) -> None:
    call, engine = Call.from_text(text), session.engine()
    inputs = context.inputs()
    if call.keeps_shapes:
        outputs = []
        for index, view in enumerate(inputs):
            tensor, output = context.forward(index, view)
            outputs.append(output)
            context.drop(tensor)  # it is an output already
        call.submit(engine, tuple(inputs), tuple(outputs)).wait()
        return
    if call.verb is Verb.ALLTOALL:
        splits = None if call.equal_splits else inputs[1]
        ticket = call.submit(engine, (inputs[0],), splits=(splits,))
        context.put(0, ticket.wait()[0])
        assert ticket.received_splits is not None
        context.put(1, ticket.received_splits[0].astype(np.int32))
        return
    for index, array in enumerate(call.submit(engine, tuple(inputs)).wait()):
        context.put(index, array)


def _threads() -> int:
    """Return with how many threads TensorFlow computes: as many as there are cores unless told otherwise."""
    return int(tf.config.threading.get_intra_op_parallelism_threads()) or os.cpu_count() or 1


def _start(text: str, context: Context) -> None:
    """Submit; outputs: the results' memory, then a number for ``_wait``."""
    call, engine = Call.from_text(text), session.engine()
    kept: list[int] = []
    outputs = []
    inputs = context.inputs()
    for index, view in enumerate(inputs):
        tensor, output = context.forward(index, view)
        outputs.append(output)
        kept.append(tensor)
        # An input that stays where it is must stay there until the reduction has read it.
        if output is not view:
            kept.append(context.take(index))
    number = next(_numbers)
    try:
        wake = wants_overlap(engine, _threads())
        _started[number] = call.submit(engine, tuple(inputs), tuple(outputs), wake=wake), kept
    except BaseException:
        for tensor in kept:
            context.drop(tensor)
        raise
    context.put(len(inputs), np.array(number, np.int64))


def _wait(text: str, context: Context) -> None:
    """Wait for what was started; inputs: the numbers, then all results, which are handed on."""
    count = int(text)
    views = context.inputs()
    error: BaseException | None = None
    for view in views[:count]:
        ticket, kept = _started.pop(int(view))
        try:
            ticket.wait()
        except BaseException as problem:
            error = error or problem
        for tensor in kept:
            context.drop(tensor)
    if error is not None:
        raise error
    for index in range(len(views) - count):
        tensor = context.take(count + index)
        context.pass_on(index, tensor)
        context.drop(tensor)


def _number(text: str, context: Context) -> None:
    what, _, set_id = text.partition(":")
    context.put(0, np.array(NUMBERS[what](int(set_id)), np.int32))


def register_all() -> None:
    """Make the operations known to TensorFlow; once in a process."""
    anything: dict[str, Any] = {
        "inputs": ["tensors: Tin"], "outputs": ["results: Tout"],
        "attributes": ["Tin: list(type) >= 1", "Tout: list(type) >= 1"],
    }  # fmt: skip
    capi.register("RingdanceCall", "call", compute=_telling(_call), **anything)
    capi.register(
        "RingdanceStart", "call", ["tensors: T"], ["results: T", "number: int64"],
        ["T: list(type) >= 1"], _telling(_start),
    )
    capi.register(
        "RingdanceWait", "count", ["numbers: N * int64", "tensors: T"], ["results: T"],
        ["N: int >= 1", "T: list(type) >= 1"], _telling(_wait),
    )
    capi.register("RingdanceNumber", "what", [], ["number: int32"], [], _telling(_number))
