"""A job's timeline, also if the job is killed."""

from __future__ import annotations

import collections
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from processes import by_main, monitors_have_ended, script

LOOP = """
import os, time
import numpy as np, ringdance.numpy as hvd
hvd.init()
for step in range(20):
    hvd.allreduce(np.ones(1_000_000, np.float32), name="large")
    hvd.allgather(np.ones(3), name="rows")
    if step == 12: {event}
"""


def events_of(path: Path) -> list[dict[str, Any]]:
    report: list[dict[str, Any]] = json.loads(path.read_text())
    return report


def run(
    tmp_path: Path, text: str, ranks: int, timeline: str, *options: str
) -> subprocess.CompletedProcess[str]:
    words = ["-np", str(ranks), *options, "python", script(tmp_path, text)]
    return by_main("run", *words, env={**os.environ, "RINGDANCE_TIMELINE": timeline})


def timeline(path: Path) -> str:
    done = by_main("timeline", str(path))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("event", ["pass", "hvd.rank() == 1 and os.kill(os.getpid(), 9)"])
def test_all_ranks_are_in_the_file(tmp_path: Path, event: str) -> None:
    path = tmp_path / "timeline.json"
    done = run(tmp_path, LOOP.format(event=event), 3, str(path))
    steps = 20 if event == "pass" else 13
    assert (done.returncode == 0) == (event == "pass")
    assert monitors_have_ended()
    found = events_of(path)
    names = {one["pid"]: one["args"]["name"] for one in found if one["name"] == "process_name" and one["pid"]}
    ended = [(row["name"], names[row["pid"]], row["tid"]) for row in found if row["ph"] == "E"]
    counts = collections.Counter(ended)
    for rank in range(3):
        assert counts["NEGOTIATE_ALLREDUCE", "allreduce.large", rank] == steps
        assert counts["ALLREDUCE", "allreduce.large", rank] == steps
        assert steps - 1 <= counts["ALLGATHER", "allgather.rows", rank] <= steps


def test_what_is_left_to_write_when_a_job_is_killed_is_written(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    text = LOOP.replace("range(20)", "range(3000)").replace("1_000_000", "100").replace("12", "2000")
    assert run(tmp_path, text.format(event="os.kill(os.getpid(), 9)"), 2, str(path)).returncode == 137
    ended = [event["tid"] for event in events_of(path) if event["ph"] == "E" and event["name"] == "ALLREDUCE"]
    assert min(collections.Counter(ended).values()) >= 2001


def test_a_timeline_of_some_steps(tmp_path: Path) -> None:
    text = LOOP.format(event="pass").replace("    if step", "    hvd.mark_step()\n    if step")
    path = tmp_path / "timeline.json"
    words = ["--timeline", str(path), "-x", "RINGDANCE_TIMELINE_STEPS=5:8", "python", script(tmp_path, text)]
    assert by_main("run", "-np", "2", *words).returncode == 0
    found = events_of(path)
    marks = [event for event in found if event["name"].startswith("step ")]
    assert sorted({mark["name"] for mark in marks}) == ["step 6", "step 7", "step 8"]
    assert len(marks) == 6
    names = {one["pid"]: one["args"]["name"] for one in found if one["name"] == "process_name" and one["pid"]}
    ended = [names[event["pid"]] for event in found if event["ph"] == "E" and event["name"] == "ALLREDUCE"]
    assert ended.count("allreduce.large") == 6
    waits = [event["args"]["tensor"] for event in found if event["name"] == "WAIT"]
    assert waits.count("allreduce.large") == 6
    assert "The file lacks" not in timeline(path)


def test_a_timeline_is_started_and_stopped_by_the_script(tmp_path: Path) -> None:
    text = (
        "import numpy as np, ringdance.numpy as hvd\nhvd.init()\n"
        "for number in range(3):\n"
        f"    hvd.start_timeline({str(tmp_path)!r} + f'/{{number}}.json', mark_cycles=number == 1)\n"
        "    hvd.barrier()\n"
        "    hvd.allreduce(np.ones(5), name=f'inside{number}')\n"
        "    hvd.barrier()\n"
        "    hvd.stop_timeline()\n"
        "    hvd.barrier()\n"
        "    hvd.allreduce(np.ones(5), name='outside')\n"
        f"hvd.start_timeline({str(tmp_path)!r} + '/no/such/directory')\n"
        "hvd.allreduce(np.ones(5), name='after')\n"
    )
    done = run(tmp_path, text, 2, "DYNAMIC")
    assert done.returncode == 0, done.stderr
    assert "the timeline is not written" in done.stderr
    assert "No such file or directory" in done.stderr
    for number in range(3):
        result = events_of(tmp_path / f"{number}.json")
        names = {row["args"]["name"] for row in result if row["name"] == "process_name" and row["pid"]}
        assert f"allreduce.inside{number}" in names
        assert "allreduce.outside" not in names
        assert any(event["name"] == "CYCLE_START" for event in result) == (number == 1)


HARM = """
import os, resource, signal, time
import numpy as np, ringdance.numpy as hvd
hvd.init()
if hvd.local_rank() == 0:
    monitor = int(open(f"/proc/self/task/{os.getpid()}/children").read().split()[0])
def full():
    resource.prlimit(monitor, resource.RLIMIT_FSIZE, (0, 0))
for step in range(50):
    time.sleep(0.02)
    hvd.allreduce(np.ones(1000, np.float32), name="gradient")
    if step == 15 and hvd.local_rank() == 0: HARM
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_file_that_has_no_room_is_said_once_and_by_who_reads_it(tmp_path: Path, ranks: int) -> None:
    path, logs = tmp_path / "timeline.json", tmp_path / "logs"
    text = HARM.replace("HARM", "full()")
    options = ("--output-filename", str(logs), "-x", "RINGDANCE_METRICS_INTERVAL=0.02")
    done = run(tmp_path, text, ranks, str(path), *options)
    assert done.returncode == 0, done.stderr
    said = [line.partition(": ")[2].partition(": ")[2] for line in done.stderr.splitlines()]
    assert sorted(said) == [
        f"{logs}/metrics-0.jsonl lacks samples: File too large",
        f"{path}: File too large. The timeline ends there; the job continues",
    ]
    assert "The file lacks its end" in timeline(path)


def test_a_monitor_that_is_killed_is_said(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    text = HARM.replace("HARM", "os.kill(monitor, 9)").replace("range(50)", "range(60)")
    done = run(tmp_path, text, 2, str(path), "--output-filename", str(tmp_path / "logs"))
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert "was killed by signal 9. From now on, the timeline and the metrics lack this host's ranks." in line
    assert "The file lacks its end" in timeline(path)
    assert monitors_have_ended()
