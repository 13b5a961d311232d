"""The command `ringdance doctor`: output and exit codes, and the checks before a job."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from breaking import program

from ringdance.errors import LaunchError
from ringdance.launch.hosts import Host
from ringdance.launch.remote.connect import Remote, connect
from ringdance.launch.remote.shell import RemoteShell
from ringdance.launch.spec import JobSpec
from ringdance.tools import cli
from ringdance.tools.doctor import cli as doctor_cli
from ringdance.tools.doctor import preflight as module
from ringdance.tools.doctor.check import AREAS, Result, Usage
from ringdance.tools.doctor.examine import CHECKS
from ringdance.tools.doctor.report import print_text
from ringdance.tools.hosts.host_set import HostSet

NOISY = {"OMP_NUM_THREADS": "9999"}


@pytest.fixture(autouse=True)
def _not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_the_list_names_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{name} " in shown for name in CHECKS)
    assert shown.endswith(f"{len(CHECKS)} checks\n")


def test_what_is_wrong_is_said_with_its_fix(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["doctor", "--check", "threads"]) == 0
    monkeypatch.setenv("OMP_NUM_THREADS", "9999")
    assert cli.main(["doctor", "--check", "threads", "--slots", "2"]) == 1
    shown = capsys.readouterr().out
    assert "OMP_NUM_THREADS=9999 with 2 ranks starts 19998 compute threads" in shown
    assert "fix: unset OMP_NUM_THREADS" in shown


def test_json_has_results_and_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--check", "limit-address-space", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [result["check"] for result in report["results"]] == ["limit-address-space"]
    assert report["facts"][os.uname().nodename]["limits"].keys() >= {"memlock", "address"}


@pytest.mark.parametrize("area", AREAS)
def test_a_heading_is_the_name_of_its_checks(monkeypatch: pytest.MonkeyPatch, area: str) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(doctor_cli, "collect", lambda *given: {})
    monkeypatch.setattr(doctor_cli, "examine", lambda *given: (asked.append(given[-1]), [])[1])
    assert cli.main(["doctor", "--check", area, "--json"]) == 0
    assert asked == [[check.name for check in CHECKS.values() if check.area == area]]
    assert asked[0]


@pytest.mark.parametrize(
    "words",
    [
        ["--check", "no-such"],
        ["-H", "-oProxyCommand=x"],
        ["-H", "a:b"],
        ["--hostfile", "/no/file"],
        ["--ssh-args='-o User=me"],
    ],
)
def test_what_cannot_be_understood_is_an_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(["doctor", *words])
    except SystemExit as end:  # argparse's own errors
        code = int(end.code or 0)
    assert code == 2
    assert "ringdance doctor" in capsys.readouterr().err


def test_a_host_s_name_is_never_an_option_of_ssh(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "-H=-oProxyCommand=touch$IFS/tmp/x:2"]) == 2


def test_hosts_are_named_where_not_all_are_meant(capsys: pytest.CaptureFixture[str]) -> None:
    result = Result("shm-size", "memory", "error", ("b",), "/dev/shm has 64 MiB", "do this")
    print_text(["a", "b"], [result])
    assert "shm-size [b]: /dev/shm has 64 MiB" in capsys.readouterr().out
    print_text(["b"], [result])
    assert "shm-size: /dev/shm" in capsys.readouterr().out


def test_the_checks_before_a_job_find_what_is_wrong_on_a_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "ssh", "echo 'me@far: Permission denied (publickey).' >&2; exit 255")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    first = module.preflight(_Ready("far.invalid"))[0]  # type: ignore[arg-type]
    assert (first.check, first.severity, first.hosts) == ("reached", "error", ("far.invalid",))


def test_the_checks_before_a_job_use_its_agents_and_leave_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "ssh", "exit 255")
    shell = RemoteShell(local=("far.invalid",))  # instead of going through ssh
    (agent,) = connect(["far.invalid"], shell, 30.0)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    try:
        ready = _Ready("far.invalid", remotes=[agent])
        for _ in range(2):
            results = module.preflight(ready)  # type: ignore[arg-type]
            assert not any(result.check == "reached" for result in results), results
            assert agent.process
            assert agent.process.poll() is None
        agent.process.kill()
        first = module.preflight(ready)[0]  # type: ignore[arg-type]
        assert (first.check, first.hosts) == ("reached", ("far.invalid",))
        assert first.text.startswith("host lost: connection closed")
    finally:
        agent.close()


def test_the_checks_that_count_less_before_a_job_exist() -> None:
    assert set(CHECKS) >= module._WARNINGS


class _Ready:
    """A job on two hosts that is about to start."""

    def __init__(self, other: str = "b", remotes: Sequence[Remote] = ()) -> None:
        self.closed, self.remotes = False, remotes
        self.spec = JobSpec(["x"], shell=RemoteShell(port=2222), output_directory="logs")
        hosts = (Host("a", 4, (0, 1), local=True), Host(other, 4, (2,)))
        self.plan = SimpleNamespace(hosts=hosts)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    """Replace the checks of two hosts and return the list of their results, which a test fills."""
    results: list[Result] = []

    def collect(hosts: HostSet, probes: object, usage: Usage, seconds: float) -> dict[str, object]:
        assert hosts.names == ["a", "b"]
        assert hosts.shell == RemoteShell(port=2222, local=frozenset({"a"}))
        assert usage.slots == {"a": 2, "b": 1}
        assert usage.directories == (os.path.abspath("logs"),)
        return {}

    monkeypatch.setattr(module, "collect", collect)
    monkeypatch.setattr(module, "examine", lambda *given: results)
    monkeypatch.setattr(HostSet, "connect", lambda *more: None)
    return results


def test_a_job_with_an_error_is_not_started(found: list[Result]) -> None:
    found += [
        Result("memory-free", "memory", "warning", ("a",), "in use", "unswap"),
        Result("shm-size", "memory", "error", ("b",), "/dev/shm has 1 MiB", "enlarge it"),
        Result("same-mpi", "python", "error", ("a", "b"), "mpi4py 4 on b, but 5 on a", "fix it"),
    ]
    ready, messages = _Ready(), list[str]()
    with pytest.raises(LaunchError) as raised:
        module.check_hosts(ready, messages.append)  # type: ignore[arg-type]
    assert str(raised.value).splitlines() == [
        "cannot start:",
        "  host b: /dev/shm has 1 MiB",
        "    fix: enlarge it",
        "  hosts a, b: mpi4py 4 on b, but 5 on a",
        "    fix: fix it",
        "(to start anyway, pass --no-check)",
    ]
    assert ready.closed
    assert messages == []


def test_errors_can_be_said_only(found: list[Result]) -> None:
    found.append(Result("shm-size", "memory", "error", ("b",), "/dev/shm has 1 MiB", "enlarge it"))
    ready, messages = _Ready(), list[str]()
    module.check_hosts(ready, messages.append, required=False)  # type: ignore[arg-type]
    assert messages == ["host b: /dev/shm has 1 MiB\n    fix: enlarge it"]
    assert not ready.closed


def test_what_does_not_hinder_a_job_is_said_in_a_line(found: list[Result]) -> None:
    found += [
        Result("names-agree", "network", "error", ("a",), "b stands for nothing", "fix names"),
        Result("memory-free", "memory", "warning", ("a", "b"), "in use", "unswap"),
        Result("pipes", "limits", "note", ("a",), "small", "fix pipes"),
        Result("cores", "cpu", "ok", ("a",), "two"),
    ]
    ready, messages = _Ready(), list[str]()
    module.check_hosts(ready, messages.append)  # type: ignore[arg-type]
    assert messages == [
        "checks found problems that may slow down or end the job: names-agree, memory-free. "
        "To see the fixes, run: ringdance doctor --quick -H a:2,b:1"
    ]
    assert not ready.closed
