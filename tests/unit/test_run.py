"""tests/runners/run.py: no test is skipped, and jobs that have passed are not run again."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import run

TESTS = Path(run.__file__).parents[1]


def test_every_file_is_in_one_job_at_least_and_most_in_make_test() -> None:
    def files_of(jobs: list[run.Job]) -> set[Path]:
        paths = [Path(name) for job in jobs for name in job.files()]
        return {file for path in paths for file in (path.rglob("test_*.py") if path.is_dir() else [path])}

    jobs = run.all_jobs()
    assert files_of(jobs) == set(TESTS.rglob("test_*.py"))
    some = [job for job in jobs if not job.only_slow or job.venv in (".venv-torchvision", ".venv-mxnet")]
    assert files_of(some) == files_of(jobs)


def test_what_make_test_has_of_the_tests_on_hosts_is_there() -> None:
    text = "".join(path.read_text() for path in (TESTS / "hosts").glob("test_*.py"))
    table = (TESTS / "hosts" / "conftest.py").read_text()
    names = re.findall(r'^    "(test_\w+)', table, re.MULTILINE)
    assert len(names) >= 10
    assert [name for name in names if f"def {name}(" not in text] == []


def test_jobs_run_side_by_side_except_those_that_are_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    both, running, beside = threading.Barrier(2), Counter[str](), []

    def run_job(job: run.Job, *_: object) -> run.Outcome:
        beside.append((job.name, running.total()))
        running[job.name] += 1
        if not job.alone:
            both.wait(30)
        running[job.name] -= 1
        return run.Outcome(job, Counter(passed=1), [])

    monkeypatch.setattr(run, "run_job", run_job)
    monkeypatch.setattr(run, "LOGS", tmp_path)
    monkeypatch.setattr(run, "AT_ONCE", 2)
    jobs = [run.Job("unit", "a"), run.Job("ranks", "b"), run.Job("faults", "c", alone=True)]
    run.run_jobs(jobs, "not slow", [])
    assert beside[-1] == ("c", 0)


def test_what_a_test_leaves_in_the_temporary_directory_goes_with_its_job(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(
        "import pathlib, tempfile\n"
        "def test_one():\n"
        "    (pathlib.Path(tempfile.gettempdir()) / 'ringdance-flight-rank0-1.json').touch()\n"
        f"    pathlib.Path({str(tmp_path / 'place')!r}).write_text(tempfile.gettempdir())\n"
    )
    outcome = run.run_job(run.Job("unit", "one", options=(f"{tmp_path}",)), [], 60.0, lambda line: None)
    assert outcome.counts == {"passed": 1}
    assert not Path((tmp_path / "place").read_text()).exists()


def test_a_process_that_a_job_leaves_is_named_and_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "GRACE", 0.5)
    (tmp_path / "test_one.py").write_text(
        "import subprocess\n"
        "def test_one():\n"
        "    process = subprocess.Popen(['sleep', '77'], start_new_session=True)\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(process.pid))\n"
    )
    outcome = run.run_job(run.Job("unit", "one", options=(f"{tmp_path}",)), [], 60.0, lambda line: None)
    pid = int((tmp_path / "pid").read_text())
    assert outcome.problems == [f"FAILED: left process {pid} (sleep 77 )"]
    until = time.monotonic() + 10
    while Path(f"/proc/{pid}/exe").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}/exe").exists()


def test_durations_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run one pytest on a test that passes, one that fails and one that is skipped."""
    (tmp_path / "test_three.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('n', [1, 2])\n"
        "def test_good(n): pass\n"
        "def test_bad(): assert False\n"
        "def test_skipped(): pytest.skip()\n"
    )
    job = run.Job("unit", "three", options=("-p", "no:cacheprovider", f"{tmp_path}"))
    outcome = run.run_job(job, [], 60.0, lambda line: None)
    assert outcome.counts == {"passed": 2, "failed": 1, "skipped": 1}
    assert outcome.problems == ["FAILED (exit code 1)"]
    assert "assert False" in outcome.output
    assert sorted(name.rpartition(".")[2] for name, _ in outcome.slowest) == [
        "test_bad", "test_good", "test_skipped",
    ]
    monkeypatch.setattr(run, "LOGS", tmp_path)
    run.record([outcome])
    (row,) = json.loads((tmp_path / "durations.json").read_text())
    assert (row["part"], row["job"]) == ("unit", "three")
    assert (row["tests"]["failed"], row["seconds"]) == (1, outcome.seconds)


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Replace all jobs with two whose names are recorded when they run. The first fails once."""
    names: list[str] = []

    def run_job(job: run.Job, *_: object) -> run.Outcome:
        names.append(job.name)
        failed = job.name == "first" and names.count("first") == 1
        return run.Outcome(job, Counter(passed=1), ["FAILED"] if failed else [])

    (tmp_path / "Makefile").touch()
    monkeypatch.setattr(run, "run_job", run_job)
    jobs = [run.Job("unit", "first"), run.Job("unit", "last", alone=True)]
    monkeypatch.setattr(run, "all_jobs", lambda: jobs)
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "LOGS", tmp_path / "build")
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)
    return names


def test_what_has_passed_on_the_same_sources_is_not_run_again(
    done: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["run.py", "--resume"])
    assert run.main() == 1
    assert run.main() == 0
    assert done == ["first", "last", "first"]
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["run.py", "--left"])
    assert run.main() == 0
    assert "passed: unit/first: 1 passed" in capsys.readouterr().out
    (tmp_path / "Makefile").write_text("changed")
    assert run.main() == 1
    assert "left: unit/first\nleft: unit/last\n" in capsys.readouterr().out
    assert len(done) == 3


def test_an_interrupt_keeps_what_has_passed(
    done: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(job: run.Job, *_: object) -> run.Outcome:
        if job.name == "last":
            raise KeyboardInterrupt
        return run.Outcome(job, Counter(passed=1), [])

    monkeypatch.setattr(run, "run_job", interrupted)
    monkeypatch.setattr("sys.argv", ["run.py", "--resume"])
    with pytest.raises(KeyboardInterrupt):
        run.main()
    monkeypatch.setattr("sys.argv", ["run.py", "--left"])
    assert run.main() == 1
    assert capsys.readouterr().out.endswith("left: unit/last\n")
