"""What the launcher reports about a rank that ends the job with an exit code or a fatal signal."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import INTEL, by_main, needed, script
from run import launcher
from sampled import sampled


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        ("sys.exit('no data')", 1, "exited with code 1; its last line on stderr: no data"),
        ("ctypes.string_at(0)", 139, "killed by SIGSEGV"),
    ],
)
def test_a_rank_that_ends_while_others_wait(tmp_path: Path, ending: str, code: int, words: str) -> None:
    path = script(
        tmp_path,
        "import ctypes, sys\nimport numpy as np, ringdance.numpy as hvd\nhvd.init()\n"
        f"def step():\n    if hvd.rank() == 1: {ending}\n    hvd.allreduce(np.ones(3))\nstep()\n",
    )
    done = by_main("run", "-np", "2", "python", path)
    assert done.returncode == code
    frame = done.stderr[done.stderr.index("the job failed") :]
    assert "first failure: rank 1 of 2" in frame
    assert words in frame
    if code == 139:
        assert f'File "{path}", line 5 in step' in frame  # instead of the C frames that MPI lists
        assert "Process received signal" not in done.stderr


ENDS = """
import argparse, sys, time
import ringdance.numpy as hvd
hvd.init()
if hvd.rank() == 1:
    try: sys.exit(5)
    except SystemExit as error: assert error.code == 5
    ENDING
time.sleep(20)
print("worked on")
"""


@pytest.mark.parametrize("by", ["mpiexec", "ringdance run"])
@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("quit(3)", 3),
        pytest.param("sys.exit('no data')", 1, marks=pytest.mark.slow),
        pytest.param("argparse.ArgumentParser().parse_args(['-x'])", 2, marks=pytest.mark.slow),
        pytest.param("hvd.shutdown(); sys.exit(1)", 1, marks=pytest.mark.slow),
    ],
)
def test_an_exit_code_ends_the_job_while_the_others_compute(
    tmp_path: Path, by: str, ending: str, code: int
) -> None:
    program = script(tmp_path, ENDS.replace("ENDING", ending))
    if by == "ringdance run":
        done = by_main("run", "-np", "2", sys.executable, program)
    else:
        command, environ = launcher(2)
        line = [*command, sys.executable, program]
        done = subprocess.run(line, env=environ, capture_output=True, text=True, check=False, timeout=50)
    # Intel's mpiexec itself exits with 255 after it has killed the other rank.
    assert done.returncode == code or (by == "mpiexec" and INTEL and done.returncode == 255), done.stderr
    assert "worked on" not in done.stdout
    if by == "ringdance run":
        assert re.search(rf"first failure: rank 1 of 2 .*: exited with code {code}", done.stderr)
    elif "shutdown" not in ending:
        assert re.search(rf"rank 1 on host \S+ \(pid \d+\) exited with code {code}\.", done.stderr)


def test_an_exit_code_ends_the_job_while_a_thread_waits(tmp_path: Path) -> None:
    """Before calling ``atexit`` functions, Python waits for the thread, which waits for the other rank."""
    path = script(
        tmp_path,
        "import sys, threading, numpy as np, ringdance.numpy as hvd\n"
        "from ringdance.training import session\nhvd.init()\n"
        "def wait(): hvd.allreduce(np.ones(2), name='a')\n"
        "if hvd.rank() == 0:\n    threading.Thread(target=wait).start()\n"
        "    while not session.engine().callers.waiting: pass\n    sys.exit(3)\n"
        "hvd.allreduce(np.ones(2), name='b')\n",
    )
    done = by_main("run", "-np", "2", "python", path)
    assert done.returncode == 3, done.stderr
    assert re.search(r"first failure: rank 0 of 2 .*: exited with code 3", done.stderr)
    assert "DeadlockError" not in done.stderr


def test_mpi_is_not_finalized_after_an_exit_code(tmp_path: Path) -> None:
    """Finalizing in a script that only uses mpi4py would wait for the other ranks."""
    path = script(
        tmp_path,
        "import sys, time\nfrom mpi4py import MPI\nif MPI.COMM_WORLD.Get_rank(): sys.exit(4)\n"
        "time.sleep(20)\nprint('worked on')\n",
    )
    done = by_main("run", "-np", "2", "python", path)
    assert (done.returncode, done.stdout) == (4, ""), done.stderr


def test_a_thread_that_has_not_run_since_its_operation_ended_does_not_wait(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import ringdance.numpy as hvd\nfrom ringdance.training import session\nhvd.init()\n"
        "callers = session.engine().callers\n"
        "class Kept(dict):\n    def pop(self, *words): pass\n"  # as if the thread had not run yet
        "callers.waiting = Kept()\nhvd.barrier()\nassert callers.waiting\n",
    )
    done = by_main("run", "-np", "2", "python", path)
    assert done.returncode == 0, done.stderr


# What a script does with a failed result, and the exit code.
READERS = {
    "read": ("result.block_until_ready()", 1),
    "unread": ("", 1),
    "later shutdown": ("while not session._process.unseen: time.sleep(0.01)\nhvd.shutdown()", 1),
    "shutdown": ("hvd.shutdown()", 0),
    "keras": ("from keras.src.utils.python_utils import pythonify_logs; pythonify_logs({'a': result})", 1),
    "caught": ("try: print(result)\nexcept jax.errors.JaxRuntimeError: jax.jit(hvd.allreduce)(two) + 1", 0),
}


@pytest.mark.parametrize("reader", sampled("readers in JAX", list(READERS), 1, always=["unread"]))
def test_an_exchange_failed_in_a_program_of_jax(tmp_path: Path, reader: str) -> None:
    """The job fails even if the result is never read or Keras drops the error, unless the script gets it."""
    ending, code = READERS[reader]
    needed("jax", "keras")
    path = script(
        tmp_path,
        "import os; os.environ['KERAS_BACKEND'] = 'jax'\nimport time, jax, ringdance.jax as hvd\n"
        "from ringdance.training import session\nhvd.init()\n"
        "x, two, matrix = map(jax.numpy.ones, (2 + hvd.rank(), 2, (1500, 1500)))\n"
        "long = jax.jit(lambda x: (x @ x)[0, 0]).lower(matrix).compile()\n"
        "first = jax.jit(lambda x, y: hvd.allreduce(x + y, name='a')[:2]).lower(x, x[0]).compile()\n"
        "more = jax.jit(lambda x: x + 1).lower(two).compile()\n"
        "result = more(more(more(first(x, long(matrix)))))\n"  # all start before the first has completed
        f"{ending}\n",
    )
    done = by_main("run", "-np", "2", sys.executable, path)
    assert done.returncode == code, done.stderr
    shown = "MismatchError: Mismatched shapes for 'allreduce.a': (2,) on rank 0"
    assert (shown in done.stderr) == bool(code), done.stderr
    if code:
        first = next(line for line in done.stderr.splitlines() if line.startswith("first failure: rank"))
        assert shown in first
        assert first.count("Error dispatching computation") <= 1
