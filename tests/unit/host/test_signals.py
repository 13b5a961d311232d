"""Signals to the launcher."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from ringdance.host.system.signals import Signals


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """Yield the SIGCHLD numbers that another handler of this process gets."""
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


def test_what_is_ignored_stays_ignored() -> None:
    """Signals that are ignored stay ignored, as under nohup or in the background without job control."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals = Signals()
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.take() == [signal.SIGTERM]
        signals.restore()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signals.restore()
        signal.signal(signal.SIGHUP, before)
