"""Read the stacks of other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ringdance.core.reports.dump import main_frames, own_lines, stacks_of

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")

PROGRAM = """
import re, threading, time
from ringdance.core.reports import dump

def stuck():
    print("ready", flush=True)
    {what}

dump.enable()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
stuck()
"""


@contextmanager
def process(what: str, program: str = PROGRAM) -> Iterator[int]:
    line = [sys.executable, "-c", program.format(what=what)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout
        assert started.stdout.readline() == "ready\n"
        try:
            yield started.pid
            assert started.poll() is None
        finally:
            started.kill()


@pytest.mark.parametrize(
    "what", ['re.match("(a+)+$", "a" * 60 + "b")', "time.sleep(60)", "while True: pass"]
)
def test_the_line_of_the_main_thread_is_found(what: str) -> None:
    with process(what) as pid:
        for _ in range(2):
            frames = own_lines(main_frames(stacks_of(pid)))
            assert [frame.rpartition(" in ")[2] for frame in frames] == ["stuck", "<module>"]


def test_a_process_that_is_no_rank_gets_no_signal() -> None:
    with process("", "import time; print('ready', flush=True); time.sleep(60)") as pid:
        assert stacks_of(pid) == ""
    assert stacks_of(2**22 + 1) == ""
