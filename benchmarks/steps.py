"""What the benchmarks of a compiled step have in common: the lists of gradients, the run, the table."""

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
#: Makes the contestants' calls for a list of shapes.
Make = Callable[[Shapes], dict[str, Callable[[], object]]]


def lists() -> dict[str, Shapes]:
    """Return the lists of shapes by title."""
    return {
        "160 gradients of 1 KB": [(256,)] * 160,
        "161 gradients of ResNet-50": [shape for _, shape in resnet50(backward=False)],
    }


def from_numpy(shapes: Shapes) -> Callable[[], object]:
    """Return a call that averages such a list in one exchange, in place."""
    import ringdance.numpy

    arrays = [np.ones(shape, np.float32) for shape in shapes]
    return lambda: ringdance.numpy.allreduce(arrays, name="benchmark", out=arrays) and None


def add_options(options: ArgumentParser) -> None:
    """Let the user leave out the framework's own collectives, and the long list."""
    options.add_argument("--no-peer", action="store_true", help="without the framework's own collectives")
    options.add_argument("--small", action="store_true", help="only the list of small gradients")


def keep_memory() -> None:
    """Let malloc, in the ranks that are started now, keep what is freed, for all contestants alike.

    By default each step gives a large model's gradients back to the system and takes as much again: 25,000
    page faults, whose time varies more from step to step than what is measured here.
    """
    for name, value in (("MMAP_MAX_", 0), ("TRIM_THRESHOLD_", 1 << 36), ("ARENA_MAX", 1)):
        os.environ.setdefault(f"MALLOC_{name}", str(value))


def addresses(job: Any) -> list[str]:
    """Return a free address of this machine for each rank, the same list on all."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        mine = f"127.0.0.1:{one.getsockname()[1]}"
        found: list[str] = job.comm.allgather(mine)
    return found


def measure(report: Report, make: Make, peer: str, arguments: Namespace) -> None:
    """Measure the lists, print a table of each and the ratios.

    Args:
        report: where it goes.
        make: the contestants, among them the three above.
        peer: name of the framework's own exchange, which may be among them.
        arguments: of the command line.
    """
    for title, shapes in list(lists().items())[: 1 if arguments.small else None]:
        calls = {name: timed(call) for name, call in make(shapes).items()}
        for call in calls.values():
            call()
        _show(report, title, alternate(report.job, calls, arguments.seconds), peer)


def _show(report: Report, title: str, samples: dict[str, list[float]], peer: str) -> None:
    summaries = report.add(title, "s", samples)
    rows = [
        [name, *map(milliseconds, (one.median, one.p10, one.p90, one.least)), str(one.count)]
        for name, one in summaries.items()
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
