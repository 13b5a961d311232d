"""Checks of what earlier jobs leave: it is really left, by processes of the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from breaking import Machine, breaks, expect, wrong

from ringdance.launch import linux

HOUR_AGO = time.time() - 7200


@breaks("zombies")
def test_a_zombie() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    found = Machine().facts(["leftovers"])
    assert child.pid in {entry["pid"] for entry in found["leftovers"]["zombies"]}
    assert "zombie processes" in wrong("zombies", found)[0].text
    child.wait()
    after = Machine().facts(["leftovers"])["leftovers"]["zombies"]
    assert child.pid not in {entry["pid"] for entry in after}


@breaks("orphans")
def test_a_rank_whose_launcher_is_gone() -> None:
    if not linux.LINUX:
        pytest.skip("needs /proc")
    environ = {**os.environ, linux.MARKER: "doctor-test"}
    # In the background of a shell that ends: its parent is then init, or whoever adopts orphans.
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
        assert "files of earlier jobs hold" in wrong("shared-memory-left", found)[0].text
        with path.open():  # in use
            found = Machine().facts(["leftovers"])
        assert path.name not in {entry["name"] for entry in found["leftovers"]["shared"]}
    finally:
        path.unlink()


@breaks("session-folders")
def test_folders_of_sessions(tmp_path: Path) -> None:
    for folder in (tmp_path / "prte.node1.4194303.0", tmp_path / "ringdance-0123456789ab-node1"):
        folder.mkdir()
        os.utime(folder, (HOUR_AGO, HOUR_AGO))
    (tmp_path / "sound").mkdir()
    expect(
        "session-folders", Machine(env={"TMPDIR": str(tmp_path)}), f"{tmp_path}/prte.node1.4194303.0",
        sound=Machine(env={"TMPDIR": f"{tmp_path}/sound"}),
    )  # fmt: skip
