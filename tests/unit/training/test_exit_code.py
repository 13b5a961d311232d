"""The exit code with which a program is about to end, which atexit functions can query."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ringdance.host.exit_code

PROGRAM = """
import atexit, pickle, sys, threading
sys.path.insert(0, sys.argv[1])
import exit_code
exit_code.watch()
exit_code.watch()
atexit.register(lambda: print(exit_code.exit_code()))
try: sys.exit(9)
except SystemExit as error:
    assert (error.code, error.args) == (9, (9,))
    error.code = 8
    assert error.code == 8 and repr(error) == repr(pickle.loads(pickle.dumps(error))) == "SystemExit(9)"
for function in sys.exit, exit:
    thread = threading.Thread(target=function, args=(7,))
    thread.start()
    thread.join()
def ends():
    try: sys.exit(6)
    except SystemExit as error: sys.exit(error)
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("", 0), ("sys.exit()", 0), ("sys.exit(0)", 0), ("sys.exit(256)", 0), ("sys.exit(False)", 0),
        ("sys.exit(-1)", 255), ("sys.exit('text')", 1), ("quit(3)", 3), ("exit(4)", 4), ("ends()", 6),
        ("import argparse; argparse.ArgumentParser().parse_args(['-x'])", 2),
    ],
)  # fmt: skip
def test_it_is_the_one_that_the_parent_gets(ending: str, code: int) -> None:
    directory = str(Path(ringdance.host.exit_code.__file__).parent)
    line = [sys.executable, "-c", PROGRAM + ending, directory]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=50)
    assert (done.returncode, done.stdout) == (code, f"{code}\n"), done.stderr
    assert "Exception in thread" not in done.stderr
    assert "text" not in ending or done.stderr == "text\n"
