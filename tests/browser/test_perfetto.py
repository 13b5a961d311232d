"""Timelines in Perfetto's own trace processor: it computes what ``ringdance timeline`` shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

LOOP = """
import os, sys, time
import numpy as np, ringdance.numpy as hvd
hvd.init()
for step in range(30):
    time.sleep(0.01 if hvd.rank() == 1 else 0.001)
    handles = [hvd.allreduce(np.ones(n, np.float32), name=f"g{n}", wait=False) for n in (1_000_000, 1000)]
    for handle in handles:
        hvd.synchronize(handle)
    hvd.allgather(np.ones(3), name="rows")
    hvd.mark_step()
    if step == 20 and sys.argv[1] == "kill" and hvd.rank() == 1:
        os.kill(os.getpid(), 9)
"""

# For each rank: its steps, and the part of its waiting time in each.
STEPS = """
with marks as (
  select p.name rank, i.name step, i.ts, lag(i.ts) over (partition by p.name order by i.ts) began
  from slice i join {track} where i.name glob 'step *'
), waits as (select p.name rank, i.ts, i.ts + i.dur ended from slice i join {track} where i.name = 'WAIT')
select m.rank, m.step, (m.ts - began) / 1e9,
  (select sum(max(0, min(ended, m.ts) - max(w.ts, began))) from waits w where w.rank = m.rank) / 1e9
from marks m where began is not null order by m.rank, m.ts
"""
TRACK = (
    "(select t.id, p.name from thread_track t join thread using(utid) join process p using(upid)"
    " union select t.id, p.name from process_track t join process p using(upid)) p on i.track_id = p.id"
)
TOTALS = """
select i.name, p.name, count(*), sum(i.dur) / 1e9 from slice i join {track}
where i.name in ('ALLREDUCE', 'NEGOTIATE_ALLREDUCE', 'MPI_ALLREDUCE', 'WAIT_FOR_DATA', 'WAIT') and i.dur >= 0
group by 1, 2
"""
LOST = "select name, value from stats where value != 0 and severity in ('error', 'data_loss')"


def run(path: Path, how: str) -> None:
    script = path.parent / "loop.py"
    script.write_text(LOOP)
    line = [sys.executable, "-m", "ringdance", "run", "-np", "3", "--timeline", str(path)]
    done = subprocess.run([*line, "python", str(script), how], timeout=120, capture_output=True, text=True)
    assert (done.returncode == 0) == (how == "end"), done.stderr


def summary(path: Path) -> dict[str, Any]:
    line = [sys.executable, "-m", "ringdance", "timeline", "--json", str(path)]
    done = subprocess.run(line, capture_output=True, text=True, check=True, env=os.environ)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize("how", ["end", "kill"])
def test_perfetto_computes_what_the_summary_shows(perfetto: Any, tmp_path: Path, how: str) -> None:
    path = tmp_path / "timeline.json"
    run(path, how)
    perfetto.open(path.name)
    assert perfetto.query(LOST) == []
    ours = summary(path)
    rows = perfetto.query(STEPS.format(track=TRACK))
    steps = 29 if how == "end" else 20
    for rank in range(3):
        times = [row[2:] for row in rows if row[0].startswith(f"rank {rank} ")]
        (mine,) = (row for row in ours["ranks"] if row["rank"] == rank)
        assert len(times) == mine["steps"] == steps
        assert sum(time[0] for time in times) / steps == pytest.approx(mine["step_seconds"], abs=1e-7)
        assert sum(time[1] for time in times) / steps == pytest.approx(mine["exposed_seconds"], abs=1e-7)
    assert ours["ranks"][0]["rank"] == 1  # the slowest rank
    for row in ours["steps"]:
        every = [item for item in rows if item[1] == f"step {row['step']}"]
        assert sum(value[2] for value in every) / 3 == pytest.approx(row["seconds"], abs=1e-7)
        assert sum(value[3] for value in every) / 3 == pytest.approx(row["exposed_seconds"], abs=1e-7)
        slowest = max(every, key=lambda one: one[2] - one[3])
        assert slowest[0].startswith(f"rank {row['slowest_rank']} ")
    totals = {(name, of): (count, seconds) for name, of, count, seconds in perfetto.query(
        TOTALS.format(track=TRACK))}  # fmt: skip
    done = steps + 1
    for tensor in ("g1000", "g1000000"):
        assert totals["ALLREDUCE", f"allreduce.{tensor}"][0] == 3 * done
        assert totals["NEGOTIATE_ALLREDUCE", f"allreduce.{tensor}"][0] == 3 * done
        (late,) = (row for row in ours["tensors"] if row["tensor"] == f"allreduce.{tensor}")
        assert (late["times"], late["late_rank"]) == (done, 1)
    assert bool(ours["unfinished"]) == (how == "kill")
    for row in ours["unfinished"]:
        assert (row["submitted_by"], row["missing"]) == ([0, 2], [1])
