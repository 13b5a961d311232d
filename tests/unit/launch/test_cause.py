"""The first failure is told apart from the failures that follow from it."""

from __future__ import annotations

import random

import pytest

from ringdance.launch.cause import Cause, Ended, Verdict, judge, parse_mark, render


def ended(rank: int, code: int | None, time: float = 1.0, **more: object) -> Ended:
    return Ended(rank, "h", 100 + rank, code, time, **more)  # type: ignore[arg-type]


def mark(rank: int, time: float, message: str = "ValueError: x", kind: str = "exception") -> Cause:
    return Cause(rank, "h", 100 + rank, time, kind, message, "Traceback ...\n" + message)


def verdict(marks: list[Cause], *ends: Ended, **more: object) -> Verdict:
    """Judge the reports in a random order, which must not matter."""
    chance = random.Random(1)
    ends_, marks_ = list(ends), list(marks)
    chance.shuffle(ends_)
    chance.shuffle(marks_)
    result = judge(marks_, {end.rank: end for end in ends_}, **more)  # type: ignore[arg-type]
    assert result
    return result


def test_nothing_failed() -> None:
    assert judge([], {0: ended(0, 0), 1: ended(1, 0)}) is None


def test_the_first_by_time() -> None:
    result = verdict([mark(0, 2.0, "KeyError: k"), mark(1, 1.0)], ended(0, 1, 3.0), ended(1, 7, 2.5))
    assert (result.cause.rank, result.code) == (1, 7)
    assert [cause.rank for cause in result.others] == [0]


def test_of_an_error_on_all_ranks_the_lowest_rank_is_named() -> None:
    text = "CheckpointError: rank 0 on h, checkpoints in logs: No space left on device"
    result = verdict([mark(0, 1.02, text), mark(1, 1.0, text), mark(2, 1.01, text)], ended(0, 5), ended(1, 1))
    assert (result.cause.rank, result.code) == (0, 5)
    assert [cause.rank for cause in result.others] == [1, 2]
    # the ranks report equal messages, but of different failures
    later = verdict([mark(0, 9.0), mark(1, 1.0)], ended(0, 1), ended(1, 1))
    assert later.cause.rank == 1


def test_errors_about_other_ranks_come_second_whenever_they_came() -> None:
    lost = mark(0, 1.0, "ringdance.errors.RankLostError: rank 1 died. Look for its last output.")
    result = verdict([lost], ended(0, 1, 1.1), ended(1, -9, 1.5))
    assert (result.cause.rank, result.code) == (1, 137)


def test_a_lost_host_is_what_its_ranks_failed_of() -> None:
    """Ranks that the launcher ended did not die, so other ranks' guesses about them are not shown."""
    lost = Cause(None, "h", 9, 1.0, "launcher", "host h3 (rank 2): no heartbeat for 30 s")
    guess = "RankLostError: rank 0 on host h (pid 100) died while rank 1 on host h waited. Look for the ..."
    ends = [ended(0, -15, 2.0, by_launcher=True), ended(1, 1, 2.1), ended(2, None, 1.0, why="not reachable")]
    result = verdict([mark(1, 2.1, guess)], *ends, outside=[lost])
    assert result.cause is lost
    assert [(cause.rank, cause.message) for cause in result.others] == [(2, "not reachable")]


def test_a_killed_rank_is_named_with_its_signal() -> None:
    result = verdict([], ended(0, -15, 2.0), ended(1, -11, 1.0))
    assert result.code == 139
    assert "SIGSEGV" in result.cause.message


def test_a_traceback_without_a_mark_is_the_cause() -> None:
    words = "Traceback (most recent call last):\n  File x\nValueError: boom"
    result = verdict([], ended(0, 0), ended(1, 1, last_words=words))
    assert result.cause.message == "ValueError: boom"
    assert result.cause.traceback == words


CRASH = (
    "Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n  File a.py, line 1\n\n"
    "Current thread 0x2 (most recent call first):\n  File train.py, line 7\n\nExtension modules: x (total: 1)"
)


def test_a_fatal_signal_shows_the_thread_in_which_it_arose() -> None:
    result = verdict([], ended(1, -11, last_words=CRASH))
    assert result.cause.traceback == "Current thread 0x2 (most recent call first):\n  File train.py, line 7"


def test_an_exit_while_others_wait_has_its_code_and_its_reason() -> None:
    left = mark(1, 1.0, "rank 1 ended its program while other ranks waited for it", kind="exit")
    result = verdict([left], ended(1, 3, 1.1, last_line="train.py: error: no such file"), ended(0, 1, 1.2))
    assert "exited with code 3 while" in result.cause.message
    assert result.cause.message.endswith("its last line on stderr: train.py: error: no such file")
    assert verdict([left], ended(1, 0, 1.1)).cause.message == left.message


def test_a_rank_that_left_early_is_the_cause_of_others_failing() -> None:
    result = verdict([mark(0, 2.0, "ShutDownError: rank 1 ended")], ended(1, 0, 1.0), ended(0, 1, 2.1))
    assert result.cause.rank == 1
    assert "exited with code 0 while other ranks were still running" in result.cause.message
    assert result.code == 1


def test_a_rank_that_finished_earlier_is_not_blamed_for_anothers_exception() -> None:
    result = verdict([mark(0, 2.0)], ended(1, 0, 1.0), ended(0, 1, 2.1))
    assert result.cause.rank == 0


def test_ends_that_the_launcher_brought_about_do_not_count() -> None:
    result = verdict([], ended(0, -15, 0.5, by_launcher=True), ended(1, 3, 1.0))
    assert (result.cause.rank, result.code, result.others) == (1, 3, ())


def test_ranks_that_mpiexec_killed_take_its_code() -> None:
    result = verdict([], ended(0, 0, by_mpiexec=True), ended(1, -9, by_mpiexec=True), mpiexec=5)
    assert result.code == 5
    assert "MPI_Abort" in result.cause.message


def test_a_killed_mpiexec_comes_before_what_follows() -> None:
    outside = Cause(None, "h", 1, 2.0, "launcher", "mpiexec was killed", code=137)
    result = verdict([], ended(0, None, 1.0), ended(1, -9, 1.0, by_mpiexec=True), outside=[outside])
    assert result.cause is outside
    assert result.code == 137


def test_a_terminated_rank_comes_before_what_mpiexec_and_its_library_end() -> None:
    ends = [ended(0, 14, 1.0), ended(1, -15, 1.2), ended(2, -15, 1.1, by_mpiexec=True), ended(3, 75, 1.0)]
    result = verdict([mark(4, 1.0, "mpi4py.MPI.Exception: MPI_ERR_PROC_FAILED: Process Failure")], *ends)
    assert (result.cause.rank, result.code) == (1, 143)


def test_a_rank_that_left_is_named_though_a_peer_noticed_it_first() -> None:
    lost = "ringdance.errors.RankLostError: rank 1 on host h (pid 101) died while rank 0 on host h waited"
    result = verdict([mark(0, 1.0, lost)], ended(0, 1, 1.1), ended(1, 0, 9.0), ended(2, 0, 8.0))
    assert (result.cause.rank, result.code) == (1, 1)
    result = verdict([], ended(0, 75, 1.0), ended(1, 0, 1.2))
    assert result.cause.rank == 1


def test_a_daemon_that_ended_before_any_rank_failed_is_the_cause() -> None:
    daemon = Cause(None, "h", 1, 1.1, "daemon", "host h: mpiexec's daemon ended")
    ends = [ended(0, -9, 1.0, by_mpiexec=True), ended(1, -11, 1.2)]
    assert verdict([], *ends, outside=[daemon]).cause is daemon
    assert verdict([], ended(0, 3, 1.0), outside=[daemon]).code == 3
    assert judge([], {0: ended(0, 0)}, [daemon]) is None


@pytest.mark.parametrize("seed", range(20))
def test_never_zero(seed: int) -> None:
    chance = random.Random(seed)
    ends = {
        rank: ended(
            rank, chance.choice([0, 0, 1, -9, None]), chance.random(), by_mpiexec=chance.random() < 0.3
        )
        for rank in range(4)
    }
    result = judge([], ends, mpiexec=0)
    assert (result is None) == (not any(end.failed for end in ends.values()))
    assert result is None or result.code != 0


def test_the_frame_shows_the_cause_once() -> None:
    result = verdict([mark(1, 1.0), mark(0, 2.0)], ended(0, 1, 3.0), ended(1, 1, 3.0))
    text = render(result, 2, "logs")
    assert text.count("Traceback") == 1
    assert "first failure: rank 1 of 2 on h, pid 101: ValueError: x" in text
    assert "then rank 0 on h, pid 100: the same error" in text
    assert "logs" in text


def test_a_long_message_is_shown_once() -> None:
    text = "DeadlockError: " + "rank 0 waits for a " * 20
    first, other = mark(0, 1.0, text + "(Last batches: /tmp/a-0.json)"), mark(1, 1.1, text.rstrip())
    shown = render(verdict([first, other], ended(0, 1), ended(1, 1)), 2)
    assert shown.count(text.strip().partition(": ")[2]) == 1
    assert shown.count("/tmp/a-0.json") == 1
    assert "DeadlockError: (see above)" in shown
    unnamed = mark(0, 1.0, "x" * 400)
    assert render(verdict([unnamed], ended(0, 1)), 2).count("(see above)") == 1
    assert "then rank 1 on h, pid 101: the same error" in shown


@pytest.mark.parametrize(
    "line", [b"", b"::ringdance-cause:: {", b"::ringdance-cause:: []", b'::ringdance-cause:: {"rank": 1}']
)
def test_what_is_not_a_mark(line: bytes) -> None:
    assert parse_mark(line) is None
