"""The progress engine: no wake-up is lost, no interrupt leaves a lock held, no thread dies silently."""

from __future__ import annotations

import dis
import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
from loopback import LoopbackTransport
from loopback_job import job

from ringdance.core import progress, stepping
from ringdance.core.engine import Engine
from ringdance.core.process_sets.state import ProcessSetState
from ringdance.core.request import Collective, ReduceOp, Work
from ringdance.core.stepping import Stepper
from ringdance.errors import EngineError
from ringdance.settings import Settings
from ringdance.training.collectives import Call, barrier


def start(engine: Engine, name: str, wake: bool = False) -> Work:
    array = np.ones(3, np.float32)
    return Call(Collective.ALLREDUCE, name).submit(engine, (array,), (array,), wake=wake)


def until(what: Callable[[], bool]) -> None:
    limit = time.monotonic() + 15
    while not what():
        assert time.monotonic() < limit, "The condition did not become true within 15 seconds."
        time.sleep(1e-3)


@pytest.fixture
def no_idle_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make sure that the engine thread finds work only after a wake-up."""
    monkeypatch.setattr(progress, "_IDLE", 60.0)


@pytest.mark.usefixtures("no_idle_look")
def test_asynchronous_work_goes_on_after_a_blocking_call() -> None:
    def program(engine: Engine) -> None:
        for name in ("A", "B"):
            start(engine, name).wait()
        for _ in range(3):
            barrier(engine)
            if engine.rank == 0:
                early = start(engine, "A", wake=True)
                start(engine, "B").wait()
            else:
                time.sleep(0.02)
                start(engine, "B").wait()
                early = start(engine, "A", wake=True)
            until(early.done)  # no thread waits for it

    job(2, program)


@pytest.mark.usefixtures("no_idle_look")
def test_a_submission_while_the_engine_thread_lies_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """A submission between the engine thread's check for work and its sleep must not be lost."""
    local = threading.local()
    original = ProcessSetState.next_due

    def next_due(state: ProcessSetState) -> float | None:
        due = original(state)
        submit = getattr(local, "submit", None)
        if due is None and submit is not None and threading.current_thread().name.startswith("ringdance"):
            local.submit = None
            submit()
        return due

    def program(engine: Engine) -> None:
        start(engine, "A").wait()
        submitted_works: list[Work] = []
        assert engine._progress_engine is not None
        run = engine._progress_engine._rest

        def rest() -> None:  # on the engine thread, which has just seen that there is nothing to do
            if not submitted_works:
                local.submit = lambda: submitted_works.append(start(engine, "A", wake=True))
            run()

        monkeypatch.setattr(engine._progress_engine, "_rest", rest)
        engine._progress_engine.wake()
        until(lambda: bool(submitted_works) and submitted_works[0].done())

    monkeypatch.setattr(ProcessSetState, "next_due", next_due)
    job(2, program)


def test_an_engine_thread_that_dies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    dying = threading.Event()
    original = ProcessSetState.next_due

    def next_due(state: ProcessSetState) -> float | None:
        name = threading.current_thread().name
        if dying.is_set() and name == "ringdance engine 1":
            raise TypeError("planted")
        return original(state)

    monkeypatch.setattr(ProcessSetState, "next_due", next_due)

    def program(engine: Engine) -> str:
        start(engine, "A").wait()
        dying.set()
        until(lambda: engine.end.broken is not None)
        with pytest.raises(Exception, match="planted") as caught:
            start(engine, "A").wait()
        return type(caught.value).__name__

    assert job(2, program)[1] == EngineError.__name__


def test_followers_are_promoted_without_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """If several threads wait, the leader promotes another when its own operation completes."""
    monkeypatch.setattr(progress, "_FOLLOWER_POLL", 60.0)

    def program(engine: Engine) -> None:
        def one(name: str) -> None:
            for _ in range(30):
                start(engine, name).wait(30.0)

        threads = [threading.Thread(target=one, args=(f"t{i}",)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
            assert not thread.is_alive()

    job(2, program)


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt, raised by the trace function."""


# Instructions after which CPython checks for signals. It also checks at the start of a function.
_LOOKS = ("CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD", "CALL_KW")


def lines_in_a_step() -> range:
    """Return the lines of ``Stepper.step`` whose interruption ends the engine: exchanges are incomplete."""
    lines, first = inspect.getsourcelines(Stepper.step)
    texts = [line.strip() for line in lines]
    return range(first + texts.index("for machine in sets.machines:"), first + texts.index("raise"))


def after_looks(code: CodeType) -> Iterator[int]:
    before, excluded = "", lines_in_a_step() if code is Stepper.step.__code__ else ()
    for instruction in dis.get_instructions(code):
        if before in _LOOKS and instruction.positions.lineno not in excluded:
            yield instruction.offset
        before = instruction.opname


def interrupt(call: Callable[[], Any], codes: dict[CodeType, set[int]], at: int) -> bool:
    """Raise at the ``at``-th place where a signal could arrive. Returns True if there was such a place."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if frame.f_code not in codes:
            return None
        frame.f_trace_opcodes = True
        if event == "call" or (event == "opcode" and frame.f_lasti in codes[frame.f_code]):
            count += 1
            if count == at:
                raise Interrupted
        return trace

    sys.settrace(trace)
    try:
        call()
    except Interrupted:
        pass
    finally:
        sys.settrace(None)
    return count >= at


def test_an_interrupt_anywhere_leaves_nothing_taken() -> None:
    functions = (
        Stepper.step, Stepper.try_exclusively, Stepper.check_peers_if_due, progress.ProgressEngine.wait,
        Engine._wait,
    )  # fmt: skip
    codes = {function.__code__: set(after_looks(function.__code__)) for function in functions}

    def program(engine: Engine) -> int:
        driver = engine._progress_engine
        assert driver is not None
        for places in range(1, 2000):  # a busy machine polls for a long time before the work is done
            name = f"n{places}"
            work, interrupted = start(engine, name), False
            if engine.rank == 0:
                interrupted = interrupt(lambda work=work: work.wait(), codes, places)  # type: ignore[misc]
                assert not engine.callers.waiting
            work.wait(20.0)  # also completes work that an interrupt left behind
            again = np.array([interrupted])
            call = Call(Collective.ALLREDUCE, "again", ReduceOp.MAX)
            work = call.submit(engine, (again,), (again,), wake=True)
            work.wait(20.0)
            if not again[0]:
                return places
        raise AssertionError("There was still another place to interrupt after 2000.")

    assert job(2, program, Settings())[0] > 15


def test_without_threads_mpi_is_called_on_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With MPI_THREAD_SINGLE, a process set is split off on the thread that initialized MPI."""
    monkeypatch.setattr(LoopbackTransport, "several_threads", False)
    callers: list[tuple[int, int]] = []
    split = LoopbackTransport.split

    def spying(self: LoopbackTransport, *arguments: Any) -> Any:
        callers.append((self.rank, threading.get_ident()))
        return split(self, *arguments)

    monkeypatch.setattr(LoopbackTransport, "split", spying)

    def program(engine: Engine) -> tuple[int, int]:
        engine.add_process_set([0, 1])
        engine.remove_process_set(1)
        return engine.rank, threading.get_ident()

    assert sorted(job(3, program, threaded=False)) == sorted(callers)


def test_notes_are_read_during_a_long_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step makes progress, so no thread sleeps, but inquiries must be answered anyway."""
    checked: list[int] = []
    check = Stepper._check_peers

    def counting(stepper: Stepper) -> None:
        checked.append(stepper.sets.find(0).state.transport.rank)
        check(stepper)

    monkeypatch.setattr(Stepper, "_check_peers", counting)
    monkeypatch.setattr(stepping, "_CHECK_EVERY", 0.0)

    def program(engine: Engine) -> None:
        state = engine.sets.find(0).state
        assert state is not None

        def busy() -> Iterator[None]:
            while not state.stopped:
                engine.context.achieved += 1
                yield

        engine.sets.machines = (*engine.sets.machines, (state, busy()))
        for _ in range(40):
            start(engine, "A").wait()

    job(2, program, threaded=False)
    assert {0, 1} == set(checked)
