"""What `ringdance explain` reports about ranks."""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace

import psutil
import pytest

from ringdance.host.system import linux
from ringdance.tools import explain


def test_operations_of_one_label_are_told_apart() -> None:
    names = ["tape.1f.0", "tape.1f.0", "tape.2a.0"]
    ranks = [
        explain._Rank(rank, "node1", rank + 7, 3, "job", "9 steps", "gradients of w", 3.0, operation=name)
        for rank, name in enumerate(names)
    ]
    assert explain._culprit(ranks[:2], []).startswith("All ranks here are waiting for 'gradients of w'")
    assert explain._culprit(ranks, []) == (
        "Ranks are waiting for different operations: rank 2 on host node1 (pid 9) for 'gradients of w' "
        "(tape.2a.0); the others for 'gradients of w' (tape.1f.0)."
    )


def test_ranks_that_end_while_they_are_looked_at_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of other jobs on the host may exit at any time, which must not stop the command."""
    with subprocess.Popen(["sleep", "60"]) as child:
        gone = psutil.Process(child.pid)
        child.kill()
    environ = {linux.MARKER: "other", "RINGDANCE_RANK": "0", "RINGDANCE_SIZE": "1"}
    monkeypatch.setattr(explain.records, "rank_processes", lambda: iter([(gone, environ)]))
    assert [rank for rank in explain._ranks_here("other") if rank.pid == gone.pid] == []
    reader = SimpleNamespace(who=(0, "here", gone.pid))
    assert explain._rank_of(reader) is None  # type: ignore[arg-type]
    assert not explain._is_below(gone.pid, os.getpid())


def test_another_host_is_asked_through_its_agent(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main(["00000000", "-H", "localhost"]) == 2
    (line,) = capsys.readouterr().err.splitlines()  # no complaint about the host's answer
    assert line.startswith("ringdance explain: no background job matches 00000000")
