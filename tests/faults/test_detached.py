"""`ringdance run --detach`, `status`, `attach` and `stop`: real jobs in the background."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from processes import MARKER, script, wait_until

from ringdance.launch.background import records

pytestmark = [pytest.mark.slow, pytest.mark.limit(150)]
Ringdance = Callable[..., "subprocess.CompletedProcess[str]"]

TALKS = """
import os, pathlib, signal, sys, time
rank, here = os.environ["RINGDANCE_RANK"], pathlib.Path(__file__).parent
def end(*_):
    print("asked to end", flush=True)
    if "stubborn" in sys.argv: return
    (here / f"saved.{rank}").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("out", rank, flush=True)
print("err", rank, file=sys.stderr, flush=True)
while not (here / "end").exists():
    time.sleep(0.05)
print("last", rank)
sys.exit(int((here / "end").read_text() or 0))
"""


@pytest.fixture
def environ(tmp_path: Path) -> Iterator[dict[str, str]]:
    allow = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    yield {**os.environ, **allow, "XDG_STATE_HOME": str(tmp_path / "state"), MARKER: str(tmp_path)}
    for process in living(tmp_path):  # leftovers of a failed test
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def living(directory: Path) -> list[psutil.Process]:
    """Return all processes of a test."""
    results = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARKER) == str(directory) and process.status() != psutil.STATUS_ZOMBIE:
                results.append(process)
        except (psutil.Error, OSError):
            continue
    return results


@pytest.fixture
def ringdance(environ: dict[str, str], tmp_path: Path) -> Ringdance:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "ringdance", *words],
            env=environ, capture_output=True, text=True, check=False, timeout=100, cwd=tmp_path,
        )  # fmt: skip

    return run


@pytest.fixture
def job(ringdance: Ringdance, tmp_path: Path) -> Callable[..., str]:
    """Return a function that starts a job of two ranks and returns its name once both run."""

    def start(*words: str) -> str:
        options = ("-np", "2", "--grace", "1.5", "--detach")
        done = ringdance("run", *options, "python", script(tmp_path, TALKS), *words)
        assert done.returncode == 0, done.stderr
        name = done.stdout.strip()
        assert f"ringdance attach {name}" in done.stderr
        output = next((tmp_path / "state").glob(f"ringdance/jobs/{name}*/log"))
        assert wait_until(lambda: output.read_text().count("err") == 2, 60.0) is not None
        return name

    return start


def state(ringdance: Ringdance, name: str) -> dict[str, object]:
    (row,) = json.loads(ringdance("status", name, "--json").stdout)
    return row


def test_a_job_is_followed_to_its_end(
    ringdance: Ringdance, job: Callable[..., str], environ: dict[str, str], tmp_path: Path
) -> None:
    name = job()
    assert state(ringdance, name)["state"] == "running"
    row = ringdance("status").stdout.splitlines()[1]
    assert row.split()[:2] == [name, "running"]
    assert row.endswith("program.py")
    line = [sys.executable, "-m", "ringdance", "attach", name]
    following = subprocess.Popen(line, env=environ, stdout=subprocess.PIPE, text=True)
    (tmp_path / "end").write_text("3")
    out, _ = following.communicate(timeout=60)
    assert following.returncode == 3
    assert {"[0] out 0", "[1] out 1", "[0] err 0", "[1] err 1"} <= set(out.splitlines())
    assert "exit code 3" in out
    done = ringdance("attach", name)
    assert (done.returncode, done.stdout) == (3, out)
    assert (state(ringdance, name)["state"], state(ringdance, name)["code"]) == ("ended", 3)
    assert ringdance("status", name).returncode == 3
    assert wait_until(lambda: not living(tmp_path), 10.0) is not None


def test_it_survives_its_terminal(job: Callable[..., str], ringdance: Ringdance, tmp_path: Path) -> None:
    """Killing all processes of the session that started the job does not affect it."""
    name = job()
    record = state(ringdance, name)
    pid = int(str(record["pid"]))
    assert os.getsid(pid) == pid
    assert psutil.Process(pid).terminal() is None
    assert not {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (0, 1, 2)} & {"/dev/tty"}
    os.kill(pid, signal.SIGCONT)
    assert state(ringdance, name)["state"] == "running"
    assert ringdance("stop", name).returncode == 0


def test_interrupting_attach_leaves_it_running(
    job: Callable[..., str], ringdance: Ringdance, environ: dict[str, str], tmp_path: Path
) -> None:
    name = job()
    line = [sys.executable, "-m", "ringdance", "attach"]
    following = subprocess.Popen(line, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert following.stdout
    assert following.stdout.readline().startswith("[")
    following.send_signal(signal.SIGINT)
    _, err = following.communicate(timeout=30)
    assert following.returncode == 130
    assert f"job {name} is still running" in err
    assert state(ringdance, name)["state"] == "running"
    assert ringdance("stop", name).stdout == f"job {name} has ended\n"
    assert {path.name for path in tmp_path.glob("saved.*")} == {"saved.0", "saved.1"}
    assert ringdance("stop", name).stdout == f"job {name} had already ended\n"
    assert wait_until(lambda: not living(tmp_path), 10.0) is not None


def test_stop_is_orderly_then_hard(job: Callable[..., str], ringdance: Ringdance, tmp_path: Path) -> None:
    name = job("stubborn")
    done = ringdance("stop", name)
    assert done.stdout == f"job {name} was killed after 1.5 s\n"
    assert wait_until(lambda: not living(tmp_path), 10.0) is not None
    assert "asked to end" in ringdance("attach", name).stdout
    assert state(ringdance, name)["code"] == 128 + signal.SIGTERM


def test_it_can_be_stopped_while_it_starts(ringdance: Ringdance, tmp_path: Path) -> None:
    """A rank that is starting while the others get SIGTERM gets it too. The delays cover the whole start."""
    outcomes = set[str]()
    for i in range(80):
        name = ringdance("run", "-np", "2", "--detach", "sleep", "1000").stdout.strip()
        record = next((tmp_path / "state").glob(f"ringdance/jobs/{name}*/job.json"))
        time.sleep(0.002 * i)
        os.kill(json.loads(record.read_text())["pid"], signal.SIGTERM)
        if not wait_until(lambda name=name: state(ringdance, name)["state"] == "ended", 5.0):
            outcomes.add(f"still running when stopped after {0.002 * i:.3f} s")
            ringdance("stop", name, "--grace", "0")
    assert not outcomes


def test_a_killed_launcher_is_told(job: Callable[..., str], ringdance: Ringdance, tmp_path: Path) -> None:
    name = job()
    os.kill(int(str(state(ringdance, name)["pid"])), signal.SIGKILL)
    assert wait_until(lambda: not living(tmp_path), 15.0) is not None
    assert state(ringdance, name)["state"] == "lost"
    done = ringdance("attach", name)
    assert "was killed" in done.stderr
    assert done.returncode != 0


def test_what_cannot_be_started_is_told_at_once(ringdance: Ringdance, tmp_path: Path) -> None:
    path = script(tmp_path, TALKS)
    for words, said in (
        (("-H=-x:1", "python", path), "-x:1"),
        (("-np", "2", "python", "nothing.py"), "no such script: nothing.py"),
        (("-np", "3", "-H", "localhost:2", "python", path), "needs 3 slots"),
    ):
        done = ringdance("run", "--detach", *words)
        assert done.returncode == 2
        assert said in done.stderr
        assert done.stdout == ""
    assert "no job has been started" in ringdance("attach").stderr
    assert "no background job matches 12345678" in ringdance("stop", "12345678").stderr
    assert not living(tmp_path)


def test_its_records_are_private(
    job: Callable[..., str], ringdance: Ringdance, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = job()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    record = records.find(name)
    assert record.directory.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in record.directory.iterdir()} == {"job.json", "log"}
    assert ringdance("stop", name).returncode == 0
