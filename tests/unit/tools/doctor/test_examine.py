"""The list of checks: complete, well formed, and each with a test that really breaks a machine."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from breaking import Machine

from ringdance.errors import LaunchError
from ringdance.launch.remote.shell import RemoteShell
from ringdance.tools.doctor import examine as module
from ringdance.tools.doctor.check import AREAS, SEVERITIES, Usage, outliers
from ringdance.tools.doctor.examine import CHECKS, examine
from ringdance.tools.doctor.probe import PROBES
from ringdance.tools.hosts.host_set import HostSet


def _broken() -> set[str]:
    """Return the names in ``@breaks(...)`` and the first words of the rows in each file's tables."""
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
    assert _broken() == set(CHECKS)


def test_checks_are_well_formed() -> None:
    assert len(CHECKS) >= 35
    for check in CHECKS.values():
        assert set(check.needs) <= set(PROBES) | {"reach"}, check
        assert check.area in AREAS
        assert check.severity in SEVERITIES
        assert check.description
        assert not check.description.endswith("."), check.name
        assert check.name == check.name.lower()


def test_a_probe_that_fails_makes_its_checks_unknown_and_no_others() -> None:
    results = examine({"a": {"memory": {"failed": "KeyError: x"}, "machine": {"failed": "gone"}}}, Usage())
    assert {result.severity for result in results} == {"unknown"}
    assert {"shm-size", "memory-limit"} <= {result.check for result in results}
    assert not {"orphans", "threads"} & {result.check for result in results}


def test_what_several_hosts_have_in_common_is_said_once() -> None:
    facts = {"leftovers": {"orphans": [], "shared": []}}
    results = examine({"a": facts, "b": facts}, Usage(), ["orphans"])
    assert [result.hosts for result in results] == [("a", "b")]


def test_of_equally_common_values_the_first_host_s_counts() -> None:
    (finding,) = outliers({"a": "1", "b": "2"}, "fix it", "version")
    assert (finding.text, finding.hosts) == ("version 2 on b, but 1 on a", ("b",))
    (equal,) = outliers({"a": "1", "b": "1"}, "fix it", "version")
    assert (equal.text, equal.fix) == ("version 1 on all hosts", "")


def test_a_probe_process_answers_even_if_a_probe_is_unknown() -> None:
    facts = Machine().facts(["nothing"])
    assert "KeyError" in facts["nothing"]["failed"]


@pytest.mark.parametrize(
    ("answer", "error", "fix"),
    [
        ({"output": 'noise }\n::ringdance-doctor::{"cpu": {"cores": 2}}\nnoise'}, "", ""),
        ({"output": "ended with exit code -9"}, "ended with exit code -9", "ssh node1"),
        ({"output": "::ringdance-doctor::{"}, "the probes fail", "-m ringdance doctor"),
        ({"problem": "no answer within 9 s"}, "no answer within 9 s", "ssh node1"),
    ],
)
def test_what_a_host_answers(answer: dict[str, str], error: str, fix: str) -> None:
    hosts = HostSet({"node1": 0}, RemoteShell())
    reach = module._facts(hosts, "node1", {"problem": "", **answer})["reach"]
    assert error in reach["error"]
    assert fix in reach.get("fix", "")
    assert bool(reach["error"]) == bool(error)


def test_a_problem_and_its_fix_are_reported_apart() -> None:
    error = LaunchError("ssh cannot connect: (All use is logged. Go. )", "Try it")
    hosts = HostSet({"node1": 0}, RemoteShell(), problems={"node1": error})
    reach = module._facts(hosts, "node1", {"problem": str(error)})["reach"]
    assert reach == {"error": "ssh cannot connect: (All use is logged. Go. )", "fix": "Try it"}
