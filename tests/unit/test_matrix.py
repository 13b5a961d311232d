"""`make test-matrix`: its rows match the package's requirements, and a row that cannot run says so."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import matrix
import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = {row.name: row for row in matrix.read_rows()}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def as_numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def test_the_first_row_is_what_make_test_installs() -> None:
    assert ROWS["newest-311"].versions == {name: pins()[name] for name in matrix.FRAMEWORKS}
    assert pins()["tensorflow-cpu"] == pins()["tensorflow"]


def test_no_row_is_below_what_the_extras_allow_and_one_is_the_lowest() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in ("tensorflow", "keras", "jax"):
        least = as_numbers(re.findall(rf"^{name}>=([\d.]+)", "\n".join(extras[name]), re.M)[0])
        tested = [as_numbers(row.versions[name]) for row in ROWS.values() if name in row.versions]
        assert min(tested)[: len(least)] == least, name


def test_each_python_has_the_newest_and_the_one_before() -> None:
    for python in ("3.11", "3.12", "3.13"):
        here = [row for row in ROWS.values() if row.python == python]
        for name in ("tensorflow", "keras", "jax"):
            assert len({row.versions.get(name) for row in here} - {None}) >= 2, (python, name)
        assert python == "3.11" or not any("torch" in row.versions for row in here)


def test_a_python_that_is_not_here_is_skipped_and_says_so() -> None:
    result = matrix.run_row(matrix.Row("none", "3.99", {}, []), "tree")
    assert result.outcome.startswith("skipped: no Python 3.99 here")


def test_this_python_is_found() -> None:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert matrix.find_python(here) is not None


def test_a_row_that_has_passed_on_these_sources_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = matrix.digest(matrix.ROOT)
    assert tree == matrix.digest(matrix.ROOT)
    monkeypatch.setattr(matrix, "DIRECTORY", tmp_path)
    monkeypatch.setattr(matrix, "digest", lambda root: tree)
    monkeypatch.setattr(matrix, "run_row", lambda row, tree, _: matrix.Result("FAILED (it was run)", tree))
    monkeypatch.setattr(sys, "argv", ["matrix.py", "--only", "newest-312"])
    passed = matrix.Result("passed", tree, {"python": "3.12.1"}, {"passed": 7}, 60.0)
    directory = tmp_path / "newest-312"
    directory.mkdir()
    (directory / "result.json").write_text(json.dumps(asdict(passed)))
    assert matrix.main() == 0
    stdout = capsys.readouterr().out
    assert "has passed on these sources" in stdout
    assert re.search(r"newest-312 +3\.12\.1 .* passed +7 passed in 1\.0 min", stdout)
    (directory / "result.json").write_text(json.dumps(asdict(passed) | {"tree": "another"}))
    assert matrix.main() == 1
    assert "FAILED (it was run)" in capsys.readouterr().out


def test_a_row_goes_on_after_the_runs_that_have_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = matrix.Row("some", f"{sys.version_info.major}.{sys.version_info.minor}", {}, [["a"], ["b"], ["c"]])
    row_folder = tmp_path / row.name
    row_folder.mkdir()
    monkeypatch.setattr(matrix, "DIRECTORY", tmp_path)
    monkeypatch.setattr(matrix, "prepare", lambda row, python: None)
    monkeypatch.setattr(matrix, "installed", lambda row: {"python": "3.11.7"})
    failing, run = {"a"}, []

    def run_tests(row: matrix.Row, words: list[str]) -> tuple[int, Counter[str]]:
        run.append(words[0])
        if words[0] == "c" and "c" in failing:
            raise KeyboardInterrupt
        return (1, Counter(failed=1)) if words[0] in failing else (0, Counter(passed=1))

    monkeypatch.setattr(matrix, "run_tests", run_tests)
    assert matrix.recorded(row, "tree") is None
    first = matrix.run_row(row, "tree")
    assert (first.outcome, first.counts) == ("FAILED", {"passed": 2, "failed": 1})
    failing.clear()
    second = matrix.run_row(row, "tree", matrix.recorded(row, "tree"))
    assert (second.outcome, second.counts, run) == ("passed", {"passed": 3}, ["a", "b", "c", "a"])
    assert matrix.recorded(row, "another") is None
    failing.add("c")
    with pytest.raises(KeyboardInterrupt):
        matrix.run_row(row, "later", matrix.recorded(row, "later"))
    interrupted = matrix.recorded(row, "later")
    assert interrupted is not None
    assert (interrupted.outcome, interrupted.done) == ("interrupted", [["a"], ["b"]])
