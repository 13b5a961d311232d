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

from ringdance.launch.directories import host_folder
from ringdance.launch.system import linux
from ringdance.launch.system.cleanup import make_directories

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
        result = wrong("shared-memory-left", found)[0]
        assert "files that no process uses hold" in result.text
        assert "rm " not in result.mend  # its name is no proof of whose it is
        with path.open():  # in use
            found = Machine().facts(["leftovers"])
        assert path.name not in {entry["name"] for entry in found["leftovers"]["shared"]}
    finally:
        path.unlink()


@breaks("session-folders")
def test_folders_of_sessions(tmp_path: Path) -> None:
    """`rm -rf` is advised only for what the marker of a dead job is in, never for a name."""
    dead, alive = (Path(host_folder(str(tmp_path), letter * 32)) for letter in "ab")
    package = Path(sys.modules["ringdance"].__file__ or "").parent
    make = (
        "sys.path.append(sys.argv[1]); from launch.system.cleanup import *; "
        "make_directories(sys.argv[2:3], sys.argv[3])"
    )
    line = [sys.executable, "-c", f"import sys; {make}", str(package), str(dead), "a" * 32]
    subprocess.run(line, check=True)
    make_directories([str(alive)], "b" * 32)  # guarded by this process
    session, thesis = tmp_path / "prte.node1.4194303.0", tmp_path / "ringdance-my-thesis"
    like = Path(host_folder(str(tmp_path), "c" * 32))
    for folder in (session, thesis, like):
        folder.mkdir()
    for folder in (dead, alive, session, thesis, like):
        os.utime(folder, (HOUR_AGO, HOUR_AGO))
    (tmp_path / "sound").mkdir()
    sound = Machine(env={"TMPDIR": f"{tmp_path}/sound"})
    machine = Machine(env={"TMPDIR": str(tmp_path)})
    expect("session-folders", machine, str(session), sound=sound)
    results = wrong("session-folders", machine.facts(["leftovers"]))
    removals = [word for result in results if "rm -rf" in result.mend for word in result.mend.split()]
    assert [word for word in removals if word.startswith(str(tmp_path))] == [str(dead)]
    assert not any(str(path) in result.text for result in results for path in (alive, thesis, like))
