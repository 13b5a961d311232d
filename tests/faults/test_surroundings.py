"""Jobs in which something usual is missing or full: stdout, a disk, HOME, /proc, the loopback."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import here_hosts
import pytest
from processes import script, wait_until
from sampled import sampled_rows

from ringdance.launch.mpi import find_mpi

RUN = f"{sys.executable} -m ringdance run -np 2"
FULL = "No space left on device. The job continues, but nothing more is written there"
SPACES = pytest.mark.skipif(bool(here_hosts.why_not()), reason=f"namespaces: {here_hosts.why_not()}")
NEW = "unshare --user --map-root-user"


def shell(line: str, directory: Path) -> subprocess.CompletedProcess[str]:
    allow = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.run(
        ["bash", "-c", line], cwd=directory, env={**os.environ, **allow}, capture_output=True, text=True,
        check=False, timeout=50,
    )  # fmt: skip


@pytest.fixture
def program(tmp_path: Path) -> str:
    """A program that prints ten lines to each stream, then writes a file to show that its rank completed."""
    path = script(
        tmp_path,
        "import os, sys\nfor n in range(10):\n    print('out', n)\n    print('err', n, file=sys.stderr)\n"
        "open(f\"done.{os.environ['RINGDANCE_RANK']}\", 'w').close()\n",
    )
    return f"python {path}"


SURROUNDINGS = [
    ("{run} {program} >/dev/full", f"cannot write to stdout: {FULL}"),
    ("{run} {program} 2>/dev/full", f"cannot write to stderr: {FULL}"),
    ("{run} {program} >/dev/full 2>&1", ""),
    ("{run} {program} >&-", "err 9"),
    ("{run} {program} <&- 2>&-", "out 9"),
    ("env -u HOME {run} {program}", "out 9"),
    ("{run} --output-filename logs {program}", f"cannot write to {{path}}/logs/rank.0/stdout: {FULL}"),
]


@pytest.mark.parametrize(("line", "words"), sampled_rows("surroundings", SURROUNDINGS, 3))
def test_training_goes_on(program: str, tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "logs" / "rank.0").mkdir(parents=True)
    (tmp_path / "logs" / "rank.0" / "stdout").symlink_to("/dev/full")
    done = shell(line.format(run=RUN, program=program).replace("logs", str(tmp_path / "logs")), tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "done.0").exists()
    assert (tmp_path / "done.1").exists()
    said = done.stdout + done.stderr
    assert words.format(path=tmp_path) in said
    assert said.count("cannot write to") == int("cannot write to" in words)
    if "logs" in line:
        assert len((tmp_path / "logs" / "rank.1" / "stdout").read_text().splitlines()) == 10


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("mkdir gone; cd gone; rmdir ../gone; {run} python train.py", "the working directory has been"),
        pytest.param(
            NEW + " --mount bash -c 'mount -t tmpfs tmpfs /proc; {run} true'",
            "/proc is not mounted",
            marks=SPACES,
        ),
        ("ulimit -f 64; {run} true", "files are limited to 64 KiB"),
    ],
)
def test_what_no_job_can_do_without_is_told_in_a_line(tmp_path: Path, line: str, words: str) -> None:
    done = shell(line.format(run=RUN), tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"ringdance run: {words}")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(find_mpi().family != "openmpi", reason="tests Open MPI's code")
def test_too_few_open_files(tmp_path: Path) -> None:
    done = shell(f"ulimit -n 24; {RUN} true", tmp_path)
    assert done.returncode == 2
    assert "open files for 2 ranks on 1 host, but its hard limit is 24 (ulimit -Hn)" in done.stderr


def test_a_stdout_that_does_not_block_gets_everything(tmp_path: Path) -> None:
    path = script(tmp_path, "for n in range(2000):\n    print(n, 'x' * 200)\n")
    read, write = os.pipe()
    os.set_blocking(write, False)
    job = subprocess.Popen([*RUN.split(), "python", path], stdout=write, stderr=subprocess.PIPE)
    # The reader starts once the pipe is full and the launcher has tried again.
    assert wait_until(lambda: not select.select([], [write], [], 0)[1], 20.0) is not None
    os.close(write)
    time.sleep(0.3)
    with open(read, "rb") as out:
        lines = out.read().decode().splitlines()
    _, said = job.communicate(timeout=30)
    assert (job.returncode, said) == (0, b"")
    for rank in range(2):
        assert [line for line in lines if line.startswith(f"[{rank}]")] == [
            f"[{rank}] {n} {'x' * 200}" for n in range(2000)
        ]
