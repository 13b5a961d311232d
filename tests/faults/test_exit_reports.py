"""What the launcher shows of a rank that ends the job by an exit code or a fatal signal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from processes import script


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        ("sys.exit(3)", 3, "exited with code 3 while other ranks waited for it"),
        ("sys.exit('no data')", 1, "1 while other ranks waited for it; its last line on stderr: no data"),
        ("ctypes.string_at(0)", 139, "killed by SIGSEGV"),
    ],
)
def test_a_rank_that_ends_while_others_wait(tmp_path: Path, ending: str, code: int, words: str) -> None:
    path = script(
        tmp_path,
        "import ctypes, sys\nimport numpy as np, ringdance.numpy as hvd\nhvd.init()\n"
        f"def step():\n    if hvd.rank() == 1: {ending}\n    hvd.allreduce(np.ones(3))\nstep()\n",
    )
    line = [sys.executable, "-m", "ringdance", "run", "-np", "2", "python", path]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == code
    frame = done.stderr[done.stderr.index("the job failed") :]
    assert "first failure: rank 1 of 2" in frame
    assert words in frame
    if code == 139:
        assert f'File "{path}", line 5 in step' in frame  # and not the C frames that MPI lists
        assert "Process received signal" not in done.stderr


def test_a_thread_that_has_not_run_since_its_operation_ended_does_not_wait(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import ringdance.numpy as hvd\nfrom ringdance import session\nhvd.init()\n"
        "callers = session.engine().callers\n"
        "class Kept(dict):\n    def pop(self, *words): pass\n"  # as if it had not run yet
        "callers.waiting = Kept()\nhvd.barrier()\nassert callers.waiting\n",
    )
    line = [sys.executable, "-m", "ringdance", "run", "-np", "2", "python", path]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == 0, done.stderr
