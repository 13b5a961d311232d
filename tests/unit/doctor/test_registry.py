"""The list of checks: whole, well formed, and each with a test that breaks the thing."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

from ringdance.doctor.probe import PROBES
from ringdance.doctor.registry import ERROR, Case, Finding, Wanted, all_checks, examine


def _broken() -> set[str]:
    """Names in ``@breaks(...)``, and first words of the tuples of the files' tables."""
    found: set[str] = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "breaks":
                found |= {word.value for word in node.args if isinstance(word, ast.Constant)}  # type: ignore[misc]
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
                rows = [row for row in node.value.elts if isinstance(row, ast.Tuple)]
                found |= {row.elts[0].value for row in rows if isinstance(row.elts[0], ast.Constant)}  # type: ignore[misc]
    return found


def test_each_check_has_a_test_that_breaks_the_thing() -> None:
    assert _broken() == set(all_checks())


def test_checks_are_well_formed() -> None:
    checks = all_checks()
    assert len(checks) >= 40
    for check in checks.values():
        assert set(check.needs) <= set(PROBES) | {"links", "reach"}, check
        assert (check.host is None) != (check.hosts is None)
        assert check.looks_at
        assert not check.looks_at.endswith("."), check.name
        assert check.name == check.name.lower()


def test_a_probe_that_fails_makes_its_checks_unknown_and_no_others() -> None:
    results = examine({"a": {"memory": {"failed": "KeyError: x"}, "machine": {"failed": "gone"}}}, Wanted())
    assert {result.severity for result in results} == {"unknown"}
    assert {"shm-size", "swap"} <= {result.check for result in results}
    assert not {"zombies", "threads"} & {result.check for result in results}


def test_what_several_hosts_have_in_common_is_said_once() -> None:
    facts = {"leftovers": {"zombies": [], "orphans": [], "shared": [], "folders": [], "threads": 1}}
    results = examine({"a": facts, "b": facts}, Wanted(), ["zombies"])
    assert [result.hosts for result in results] == [("a", "b")]


def test_a_finding_is_wrong_if_it_has_a_mend() -> None:
    assert Finding("x", "do y").wrong
    assert not Finding("x").wrong
    assert Case({"environment": {"variables": {"A": "1"}}}).variable("A") == "1"
    assert ERROR == "error"


def test_a_probe_process_answers_even_if_a_probe_is_unknown() -> None:
    asked = {"probes": ["nothing"], "wanted": {}, "seconds": 10}
    done = subprocess.run(
        [sys.executable, "-m", "ringdance.doctor.probe"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "ModuleNotFoundError" in done.stdout
