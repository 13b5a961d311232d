"""What a stall report says about each thing that the other ranks may be doing."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from loopback_job import job

from ringdance.core import labels
from ringdance.core.engine import Engine
from ringdance.core.reports.procfs import describe_threads, sample_cpu
from ringdance.core.reports.stacks import thread_locations, user_frames
from ringdance.core.reports.stall_message import Stall, stall_message
from ringdance.core.request import Collective, ReduceOp
from ringdance.core.ring import Word
from ringdance.core.stalls import StallWatch
from ringdance.core.transport.base import Identity
from ringdance.core.transport.single import SingleTransport
from ringdance.settings import Settings
from ringdance.training.collectives import Call, join

WHO = tuple(Identity(rank, f"host{rank // 2}", 100 + rank) for rank in range(4))
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def thread(*frames: str, name: str = "main thread", pending: bool = False) -> dict[str, Any]:
    return {"name": name, "pending": pending, "frames": list(frames)}


OWN = {"threads": [thread("train.py:7 in step")], "pending": [[0, "grad"]]}


def answer(
    *names: str, waiting: bool = True, joined: bool = False, due: bool = True, threads: Any = None
) -> dict[str, Any]:
    return {
        "pending": [[0, name] for name in names],
        "due": [0] if due else [],
        "waiting": waiting,
        "joined": joined,
        "after": "7 steps",
        "threads": threads or [thread("other.py:9 in f")],
    }


def message(answers: dict[int, dict[str, Any]], **others: Any) -> str:
    known: dict[str, Any] = {"status": OWN, "name": "grad", "set_id": 0, "others": [0, 2, 3], "waits": True}
    known |= {"unanswered": {rank: "its process has exited" for rank in range(4)}} | others
    return stall_message(Stall(WHO, 1, seconds=12.4, answers=answers, **known))


def test_names_on_both_sides_with_lines() -> None:
    report = message({0: answer("grad"), 2: answer("grad"), 3: answer("loss", "metric")})
    assert report.startswith("rank 1 on host host0 (pid 101) has waited 12 s for 'grad'")
    assert "train.py:7 in step" in report
    assert (
        "rank 3 on host host1 (pid 103): it is waiting for 'loss', 'metric', which no other rank has "
        "submitted; its main thread is at other.py:9 in f"
        in report
    )
    assert "rank 0 " not in report
    assert "rank 2 " not in report


def test_another_ranks_labels_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "_tensors", {})
    labels.note("grad", "here", "gradients", ["w", "b"])
    labels.adopt({"grad": "gradients of x", "loss": "gradients of y", "metric": "gradients of w and 1 more"})
    text = message({0: answer("grad"), 2: answer("grad"), 3: answer("loss", "metric")})
    assert "has waited 12 s for the gradients of w and 1 more (" in text
    assert "it is waiting for the gradients of y, the gradients of w and 1 more ('metric'), which no" in text


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (answer(waiting=False), "it is not waiting for anything"),
        (answer("loss", waiting=False), "it has submitted 'loss'"),
        (answer(), "it is waiting in another process set"),
        (answer(joined=True), "it has joined after 7 steps"),
        (answer(*map(str, range(9))), "'5' and 3 more"),
    ],
)
def test_what_another_rank_does(found: dict[str, Any], words: str) -> None:
    assert words in message({0: answer("grad"), 2: answer("grad"), 3: found})


def test_the_rank_that_alone_waits_for_something_is_named() -> None:
    report = message({0: answer("loss"), 2: answer("loss"), 3: answer("loss")})
    assert "Only rank 1 has submitted 'grad'." in report
    assert "Only rank" not in message({0: answer("loss"), 2: answer("loss"), 3: answer("metric")})


@pytest.mark.parametrize(
    ("found", "fewer_steps"),
    [
        (answer("barrier"), True),
        (answer("barrier", joined=True), False),
        (answer(waiting=False), False),  # for example, it sleeps
        (answer("allreduce.loss", waiting=False), False),  # and has submitted something earlier
    ],
)
def test_steps_that_a_rank_has_not_made(found: dict[str, Any], fewer_steps: bool) -> None:
    """If a rank waits elsewhere, the report names two possible causes and each rank's number of steps."""
    status = OWN | {"after": "8 steps"}
    answers = {0: answer("allreduce.grad"), 2: found}
    report = message(answers, name="allreduce.grad", others=[0, 2], status=status)
    made = "So far rank 1 has made 8 steps, rank 2 has made 7 steps."
    causes = re.search(rf"{made}.* skipped .*run out of data", report)
    assert bool(causes) == ("hvd.join()" in report) == fewer_steps


def test_what_a_rank_has_marked_is_named() -> None:
    report = message({0: answer("grad"), 2: answer("grad"), 3: answer()}, pauses={3: "evaluation"})
    assert "rank 3 on host host1 (pid 103): it is in a block marked 'evaluation'; it is waiting in" in report


def test_the_limit_follows_the_steps_unless_it_is_set() -> None:
    """Nine steps of 8 s, in each of which this rank waits 6 s, then a compilation of 60 s or ten minutes."""
    explicit = Settings(origins={"stall_check_time": "environment variable X"})
    now = time.monotonic()
    for settings, limits in ((Settings(), (4.0, 8.0, 60.0, 120.0)), (explicit, (4.0,) * 4)):
        engine = Engine(SingleTransport(), settings)
        recorder, callers = engine.recorder, engine.callers
        watch = StallWatch(engine.transport, settings, engine.sets, callers, recorder)
        measured = [watch._limit(now + 1)]
        for number in range(9):
            recorder.words[Word.BATCHES] += 1
            recorder.words[Word.STEPS] += 1
            recorder.words[Word.WAITED] += 6 * 10**9
            watch._note_pace(now + 8 * number)
        measured += [watch._limit(now + 64 + seconds) for seconds in (1, 60, 600)]
        assert measured == pytest.approx(limits, abs=0.1)


def test_a_rank_that_does_not_answer_is_not_said_to_be_late() -> None:
    report = message({0: answer("grad"), 2: answer("grad")})
    assert report.endswith(" No answer from rank 3 on host host1 (pid 103): its process has exited.")


def test_the_same_name_in_another_set_does_not_count() -> None:
    other = {**answer(), "pending": [[5, "grad"]]}
    assert "rank 3" in message({0: answer("grad"), 2: answer("grad"), 3: other})


def test_who_has_submitted_and_computes_on_is_named() -> None:
    report = message({0: answer("grad"), 2: answer("grad"), 3: answer("grad", due=False, waiting=False)})
    words = "Submitted but not yet waited for by rank 3 on host host1 (pid 103): its main thread is at other"
    assert words in report
    assert "slow" not in report


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"moving": True}, "and its exchange is in progress."),
        ({"in_round": True, "idle": 9.0}, "its exchange has made no progress for 9 s."),
        (
            {"in_round": True, "idle": 9.0, "behind": [2]},
            "made no progress for 9 s: it is waiting for rank 2 on host host1 (pid 102): its main thread",
        ),
        ({"idle": 9.0}, "no exchange has started for 9 s."),
    ],
)
def test_all_have_submitted_it(facts: dict[str, Any], words: str) -> None:
    answers = {rank: answer("grad") for rank in (0, 2, 3)}
    assert words in message(answers, **facts)


def test_an_exchange_that_moves_is_no_stall() -> None:
    known: Any = {"status": OWN, "seconds": 9.0, "waits": True, "name": "grad", "set_id": 0, "others": [0]}
    known |= {"identities": WHO, "rank": 1, "unanswered": {0: ""}, "idle": 0.1}
    assert Stall(answers={0: answer("grad")}, **known).under_way(4.0)
    assert Stall(answers={}, **known, in_round=True, moving=True).under_way(4.0)
    assert not Stall(answers={}, **known, in_round=True).under_way(4.0)
    assert not Stall(answers={0: answer()}, **known, moving=True).under_way(4.0)
    assert not Stall(answers={0: answer("grad", due=False)}, **known, moving=True).under_way(4.0)


@pytest.mark.parametrize(
    ("answers", "culprits"),
    [
        ({0: answer("grad"), 2: answer(), 3: answer("grad", due=False)}, [2]),
        ({0: answer("grad"), 2: answer("grad"), 3: answer("grad", due=False)}, [3]),
        ({0: answer("grad"), 3: answer("grad", due=False)}, [3]),  # rank 2 has not answered
        ({0: answer("grad"), 3: answer("grad")}, [2]),
        ({rank: answer("grad") for rank in (0, 2, 3)}, [0]),
        ({rank: answer("loss") for rank in (0, 2, 3)}, [1]),  # only this rank has submitted it
        ({0: answer("loss"), 2: answer("loss"), 3: answer("metric")}, [0, 2, 3]),
    ],
)
def test_the_ranks_that_others_wait_for(answers: dict[int, dict[str, Any]], culprits: list[int]) -> None:
    known: Any = {"status": OWN, "seconds": 9.0, "waits": True, "name": "grad", "set_id": 0, "behind": [0]}
    known |= {"unanswered": {2: "its process has exited"}, "others": [0, 2, 3], "answers": answers}
    assert Stall(WHO, 1, **known).culprits == culprits


def test_what_was_submitted_and_is_not_waited_for() -> None:
    report = message({0: answer(waiting=False)}, set_id=3, others=[0], waits=False)
    assert "rank 1 on host host0 (pid 101) submitted 12 s ago 'grad' in process set 3" in report


def test_the_line_that_differs_is_shown_where_a_helper_function_calls_us() -> None:
    helper, script = "utils.py:4 in metric_average", "train.py:120 in <module>"
    own = {"threads": [thread(helper, "train.py:80 in train", script)]}
    late = [thread(helper, "train.py:95 in evaluate", script)]
    text = message({0: answer(), 2: answer(threads=late), 3: answer(threads=late)}, status=own, others=[2, 3])
    assert f"(its main thread is at {helper}, called from train.py:80 in train)" in text
    said_of_one_line = message({2: answer(threads=own["threads"])}, status=own, others=[2])
    assert said_of_one_line.count(f"at {helper}, called from train.py:80 in train") == 2
    assert text.count(f"its main thread is at {helper}, called from train.py:95 in evaluate") == 2
    elsewhere = [thread("train.py:97 in evaluate", script)]
    text = message({2: answer(threads=elsewhere)}, status=own, others=[2])
    assert f"(its main thread is at {helper}, called from train.py:80 in train)" in text
    assert f"its main thread is at train.py:97 in evaluate, called from {script}. " in text


def test_other_threads_are_shown_where_they_matter() -> None:
    main, loader = thread("train.py:9 in main"), thread("data.py:3 in load", name="thread 'loader'")
    own = {"threads": [thread("train.py:70 in loop", name="thread 'trainer'", pending=True), main, loader]}
    report = message({2: answer(threads=[main, loader])}, status=own, others=[2])
    assert "(its thread 'trainer' is at train.py:70 in loop; its main thread is at train.py:9 in" in report
    assert "its main thread is at train.py:9 in main; its thread 'loader' is at data.py:3 in load. " in report


@pytest.mark.parametrize(
    ("name", "set_id", "expected"),
    [
        ("grouped_allreduce.gradients.1a2b.0", 0, True),
        ("allreduce.loss", 0, True),
        ("allgather.rows", 0, False),  # ``hvd.join()`` would not help
        ("allreduce.loss", 2, False),
    ],
)
def test_what_to_do_where_a_rank_has_no_more_data(name: str, set_id: int, expected: bool) -> None:
    status = OWN | {"after": "8 steps"}
    report = message({0: answer("barrier")}, name=name, set_id=set_id, others=[0], status=status)
    advised = "ends='pad'" in report and "hvd.join() after the last batch" in report
    assert advised is expected


def test_threads_in_the_users_code_are_found() -> None:
    done = threading.Event()

    def work() -> None:
        done.wait()  # the other thread is here

    other = threading.Thread(target=work, name="worker")
    other.start()
    try:
        while not any(location["name"] == "thread 'worker'" for location in thread_locations()):
            time.sleep(0.01)
        first, second = thread_locations([other.ident])[:2]
    finally:
        done.set()
        other.join()
    assert (first["name"], first["pending"]) == ("thread 'worker'", True)
    assert first["frames"][0].endswith(" in work")
    assert (second["name"], second["pending"]) == ("main thread", False)
    assert "test_watch.py:" in second["frames"][0]


@pytest.mark.parametrize(
    ("path", "module", "users"),
    [
        ("/env/lib/python3.12/site-packages/torch/nn/linear.py", "torch.nn.linear", False),
        ("/usr/lib/python3/dist-packages/yaml/__init__.py", "yaml", False),
        (threading.__file__, "threading", False),
        ("<frozen runpy>", "runpy", False),
        ("/home/me/horovod/compat/src/horovod/torch/mpi_ops.py", "horovod.torch.mpi_ops", False),
        ("/home/me/src/ringdance/torch/operations.py", "ringdance.torch.operations", False),
        ("/home/me/ringdance/train.py", "__main__", True),
        ("/home/me/horovod/model.py", "model", True),
    ],
)
def test_libraries_are_not_the_users(path: str, module: str, users: bool) -> None:
    space: dict[str, Any] = {"__name__": module}
    exec(compile("def call(function):\n    return function()", path, "exec"), space)
    inner, *outer = space["call"](lambda: user_frames([f for f, _ in traceback.walk_stack(sys._getframe(1))]))
    assert inner.startswith(path if users else __file__)
    assert not users or outer[0].startswith(__file__)


@linux
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import ctypes; print(flush=True); ctypes.PyDLL(None).usleep(9000000)", "its main thread sleeps, "),
        ("print(flush=True)\nwhile True: pass", "its main thread computes"),
    ],
)
def test_a_process_seen_from_outside(script: str, words: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        before = sample_cpu(process.pid)
        time.sleep(0.3)
        assert words in describe_threads(process.pid, before)
    finally:
        process.kill()
        process.wait()
    assert describe_threads(process.pid, None) == ""


def test_a_host_that_does_not_answer_is_not_looked_into() -> None:
    """If no rank of a host answers, the host may be switched off."""
    transport = Mock(identities=WHO, **{"state.return_value": "unknown"})
    watch = StallWatch(transport, Settings(), Mock(), Mock(), Mock(words=[0] * 64))
    inquiry = Mock(seen={2: {"text": "its main thread sleeps", "stacks": "x"}}, cpu={3: None})
    stacks: dict[int, str] = {}
    text = watch._outside(3, inquiry, stacks)
    assert text.startswith("no rank on its host answers: host1 is down or unreachable (`ping host1`), or")
    assert "py-spy" not in text
    assert watch._outside(2, inquiry, stacks) == "its main thread sleeps"
    assert stacks == {2: "x", 3: ""}


def run_late(program: Callable[[Engine, list[str]], None], **settings: Any) -> list[str]:
    """Run a program on two ranks and return the messages it reports."""
    messages: list[str] = []
    limits = Settings(stall_check_time=0.4, origins={"stall_check_time": "environment variable"}, **settings)
    job(2, lambda engine: program(engine, messages), limits, report=messages.append)
    return messages


def test_time_counts_from_when_a_thread_waits_and_who_computes_on_is_late() -> None:
    """Waiting starts when a thread waits, not at submission.

    Both ranks submit early without waking the engine, as if all cores were busy. One of them starts to wait
    1 s earlier.
    """

    def program(engine: Engine, said: list[str]) -> None:
        work = Call(Collective.ALLREDUCE, "gradient", ReduceOp.AVERAGE).submit(engine, (np.ones(3),))
        time.sleep(0.6)
        assert not said  # longer than stall_check_time, but no thread has waited yet
        if engine.rank == 1:
            time.sleep(1.0)
        work.wait()

    text = run_late(program)[0]
    # not 2 s, which would count from the submission
    assert re.search("has waited [01] s for 'allreduce.gradient'", text)
    assert "Submitted but not yet waited for by rank 1" in text


def test_a_rank_in_join_is_seen_to_wait() -> None:
    """``ringdance explain`` must not call a rank in ``hvd.join()`` late."""
    engines = []

    def program(engine: Engine, said: list[str]) -> None:
        if engine.rank == 0:
            engines.append(engine)
        until = time.monotonic() + 20
        while engine.rank == 1 and not (engines and engines[0].recorder.words[Word.PENDING]):
            assert time.monotonic() < until
            time.sleep(0.02)
        join(engine)

    run_late(program)


def test_one_report_speaks_for_all_that_is_behind() -> None:
    def program(engine: Engine, said: list[str]) -> None:
        works = []
        for i in range(7):
            if engine.rank == 1:
                time.sleep(0.1 if i else 0.6)
            works.append(Call(Collective.ALLREDUCE, f"g{i}").submit(engine, (np.ones(3),), wake=True))
        for work in works:
            work.wait()

    assert len(run_late(program)) <= 3  # reports are at least 0.4 s apart


def test_more_names_than_are_sent() -> None:
    def program(engine: Engine, said: list[str]) -> None:
        works = [Call(Collective.ALLREDUCE, f"g{i}").submit(engine, (np.ones(3),)) for i in range(300)]
        if engine.rank == 1:
            time.sleep(0.7)
        works[299 if engine.rank == 0 else 0].wait()
        for work in works:
            work.wait()

    (text,) = run_late(program)
    assert "'allreduce.g299'" in text
    assert "Submitted but not yet waited for by rank 1" in text
