"""Hooks for all tests: a time limit that dumps every thread's stack, and markers for numbers of ranks."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from typing import TextIO

import pytest
from sampled import seed_of_the_day
from this_rank import rank_and_size

LIMIT = 60.0  # seconds per test, unless a marker sets another limit
SLOW_LIMIT = 3600.0

_stderr = pytest.StashKey[TextIO]()


def pytest_configure(config: pytest.Config) -> None:
    # While a test runs, descriptor 2 belongs to pytest's capture. Here it is still the real one.
    config.stash[_stderr] = os.fdopen(os.dup(2), "w")


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_stderr].close()


def pytest_report_header() -> str:
    return "rank {} of {}".format(*rank_and_size())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    """After a failure, print how to run the same cases on another day."""
    if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        terminalreporter.write_line(f"To repeat these cases of sweeps, set TEST_SEED={seed_of_the_day()}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("ranks")
    if marker is not None and rank_and_size()[1] not in marker.args:
        pytest.skip(f"for {' or '.join(map(str, marker.args))} ranks")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Exit the process if a test exceeds its limit. mpiexec then stops the other ranks."""
    marker = item.get_closest_marker("limit")
    default = SLOW_LIMIT if item.get_closest_marker("slow") else LIMIT
    seconds = float(marker.args[0]) if marker else default
    stderr = item.config.stash[_stderr]
    faulthandler.dump_traceback_later(seconds, exit=True, file=stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
