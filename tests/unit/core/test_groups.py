"""Process groups that only their members know, and messages between two ranks."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import numpy as np
import pytest
from loopback_job import job

from ringdance.core import stepping
from ringdance.core.engine import Engine
from ringdance.core.process_sets.registry import FIRST_GROUP
from ringdance.core.reports.stacks import all_stacks
from ringdance.core.request import Collective, Description, ReduceOp, Request, Work
from ringdance.core.ring import Word
from ringdance.core.transfers import Transfer
from ringdance.errors import ProcessSetRemovedError, ShutDownError, StallError
from ringdance.settings import Settings
from ringdance.tools import explain


def submitted(engine: Engine, set_id: int) -> Work:
    description = Description(Collective.ALLREDUCE, ("float64",), ((3,),), ReduceOp.SUM)
    return engine.submit(Request(description, (np.ones(3),), set_id=set_id))


def free(engine: Engine) -> list[int]:
    """Wait until no group is left, for at most 10 seconds, and return the groups that remain."""
    until = time.monotonic() + 10
    while engine.group_numbers() and time.monotonic() < until:
        time.sleep(0.01)
    return engine.group_numbers()


@pytest.mark.parametrize("size", [2, 3])
def test_what_a_rank_that_leaves_has_not_submitted_fails_at_once(size: int) -> None:
    def program(engine: Engine) -> list[str]:
        group = engine.add_group(7, tuple(range(size)))
        submitted(engine, group).wait(20.0)
        # submitted by all ranks, so it completes although rank 0 does not wait for it
        last = submitted(engine, group)
        if engine.rank == 0:
            engine.leave_group(group)
        errors = []
        for _ in range(2 if engine.rank == 1 else 0):  # rank 2 makes no call in the meantime
            with pytest.raises(ProcessSetRemovedError) as caught:
                submitted(engine, group).wait(20.0)
            errors.append(str(caught.value))
        last.wait(20.0)
        assert last.result[0][0] == size
        assert engine.rank == 0 or engine.group_numbers() == [7]
        submitted(engine, 0).wait(20.0)
        engine.leave_group(group)
        assert free(engine) == []
        return errors

    for rank, errors in enumerate(job(size, program)):
        assert len(errors) == 2 * (rank == 1)
        for text in errors:
            assert re.search(r"rank 0 on host loopback \(pid \d+\) has destroyed", text)
            assert f"process group {FIRST_GROUP + 7}, whose members are the ranks {list(range(size))}" in text


def test_a_group_of_one_rank_is_freed() -> None:
    def program(engine: Engine) -> None:
        group = engine.add_group(engine.rank, (engine.rank,))
        assert submitted(engine, group).wait(20.0)[0][0] == 1
        engine.leave_group(group)
        assert engine.process_sets().keys() == {0}

    job(2, program)


def test_a_group_made_while_another_thread_is_long_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping, "_STEP_LIMIT", 0.05)

    def program(engine: Engine) -> float:
        begun = threading.Event()

        def long_step() -> None:
            begun.set()
            time.sleep(0.3)

        thread = threading.Thread(target=lambda: engine._exclusively(long_step))
        if engine.rank == 0:
            thread.start()
            begun.wait(10)
        group = engine.add_group(0, (0, 1))
        if engine.rank == 0:
            thread.join()
        return float(submitted(engine, group).wait(20.0)[0][0])

    assert job(2, program) == [2, 2]


class Message:
    """A transport's request that completes once ``there`` is set."""

    source = 0

    def __init__(self) -> None:
        self.there = threading.Event()

    def test(self) -> bool:
        return self.there.is_set()


def receive(engine: Engine, set_id: int = 0, pending: Any = None, verb: str = "receive") -> Transfer:
    state = engine.sets.find(set_id).state
    assert state is not None
    return Transfer(engine, pending or Message(), state, verb, 12, 1 - engine.rank, 0)


@pytest.mark.parametrize("give_up", [0.0, 0.8])
def test_two_ranks_that_wait_for_messages_of_each_other(give_up: float) -> None:
    """The stall check reports them, and `ringdance explain` recognizes their stacks."""
    messages: list[str] = []
    seen: list[int] = []
    stacks: list[str] = []

    def program(engine: Engine) -> None:
        submitted(engine, 0).wait(20.0)
        message = Message()

        def arrive() -> None:
            seen.append(engine.recorder.words[Word.PENDING])
            stacks.append(all_stacks())
            message.there.set()

        threading.Timer(1.2, arrive).start()
        if give_up:
            with pytest.raises(StallError, match="message of 12 bytes from rank 1 to rank 0"):
                receive(engine, pending=message).wait(20.0)
            return
        receive(engine, pending=message).wait(20.0)

    settings = Settings(stall_check_time=0.4, stall_shutdown_time=give_up, flight_recorder_dir="")
    job(2, program, settings, report=messages.append)
    if not give_up:
        assert "rank 0 on host loopback" in messages[0]
        assert "s for 'message of 12 bytes from rank 1 to rank 0'" in messages[0]
        assert "Not waited for by rank 1 on host loopback" in messages[0]
        assert "it is waiting for 'message of 12 bytes from rank 0 to rank 1'; its " in messages[0]
        assert "Each message needs a send and a receive with the same size and tag." in messages[0]
        assert all(seen)
        frames = [line for line in stacks[0].splitlines() if "core/transfers.py" in line]
        assert explain._WAITS.search("\n".join(frames).replace(", in", " in"))  # as faulthandler writes them


def test_a_message_under_way_is_not_reported() -> None:
    messages: list[str] = []
    message = Message()

    def program(engine: Engine) -> None:
        submitted(engine, 0).wait(20.0)
        if engine.rank == 0:
            threading.Timer(1.0, message.there.set).start()
        receive(engine, pending=message, verb=("send", "receive")[engine.rank]).wait(20.0)

    job(2, program, Settings(stall_check_time=0.4, flight_recorder_dir=""), report=messages.append)
    assert not messages


def test_a_message_of_a_rank_that_has_left_never_comes() -> None:
    def program(engine: Engine) -> str:
        group = engine.add_group(0, (0, 1))
        submitted(engine, group).wait(20.0)
        error = ""
        if engine.rank == 0:
            engine.leave_group(group)
        else:
            with pytest.raises(ProcessSetRemovedError) as caught:
                receive(engine, group).wait(20.0)
            error = str(caught.value)
        submitted(engine, 0).wait(20.0)
        return error

    error = job(2, program)[1]
    assert error.startswith("'message of 12 bytes from rank 0 to rank 1': rank 0 on host loopback")


def test_leaving_while_the_job_ends() -> None:
    def program(engine: Engine) -> None:
        group = engine.add_group(0, (0, 1))
        work = submitted(engine, group) if engine.rank else None
        if engine.rank == 0:
            engine.leave_group(group)
            engine.shutdown()
        else:
            assert work is not None
            with pytest.raises((ProcessSetRemovedError, ShutDownError)):
                work.wait(20.0)

    job(2, program)
