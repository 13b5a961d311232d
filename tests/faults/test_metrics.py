"""Figures of a job's ranks: files, the endpoint, the summary; also of ranks that are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import script

LOOP = """
import os, time
import numpy as np, ringdance.numpy as hvd
from ringdance import session
hvd.init()
for step in range(1, 31):
    time.sleep(0.02)
    hvd.allreduce(np.ones(1000, np.float32), name="gradient")
    session.mark_step()
    if step == 20: {event}
"""


def run(
    tmp_path: Path, text: str, ranks: int, *options: str, **environ: str
) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "ringdance", "run", "-np", str(ranks), *options, "python"]
    return subprocess.run(
        [*line, script(tmp_path, text)],
        capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **environ},
    )  # fmt: skip


@pytest.mark.parametrize("event", ["pass", "hvd.rank() == 1 and os.kill(os.getpid(), 9)"])
def test_figures_of_all_ranks_are_in_the_output_directory(tmp_path: Path, event: str) -> None:
    options = ("--output-filename", str(tmp_path / "out"), "-x", "RINGDANCE_METRICS_INTERVAL=0.1")
    done = run(tmp_path, LOOP.format(event=event), 3, *options)
    assert (done.returncode == 0) == (event == "pass"), done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics-0.jsonl").read_text().splitlines()]
    steps = 30 if event == "pass" else 20
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
