"""Corner cases of the engine that random programs have found, one test each, on loopback worlds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from loopback import LoopbackTransport, LoopbackWorld

from ringdance.core.collectives import AgreedRequest, execute
from ringdance.core.engine import Engine
from ringdance.core.process_sets.agreement import PIGGYBACK_ENTRIES
from ringdance.core.process_sets.pending import PendingRequests
from ringdance.core.process_sets.registry import buffer_bytes, vector_bytes
from ringdance.core.process_sets.state import ProcessSetState
from ringdance.core.request import Collective, Description, ReduceOp, Request, Work
from ringdance.core.transport.single import SingleTransport
from ringdance.errors import ArgumentError, EngineError, MismatchError, ProcessSetRemovedError
from ringdance.settings import Settings

Array = np.ndarray[Any, Any]


def on_ranks(size: int, program: Callable[[Engine], Any], **values: Any) -> list[Any]:
    settings = Settings(**values)
    room = vector_bytes(size, settings.cache_capacity)
    world = LoopbackWorld(size, buffer_bytes=buffer_bytes(settings), vector_bytes=room)

    def rank(transport: LoopbackTransport) -> Any:
        engine = Engine(transport, settings)
        result = program(engine)
        engine.submit(Request(Description(Collective.BARRIER), name="end")).wait()
        engine.shutdown()
        return result

    return world.run(rank, 20.0)


def request(kind: Collective, view: Array, name: str | None = None, **more: Any) -> Request:
    description = Description(kind, (str(view.dtype),), (view.shape,), ReduceOp.SUM, **more)
    return Request(description, (view,), name=name)


def allreduce(engine: Engine, view: Array, name: str | None = None) -> Work:
    return engine.submit(request(Collective.ALLREDUCE, view, name))


def error_of(work: Work) -> str:
    with pytest.raises(MismatchError) as caught:
        work.wait()
    return str(caught.value)


def test_a_collective_that_the_engine_cannot_execute() -> None:
    """Without an error, a new kind of collective would return its inputs, or nothing."""
    unknown = request(Collective.TUNE, np.ones(3), "new")
    with pytest.raises(EngineError, match="cannot execute TUNE"):
        Engine(SingleTransport(), Settings()).submit(unknown)
    with pytest.raises(EngineError, match="cannot execute TUNE"):
        next(execute(Mock(), (0, 1), [AgreedRequest("new", unknown.description, None)]))


def test_a_signal_handler_submits_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler may submit while its thread waits and holds the lock of the requests."""
    engines: list[Engine] = []
    works: list[Work] = []
    compose = ProcessSetState._compose

    def composing(state: ProcessSetState) -> int:
        vector = compose(state)
        if engines and not works and state is engines[0].sets.registered[0].state:
            works.append(allreduce(engines[0], np.ones(2), "of the handler"))
        return vector

    monkeypatch.setattr(ProcessSetState, "_compose", composing)

    def program(engine: Engine) -> Any:
        if engine.rank == 0:
            engines.append(engine)
            allreduce(engine, np.ones(2), "of the thread").wait()
            return works[0].wait()[0].tolist()
        other = allreduce(engine, np.ones(2), "of the thread")
        result = allreduce(engine, np.ones(2), "of the handler").wait()[0].tolist()
        other.wait()
        return result

    assert on_ranks(2, program) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("capacity", [1, 2, 8])
@pytest.mark.parametrize("leader", [0, 1])
def test_more_in_flight_than_the_cache_holds(capacity: int, leader: int) -> None:
    """One rank has all names in flight. The other waits for one at a time, starting from the last."""
    count = 24

    def program(engine: Engine) -> list[float]:
        views = [np.full(3, i + 100.0 * engine.rank, np.float32) for i in range(count)]
        if engine.rank == leader:
            works = [allreduce(engine, views[i], f"t{i}") for i in range(count)]
            return [float(work.wait()[0][0]) for work in works]
        totals = {i: float(allreduce(engine, views[i], f"t{i}").wait()[0][0]) for i in reversed(range(count))}
        return [totals[i] for i in range(count)]

    right = [2 * i + 100.0 for i in range(count)]
    assert on_ranks(2, program, cache_capacity=capacity) == [right, right]


def test_unnamed_requests_match_after_a_join_of_unequal_ranks() -> None:
    def program(engine: Engine) -> list[float]:
        for _ in range(1 + 3 * engine.rank):
            allreduce(engine, np.ones(2, np.float32)).wait()
        engine.submit(Request(Description(Collective.JOIN))).wait()
        works = [allreduce(engine, np.full(2, i, np.float32)) for i in range(20)]
        return [float(work.wait()[0][0]) for work in works]

    right = [3.0 * i for i in range(20)]
    assert on_ranks(3, program) == [right] * 3


def test_a_name_used_again_at_once_after_a_refused_call() -> None:
    """The other ranks learn of the refused call, and the next call matches theirs, however soon it comes."""

    def program(engine: Engine) -> tuple[str, float]:
        view = np.full(2, engine.rank + 1.0)
        text = ""
        if engine.rank == 1:
            engine.refuse(request(Collective.ALLREDUCE, view, "x"), "splits are wrong")
        else:
            time.sleep(0.01)
            text = error_of(allreduce(engine, view, "x"))
        return text, float(allreduce(engine, view, "x").wait()[0][0])

    (first, a), (_, b), (third, c) = on_ranks(3, program)
    assert "rank 1" in first
    assert "splits are wrong" in first
    assert first == third
    assert a == b == c == 6.0


@pytest.mark.parametrize("name", [None, "x"])
def test_different_verbs_say_the_same_to_all(name: str | None) -> None:
    def program(engine: Engine) -> str:
        kind = Collective.BROADCAST if engine.rank == 1 else Collective.ALLREDUCE
        return error_of(engine.submit(request(kind, np.zeros(2), name)))

    texts = set(on_ranks(3, program))
    assert len(texts) == 1
    assert "broadcast on rank 1" in texts.pop()


def test_groups_of_different_size_are_not_called_different_types() -> None:
    def program(engine: Engine) -> str:
        views = tuple(np.zeros(2) for _ in range(1 + engine.rank))
        shapes = tuple(view.shape for view in views)
        description = Description(Collective.ALLREDUCE, ("float64",) * len(views), shapes)
        return error_of(engine.submit(Request(description, views, name="g")))

    assert "numbers of tensors in the group" in on_ranks(2, program)[0]


@pytest.mark.parametrize("chunk", [1, 64])
def test_chunks_smaller_than_a_share_for_each_member(chunk: int) -> None:
    def program(engine: Engine) -> tuple[list[float], list[float]]:
        view = np.arange(30, dtype=np.float64) + engine.rank
        scattered = engine.submit(request(Collective.REDUCESCATTER, view, "r")).wait()[0]
        splits = (np.full(3, 10, np.int64),)
        description = Description(Collective.ALLTOALL, ("float64",), ((),))
        moved = Request(description, (view,), name="a", splits=splits)
        return scattered.tolist(), engine.submit(moved).wait()[0].tolist()

    for rank, (scattered, moved) in enumerate(on_ranks(3, program, chunk_bytes=chunk, small_bytes=0)):
        scattered_part = np.arange(10) + 10.0 * rank
        assert scattered == (3 * scattered_part + 3).tolist()
        assert moved == np.concatenate([scattered_part, scattered_part + 1, scattered_part + 2]).tolist()


def test_a_thread_that_submits_while_its_set_is_removed_gets_an_error() -> None:
    def program(engine: Engine) -> str:
        set_id = engine.add_process_set([0, 2])
        ended: list[str] = []

        def submit_on() -> None:
            """Submit requests that no other rank submits, so that none of them can complete."""
            works = []
            for i in range(100_000):
                try:
                    view = np.zeros(1)
                    description = request(Collective.ALLREDUCE, view).description
                    made = Request(description, (view,), None, f"{i}", set_id)
                    works.append(engine.submit(made, wake=False))
                except (ProcessSetRemovedError, ArgumentError):
                    break
            for work in works:
                with pytest.raises(ProcessSetRemovedError):
                    work.wait(5.0)
            ended.append("ended")

        thread = threading.Thread(target=submit_on, daemon=True)
        if engine.rank == 0:
            thread.start()
        engine.remove_process_set(set_id)
        if engine.rank == 0:
            thread.join(10.0)
        return "".join(ended)

    for _ in range(5):
        assert on_ranks(3, program)[0] == "ended"


def test_a_table_larger_than_the_number_of_what_rides_along() -> None:
    capacity = PIGGYBACK_ENTRIES + 100

    def program(engine: Engine) -> list[float]:
        view = np.full(3, 1.0 + engine.rank)
        allreduce(engine, view, "first").wait()
        cache = engine.sets.states()[0].pending.cache
        cache.entries += [None] * (PIGGYBACK_ENTRIES + 10)  # as if this many names had been cached
        return [float(allreduce(engine, view, name).wait()[0][0]) for name in "abab" for _ in range(3)]

    assert on_ranks(2, program, cache_capacity=capacity) == [[3.0] * 12] * 2


def test_reports_list_what_is_pending_while_other_threads_submit() -> None:
    """Reports take no lock, so a submission during a report must not stop the engine."""
    pending = PendingRequests(8)

    class Queue(list[Work]):
        def __iter__(self) -> Iterator[Work]:
            pending.held[f"another {len(pending.held)}"] = []  # as another thread does when it submits
            return super().__iter__()

    pending.held = {"a": Queue(), "b": Queue()}
    assert pending.in_flight() == []
    assert len(pending.held) == 4
