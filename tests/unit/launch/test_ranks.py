"""What the table of a job's ranks makes of their reports."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from ringdance.launch.agents import RankLink
from ringdance.launch.cause import Cause, Ended
from ringdance.launch.hosts import Host
from ringdance.launch.output.stream import WITH_RANK, Stream
from ringdance.launch.ranks import Rank, RankTable
from ringdance.launch.remote.connect import Remote


def reported(table: Any, remotes: list[Remote], rank: int, message: str, when: float) -> None:
    """A rank reports an error by its host's clock, and then its wrapper the end."""
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
    """The other host's clock is off; messages take a millisecond, those that report ends up to 20."""
    now = [1e9]
    monkeypatch.setattr(time, "time", lambda: now[0])
    hosts = [Host("here", 1, (0,), local=True), Host("there", 1, (1,))]
    remotes = [Remote(host.name, None, (), local=host.local) for host in hosts]  # type: ignore[arg-type]
    plan, spec = SimpleNamespace(hosts=hosts, ranks=2), SimpleNamespace(fold=False)
    prepared: Any = SimpleNamespace(plan=plan, spec=spec, style=WITH_RANK)
    table = RankTable(prepared, SimpleNamespace(of=lambda which: None), -1, None)  # type: ignore[arg-type]
    for number, remote in enumerate(remotes):
        streams = [Stream(lambda data: None, WITH_RANK, holds=bool(which)) for which in range(2)]
        table._ranks[number] = Rank(RankLink(remote, number), number, remote.host, streams, 100 + number)
        remote.time_here(now[0] - 0.001 + number * off)  # it has started
    for rank, message in ((first, "ValueError: image 17"), (1 - first, "EOFError")):
        now[0] += 0.05
        reported(table, remotes, rank, message, now[0] - 0.02 + rank * off)
    verdict, _ = table.judge((), None)
    assert verdict is not None
    assert (verdict.cause.rank, verdict.cause.message) == (first, "ValueError: image 17")
    assert 1e9 < verdict.cause.time < now[0]
