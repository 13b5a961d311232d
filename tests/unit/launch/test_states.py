"""The table of a job's states."""

from __future__ import annotations

import math
import signal

import pytest

from ringdance.launch.shutdown import Shutdown
from ringdance.launch.states import TRANSITIONS, Event, State


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
