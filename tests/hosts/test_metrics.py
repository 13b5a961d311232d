"""Metrics of a job on several hosts: in the launcher's output directory, and in the summary."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hosts import Hosts

pytestmark = pytest.mark.limit(300)
LOOP = """
import sys, time
import numpy as np, ringdance.numpy as hvd
hvd.init()
for step in range(21):
    time.sleep(0.2 if hvd.rank() == 2 else 0.02)
    hvd.allreduce(np.ones(100_000, np.float32), name="gradient")
    hvd.mark_step()
if {fails} and hvd.rank() == 1:
    raise SystemExit(3)
hvd.barrier()
"""


@pytest.mark.parametrize("fails", [False, True])
def test_figures_of_all_hosts_come_to_the_launcher(three_hosts: Hosts, tmp_path: Path, fails: bool) -> None:
    (tmp_path / "loop.py").write_text(LOOP.format(fails=fails))
    out = tmp_path / "out"
    line = [sys.executable, "-m", "ringdance", "run", "-H", "h2:2,h3:1,h1:1", "--output-filename", str(out)]
    line += ["-x", "RINGDANCE_SUMMARY_TIME=0.5", "python", str(tmp_path / "loop.py")]
    done = three_hosts.run("h1", *line)
    assert done.returncode == 3 * fails, done.stderr
    summary = [text.partition("ringdance: ")[2] for text in done.stderr.splitlines() if "ringdance: " in text]
    if not fails:
        assert summary[0].startswith("4 ranks on 3 hosts, ")
        assert summary[2].startswith("slowest rank: rank 2 on host h3 ")
    for rank, host in enumerate(["h2", "h2", "h3", "h1"]):
        rows = map(json.loads, (out / f"metrics-{0 if rank == 1 else rank}.jsonl").read_text().splitlines())
        last = [row for row in rows if row["rank"] == rank][-1]
        assert (last["host"], last["steps"], last["size"]) == (host, 21, 4)
    assert [three_hosts.leftovers(name) for name in three_hosts.names] == [[], [], []]
