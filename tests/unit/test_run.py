"""tests/run.py and tests/run_all.py: nothing is left out, and what has passed is not run again."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path

import pytest
import run
import run_all

TESTS = Path(run.__file__).parent


def test_every_file_is_in_one_job_at_least_and_most_in_make_test() -> None:
    def files_of(jobs: list[run.Job]) -> set[Path]:
        found = [Path(name) for job in jobs for name in job.files()]
        return {file for path in found for file in (path.rglob("test_*.py") if path.is_dir() else [path])}

    jobs = run.all_jobs()
    assert files_of(jobs) == set(TESTS.rglob("test_*.py"))
    some = [job for job in jobs if not job.only_slow or {"torchvision", "mxnet"}.intersection(job.needs)]
    assert files_of(some) == files_of(jobs)


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


def test_durations_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pytest with a test that passes, one that fails and one that is skipped."""
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
def steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Two steps of make test-all that only note that they were run; the first one fails at first."""
    done: list[str] = []

    def run_step(step: run_all.Step) -> tuple[bool, str]:
        done.append(str(step))
        return done.count(str(step)) > 1 or "first" not in str(step), "=== 1 passed ==="

    monkeypatch.setattr(run_all, "run", run_step)
    both = [run_all.Step(".venv", (name,)) for name in ("first", "last")]
    monkeypatch.setattr(run_all, "all_steps", lambda: both)
    monkeypatch.setattr(run_all, "LOGS", tmp_path)
    monkeypatch.setattr(run_all, "PASSED", tmp_path / "all.json")
    monkeypatch.setattr("sys.argv", ["run_all.py"])
    return done


def test_what_has_passed_on_the_same_sources_is_not_run_again(
    steps: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_all, "digest", lambda: "one state")
    assert run_all.main() == 1
    assert "FAILED: .venv: first" in capsys.readouterr().out
    assert run_all.main() == 0
    assert steps == [".venv: first", ".venv: last", ".venv: first"]
    assert "2 of 2 passed on these sources, 0 left" in capsys.readouterr().out
    monkeypatch.setattr(run_all, "digest", lambda: "another state")
    monkeypatch.setattr("sys.argv", ["run_all.py", "--left"])
    assert run_all.main() == 1
    assert "left: .venv: first\nleft: .venv: last\n" in capsys.readouterr().out
    assert len(steps) == 3


def test_an_interrupt_keeps_what_has_passed(
    steps: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(step: run_all.Step) -> tuple[bool, str]:
        if "last" in str(step):
            raise KeyboardInterrupt
        return True, ""

    monkeypatch.setattr(run_all, "digest", lambda: "one state")
    monkeypatch.setattr(run_all, "run", interrupted)
    assert run_all.main() == 1
    assert "left: .venv: last\n===== 1 of 2 passed" in capsys.readouterr().out
