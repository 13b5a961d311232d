"""Check rows.toml and write README.md from it: `python rows.py [--write]`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
PAGE = HERE / "README.md"
HEAD = """# What Horovod's tests check

Horovod's own tests of its bindings and its launcher, row by row: what each test checks, and the test here
that checks the same with the same inputs, values, tolerances and kinds of errors. The bindings' tests run on
2 and 3 real processes with `python tests/runners/run.py --all dropin`. TensorFlow's run both eagerly and as
graphs, and `make test-mxnet` runs MXNet's on 1, 2 and 3. A test marked with * also runs on a GPU, and **GPU**
marks tests that need one. Numbers in parentheses are the original's numbers of tests.
"""

NEEDS = {"PyTorch": "torch", "TensorFlow": "tensorflow", "Keras": "keras", "MXNet": "mxnet"}

Row = dict[str, Any]


def load() -> list[Row]:
    """Return the rows: part, name, count, and checks with says, tests, gpu and difference."""
    rows: list[Row] = tomllib.loads((HERE / "rows.toml").read_text())["row"]
    return rows


def here(rows: list[Row]) -> list[Row]:
    """Return the rows whose framework is installed."""
    return [row for row in rows if row["part"] not in NEEDS or importlib.util.find_spec(NEEDS[row["part"]])]


def checks(rows: list[Row]) -> Iterator[tuple[str, Row]]:
    for row in rows:
        for check in row["checks"]:
            yield f"{row['part']}: {row['name']}: {check['says']}", check


def collected(rows: list[Row]) -> set[str]:
    """Return the ids below tests/ of all tests in the files that rows name, with and without parameters."""
    named = {test.partition("::")[0] for _, check in checks(rows) for test in check.get("tests", [])}
    files = sorted(file for file in named if (TESTS / file).exists())
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError("\n".join([*done.stdout.splitlines()[-20:], done.stderr]))
    ids = {line.removeprefix("tests/") for line in done.stdout.splitlines() if "::" in line}
    return ids | {test.partition("[")[0] for test in ids}


def mistakes(rows: list[Row], known: set[str]) -> list[str]:
    """Return what is wrong: rows without checks, tests that do not exist, unknown words."""
    problems = [f"{row['part']}: {row['name']}: no checks" for row in rows if not row["checks"]]
    for where, check in checks(rows):
        if set(check) - {"says", "tests", "gpu", "difference"} or not check["says"]:
            problems.append(f"{where}: {sorted(check)}")
        if not check.get("tests") and not check.get("difference"):
            problems.append(f"{where}: neither a test nor a difference")
        if check.get("gpu") not in (None, "also", "only"):
            problems.append(f"{where}: gpu = {check['gpu']!r}")
        problems += [f"{where}: no test {test}" for test in check.get("tests", []) if test not in known]
        if "gpu" in check and not any(on_gpu(test, check["gpu"], known) for test in check["tests"]):
            problems.append(f"{where}: none of its tests has a form for a GPU")
    return problems


def on_gpu(test: str, how: str, known: set[str]) -> bool:
    forms = [item for item in known if item.startswith(f"{test}[")]
    return any("cuda" in form for form in forms) or (how == "only" and "gpu" in test)


def page(rows: list[Row]) -> str:
    """Return the readable page."""
    lines = [HEAD]
    part = ""
    for row in rows:
        if row["part"] != part:
            part = row["part"]
            lines.append(f"## {part}\n")
        lines += [f"### {row['name']} ({row['count']})\n", "| what is checked | test | different here |"]
        lines.append("| --- | --- | --- |")
        for check in row["checks"]:
            mark = {"also": " *", "only": " **GPU**"}.get(check.get("gpu", ""), "")
            tests = "<br>".join(f"`{short(test)}`" for test in check.get("tests", [])) or "none"
            lines.append(f"| {check['says']}{mark} | {tests} | {check.get('difference', '')} |")
        lines.append("")
    return "\n".join(lines)


def short(test: str) -> str:
    file, _, name = test.partition("::")
    return f"{file.rpartition('/')[2].removesuffix('.py')}::{name}"


def main() -> int:
    rows = load()
    problems = mistakes(here(rows), collected(here(rows)))
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(rows))
    number = sum(1 for _ in checks(rows))
    print("\n".join(problems) or f"{number} checks in {len(rows)} rows, all with tests or reasons")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
