"""The timeline of a job on several hosts. Its file is on the launcher's host."""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path

import pytest
from hosts import Hosts

from ringdance.core.monitor.chrome import END

pytestmark = pytest.mark.limit(300)
LOOP = """
import time
import numpy as np, ringdance.numpy as hvd
hvd.init()
for step in range(30):
    time.sleep(0.01 * (hvd.rank() == 3))
    hvd.allreduce(np.ones(100_000, np.float32), name="gradient")
if {fails} and hvd.rank() == 1:
    raise SystemExit(3)
hvd.barrier()
"""
KILL = """
import os, subprocess, time
import ringdance.numpy as hvd
hvd.init()
for step in range(STEPS):
    time.sleep(0.05)
    hvd.barrier()
if hvd.rank() == 1:
    subprocess.run(["pkill", "-9", "-f", "ringdance.core.monitor.main", "-P", str(os.getpid())], check=True)
hvd.barrier()
"""


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_of_all_hosts_are_in_the_launchers_file(
    three_hosts: Hosts, tmp_path: Path, fails: bool
) -> None:
    (tmp_path / "loop.py").write_text(LOOP.format(fails=fails))
    path = tmp_path / "timeline.json"
    line = [sys.executable, "-m", "ringdance", "run", "-H", "h2:2,h3:1,h1:1", "--timeline", str(path)]
    done = three_hosts.run("h1", *line, "python", str(tmp_path / "loop.py"))
    assert done.returncode == 3 * fails, done.stderr
    found = json.loads(path.read_text())
    names = {one["pid"]: one["args"]["name"] for one in found if one["name"] == "process_name" and one["pid"]}
    assert {name.partition(" (")[0] for name in names.values() if name.startswith("rank ")} == {
        "rank 0 on h2", "rank 1 on h2", "rank 2 on h3", "rank 3 on h1"
    }  # fmt: skip
    (tensor,) = [pid for pid, name in names.items() if name == "allreduce.gradient"]
    times = collections.defaultdict(list)
    for event in found:
        if event["pid"] == tensor and event["ph"] in "BE":
            times[event["name"], event["ph"], event["tid"]].append(event["ts"])
    for rank in range(4):
        assert len(times["ALLREDUCE", "E", rank]) == 30
        assert len(times["NEGOTIATE_ALLREDUCE", "B", rank]) == 30
        # On a common clock, all start to exchange at the same time, and the sleeping rank submits last.
        for own, others in zip(times["ALLREDUCE", "B", rank], times["ALLREDUCE", "B", 0], strict=True):
            assert abs(own - others) < 100_000
    late = sum(
        max(range(4), key=lambda rank: times["NEGOTIATE_ALLREDUCE", "B", rank][step]) == 3
        for step in range(1, 30)
    )
    assert late > 20
    assert [three_hosts.leftovers(name) for name in three_hosts.names] == [[], [], []]


def test_a_job_that_ends_at_once_has_all_its_ranks(three_hosts: Hosts, tmp_path: Path) -> None:
    """Its ranks leave before their hosts' monitors have connected."""
    path, script = tmp_path / "timeline.json", tmp_path / "short.py"
    script.write_text("import ringdance.numpy as hvd\nhvd.init()\nhvd.barrier()\n")
    line = [sys.executable, "-m", "ringdance", "run", "-H", "h1:1,h2:1,h3:1", "--timeline", str(path)]
    for _ in range(3):
        done = three_hosts.run("h1", *line, "python", str(script))
        assert done.returncode == 0, done.stderr
        report = json.loads(path.read_text())
        named = [row["args"]["name"] for row in report if row["name"] == "process_name" and row["pid"]]
        assert {"rank 0 on h1", "rank 1 on h2", "rank 2 on h3"} == {
            name.partition(" (")[0] for name in named if name.startswith("rank ")
        }


@pytest.mark.parametrize("steps", [0, 20])
def test_a_killed_monitor_does_not_end_the_job(three_hosts: Hosts, tmp_path: Path, steps: int) -> None:
    """This holds even before it has connected to the other host's monitor. A warning reports its death."""
    path, script = tmp_path / "timeline.json", tmp_path / "kill.py"
    script.write_text(KILL.replace("STEPS", str(steps)))
    line = [sys.executable, "-m", "ringdance", "run", "-H", "h1:1,h2:1", "--timeline", str(path)]
    done = three_hosts.run("h1", *line, "python", str(script))
    assert done.returncode == 0, done.stderr
    assert "by signal 9. From now on, the timeline and the metrics lack this host's ranks." in done.stderr
    names = [load["name"] for load in json.loads(path.read_text())]
    if steps:
        assert names[-1] == f"{END}the end of rank 1 on h2: its monitor was killed, or cannot be reached"
    assert any(name.startswith(END) and "complete" not in name for name in names)
