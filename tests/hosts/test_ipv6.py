"""Hosts that have only IPv6 addresses."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Hosts, why_not
from jobs import PLACES

from ringdance.launch.mpi import find_mpi

pytestmark = [pytest.mark.limit(120), pytest.mark.skipif(bool(why_not()), reason=why_not())]
LINE = (sys.executable, "-m", "ringdance")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with tempfile.TemporaryDirectory(prefix="rdh-") as directory:
        hosts = Hosts(Path(directory) / "net", 3, ipv6=True)
        yield hosts
        hosts.down()


@pytest.mark.parametrize("names", ["h1:2,h2:1", "fd83:7::2 slots=2\nh1 slots=1\n"])
def test_a_job(hosts: Hosts, tmp_path: Path, names: str) -> None:
    (tmp_path / "places.py").write_text(PLACES)
    where = ["-H", names]
    if "\n" in names:
        (tmp_path / "hosts").write_text(names)
        where = ["--hostfile", str(tmp_path / "hosts")]
    done = hosts.run("h1", *LINE, "run", *where, "python", str(tmp_path / "places.py"))
    if find_mpi().family == "mpich":
        assert done.returncode == 2
        assert "MPICH's mpiexec supports only IPv4. Install Open MPI" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3
    plan = hosts.run("h1", *LINE, "run", *where, "--dry-run", "true").stdout
    assert "network:     fd83:7::/64" in plan


def test_a_copy_goes_from_host_to_host(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(3_000_000))
    done = hosts.run("h1", *LINE, "hosts", "copy", "-H", "h2,h3", str(tmp_path / "big"), "/run/copied")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "the hosts pass the copy on without errors"
    for name in ("h2", "h3"):
        assert hosts.run(name, "cmp", str(tmp_path / "big"), "/run/copied").returncode == 0
