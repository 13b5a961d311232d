"""Checks of what earlier jobs leave: it is really left, by processes of the test."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from breaking import Machine, breaks, wrong

from ringdance.launch.system import linux

HOUR_AGO = time.time() - 7200


@breaks("orphans")
def test_a_rank_whose_launcher_is_gone() -> None:
    if not linux.LINUX:
        pytest.skip("needs /proc")
    environ = {**os.environ, linux.MARKER: "d0c70123"}
    # In the background of a shell that ends: its parent is then init, or a subreaper.
    done = subprocess.run(
        ["setsid", "sh", "-c", "sleep 60 >/dev/null 2>&1 & echo "
                               "$!"], env=environ, capture_output=True, check=True,
    )  # fmt: skip
    pid = int(done.stdout)
    try:
        found = Machine().facts(["leftovers"])
        if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) != 1:
            pytest.skip("another process than init adopts orphans here")
        assert any(f"sleep {pid}" in result.text for result in wrong("orphans", found)), found
    finally:
        os.kill(pid, signal.SIGKILL)


@breaks("shared-memory-left")
def test_shared_memory_that_nobody_uses() -> None:
    if not linux.sees_all_users_of_shared_memory():
        pytest.skip("other containers may use this /dev/shm")
    path = Path(f"/dev/shm/sm_segment.doctor-test.{os.getpid()}")
    path.write_bytes(bytes(2 << 20))
    os.utime(path, (HOUR_AGO, HOUR_AGO))
    try:
        found = Machine().facts(["leftovers"])
        assert path.name in {entry["name"] for entry in found["leftovers"]["shared"]}
        result = wrong("shared-memory-left", found)[0]
        assert "files that no process uses hold" in result.text
        assert "rm " not in result.fix  # its name is no proof of whose it is
        with path.open():  # in use
            found = Machine().facts(["leftovers"])
        assert path.name not in {entry["name"] for entry in found["leftovers"]["shared"]}
    finally:
        path.unlink()
