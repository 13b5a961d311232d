"""The table of a job's states."""

from __future__ import annotations

import math
import signal
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from ringdance.launch import running
from ringdance.launch.shutdown import Shutdown
from ringdance.launch.spec import JobSpec
from ringdance.launch.states import TRANSITIONS, Event, State


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGHUP, "its terminal"), (signal.SIGTERM, "")]
)
def test_an_end_by_the_terminal_says_how_to_continue(number: signal.Signals, words: str) -> None:
    shutdown = Shutdown(30.0)
    shutdown.add(number, math.inf, True)
    assert shutdown.sentence().startswith(f"the job was ended by {number.name}, sent to its launcher")
    assert shutdown.sentence().endswith(f"does not end with {words}") == bool(words)
    assert ("continues from there" in shutdown.sentence()) == bool(words)


@pytest.mark.parametrize("state", State)
def test_each_state_leads_to_the_end_and_never_back(state: State) -> None:
    order = list(State)
    assert all(order.index(after) >= order.index(state) for after in TRANSITIONS[state].values())
    while state is not State.DONE:
        state = max(TRANSITIONS[state].values(), key=order.index)


def test_a_failure_after_a_signal_or_while_cleaning_changes_nothing() -> None:
    for state in (State.STOPPING, State.CLEANING_REMOTE, State.CLEANING_LOCAL):
        assert Event.FAILURE not in TRANSITIONS[state]


def test_a_deadline_is_extended_once_for_a_failure_and_for_a_second_for_a_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(running, "Agents", Mock())
    monkeypatch.setattr(running, "RankTable", Mock())
    signals: Any = SimpleNamespace(wakes=None)
    prepared: Any = SimpleNamespace(spec=JobSpec(["x"]), plan=Mock(multi_host=True), remotes=[])
    job: Any = running.RunningJob(prepared, Mock(), Mock(), Mock(), signals, Mock(), None)
    job._agents = Mock(pending=False)
    job._ranks = Mock(completed=False, idle=False, running=[])
    reports, follows = job._ranks.own_failure_reported, Mock(follows=True)
    job._ranks.judge.return_value = (follows, 0)
    job._handle(Event.FAILURE, 0.1)
    assert (job._stage.state, job._stage.deadline) == (State.FAILED, pytest.approx(100.1))
    extended = []
    while job._stage.state is State.FAILED:
        now[0] = job._stage.deadline
        reports.return_value = len(extended) < 5
        job._expire()
        extended.append(round(job._stage.deadline - now[0], 2))
    assert extended[:2] == [1.0, 0.05]
    assert sum(extended[1:-1]) == pytest.approx(1.0, abs=0.06)
    assert (job._stage.state, extended[-1]) == (State.STOPPING, 0.2)
