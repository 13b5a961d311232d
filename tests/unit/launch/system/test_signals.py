"""Signals to the launcher."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from ringdance.launch.system.signals import Signals


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """Numbers of SIGCHLD that another handler of this process gets."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGCHLD, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGCHLD, before)


def test_only_the_launchers_signals_are_taken(handled: list[int]) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    signals = Signals()
    try:
        for number in (signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert signals.take() == [signal.SIGUSR1, signal.SIGTERM]
        assert handled == [signal.SIGCHLD]
        assert signals.take() == []
    finally:
        signals.restore()
    assert signal.getsignal(signal.SIGUSR1) is before
