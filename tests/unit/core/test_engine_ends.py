"""How an engine ends: by agreement, kill, interrupt or stall, and what it records."""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from by_numpy import same
from loopback import LoopbackTransport, RankKilled
from loopback_job import bind, job, world_for

import ringdance.numpy as hvd
from ringdance.core import progress, stepping
from ringdance.core.engine import Engine
from ringdance.core.recorder import StepMark
from ringdance.core.request import Collective, Description, ReduceOp, Request
from ringdance.errors import CollectiveError, EngineError, RankLostError, ShutDownError, StallError
from ringdance.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(flight_recorder_dir=str(tmp_path), stall_check_time=0.3)


def request_of(name: str | None, value: float = 1.0, length: int = 3) -> Request:
    array = np.full(length, value)
    return Request(
        Description(Collective.ALLREDUCE, ("float64",), ((length,),), ReduceOp.SUM), (array,), None, name
    )


def test_timeout_of_a_wait(settings: Settings) -> None:
    """A timed-out wait leaves the operation running, and the same work can be waited for again."""

    def program(engine: Engine) -> None:
        if engine.rank == 0:
            work = engine.submit(request_of("late"))
            with pytest.raises(TimeoutError, match="'late' did not complete within the timeout"):
                work.wait(0.05)
            assert not work.done()
            engine.submit(request_of("go")).wait()
        else:
            engine.submit(request_of("go")).wait()
            work = engine.submit(request_of("late"))
        same(work.wait(20.0)[0], np.full(3, 2.0))

    job(2, program, settings)


def test_nothing_starts_before_it_is_wanted(settings: Settings) -> None:
    def program(engine: Engine) -> None:
        quiet = engine.submit(request_of("quiet"), wake=False)
        engine.submit(request_of("meet"), wake=True).wait()
        time.sleep(0.01)
        other = engine.submit(request_of("flushed"), wake=False)
        engine.flush()
        while not other.done():  # the engine's own thread completes it
            time.sleep(0.001)
        same(quiet.wait()[0], np.full(3, 2.0))

    job(2, program, settings)


def test_an_idle_engine_takes_no_steps(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(engine: Engine) -> int:
        hvd.barrier()
        time.sleep(0.05)
        steps = 0
        step = engine._stepper.step

        def counted() -> bool:
            nonlocal steps
            steps += 1
            return step()

        monkeypatch.setattr(engine._stepper, "step", counted)
        time.sleep(0.5)
        counted_steps = steps
        hvd.barrier()
        return counted_steps

    assert job(2, program, settings) == [0, 0]


def test_a_killed_rank_is_named(settings: Settings, tmp_path: Path) -> None:
    world = world_for(settings, 3)

    def program(engine: Engine) -> None:
        hvd.barrier()
        if engine.rank == 1:
            world.kill(1)
            engine.end.closed = True  # the process is dead, so none of its threads continues
            raise RankKilled
        with pytest.raises(RankLostError, match=r"rank 1 on host loopback \(pid \d+\) died"):
            hvd.allreduce(np.ones(3), name="never")
        with pytest.raises(RankLostError, match="rank 1"):
            hvd.allreduce(np.ones(3))

    job(3, program, settings, world=world)
    dumps = sorted(tmp_path.glob("*.json"))
    assert dumps
    assert all("rank 1" in json.loads(path.read_text())["reason"] for path in dumps)


@pytest.mark.parametrize("leaves", [True, False])
def test_a_flight_record_is_left_only_where_an_error_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    """A failing rank shows its own exception, and the other ranks name that rank."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def program(engine: Engine) -> list[str]:
        hvd.barrier()
        if leaves and engine.rank == 1:
            engine.leave("rank 1 ended with ValueError: x")
            return []
        with pytest.raises((RankLostError, StallError)) as caught:
            hvd.allreduce(np.ones(2), name=f"{engine.rank > 0}")
        return re.findall(r"Last batches: (\S+)\)", str(caught.value))

    settings = Settings(stall_check_time=0.3, stall_shutdown_time=0.6)
    named = [path for paths in job(3, program, settings, report=lambda text: None) for path in paths]
    assert sorted(named) == sorted(map(str, tmp_path.glob("ringdance-flight-*")))
    assert bool(named) == (not leaves)  # two ranks may detect a stall at the same time


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("name", ["broken", None])
def test_an_exception_in_a_step_breaks_the_engine_everywhere(
    settings: Settings, kind: type[BaseException], name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ringdance.core.exchange.shared_memory import SharedMemoryExchange

    arm = threading.Event()
    usual = SharedMemoryExchange.allreduce

    def allreduce(self: SharedMemoryExchange, *given: Any) -> Any:
        if arm.is_set() and self.rank == 1:
            raise kind("as if by Ctrl-C")
        return usual(self, *given)

    monkeypatch.setattr(SharedMemoryExchange, "allreduce", allreduce)

    def program(engine: Engine) -> BaseException:
        hvd.barrier()
        arm.set()
        hvd.barrier()
        with pytest.raises((CollectiveError, KeyboardInterrupt)) as caught:
            hvd.allreduce(np.ones(3), name=name)
        assert engine.end.broken is not None
        with pytest.raises(CollectiveError):
            hvd.allreduce(np.ones(3), name="after")
        return caught.value

    zero, one, two = job(3, program, settings)
    if kind is ValueError:
        assert isinstance(one, EngineError)
        assert "rank 1 on host loopback" in str(one)
        assert "ValueError: as if by Ctrl-C" in str(one)
    for other in (zero, two):
        assert isinstance(other, RankLostError)
        assert "rank 1 on host loopback" in str(other)


@pytest.mark.parametrize("waiting", [True, False])
def test_an_error_while_looking_for_notes_breaks_the_engine(settings: Settings, waiting: bool) -> None:
    """An error on the engine's own thread, where no caller would see it, also breaks the engine."""

    def program(engine: Engine) -> None:
        hvd.barrier()
        if engine.rank == 0:

            def messages() -> list[tuple[int, bytes]]:
                raise OSError("the network is down")

            engine.transport.messages = messages  # type: ignore[method-assign]
            if waiting:
                with pytest.raises(EngineError, match="OSError: the network is down"):
                    hvd.allreduce(np.ones(3), name="never")
            while engine.end.broken is None:
                time.sleep(0.01)
        with pytest.raises(CollectiveError, match="OSError: the network is down"):
            hvd.allreduce(np.ones(3), name="after")

    job(2, program, settings)


def test_the_recorder_writes_what_went_before(settings: Settings, tmp_path: Path) -> None:
    def program(engine: Engine) -> str:
        for step in range(3):
            hvd.allreduce(np.ones(3), name=f"step {step}")
        pending = engine.submit(request_of("open"), wake=False)
        hvd.barrier()
        if engine.rank == 0:
            engine.leave("rank 0 ended with ValueError: for the test")
        with pytest.raises(RankLostError, match="for the test") as caught:
            pending.wait()
        return str(caught.value)

    texts = job(2, program, settings)
    for rank in range(2):
        path = tmp_path / f"ringdance-flight-rank{rank}-{os.getpid()}.json"
        assert oct(path.stat().st_mode & 0o777) == "0o600"
        assert str(path) in texts[rank]
        content = json.loads(path.read_text())
        assert content["rank"] == rank
        assert content["pid"] == os.getpid()
        assert "for the test" in content["reason"]
        assert content["pending"] == ["open"]
        names = [
            name
            for record in content["records"]
            if record["kind"] == "batch"
            for name in record["details"]["names"]
        ]
        assert [name for name in names if name.startswith("allreduce.step")] == [
            f"allreduce.step {step}" for step in range(3)
        ]


def test_a_stall_is_said_by_the_lowest_rank_and_ends_the_job_in_time(tmp_path: Path) -> None:
    messages: list[str] = []
    settings = Settings(stall_check_time=0.5, stall_shutdown_time=2.0, flight_recorder_dir=str(tmp_path))

    def program(engine: Engine) -> None:
        with pytest.raises((StallError, RankLostError), match="This rank gave up"):
            hvd.allreduce(np.ones(2), name="this" if engine.rank == 0 else "that")
        with pytest.raises((StallError, RankLostError)):
            hvd.barrier()

    job(3, program, settings, report=messages.append)
    words = next(text for text in messages if "'allreduce.that'" in text)
    assert words.startswith("rank 0 on host loopback")
    assert "'allreduce.this'" in words
    assert "rank 1 on host loopback" in words
    assert "rank 2 on host loopback" in words


@pytest.mark.parametrize("threaded", [True, False])
def test_what_an_interrupt_has_taken_out_fails_too(settings: Settings, threaded: bool) -> None:
    """A Ctrl-C between removing a ``Work`` from the lists and completing it must fail its waiters."""

    def program(engine: Engine) -> None:
        engine.submit(request_of("x"), wake=False).wait()  # from now on, its data travel with the vector

        def interrupted(*record: object) -> None:
            raise KeyboardInterrupt

        if engine.rank == 0:
            engine.recorder.small_batch = interrupted  # type: ignore[method-assign]
        work = engine.submit(request_of("x"), wake=False)
        if engine.rank == 0:
            with pytest.raises(KeyboardInterrupt):
                work.wait(20.0)
            with pytest.raises(EngineError, match="was interrupted"):
                work.wait(20.0)
        else:
            work.wait(20.0)

    job(2, program, settings, threaded=threaded)


def test_shutdown_ends_what_others_wait_for(settings: Settings) -> None:
    def program(engine: Engine) -> bool:
        hvd.barrier()
        if engine.rank == 1:
            assert engine.shutdown("has had enough")
            assert engine.end.stopped_first
            return engine.end.unclean
        with pytest.raises(ShutDownError, match=r"rank 1 on host loopback .* has had enough"):
            hvd.allreduce(np.ones(3), name="never")
        with pytest.raises(ShutDownError, match="No further operations can be submitted"):
            hvd.barrier()
        assert engine.shutdown()
        return engine.end.unclean

    assert job(3, program, settings) == [True] * 3


def test_a_program_that_ends_early_has_skipped_a_step_or_run_out_of_data(settings: Settings) -> None:
    text = r"rank 1 .* ended its program .* Rank 0 has made 1 step\. .* skipped .* hvd\.shard\(.* hvd\.join"

    def program(engine: Engine) -> None:
        hvd.barrier()
        engine.recorder.step(StepMark.OPTIMIZER)
        if engine.rank == 1:
            engine.shutdown("has ended its program", departing=True)
            return
        with pytest.raises(ShutDownError, match=text):
            hvd.allreduce(np.ones(3), name="gradient")

    job(2, program, settings)


def test_a_clean_end(settings: Settings) -> None:
    def program(engine: Engine) -> tuple[bool, bool]:
        hvd.allreduce(np.ones(3))
        return engine.shutdown(), engine.end.unclean

    assert job(4, program, settings, hosts=("a", "a", "b", "b")) == [(True, False)] * 4


def test_a_rank_that_does_not_come_to_the_end_is_named(settings: Settings) -> None:
    """If the engine of a rank does not respond, shutdown gives up after its timeout and names that rank."""
    world = world_for(settings, 2)
    over = threading.Event()

    def rank(transport: Any) -> None:
        if transport.rank == 1:
            over.wait(30)
            return
        engine = Engine(transport, settings)
        with bind(engine):
            assert not engine.shutdown(timeout=0.3)
        assert "rank 1 on host loopback" in str(engine.end.broken)
        over.set()

    world.run(rank)


@pytest.mark.parametrize("end", ["leave", "shutdown"])
def test_one_thread_at_a_time_sends_and_reads_notes(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Only one thread at a time sends and reads notes, or MPI would test the same requests on two threads."""
    monkeypatch.setattr(progress, "_IDLE", 1e-4)
    monkeypatch.setattr(stepping, "_CHECK_EVERY", 0.0)
    busy: set[LoopbackTransport] = set()
    together: list[str] = []

    def alone(name: str) -> None:
        usual = getattr(LoopbackTransport, name)

        def call(self: LoopbackTransport, *given: Any) -> Any:
            if self in busy:
                together.append(f"{name} on {threading.current_thread().name}")
            busy.add(self)
            time.sleep(1e-4)
            busy.discard(self)
            return usual(self, *given)

        monkeypatch.setattr(LoopbackTransport, name, call)

    alone("post")
    alone("messages")

    def program(engine: Engine) -> None:
        for number in range(100):
            with engine.pause_stall_check(f"evaluation {number}", 10.0):
                engine.post_all({"kind": "monitor"})
        if end == "leave":
            engine.leave("planted")

    job(2, program, settings)
    assert not together
