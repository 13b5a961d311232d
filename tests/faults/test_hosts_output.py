"""Output formats other than lines with their rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from processes import by_main, script

run = partial(by_main, "run", "-np", "3")


def program(directory: Path) -> str:
    return script(
        directory,
        "import os, sys\n"
        "print('same', flush=True)\n"
        "print('own', os.environ['RINGDANCE_RANK'])\n"
        "print('warning \"ü\"', file=sys.stderr)\n",
    )


def test_json_lines(tmp_path: Path) -> None:
    done = run("--output-json", "python", program(tmp_path))
    results = [json.loads(line) for line in (done.stdout + done.stderr).splitlines()]
    for rank in range(3):
        mine = [(line["stream"], line["text"]) for line in results if line["rank"] == rank]
        assert mine == [("stdout", "same"), ("stdout", f"own {rank}"), ("stderr", 'warning "ü"')]
    assert all(line["time"] > 1e9 and line["host"] for line in results)


def test_colours_are_on_the_screen_only(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    ours, theirs = os.openpty()
    words = [sys.executable, "-m", "ringdance", "run", "-np", "3", "--output-filename", str(logs)]
    words += ["python", "-c", "print('word')"]
    environ = {**os.environ, "TERM": "xterm"}
    environ.pop("NO_COLOR", None)
    subprocess.run(words, stdin=subprocess.DEVNULL, stdout=theirs, env=environ, check=True, timeout=50)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode().splitlines()
    os.close(ours)
    lines = sorted(line[line.index("[", 2) :] for line in shown)
    assert lines == [f"[{rank}] \033[0mword" for rank in range(3)]
    assert len({line[: line.index("[", 2)] for line in shown}) == 3
    assert (logs / "rank.1" / "stdout").read_text() == "[1] word\n"
    assert "\033" not in run("python", "-c", "print('word')").stdout


@pytest.mark.parametrize("terminal", [True, False])
def test_bars_of_two_ranks_do_not_overwrite_each_other(tmp_path: Path, terminal: bool) -> None:
    path = script(
        tmp_path,
        "import os, sys, time\n"
        "for n in range(5):\n"
        "    sys.stderr.write(f'\\rbar {n}')\n"
        "    time.sleep(0.05)\n"
        "sys.stderr.write('\\r')\n",
    )
    ours, theirs = os.openpty() if terminal else os.pipe()
    line = [sys.executable, "-m", "ringdance", "run", "-np", "2", "python", path]
    done = subprocess.run(
        line, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, check=False, timeout=50,
        env={**os.environ, "TERM": "xterm", "NO_COLOR": "1"},
    )  # fmt: skip
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 0, shown
    if terminal:  # one bar below the other: two lines are removed before each redraw
        last = shown.rpartition("\x1b[2A\x1b[J")[2]
        assert last.splitlines() == ["[0] bar 4", "[1] bar 4"]
    else:
        for row in shown.split("\n"):
            assert not ("[0]" in row and "[1]" in row)
        assert "[0] bar 4\r" in shown
        assert "[1] bar 4\r" in shown
