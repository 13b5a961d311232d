"""Shared code of the benchmarks of compiled steps: lists of gradients, measuring, tables."""

from __future__ import annotations

import os
import socket
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

import numpy as np
from common import Report, alternate, milliseconds, ratio, timed
from shapes import resnet50

IDENTITY, EXCHANGE, NUMPY = "identity step", "step with exchange", "exchange from NumPy"
RATE = 1e-7
Shapes = list[tuple[int, ...]]
#: Creates the contestants' calls for a list of shapes.
Make = Callable[[Shapes], dict[str, Callable[[], object]]]


def lists() -> dict[str, Shapes]:
    """Return the lists of shapes by title."""
    return {
        "160 gradients of 1 KB": [(256,)] * 160,
        "161 gradients of ResNet-50": [shape for _, shape in resnet50(backward=False)],
    }


def from_numpy(shapes: Shapes) -> Callable[[], object]:
    """Return a call that averages such a list in place in one exchange."""
    import ringdance.numpy

    arrays = [np.ones(shape, np.float32) for shape in shapes]
    return lambda: ringdance.numpy.allreduce(arrays, name="benchmark", out=arrays) and None


def add_options(options: ArgumentParser) -> None:
    """Add options to skip the framework's own collectives and the long list."""
    options.add_argument("--no-peer", action="store_true", help="skip the framework's own collectives")
    options.add_argument("--small", action="store_true", help="only the list of small gradients")


def keep_memory() -> None:
    """Let malloc keep freed memory in the ranks that are started next, for all contestants.

    By default, each step returns the memory of a large model's gradients to the system and requests it again.
    That is 25,000 page faults, whose time varies more between steps than the effect measured here.
    """
    for name, value in (("MMAP_MAX_", 0), ("TRIM_THRESHOLD_", 1 << 36), ("ARENA_MAX", 1)):
        os.environ.setdefault(f"MALLOC_{name}", str(value))


def addresses(job: Any) -> list[str]:
    """Return a free address on this machine for each rank. All ranks get the same list."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        own = f"127.0.0.1:{one.getsockname()[1]}"
        gathered: list[str] = job.comm.allgather(own)
    return gathered


def measure(report: Report, make: Make, peer: str, arguments: Namespace) -> None:
    """Measure the lists. Print a table and the ratios for each.

    Args:
        report: Report for the results.
        make: Function that creates the contestants. They include the three named above.
        peer: Name of the framework's own exchange, which may be among the contestants.
        arguments: Command-line arguments.
    """
    for title, shapes in list(lists().items())[: 1 if arguments.small else None]:
        calls = {name: timed(call) for name, call in make(shapes).items()}
        for call in calls.values():
            call()
        _show(report, title, alternate(report.job, calls, arguments.seconds), peer)


def _show(report: Report, title: str, samples: dict[str, list[float]], peer: str) -> None:
    summaries = report.add(title, "s", samples)
    rows = [
        [name, *map(milliseconds, (times.median, times.p10, times.p90, times.least)), str(times.count)]
        for name, times in summaries.items()
    ]
    report.table((title, "median ms", "p10", "p90", "min", "runs"), rows)
    base = summaries[IDENTITY].median
    added = report.figure(title, "added, s", summaries[EXCHANGE].median - base)
    text = f"added: {milliseconds(added)} ms"
    share = report.figure(title, "added / NumPy", added / summaries[NUMPY].median)
    text += f"; / NumPy: {ratio(share)}"
    if peer in summaries:
        theirs = report.figure(title, f"added by {peer}, s", summaries[peer].median - base)
        share = report.figure(title, f"added / {peer}", added / theirs)
        text += f"; {peer} adds {milliseconds(theirs)} ms; / {peer}: {ratio(share)}"
    report.say(f"{text}\n")
