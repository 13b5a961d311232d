"""A job on three hosts that is terminated from outside: its ranks have time to save."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from hosts import Hosts, wait_until
from jobs import SAVES

RUN = (sys.executable, "-m", "ringdance", "run", "--no-check", "-H", "h1:2,h2:2,h3:2")


@pytest.mark.parametrize("seconds", [3, 20])
@pytest.mark.parametrize("everywhere", [False, True])
def test_ranks_have_time_to_save(three_hosts: Hosts, tmp_path: Path, everywhere: bool, seconds: int) -> None:
    """The launcher gets SIGTERM, or all processes on all hosts get it, as from schedulers."""
    (tmp_path / "saves.py").write_text(SAVES)
    log = tmp_path / "log"
    outer = three_hosts.start("h1", *RUN, "python", str(tmp_path / "saves.py"), str(seconds), log=log)
    assert wait_until(lambda: log.read_text().count("ready") == 6, 60.0) is not None, log.read_text()
    launcher = [pid for pid, line in three_hosts.processes("h1").items() if " ringdance run " in line]
    hosts = three_hosts.names if everywhere else []
    lines = [entry for host in hosts for entry in three_hosts.processes(host).items()]
    for pid in {*launcher, *(pid for pid, _ in lines)}:
        os.kill(pid, signal.SIGTERM)
    assert wait_until(lambda: outer.poll() is not None, seconds + 20.0) is not None, log.read_text()
    said = log.read_text()
    for rank in (1, 3, 5):
        assert f"[{rank}]<h{rank // 2 + 1}> saved after 1 signal" in said
    assert outer.returncode == 128 + signal.SIGTERM
    assert "the job failed" not in said
    assert [three_hosts.leftovers(name) for name in three_hosts.names] == [[], [], []]
