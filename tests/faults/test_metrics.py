"""Metrics of a job's ranks: files, the endpoint, the summary, also for killed ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import by_main, monitors_have_ended, script
from run import launcher

WRITTEN = """
def written():
    while not os.path.exists({path!r}):  # on a busy host the monitor may still be starting
        time.sleep(0.01)

def killed():
    written()
    if hvd.rank() == 1:
        os.kill(os.getpid(), 9)
"""
LOOP = """
import os, time
import numpy as np, ringdance.numpy as hvd
from ringdance.training import session
hvd.init()
for step in range(1, 31):
    time.sleep(0.02)
    hvd.allreduce(np.ones(1000, np.float32), name="gradient")
    session.mark_step()
    if step == 20: {event}
"""


def ringdance(
    tmp_path: Path, text: str, ranks: int, *options: str, **environ: str
) -> subprocess.CompletedProcess[str]:
    words = ["-np", str(ranks), *options, "python", script(tmp_path, text)]
    return by_main("run", *words, env={**os.environ, **environ})


@pytest.mark.parametrize("event", ["written()", "killed()"])
def test_figures_of_all_ranks_are_in_the_output_directory(tmp_path: Path, event: str) -> None:
    options = ("--output-filename", str(tmp_path / "out"), "-x", "RINGDANCE_METRICS_INTERVAL=0.1")
    path = str(tmp_path / "out" / "metrics-0.jsonl")
    done = ringdance(tmp_path, WRITTEN.format(path=path) + LOOP.format(event=event), 3, *options)
    assert (done.returncode == 0) == (event == "written()"), done.stderr
    assert monitors_have_ended()
    assert "ringdance: 3 ranks" not in done.stderr  # the run is too short for a summary
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics-0.jsonl").read_text().splitlines()]
    steps = 30 if event == "written()" else 20
    for rank in range(3):
        own = [row for row in rows if row["rank"] == rank]
        assert [row["steps"] for row in own] == sorted(row["steps"] for row in own)
        last = own[-1]
        assert last["steps"] == steps
        assert last["batches"] == last["tensors"] >= steps
        assert 4000 * steps <= last["bytes"] < 4000 * steps + 1000
        assert last["size"] == 3
        assert 0 < last["exposed_seconds"] < last["time"] - own[0]["time"] + 30
        assert last["cpu_seconds"] > 0
        assert last["rss_bytes"] > 1 << 20


SLOW = """
import time
import numpy as np, ringdance.numpy as hvd
hvd.init()
for step in range(51):
    time.sleep(0.065 if hvd.rank() == 1 else 0.05)
    hvd.allreduce(np.ones(1000, np.float32), name="gradient")
    hvd.mark_step()
{end}
"""


@pytest.mark.parametrize("by", ["ringdance run", pytest.param("mpiexec", marks=pytest.mark.slow)])
def test_a_rank_that_is_30_percent_slower_is_named_at_the_end(tmp_path: Path, by: str) -> None:
    path = script(tmp_path, SLOW.format(end="hvd.shutdown()" if by == "mpiexec" else ""))
    short = {"RINGDANCE_SUMMARY_TIME": "0.5"}
    if by == "mpiexec":
        start, environ = launcher(3)
        line = [*start, sys.executable, path]
        done = subprocess.run(
            line, capture_output=True, text=True, check=False, timeout=60, env=environ | short
        )
    else:
        done = by_main("run", "-np", "3", sys.executable, path, env=os.environ | short)
    assert done.returncode == 0, done.stderr
    lines = [line.partition("ringdance: ")[2] for line in done.stderr.splitlines() if "ringdance: " in line]
    assert len(lines) == 3, done.stderr
    assert lines[0].startswith("3 ranks, 0 min ")
    assert ": 51 steps, " in lines[0]
    assert lines[1].startswith("exposed communication: ")
    assert lines[2].startswith("slowest rank: rank 1 on host ")
    assert "slower than the others" in lines[2]
