"""What the table of a job's ranks makes of their reports."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from ringdance.launch.agents import RankLink
from ringdance.launch.cause import Cause, Ended
from ringdance.launch.hosts import Host, assign_ranks, rank_numbers
from ringdance.launch.output.stream import Stream, Style
from ringdance.launch.rank_table import Rank, RankTable
from ringdance.launch.remote.connect import Remote


def steps_of(action: Callable[[], Any]) -> int:
    """Return how many lines of Python and iterations of comprehensions an action takes."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def steps_of_a_job(ranks: int) -> list[int]:
    """Return the steps per rank for numbering, for each report of the last rank, and for one loop turn."""
    hosts = assign_ranks(ranks, [(f"h{n}", 4) for n in range(ranks // 4)])
    plan: Any = SimpleNamespace(hosts=hosts, ranks=ranks)
    spec = SimpleNamespace(output_directory="", style=Style())
    sinks = SimpleNamespace(of=lambda *which: lambda data: None)
    agents = SimpleNamespace(port=lambda host: 1)
    table = RankTable(SimpleNamespace(plan=plan, spec=spec), sinks, agents)  # type: ignore[arg-type]
    frames = SimpleNamespace(send=lambda *message: True)
    links = [RankLink(Remote(f"h{n // 4}", frames, ()), n) for n in range(ranks)]  # type: ignore[arg-type]
    for number, link in enumerate(links):
        assert not table.add(link, {"rank": number, "size": ranks, "host": link.remote.host})
        for which in range(2):
            table.write(link, which, b"Traceback (most recent call last):\n")
        if number < ranks - 1:
            table.on_start(table._ranks[number], 1)
        if number % 2 and number < ranks - 1:
            table.on_end(table._ranks[number], Ended(number, "h", 1, 0, 0.0))
    last = table._ranks[ranks - 1]

    table.show_due()
    return [
        steps_of(lambda: rank_numbers(hosts)) // ranks,
        steps_of(lambda: table.write(links[-1], 0, b"line\n")),
        steps_of(lambda: (table.on_start(last, 1), table.started, table.idle)),
        steps_of(lambda: (table.on_end(last, Ended(last.rank, "h", 1, 0, 0.0)), table.over, table.idle)),
        steps_of(table.show_due),
    ]


def test_the_work_for_a_report_does_not_grow_with_the_number_of_ranks() -> None:
    few, many = steps_of_a_job(40), steps_of_a_job(400)
    assert all(after <= before + 2 for before, after in zip(few, many, strict=True)), (few, many)


def reported(table: Any, remotes: list[Remote], rank: int, message: str, when: float) -> None:
    """Let a rank report an error by its host's clock, and then let its wrapper report the exit."""
    cause = Cause(rank, remotes[rank].host, 100 + rank, when, "exception", message, "Traceback ...")
    line = f"::ringdance-cause:: {json.dumps(asdict(cause))}\n"
    table.write(table._ranks[rank].link, 1, line.encode())
    ended = remotes[rank].time_here(when + 0.01)
    table._ranks[rank].ended = Ended(rank, cause.host, cause.pid, 1, ended)


@pytest.mark.parametrize("off", [-2.0, 0.0, 2.0, 3600.0])
@pytest.mark.parametrize("first", [0, 1])
def test_the_first_failure_does_not_depend_on_the_clocks_of_hosts(
    monkeypatch: pytest.MonkeyPatch, off: float, first: int
) -> None:
    """The other host's clock is off. Messages take 1 ms, and reports of exits up to 20 ms."""
    now = [1e9]
    monkeypatch.setattr(time, "time", lambda: now[0])
    hosts = [Host("here", 1, (0,), local=True), Host("there", 1, (1,))]
    remotes = [Remote(host.name, None, (), local=host.local) for host in hosts]  # type: ignore[arg-type]
    plan, spec = SimpleNamespace(hosts=hosts, ranks=2), SimpleNamespace()
    prepared: Any = SimpleNamespace(plan=plan, spec=spec)
    table = RankTable(prepared, SimpleNamespace(of=lambda which: None), None)  # type: ignore[arg-type]
    for number, remote in enumerate(remotes):
        streams = [Stream(lambda data: None, Style(""), holds=bool(which)) for which in range(2)]
        link = RankLink(remote, number)
        table._ranks[number] = Rank(link, number, remote.host, streams, 100 + number)
        table._by_link[link] = table._ranks[number]
        remote.time_here(now[0] - 0.001 + number * off)  # the rank has started
    for rank, message in ((first, "ValueError: image 17"), (1 - first, "EOFError")):
        now[0] += 0.05
        reported(table, remotes, rank, message, now[0] - 0.02 + rank * off)
    verdict, _ = table.judge((), None)
    assert verdict is not None
    assert (verdict.cause.rank, verdict.cause.message) == (first, "ValueError: image 17")
    assert 1e9 < verdict.cause.time < now[0]
