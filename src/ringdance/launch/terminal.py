"""Run a prepared job in this terminal."""

from __future__ import annotations

import fcntl
import os
import sys
import termios

from ringdance.launch.cause import Verdict, render
from ringdance.launch.job import Job
from ringdance.launch.output.screen import Screen
from ringdance.launch.output.stream import write_all
from ringdance.launch.prepare import PreparedJob


def run_in_terminal(prepared: PreparedJob) -> int:
    """Run a job with its output on this process's stdout and stderr. Return the exit code.

    Raises:
        LaunchError: Nothing was started.
    """
    if prepared.spec.verbose:
        print(prepared.plan.describe(os.environ), file=sys.stderr)
    sys.stdout.flush()
    # Do not read from a terminal: a prompt would not be shown until its line ends, and a background job
    # would steal input.
    stdin = -1 if sys.stdin is None or sys.stdin.isatty() else 0
    first = prepared.plan.hosts[0]
    if stdin == 0 and not first.local and _waits(stdin):
        text = f"rank 0 runs on {first.name} and cannot read standard input from here. List this host first"
        print(f"ringdance run: {text}", file=sys.stderr)
    smart = os.environ.get("TERM", "dumb") != "dumb"
    terminals = [smart and os.isatty(descriptor) for descriptor in (1, 2)]
    screen = Screen((write_all(1), write_all(2)), terminals)
    return show_outcome(Job(prepared, screen, stdin=stdin).run(), prepared, screen)


def show_outcome(outcome: Verdict | int, prepared: PreparedJob, screen: Screen) -> int:
    """Show the verdict if the job has failed, and return the job's exit code."""
    if isinstance(outcome, int):
        return outcome
    text = render(outcome, prepared.plan.ranks, prepared.spec.output_directory)
    screen.of(1)(text.encode(errors="surrogateescape") + b"\n")
    return outcome.code


def _waits(descriptor: int) -> bool:
    """Return True if a file or pipe has data that can be read now."""
    try:
        return any(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    except OSError:  # /dev/null
        return False
