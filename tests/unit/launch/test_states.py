"""The table of a job's states."""

from __future__ import annotations

import math
import signal
import time

import pytest

from ringdance.launch.shutdown import Shutdown
from ringdance.launch.states import TRANSITIONS, Event, Stage, State, Wait


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGHUP, "its terminal"), (signal.SIGTERM, "")]
)
def test_an_end_by_the_terminal_says_how_to_continue(number: signal.Signals, words: str) -> None:
    shutdown = Shutdown(30.0)
    shutdown.add(number, math.inf, True)
    assert shutdown.sentence().startswith(f"the job was ended by {number.name} to its launcher")
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
    stage = Stage(60.0)
    assert stage.follow(Event.FAILURE)
    assert (stage.state, stage.deadline) == (State.FAILED, pytest.approx(100.1))
    extended = []
    for reason in (Wait.OWN_FAILURE, Wait.CAUSE):
        start = now[0]
        while stage.extend(lambda wanted, reason=reason: math.inf if wanted is reason else 0.0):
            now[0] = stage.deadline
        extended.append(round(now[0] - start, 1))
        assert stage.deadline == math.inf
    assert extended == [1.0, 1.0]
    assert stage.follow(Event.TIMEOUT)
    assert (stage.state, stage.deadline - now[0]) == (State.STOPPING, pytest.approx(0.2))
