"""A host that cannot run the job is detected before anything starts there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from hosts import Hosts

pytestmark = pytest.mark.limit(300)
RUN = (sys.executable, "-m", "ringdance", "run", "-H", "h1:1,h2:1,h3:1")
MARK = "the rank of "
Run = Callable[..., CompletedProcess[str]]


@pytest.fixture
def run(three_hosts: Hosts, tmp_path: Path) -> Run:
    (tmp_path / "say.py").write_text(f"import os\nprint({MARK!r} + os.uname().nodename)\n")

    def run_(*words: str) -> CompletedProcess[str]:
        line = (*RUN, *words, "python", str(tmp_path / "say.py"))
        return three_hosts.run("h1", *line)

    return run_


@pytest.fixture
def full(three_hosts: Hosts) -> Iterator[None]:
    """Fill h2's /dev/shm."""
    assert three_hosts.run("h2", "mount", "-t", "tmpfs", "-o", "size=4k", "full", "/dev/shm").returncode == 0
    yield
    three_hosts.run("h2", "umount", "/dev/shm")


@pytest.mark.usefixtures("full")
def test_a_host_without_shared_memory(run: Run, three_hosts: Hosts) -> None:
    done = run()
    assert done.returncode == 2
    assert done.stdout == ""
    assert "cannot start:\n  host h2: /dev/shm has 4 KiB" in done.stderr, done.stderr
    assert "fix: start the container with --shm-size" in done.stderr
    assert "start anyway, pass --no-check" in done.stderr
    assert "h3" not in done.stderr
    assert [three_hosts.processes(name) for name in three_hosts.names] == [{}, {}, {}]
    assert run("--no-check").stdout.count(MARK) == 3
    plan = run("--dry-run")  # starts nothing, whatever is wrong
    assert plan.returncode == 0
    assert MARK not in plan.stdout


def test_a_new_key_is_refused_where_ssh_is_set_so(run: Run, three_hosts: Hosts, tmp_path: Path) -> None:
    config = three_hosts.directory / "ssh" / "config"
    config.write_text(f"UserKnownHostsFile {tmp_path}/known\nStrictHostKeyChecking yes\n")
    try:
        done = run("--no-check", "-H", "h1:1,h2:1", "true")
        assert done.returncode == 2
        assert "host h2: ssh cannot connect: Host key verification failed" in done.stderr
        assert "ssh-keyscan h2" in done.stderr
        config.write_text(f"UserKnownHostsFile {tmp_path}/known\n")
        assert run("--no-check", "-H", "h1:1,h2:1", "true").returncode == 0
    finally:
        config.unlink()
