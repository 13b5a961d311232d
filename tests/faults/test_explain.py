"""``ringdance explain`` for jobs that hang."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from planted_job import line_of
from processes import Job, by_main, start, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

EARLY = """
import os, pathlib, time
rank, here = os.environ["RINGDANCE_RANK"], pathlib.Path(__file__).parent
import ringdance.numpy as hvd
(here / f"began.{rank}").touch()
while not (here / f"init.{rank}").exists():
    time.sleep(0.1)
hvd.init()
"""
LOADER = """
import multiprocessing
def iterate(load):
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(target=lambda: theirs.send(load()), daemon=True).start()
    while True:
        if ours.poll(60):
            yield ours.recv()
"""
LOADING = """
import pathlib, sys, time
import numpy as np
import ringdance.numpy as hvd
here = pathlib.Path(__file__).parent
sys.path.insert(0, str(here / "site-packages/torch/utils/data"))
from dataloader import iterate
def load():
    if hvd.rank() == 1:
        (here / "began").touch()
        time.sleep(600)
    return 1
hvd.init()
for batch in iterate(load):
    hvd.allreduce(np.ones(3), name="loss")
    break
"""
PLANTED = Path(__file__).with_name("planted_job.py")


def explain(*arguments: str) -> str:
    done = by_main("explain", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def begin(directory: Path, cause: str) -> Job:
    """Start three ranks with a planted cause. Their output goes to ``directory/out``."""
    os.environ["PLANTED"] = str(directory)
    options = ("-np", "3", "--output-filename", str(directory / "out"))
    output = open(directory / "output", "wb")  # noqa: SIM115
    return start(directory, *options, sys.executable, str(PLANTED), cause, stdout=output, stderr=output)


def test_a_job_that_hangs_is_explained_and_leaves_stacks(tmp_path: Path) -> None:
    job, out = begin(tmp_path, "file_lock"), tmp_path / "out"
    try:
        assert wait_until((tmp_path / "began").exists, 30.0) is not None
        assert wait_until(lambda: "Ranks 0, 2 wait" in explain(str(job.process.pid)), 10.0) is not None
        said = explain(str(job.process.pid), "--stacks")
        last = said.splitlines()[-1]
        assert last.startswith("Ranks 0, 2 wait for rank 1 on host ")
        assert f"waits for a lock on the file {tmp_path}/cache.lock, held by process " in last
        assert f"planted_job.py:{line_of('file_lock')} in file_lock" in last
        assert "rank 0 on host " in said
        assert "s for 'allreduce.loss' (after " in said
        assert said.count("hread 0x") >= 6  # two per rank
        assert wait_until(lambda: len(list(out.glob("ringdance-st*-rank*"))) == 4, 30.0) is not None
        stall = json.loads(next(out.glob("ringdance-stall-rank0-*.json")).read_text())
        assert (stall["name"], stall["culprits"]) == ("allreduce.loss", [1])
        stacks = next(out.glob("ringdance-stacks-rank1-*.txt"))
        assert f'planted_job.py", line {line_of("file_lock")}, in file_lock' in stacks.read_text()
        os.kill(int(stacks.stem.rpartition("-")[2]), 9)
        assert wait_until(lambda: job.process.poll() is not None, 10.0) is not None
        outcome = json.loads((out / "ringdance-outcome.json").read_text())
        assert outcome["cause"]["message"].startswith("killed by SIGKILL")
    finally:
        job.end()


def test_a_worker_of_a_data_loader_is_looked_at(tmp_path: Path) -> None:
    """From outside, the rank's main thread appears to be in a PyTorch file. Importing torch takes long."""
    library, program = tmp_path / "site-packages/torch/utils/data/dataloader.py", tmp_path / "job.py"
    library.parent.mkdir(parents=True)
    library.write_text(LOADER)
    program.write_text(LOADING)
    job = start(tmp_path, "-np", "2", sys.executable, str(program))
    try:
        assert wait_until((tmp_path / "began").exists, 30.0) is not None
        results: list[str] = []
        assert wait_until(lambda: _says(results, job, "Rank 0 waits for rank 1"), 20.0) is not None, results
        last = results[-1].splitlines()[-1]
        assert f"its main thread waits for its data loader, at {program}:14 in <module>; its worker " in last
        assert re.search(rf"; its worker process \d+ sleeps, at {program}:11 in load\.$", last), last
        assert 'job.py", line 11 in load' in explain(str(job.process.pid), "--stacks")
    finally:
        job.end()


def _says(found: list[str], job: Job, words: str) -> bool:
    found[:] = [explain(str(job.process.pid))]
    return words in found[0]


def test_the_outcome_is_written_and_a_new_job_removes_it(tmp_path: Path) -> None:
    job, out = begin(tmp_path, "exception"), tmp_path / "out"
    assert job.process.wait(30.0) != 0
    outcome = json.loads((out / "ringdance-outcome.json").read_text())
    assert (outcome["code"], outcome["cause"]["rank"]) == (1, 1)
    assert outcome["cause"]["message"] == "ValueError: image 17 cannot be read"
    assert f"line {line_of('exception')}, in exception" in outcome["cause"]["traceback"]
    for left in ("metrics-2.jsonl", "rank.03/stderr", "mine.json", "rank.1/mine"):
        (out / left).parent.mkdir(exist_ok=True)
        (out / left).touch()
    options = ("-np", "1", "--output-filename", str(out))
    again = start(tmp_path, *options, sys.executable, "-c", "")
    assert again.process.wait(30.0) == 0
    outcome = json.loads((out / "ringdance-outcome.json").read_text())
    assert (outcome["code"], outcome["cause"]) == (0, None)
    files = [path for path in out.rglob("*") if path.is_file()]
    assert {str(path.relative_to(out)) for path in files} == {
        "mine.json", "rank.1/mine", "rank.0/stdout", "rank.0/stderr", "ringdance-outcome.json"
    }  # fmt: skip


def test_several_jobs_are_told_apart(tmp_path: Path) -> None:
    """Jobs are distinguished by directory and command, including foreground jobs."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    jobs = [begin(tmp_path / name, "file_lock") for name in ("one", "other")]
    try:
        for name in ("one", "other"):
            assert wait_until((tmp_path / name / "began").exists, 30.0) is not None
        done = by_main("explain")
        assert done.returncode == 2
        rows = [line for line in done.stderr.splitlines() if f"in {os.getcwd()}: python" in line]
        assert len([row for row in rows if ": 3 ranks for " in row and row.endswith("file_lock")]) >= 2
        report = json.loads(by_main("status", "--json").stdout)
        assert {job.process.pid for job in jobs} <= {row["pid"] for row in report if row["ranks"] == 3}
    finally:
        for job in jobs:
            job.end()


def test_ranks_before_init_are_shown_and_a_foreground_job_cannot_be_stopped(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(EARLY)
    job = start(tmp_path, "-np", "2", sys.executable, str(tmp_path / "job.py"))
    try:
        assert wait_until(lambda: len(list(tmp_path.glob("began.*"))) == 2, 30.0) is not None
        said = explain(str(job.process.pid)).splitlines()
        assert said[-1] == "All ranks must call init(). It has not been called yet by ranks 0, 1."
        assert said[0].startswith("rank 0 on host ")
        assert said[0].endswith(" s without init())")
        (tmp_path / "init.0").touch()
        last = "All ranks must call init(). It has not been called yet by rank 1."
        assert wait_until(lambda: explain(str(job.process.pid)).splitlines()[-1] == last, 30.0) is not None
        assert "now in init())" in explain(str(job.process.pid))
        shown = json.loads(by_main("status", "--json").stdout)
        name = next(row["job"] for row in shown if row["pid"] == job.process.pid)
        done = by_main("stop", name[:6])
        assert done.returncode == 2
        assert f"no background job matches {name[:6]}" in done.stderr
    finally:
        job.end()


def test_what_is_not_there() -> None:
    line = [sys.executable, "-m", "ringdance", "explain", "/no/such/directory"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 2
    assert "ringdance explain: " in done.stderr
