"""A process of a job on several hosts is stopped (SIGSTOP): the job continues and reports what is waiting."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import here_hosts
import pytest
from processes import script, wait_until

from ringdance.launch.mpi import find_mpi

pytestmark = [
    pytest.mark.limit(100),
    pytest.mark.skipif(bool(here_hosts.why_not()), reason=f"hosts: {here_hosts.why_not()}"),
    pytest.mark.skipif(find_mpi().family != "openmpi", reason="UCX treats hosts on one kernel as one"),
]
WORK = """
import os, signal, time
import numpy as np
import ringdance.numpy as rd
rd.init()
print("works", flush=True)
if rd.rank() == 2:
    {rank_2}
go_on = True
while go_on:
    go_on = rd.allreduce(float(rd.rank() == 0 and os.path.exists({flag!r})), name="end") == 0.0
    time.sleep(0.02)
print("done", flush=True)
rd.shutdown()
"""


def start(tmp_path: Path, rank_2: str = "pass", **environ: str) -> subprocess.Popen[bytes]:
    program = script(tmp_path, WORK.format(rank_2=rank_2, flag=str(tmp_path / "flag")))
    line = [sys.executable, "-m", "ringdance", "run", "--no-check", "--host-timeout", "1.5"]
    with open(tmp_path / "log", "wb") as log:
        return subprocess.Popen(
            [*line, "-H", "localhost:1,other1:2", "python", program],
            stdout=log,
            stderr=log,
            env={**here_hosts.environment(tmp_path / "bin"), **environ},
        )


def test_a_launcher_that_is_stopped_for_a_while_goes_on(tmp_path: Path) -> None:
    job = start(tmp_path)
    try:
        log = tmp_path / "log"
        assert wait_until(lambda: log.read_text().count("works") == 3, 30.0) is not None, log.read_text()
        os.kill(job.pid, signal.SIGSTOP)
        time.sleep(3.0)
        (tmp_path / "flag").touch()
        os.kill(job.pid, signal.SIGCONT)
        assert job.wait(30.0) == 0, log.read_text()
        assert log.read_text().count("done") == 3
    finally:
        job.kill()
        job.wait()


def test_a_stopped_rank_on_another_host_is_called_stopped(tmp_path: Path) -> None:
    stop = "os.kill(os.getpid(), signal.SIGSTOP)"
    job = start(tmp_path, stop, RINGDANCE_STALL_CHECK_TIME="1", RINGDANCE_STALL_SHUTDOWN_TIME="3")
    try:
        job.wait(40.0)
        text = (tmp_path / "log").read_text()
        assert re.search(r"ringdance: rank 2 on other1 \(pid \d+\) was stopped by SIGSTOP", text), text
        # Rank 0, on the other host, reports this without seeing the rank. Rank 1 does see it.
        assert re.search(
            r"rank 0 .* No answer from rank 2 on host other1 \(pid \d+\): its process is stopped", text
        )
        assert job.returncode == 1
    finally:
        job.kill()
        job.wait()
