"""Run scripts as users write them: many in one job, each in its own job, or within a rank test."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import pytest
from doc_blocks import blocks
from run import launcher

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests" / "dropin" / "scripts"
RUNNER = ROOT / "tests" / "dropin" / "script_runner.py"
BIN = Path(sys.executable).parent
LIMIT = 280.0  # seconds for one job; generous, because the machine may be busy
PREFIX = re.compile(r"^\[\d+\](<\w+>:| )", re.MULTILINE)

every_way = pytest.mark.parametrize(
    ("way", "size"),
    [
        ("alone", 1),
        ("horovodrun", 2),
        pytest.param("mpiexec", 3, marks=pytest.mark.slow),
        pytest.param("each by horovodrun", 3, marks=pytest.mark.slow),
        pytest.param("each by mpiexec", 2, marks=pytest.mark.slow),
    ],
)


@dataclass(frozen=True)
class Task:
    """A script that the ranks of a job run to completion.

    Attributes:
        script: Path of the script.
        words: Arguments of the script.
        directory: Working directory. The runner's files for this task are named after it.
        text: Code to run instead of the file, in a job that is already initialized.
        alone: If True, only rank 0 runs the script.
    """

    script: str
    words: tuple[str, ...]
    directory: Path
    text: str = ""
    alone: bool = False


@dataclass
class Outcome:
    """The outcome of a script's run."""

    code: int
    out: str  # without the launcher's prefixes
    err: str
    directory: Path
    size: int
    ended: float = 0.0  # seconds since 1970

    def one(self, pattern: str) -> float:
        """Return the number in the last line that matches `pattern`."""
        numbers: list[str] = re.findall(pattern, self.out, re.MULTILINE)
        assert numbers, self.out
        return float(numbers[-1])

    def of_ranks(self, pattern: str) -> list[str]:
        """Return the part that matches `pattern` after "rank r: ", for all ranks in rank order."""
        matches = dict(re.findall(rf"^rank (\d+): ({pattern})$", self.out, re.MULTILINE))
        assert sorted(matches) == [str(rank) for rank in range(self.size)], self.out
        return [matches[str(rank)] for rank in range(self.size)]

    def files(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())


def command(way: str, size: int) -> tuple[list[str], dict[str, str]]:
    if way.endswith("mpiexec"):
        return launcher(size)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if way == "alone":
        return [], environ
    return [str(BIN / "horovodrun"), "-np", str(size), "-H", f"localhost:{size}"], environ


def run_each(way: str, size: int, line: list[str], directory: Path, limit: float = LIMIT) -> Outcome:
    """Run a script as its own job."""
    start, environ = command(way, size)
    done = subprocess.run(
        [*start, sys.executable, *line], cwd=directory, env=environ, capture_output=True, text=True,
        errors="replace", check=False, timeout=limit,
    )  # fmt: skip
    out, err = PREFIX.sub("", done.stdout), PREFIX.sub("", done.stderr)
    return Outcome(done.returncode, out, err, directory, size)


def run_together(way: str, size: int, tasks: dict[str, Task], limit: float = LIMIT) -> dict[str, Outcome]:
    """Run all scripts in one job."""
    path = next(iter(tasks.values())).directory.parent / "plan.json"
    path.write_text(json.dumps([asdict(task) for task in tasks.values()], default=str))
    job = run_each(way, size, [str(RUNNER), str(path)], path.parent, limit)
    assert job.code == 0, job.out + job.err
    outcomes = {}
    for name, task in tasks.items():
        ends = [json.loads(Path(f"{task.directory}.{rank}.json").read_text()) for rank in range(size)]
        out, err = (
            "".join(Path(f"{task.directory}.{rank}.{ending}").read_text() for rank in range(size))
            for ending in ("out", "err")
        )
        code = next((end["code"] for end in ends if end["code"]), 0)
        ended = max(end["ended"] for end in ends)
        outcomes[name] = Outcome(code, out, err, task.directory, size, ended)
    return outcomes


def run_all(way: str, size: int, tasks: dict[str, Task]) -> dict[str, Outcome]:
    """Run scripts in one job, or each in its own job if the way starts with "each"."""
    if way.startswith("each"):
        return {
            name: run_each(way, size, [task.script, *task.words], task.directory)
            for name, task in tasks.items()
        }
    return run_together(way, size, tasks)


def output_of(script: Path, *words: str) -> str:
    """Run a script on this rank of a rank test and return what Python wrote to stdout."""
    out = io.StringIO()
    with mock.patch.object(sys, "argv", [str(script), *words]), contextlib.redirect_stdout(out):
        runpy.run_path(str(script), run_name="__main__")
    return out.getvalue()


def check_shown_script(page: str, command: str, directory: Path, rank: int) -> None:
    """Run the page's `command` on this rank. It must print what the page shows for this rank."""
    parts = blocks(ROOT / page)
    consoles = [block for block in parts if block.language == "console"]
    shown = {line: output for block in consoles for line, output in block.commands()}
    name = command.split()[-1]
    (directory / name).write_text(next(block.text for block in parts if block.file == name))
    prefix = f"[{rank}] "
    expected = [line.removeprefix(prefix) for line in shown[command].splitlines() if line.startswith(prefix)]
    assert expected
    with contextlib.chdir(directory):
        assert output_of(directory / name).splitlines() == expected
