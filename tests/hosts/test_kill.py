"""Whatever happens to a host, a daemon or a rank: the job ends soon, names the cause, and leaves nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts import Hosts, wait_until

pytestmark = pytest.mark.limit(300)
RUN = (sys.executable, "-m", "ringdance", "run")
DAEMONS = ("/prted", "/orted", "/hydra_pmi_proxy")
LIMIT = 10.0  # seconds, promised by the contract; not a measure of speed

WORK = """
import os, time
import numpy as np
from mpi4py import MPI
comm = MPI.COMM_WORLD
comm.Barrier()
print("works", flush=True)
while True:
    time.sleep(0.05) if {idle} else comm.Allreduce(np.ones(100000), np.empty(100000))
"""


class Job:
    """A job of six ranks on the three hosts, started on h1. `timeout` is the heartbeat's."""

    def __init__(self, hosts: Hosts, directory: Path, idle: bool, timeout: str = "6") -> None:
        self.hosts, self.log = hosts, directory / "log"
        (directory / "work.py").write_text(WORK.format(idle=idle))
        words = [*RUN, "-H", "h1:2,h2:2,h3:2", "--host-timeout", timeout]
        words += ["python", str(directory / "work.py")]
        self.outer = hosts.start("h1", *words, log=self.log)
        assert wait_until(lambda: self.log.read_text().count("works") == 6, 60.0) is not None, self.said
        self.launcher = min(self.find("h1", " ringdance run "))
        environs = [Path(f"/proc/{pid}/environ").read_text() for pid in self.find("h1", "work.py")]
        marks = (re.search(r"\0RINGDANCE_JOB=([0-9a-f]+)\0", text) for text in environs)
        self.id = next(mark[1] for mark in marks if mark)

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def find(self, host: str, words: str) -> list[int]:
        """Find processes on a host by their command line."""
        return [pid for pid, line in self.hosts.processes(host).items() if words in line]

    def end(self) -> int:
        """Wait for the job to exit, and return its exit code."""
        began = time.monotonic()
        while self.outer.poll() is None:
            assert time.monotonic() - began < LIMIT, f"still runs after {LIMIT} s: {self.said}"
            time.sleep(0.05)
        return self.outer.returncode


def kill_rank(job: Job) -> str:
    victim = job.find("h2", "work.py")
    lines = job.hosts.processes("h2")
    ranks = [pid for pid in job.find("h2", "work.py") if "host.agent.rank" not in lines[pid]]
    assert len(ranks) == 2, victim
    os.kill(ranks[0], signal.SIGKILL)
    return r"first failure: rank"


def kill_daemon(job: Job) -> str:
    result = job.hosts.processes("h2").items()
    daemon = next(pid for pid, line in result if line.split()[0].endswith(DAEMONS))
    os.kill(daemon, signal.SIGKILL)
    return "host h2 (ranks 2-3): "


def kill_agent(job: Job) -> str:
    os.kill(min(job.find("h2", "host.agent.main")), signal.SIGKILL)
    return "host h2 (ranks 2-3): connection closed"


def kill_host(job: Job) -> str:
    job.hosts.kill("h3")
    return "host h3 (ranks 4-5): connection closed"


def power_off(job: Job) -> str:
    job.hosts.power_off("h3")
    return "host h3 (ranks 4-5): no heartbeat"


def unplug(job: Job) -> str:
    job.hosts.unplug("h2")
    return "host h2 (ranks 2-3): no heartbeat"


def interrupt(job: Job) -> str:
    os.kill(job.launcher, signal.SIGINT)
    return ""


def kill_launcher(job: Job) -> str:
    os.kill(job.launcher, signal.SIGKILL)
    return ""


HARMS = [kill_rank, kill_daemon, kill_agent, kill_host, power_off, unplug, interrupt, kill_launcher]


@pytest.fixture
def whole(three_hosts: Hosts) -> Iterator[Hosts]:
    """Return the hosts, which are repaired after each test."""
    yield three_hosts
    for name in three_hosts.names:
        three_hosts.plug(name)
        if not three_hosts.alive(name):
            three_hosts.revive(name)
    for name in three_hosts.names:
        ssh = ("ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=accept-new", name, "true")
        assert wait_until(lambda ssh=ssh: three_hosts.run("h1", *ssh).returncode == 0, 20.0) is not None


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("trial", range(int(os.environ.get("KILL_TRIALS", "5"))))
def test_harm(whole: Hosts, tmp_path: Path, harm: Callable[[Job], str], idle: bool, trial: int) -> None:
    # A host that was killed in an earlier trial keeps its files.
    before = {line for name in whole.names for line in whole.leftovers(name)}
    job = Job(whole, tmp_path, idle)
    try:
        words = harm(job)
        code = job.end()
        assert code != 0
        assert words in job.said, job.said
        if harm is not kill_launcher:
            assert harm is interrupt or "the job failed" in job.said, job.said
        living = [name for name in whole.names if whole.alive(name)]
        left: list[str] = []

        def nothing_left() -> bool:
            now = (line for name in living for line in whole.leftovers(name, job.id))
            left[:] = [line for line in now if line not in before]
            return not left

        assert wait_until(nothing_left, LIMIT) is not None, left
    finally:
        job.outer.kill()
        job.outer.wait()
        for name in whole.names:
            for pid in whole.processes(name):
                subprocess.run(["kill", "-9", str(pid)], check=False, capture_output=True)


def test_a_network_that_comes_back_ends_no_job(whole: Hosts, tmp_path: Path) -> None:
    """As in a live migration, the job reports that a host is silent, and later that it responds again."""
    job = Job(whole, tmp_path, False, "30")
    try:
        whole.unplug("h2")
        shown = "host h2 (ranks 2-3): no heartbeat for 6 s. After 30 s (--host-timeout), the host is"
        assert wait_until(lambda: shown in job.said, 9.0) is not None, job.said
        time.sleep(2.0)
        whole.plug("h2")
        resumed = "host h2 (ranks 2-3): heartbeats have resumed after"
        assert wait_until(lambda: resumed in job.said, 20.0), job.said
        time.sleep(3.0)
        assert job.outer.poll() is None, job.said
    finally:
        whole.end(job.outer)
