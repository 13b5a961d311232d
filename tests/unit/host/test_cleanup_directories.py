"""Directories of jobs are locked while a process guards them. Afterwards, the next job removes them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringdance.host.copy.received_file import ReceivedFile
from ringdance.host.directories import host_directory
from ringdance.host.system.cleanup import abandoned, make_directories

GUARD = """
import sys
sys.path.append(sys.argv[1])
from host.system.cleanup import make_directories
make_directories([sys.argv[2]], sys.argv[3])
print("made", flush=True)
sys.stdin.read()
"""


def make(base: Path, job: str) -> None:
    """Create the directory of a job of this process."""
    make_directories([host_directory(str(base), job)], job)


def old(directory: Path) -> Path:
    """Make a directory look five minutes old."""
    os.utime(directory, (time.time() - 300,) * 2)
    return directory


def test_what_a_dead_guard_has_left_goes_with_the_next_job(tmp_path: Path) -> None:
    package = Path(sys.modules["ringdance"].__file__ or "").parent
    first = Path(host_directory(str(tmp_path), "a" * 32))
    line = [sys.executable, "-c", GUARD, str(package), str(first), "a" * 32]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as guard:
        assert guard.stdout
        assert guard.stdout.readline() == b"made\n"
        (first / "file").write_text("x")
        old(first)
        make(tmp_path, "b" * 32)
        assert first.exists()
        guard.kill()
    make(tmp_path, "c" * 32)
    assert not first.exists()
    assert Path(host_directory(str(tmp_path), "b" * 32)).exists()  # this process is alive


def test_what_is_not_ours_or_young_stays(tmp_path: Path) -> None:
    """Only directories with the marker belong to jobs. Others with such names are users' data."""
    names = ["ringdance-aaaaaaaaaaaa-otherhost", "ringdance-flight-x", "ringdance-my-thesis"]
    others = [tmp_path / name for name in names] + [Path(host_directory(str(tmp_path), "a" * 32))]
    for directory in others:
        directory.mkdir()
        (directory / "results.csv").write_text("important")
        old(directory)
    young = Path(host_directory(str(tmp_path), "d" * 32))
    young.mkdir()
    make(tmp_path, "e" * 32)
    assert all(directory.exists() for directory in [*others, young])


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
@pytest.mark.parametrize("links", [False, True])
def test_a_rank_asks_no_other_users_socket(links: bool) -> None:
    """Job directories have known names, so another user may create one before the job does."""
    with (
        tempfile.TemporaryDirectory(prefix="rdt-") as place,  # for a short path
        tempfile.TemporaryDirectory(prefix="rdt-") as other,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        foreign = Path(host_directory(place, "a" * 32))
        made = Path(other) if links else foreign
        made.mkdir(exist_ok=True)
        os.chown(made, 65534, 65534)
        if links:
            foreign.symlink_to(made)
        listener.bind(str(made / "s"))
        listener.listen()
        listener.settimeout(0.0)
        text = "import sys; from ringdance.host.agent.rank import main; main(sys.argv[1:])"
        line = [sys.executable, "-c", text, place, "a" * 32, "true"]
        environ = {**os.environ, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
        assert subprocess.run(line, env=environ, timeout=20, check=False).returncode == 1
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_names_of_hosts_that_end_or_begin_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts on EC2 have such names. If they share TMPDIR, they may not see each other's locks."""
    made: list[str] = []
    for number in (23, 24):
        own = SimpleNamespace(nodename=f"ip-10-0-1-{number}.us-west-2.compute.internal")
        monkeypatch.setattr(os, "uname", lambda own=own: own)
        assert abandoned(str(tmp_path)) == []  # the directory of the other host
        path = Path(host_directory(str(tmp_path), "a" * 32))
        assert len(path.name) <= len("ringdance-") + 12 + 1 + 20
        path.mkdir()
        (path / "RINGDANCE_JOB").symlink_to("a" * 32)
        assert abandoned(str(tmp_path)) == []  # too young
        assert abandoned(str(old(path).parent)) == [str(path)]
        made += [path.name, ReceivedFile(str(tmp_path / "file"), 1, 0o600, 1)._stem]
    assert len(set(made)) == 4


def test_a_folder_that_is_there_is_no_new_one(tmp_path: Path) -> None:
    make(tmp_path, "f" * 32)
    with pytest.raises(FileExistsError):
        make(tmp_path, "f" * 32)
