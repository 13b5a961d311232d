"""`ringdance explain` for a job on several hosts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hosts import Hosts, wait_until

pytestmark = pytest.mark.limit(300)
# A stall report would leave records, which stay by design.
HANG = """
import os, pathlib, time
os.environ["RINGDANCE_STALL_CHECK_DISABLE"] = "1"
import numpy as np, ringdance.numpy as hvd
hvd.init()
if hvd.rank() == 2:
    pathlib.Path("{began}").touch()
    time.sleep(600)  # here
hvd.allreduce(np.ones(3), name="gradient")
"""


def test_the_rank_of_another_host_is_named(three_hosts: Hosts, tmp_path: Path) -> None:
    script, began = tmp_path / "hang.py", tmp_path / "began"
    script.write_text(HANG.format(began=began))
    command = [sys.executable, "-m", "ringdance"]
    line = [*command, "run", "-H", "h1:1,h2:1,h3:1", "python", str(script)]
    job = three_hosts.start("h1", *line, log=tmp_path / "log")
    try:
        assert wait_until(began.exists, 60.0) is not None
        done = three_hosts.run("h1", *command, "explain", "-H", "h1,h2,h3")
        assert done.returncode == 0, done.stderr
        last = done.stdout.splitlines()[-1]
        assert last.startswith("Ranks 0, 1 wait for rank 2 on host h3 (pid "), done.stdout
        assert f"{script}:8 in <module>" in last
        here = three_hosts.run("h1", *command, "explain").stdout.splitlines()
        assert here[-2].startswith("Not seen: ranks 1, 2.")
        assert "ranks that were not seen" in here[-1]
    finally:
        three_hosts.end(job)
    assert [three_hosts.leftovers(name) for name in three_hosts.names] == [[], [], []]
