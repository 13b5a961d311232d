"""Ranks that never call init(): the others name them before MPI could."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import by_main, script
from run import launcher

PROGRAM = """
import os, sys, time
import ringdance.numpy as hvd

rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
{before}
hvd.init()
print("ringdance has begun", flush=True)
"""
SLEEP = "if rank == 2: time.sleep(600)"


def said(command: list[str], seconds: float = 60.0, **environ: str) -> str:
    """Return the job's stderr up to the message that names the missing rank, then terminate the job."""
    begun = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "RINGDANCE_INIT_TIMEOUT": "1", **environ},
    )
    assert begun.stderr is not None
    text = ""
    deadline = time.monotonic() + seconds
    try:
        for line in begun.stderr:
            text += line
            if "has waited" in line or time.monotonic() > deadline:
                break
    finally:
        os.killpg(begun.pid, signal.SIGTERM)
        try:
            begun.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(begun.pid, signal.SIGKILL)
            begun.wait()
        begun.stderr.close()
    return text


@pytest.mark.parametrize("by", ["mpiexec", "ringdance run"])
def test_a_rank_that_does_not_call_init_is_named(by: str, tmp_path: Path) -> None:
    program = script(tmp_path, PROGRAM.format(before=SLEEP))
    if by == "mpiexec":
        command, environ = launcher(3)
    else:
        command, environ = [sys.executable, "-m", "ringdance", "run", "-np", "3"], {}
    text = said([*command, sys.executable, program], **environ)
    report = r"Waiting: ranks 0, 1\. Still missing: rank 2 \(pid \d+\)\. Check what is running there"
    assert re.search(report, text), text


def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    program = script(tmp_path, PROGRAM.format(before="if rank == 0: os.kill(os.getpid(), 19)"))
    command, environ = launcher(2)
    text = said([*command, sys.executable, program], **environ)
    assert re.search(r"Waiting: rank 1\. Still missing: rank 0 \(pid \d+, stopped\)", text), text


def test_a_rank_that_was_never_started_is_named(tmp_path: Path) -> None:
    """Only some of the ranks are started. The others are on another host, or have exited."""
    program = script(
        tmp_path,
        """
        import time
        from ringdance.core.transport.missing_ranks import waiting_in_init
        with waiting_in_init(0.5):
            time.sleep(30)
        """,
    )
    each = f"OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_SIZE=4 {sys.executable} {program} &"
    text = said(["sh", "-c", f"for rank in 0 1; do {each} done; wait"])
    report = "Waiting: ranks 0, 1. Not on this host: ranks 2, 3. Each of them either exited before init()"
    assert report in text, text


CHILDREN = """
import multiprocessing, subprocess, sys
import ringdance.numpy as hvd
from ringdance.errors import NotInitializedError

hvd.init()

def told(_):
    try:
        hvd.barrier()
    except NotInitializedError as error:
        return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), str(error)

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + chr(10))  # in one piece: two processes share the pipe
    sys.stdout.flush()

if __name__ == "__main__":
    if sys.argv[1] == "inner":
        print("inner", int(hvd.allreduce(hvd.rank() + 1, op=hvd.Sum)), flush=True)
    elif sys.argv[1] == "child":
        say("child", *told(0))
    else:
        method, *nested = sys.argv[1:]
        child = subprocess.Popen([sys.executable, __file__, "child"])
        with multiprocessing.get_context(method).Pool(1) as pool:
            say(method, *pool.map(told, [0])[0])
        assert child.wait() == 0
        if hvd.rank() and nested:
            subprocess.run([*nested, sys.executable, __file__, "inner"], check=True)
        hvd.barrier()
"""


@pytest.mark.parametrize(
    ("by", "method", "nested"),
    [
        ("ringdance run", "spawn", ()),
        pytest.param("mpiexec", "forkserver", (), marks=pytest.mark.slow),
        pytest.param(
            "ringdance run", "spawn",
            ("env", "-u", "RINGDANCE_SIZE", sys.executable, "-m", "ringdance", "run", "-np", "2"),
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_process_that_a_rank_starts_is_not_the_rank(
    by: str, method: str, nested: tuple[str, ...], tmp_path: Path
) -> None:
    """It calls init() with the rank's environment anyway. A process in its own launcher's job is a rank."""
    command, environ = launcher(2)
    if by == "ringdance run":
        command = [sys.executable, "-m", "ringdance", "run", "-np", "2"]
    line = [*command, sys.executable, script(tmp_path, CHILDREN), method, *nested]
    done = subprocess.run(line, env=environ, capture_output=True, text=True, check=False, timeout=55)
    assert done.returncode == 0, done.stderr
    who = r"This process \(pid \d+\) was started by rank {0} on host \S+ \(pid \d+\)"
    for kind in (method, "child"):
        for rank in (0, 1):
            assert re.search(f"{kind} {rank} 2 {rank} 2 {who.format(rank)}", done.stdout), done.stdout
    assert done.stdout.count("inner 3") == 2 * bool(nested), done.stdout


def test_mpi_without_support_for_threads_is_called_by_no_thread_of_the_engine(tmp_path: Path) -> None:
    """Then only the main thread may call MPI, so the engine works while the main thread waits."""
    path = script(
        tmp_path,
        "import mpi4py, threading\n"
        "mpi4py.rc.thread_level = 'single'\n"
        "from mpi4py import MPI\n"
        "import numpy as np, ringdance.numpy as hvd\n"
        "hvd.init()\n"
        "print(hvd.allreduce(np.ones(3), op=hvd.Sum, name='x'), [t.name for t in threading.enumerate()])\n",
    )
    done = by_main("run", "-np", "2", "--no-prefix", sys.executable, path)
    assert done.stdout == "[2. 2. 2.] ['MainThread']\n" * 2, done.stderr
    assert "initialized without support for multiple threads" in done.stderr
