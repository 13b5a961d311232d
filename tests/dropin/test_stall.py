"""Ranks that make different calls: what is reported, and how the job ends, in scripts run as usual."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from run import launcher

HOST = socket.gethostname()
BIN = Path(sys.executable).parent
STALL = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3"}

Start = Callable[..., tuple[int, str]]

# The launcher stops all ranks once one exits with an error, so each waits until all have reported theirs.
TOGETHER = """
    from pathlib import Path
    Path(f"done.{hvd.rank()}").touch()
    while not all(Path(f"done.{rank}").exists() for rank in range(hvd.size())):
        time.sleep(0.01)
"""
DISJOINT = """
    import time
    import torch
    import horovod.torch as hvd

    def evaluate(x):
        return hvd.allreduce(x, name="validation.loss")  # here rank 0 waits

    def train(x):
        return hvd.allreduce(x, name="training.loss")  # here rank 1 waits

    hvd.init()
    if hvd.rank() == 2:
        time.sleep(5)  # here rank 2 is
    for _ in range(2):
        try:
            (evaluate if hvd.rank() == 0 else train)(torch.ones(3))
        except hvd.HorovodInternalError as error:
            print(f"rank {hvd.rank()} got {type(error).__name__}: {error}", flush=True)
    hvd.shutdown()
    hvd.init()
    handle = hvd.allreduce_async(torch.ones(3), name=f"of.rank.{hvd.rank()}")
    try:
        while not hvd.poll(handle):
            time.sleep(0.01)  # here all poll
        hvd.synchronize(handle)
    except hvd.HorovodInternalError as error:
        print(f"rank {hvd.rank()} polled: {type(error).__name__}: {error}", flush=True)
""" + TOGETHER
LATE = """
    import time
    import numpy as np
    import ringdance.numpy as hvd

    hvd.init()
    time.sleep(10 * hvd.rank())  # here the late ones are
    hvd.allreduce(np.ones(3), name="gradient")  # here rank 0 waits
    print("went on")
"""
POOL = """
    import threading
    import time
    import tensorflow as tf
    import horovod.tensorflow as hvd

    tf.config.threading.set_inter_op_parallelism_threads(1)
    hvd.init()

    def run(name, seconds):
        time.sleep(seconds)
        tf.function(lambda: hvd.allreduce(tf.ones(3), name=name))()

    names = "ab" if hvd.rank() else "ba"
    for seconds, name in enumerate(names):
        threading.Thread(target=run, args=(name, seconds)).start()
"""


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Return a function that runs a script on several ranks and returns the exit code and all output."""
    def start(way: str, size: int, script: str, **settings: str) -> tuple[int, str]:
        (tmp_path / "train.py").write_text(textwrap.dedent(script))
        command, environ = launcher(size)
        if way == "horovodrun":
            command = [str(BIN / "horovodrun"), "-np", str(size)]
        environ = {k: v for k, v in environ.items() if not k.startswith(("HOROVOD_", "RINGDANCE_"))}
        environ |= {**settings, "RINGDANCE_FLIGHT_RECORDER_DIR": str(tmp_path)}
        done = subprocess.run(
            [*command, sys.executable, "train.py"],
            cwd=tmp_path, env=environ, text=True, timeout=150,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return done.returncode, done.stdout

    return start


# On a busy machine, starting Python and PyTorch on all ranks takes long.
pytestmark = pytest.mark.limit(160)


def line_with(script: str, words: str) -> str:
    """Return "train.py:N in ", where N is the number of the line with these words."""
    lines = textwrap.dedent(script).splitlines()
    return f"train.py:{next(number for number, line in enumerate(lines, 1) if words in line)} in "


def warnings_in(output: str) -> list[str]:
    return [line for line in output.splitlines() if " has waited " in line and "got " not in line]


def errors_in(output: str) -> dict[int, list[str]]:
    texts: dict[int, list[str]] = {}
    for rank, text in re.findall(r"rank (\d+) got (.*)", output):
        texts.setdefault(int(rank), []).append(text)
    return texts


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_disjoint_names(start: Start, size: int) -> None:
    """First a warning with everything needed to find the cause, then an error on every rank at every call.

    After a restart, all ranks poll, and none waits.
    """
    code, output = start("mpiexec", size, DISJOINT, **STALL)
    assert code != 0
    warning = warnings_in(output)[0]
    assert f"rank 0 on host {HOST}" in warning
    assert "'allreduce.validation.loss'" in warning
    assert line_with(DISJOINT, "rank 0 waits") + "evaluate" in warning
    assert f"rank 1 on host {HOST}" in warning
    assert "'allreduce.training.loss'" in warning
    assert line_with(DISJOINT, "rank 1 waits") + "train" in warning
    if size == 3:
        assert f"rank 2 on host {HOST}" in warning
        assert "it is not waiting for anything" in warning
        assert line_with(DISJOINT, "rank 2 is") + "<module>" in warning
    assert "All ranks must make the same calls." in warning
    errors = errors_in(output)
    assert sorted(errors) == list(range(size)), output
    for texts in errors.values():
        assert len(texts) == 2
        for text in texts:
            assert text.startswith("StallError: "), text
            assert "This rank gave up" in text
            assert "allreduce.training.loss" in text
            assert "allreduce.validation.loss" in text
    warning = next(line for line in output.splitlines() if " s ago 'allreduce.of.rank." in line)
    for rank in range(size):
        assert f"rank {rank} on host {HOST}" in warning
        assert f"'allreduce.of.rank.{rank}'" in warning
    assert warning.count(line_with(DISJOINT, "here all poll")) == size
    assert output.count(" polled: StallError") == size, output


@pytest.mark.parametrize(
    ("way", "size"), [("mpiexec", 2), pytest.param("horovodrun", 3, marks=pytest.mark.slow)]
)
def test_late_ranks_end_the_job(start: Start, way: str, size: int) -> None:
    """Rank r is 10 r seconds late, the warning is due after 2 seconds, and the job's end after 5."""
    limits = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "2", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5"}
    code, output = start(way, size, LATE, **limits)
    assert code != 0
    assert "went on" not in output
    assert "StallError" in output
    warning = warnings_in(output)[0]
    assert f"rank 0 on host {HOST}" in warning
    assert "'allreduce.gradient'" in warning
    assert line_with(LATE, "rank 0 waits") in warning
    for rank in range(1, size):
        assert f"rank {rank} on host {HOST}" in warning
    assert line_with(LATE, "the late ones are") in warning


def test_late_ranks_that_nobody_watches(start: Start) -> None:
    script = LATE.replace("10 *", "3 *")
    code, output = start("mpiexec", 2, script, **STALL, HOROVOD_STALL_CHECK_DISABLE="1")
    assert code == 0, output
    assert output.count("went on") == 2
    assert not warnings_in(output)


@pytest.mark.slow  # TensorFlow on two ranks
def test_programs_side_by_side_in_one_thread_of_tensorflow(start: Start) -> None:
    """Two programs run in a different order on rank 1, and no TensorFlow thread is left for the other one."""
    times = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "RINGDANCE_DEADLOCK_TIME": "2"}
    code, output = start("mpiexec", 2, POOL, **times)
    assert code != 0
    assert "All ranks are waiting, each for an operation" in output
    assert "it is waiting for 'allreduce.a'" in output
