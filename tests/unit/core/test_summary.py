"""The summary at the end of a run."""

from __future__ import annotations

import numpy as np
import pytest
from loopback_job import job

import ringdance.numpy as hvd
from ringdance.core import ends
from ringdance.core.engine import Engine
from ringdance.core.reports.summary import Figures, RunSummary, summary_lines
from ringdance.core.ring import Ring, Word
from ringdance.core.transport.base import Identity
from ringdance.settings import Settings

RANKS = [Identity(rank, f"h{rank // 2}", 100 + rank) for rank in range(4)]


def figures(*busy: float, step: float = 0.02, steps: int = 1000) -> dict[int, Figures]:
    return {rank: Figures(steps, steps * step, steps * (step - seconds)) for rank, seconds in enumerate(busy)}


def test_three_lines_name_the_rank_that_waits_least() -> None:
    lines = summary_lines(RANKS, figures(0.01, 0.0101, 0.0135, 0.01), 125)
    assert lines == [
        "4 ranks on 2 hosts, 2 min 5 s: 1001 steps, 50 steps/s (20 ms each)",
        "exposed communication: 45.5% of the time, 9.1 ms per step; 2.6 ms of it waiting for slower ranks",
        "slowest rank: rank 2 on host h1 (pid 102), 35% slower than the others: 13.5 ms per step without "
        "waiting, against 10 ms",
    ]


def test_small_differences_are_called_so() -> None:
    lines = summary_lines(RANKS, figures(0.0101, 0.01, 0.01, 0.01), 60)
    assert lines[2] == "slowest rank: rank 0 on host h0 (pid 100), by 1%: all are about equally fast"


def test_no_rank_is_blamed_for_a_few_steps() -> None:
    lines = summary_lines(RANKS, figures(0.01, 0.01, 0.02, 0.01, steps=3), 61)
    assert lines[2] == "slowest rank: unknown (4 steps are too few to tell)"


def test_what_is_missing_is_said() -> None:
    known = figures(0.01, 0.01)
    unknown = "slowest rank: unknown (no figures from 2 ranks)"
    assert summary_lines(RANKS, known, 60)[2] == unknown
    known.update(figures(0.01, 0.01, 0.01))
    assert summary_lines(RANKS, known, 60)[2] == unknown.replace("2 ranks", "1 rank")
    known = {rank: Figures(0, 100, 25) for rank in range(4)}
    first, second, _ = summary_lines(RANKS, known, 100)
    assert first.endswith("no steps were counted. Call hvd.mark_step() after each step")
    assert second == "exposed communication: 25.0% of the time"
    assert len(summary_lines(RANKS[:1], figures(0.02), 60)) == 1
    assert summary_lines(RANKS[:1], known, 60) == []


def test_what_is_before_the_first_step_and_after_the_last_does_not_count() -> None:
    words = Ring().words
    summary = RunSummary(words, 1e-9, 1)
    second = 1_000_000_000
    words[Word.STEPS], words[Word.FIRST_STEP], words[Word.LAST_STEP] = 101, 50 * second, 60 * second
    words[Word.FIRST_WAITED], words[Word.LAST_WAITED] = 40 * second, 42 * second
    words[Word.WAITED] = 99 * second
    assert summary.figures() == (100, 10, 2, True)
    assert summary.lines(RANKS[:1])[0].endswith("101 steps, 10 steps/s (100 ms each)")
    assert RunSummary(words, 0, 1).lines(RANKS[:1]) == []


def test_waiting_that_cannot_be_seen_is_not_said_to_be_none() -> None:
    known = figures(0.01, 0.01, 0.01)
    lines = summary_lines(RANKS, {**known, 3: known[2]._replace(known=False)}, 60)
    assert lines[1:] == [
        "exposed communication, slowest rank: unknown, because the script polled for results, or never "
        "waited for a result. Any other waiting in the script cannot be observed"
    ]


def test_who_polls_or_never_waits_has_no_figures() -> None:
    def program(engine: Engine) -> list[bool]:
        known = [engine.summary.figures().known]
        engine.recorder.words[Word.BATCHES] = 1  # as if no caller had waited for a result
        known.append(engine.summary.figures().known)
        hvd.allreduce(np.ones(3), name="x")
        engine.recorder.publish()
        known.append(engine.summary.figures().known)
        if engine.rank:
            hvd.allreduce(np.ones(3), name="y")
        handle = hvd.allreduce(np.ones(3), name="late", wait=False)
        if not engine.rank:
            assert not hvd.poll(handle)  # the other rank still waits for "y"
            hvd.allreduce(np.ones(3), name="y")
        hvd.synchronize(handle)
        known.append(engine.summary.figures().known)
        return known

    assert job(2, program) == [[True, False, True, False], [True, False, True, True]]


def test_the_figures_of_all_ranks_are_at_rank_0_when_they_have_stopped() -> None:
    lines = job(3, ended, Settings(summary_time=1e-6))
    assert [len(rank_lines) for rank_lines in lines] == [3, 0, 0]
    assert lines[0][2].startswith("slowest rank: rank ")


def test_a_rank_without_figures_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = RunSummary.wanted
    monkeypatch.setattr(ends, "_FIGURES_S", 0.1)
    monkeypatch.setattr(RunSummary, "wanted", lambda self, tolerance=1.0: wanted(self) and tolerance == 1.0)
    lines = job(3, ended, Settings(summary_time=1e-6))
    assert lines[0][2] == "slowest rank: unknown (no figures from 2 ranks)"


def ended(engine: Engine) -> list[str]:
    for _ in range(25):
        hvd.allreduce(np.ones(3), name="x")
        engine.recorder.step()
    assert engine.shutdown()
    return [] if engine.rank else engine.summary.lines(engine.transport.identities)
