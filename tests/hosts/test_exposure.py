"""Sockets of running jobs on simulated hosts: as documented, and probed from another host."""

from __future__ import annotations

import sys
from pathlib import Path

import exposure
import pytest
from hosts import Hosts, wait_until

from ringdance.launch.mpi import find_mpi

pytestmark = [
    pytest.mark.limit(120),
    pytest.mark.skipif(find_mpi().family != "openmpi", reason="the table is about Open MPI"),
]
RUN = (sys.executable, "-m", "ringdance", "run", "--no-check")
WAITING = """
import os, sys, time
import numpy as np
import ringdance.numpy as rd
rd.init()
rd.allreduce(np.ones(4), name="start")
open(f"{sys.argv[1]}.{rd.rank()}", "w").close()
while os.path.exists(sys.argv[1]): time.sleep(0.02)
rd.allreduce(np.ones(4), name="end")
"""
TRY = """
import socket, sys
for port in sys.argv[2:]:
    try:
        socket.create_connection((sys.argv[1], int(port)), 2.0).close()
        print(port)
    except OSError as error:
        print(port, error, file=sys.stderr)
"""


@pytest.mark.parametrize("hosts", ["h1:2", "h1:2,h2:1"])
def test_a_job_listens_as_documented(three_hosts: Hosts, tmp_path: Path, hosts: str) -> None:
    several = "," in hosts
    (tmp_path / "program.py").write_text(WAITING)
    path = tmp_path / "wait"
    path.touch()
    line = [*RUN, "-H", hosts, "python", str(tmp_path / "program.py"), str(path)]
    job = three_hosts.start("h1", *line, log=tmp_path / "log")
    try:
        ranks = range(3 if several else 2)
        come = wait_until(lambda: all(Path(f"{path}.{rank}").exists() for rank in ranks), 60.0)
        assert come is not None, (tmp_path / "log").read_text()
        every, every_port = exposure.listening(three_hosts.processes("h1"))
        if several:
            there, _ = exposure.listening(three_hosts.processes("h2"))
            assert {process for process, _ in there} == {"prted", "rank"}
            every |= there
        assert every == exposure.documented(several)
        all_ports = {str(port) for port in every_port | _ports(three_hosts, "h1")}
        tried = three_hosts.run("h3", sys.executable, "-c", TRY, three_hosts.address["h1"], *all_ports)
        assert {int(port) for port in tried.stdout.split()} == every_port, tried.stderr
        assert bool(every_port) == several
        path.unlink()
        assert job.wait(30.0) == 0, (tmp_path / "log").read_text()
    finally:
        three_hosts.end(job)


def _ports(hosts: Hosts, name: str) -> set[int]:
    """Return all listening TCP ports of a host except sshd's."""
    lines = hosts.run(name, "cat", "/proc/net/tcp", "/proc/net/tcp6").stdout.splitlines()
    words = [line.split() for line in lines if "local_address" not in line]
    return {int(word[1].rpartition(":")[2], 16) for word in words if word[3] == "0A"} - {22}
