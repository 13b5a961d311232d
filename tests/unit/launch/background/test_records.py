"""Records of jobs in the background."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ringdance.errors import LaunchError
from ringdance.host.system.machine import in_home
from ringdance.launch.background import commands, records


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(autouse=True)
def _own_streams() -> Iterator[None]:
    """Restore stdout and stderr, which creating a record redirects."""
    kept = os.dup(1), os.dup(2)
    yield
    for descriptor, copy in enumerate(kept, 1):
        os.dup2(copy, descriptor)
        os.close(copy)


def made(job: str, **changes: object) -> records.Record:
    record = records.create(job * 8, ["python", "x.py"], {"a": 2, "b": 1})
    changed = replace(record, **changes)  # type: ignore[arg-type]
    changed.write()
    return changed


def test_the_state_of_a_job() -> None:
    running = made("0000")
    assert records.load_all() == [running]
    assert (running.state, running.ranks, running.short) == ("running", 3, "00000000")
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert made("1111", pid=ended.pid).state == "lost"
    assert made("2222", pid_start="another process of that number").state == "lost"
    assert made("3333", machine="other boot", launcher_host="other").state == "elsewhere"
    assert made("6666", machine=f"{os.uname().nodename} before a restart").state == "lost"
    assert made("4444", ended=5.0, code=3).state == "ended"
    # The job ended between reading its file and checking its process, here or on another machine.
    assert replace(made("5555", ended=5.0, code=3), ended=None, pid=ended.pid).state == "ended"
    other = made("7777", ended=5.0, code=3, machine="other boot", launcher_host="other")
    assert replace(other, ended=None).state == "ended"


WRONG = json.dumps({
    "job": "../../victim", "command": ["true"], "hosts": {"a": 1}, "cwd": "/", "began": "long ago", "pid": 1,
    "pid_start": "1", "machine": "m", "launcher_host": "a",
})  # fmt: skip


@pytest.mark.parametrize("damage", ["", "null", '{"job": "1"}', "[" * 100_000, WRONG])
def test_a_damaged_record_is_left_out(damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    kept, damaged = made("0000"), made("1111")
    (damaged.directory / "job.json").write_text(damage)
    assert records.load_all() == [kept]
    assert commands.status([]) == 0
    assert kept.short in capsys.readouterr().out
    assert records.find("0000") == kept
    assert commands.attach(["1111"]) == 2


def test_only_what_is_the_record_of_its_directory_is_removed(tmp_path: Path) -> None:
    ended = made("0000", ended=1.0, code=0, began=1.0)
    text = (ended.directory / "job.json").read_text()
    victim = tmp_path / "state" / "victim"
    victim.mkdir()
    (ended.directory / "job.json").write_text(text.replace(ended.job, "../../victim"))
    shutil.copytree(ended.directory, ended.directory.with_name("a copy"))
    for number in range(1, 55):
        made(f"{number:04x}", began=float(number + 1), ended=1.0, code=0)
    assert victim.exists()
    assert "0000" not in [loaded.short[:4] for loaded in records.load_all()]


def test_the_end_is_written_where_the_disk_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    record = made("0000")

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(records, "whole_text", full)
    before = (record.directory / "job.json").stat().st_size
    replace(record, ended=5.0, code=3).write()
    assert (record.directory / "job.json").stat().st_size == before
    assert record.reload().code == 3
    with pytest.raises(LaunchError, match="No space left"):
        made("1111")


def test_words_that_are_no_utf8_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    made("0000", command=["python", os.fsdecode(b"\xff.py")])
    assert commands.status([]) == 0
    assert r"\udcff.py" in capsys.readouterr().out


def test_a_job_of_another_machine_is_followed_to_its_end() -> None:
    other = made("8888", machine="other boot", launcher_host="other")
    ending = threading.Timer(0.3, replace(other, ended=5.0, code=7).write)
    ending.start()
    assert commands.attach(["8888"]) == 7
    ending.join()


def test_table_and_json_have_one_word_for_a_state(capsys: pytest.CaptureFixture[str]) -> None:
    for code, said in ((0, "ended"), (3, "ended, exit code 3")):
        name = f"{code}" * 4
        made(name, ended=5.0, code=code)
        assert commands.status([name]) == code
        assert f"{said}  " in capsys.readouterr().out.splitlines()[1]
        commands.status([name, "--json"])
        assert json.loads(capsys.readouterr().out)[0]["state"] == "ended"


def test_a_job_older_than_a_restart_is_lost() -> None:
    made("9999", machine=f"{os.uname().nodename} before a restart")
    assert commands.attach(["9999"]) == 2
    assert commands.stop(["9999"]) == 0


def test_jobs_are_found_by_the_first_digits_of_their_names() -> None:
    with pytest.raises(LaunchError, match="no job has been started"):
        records.find()
    first, second = made("ab00", began=1.0), made("ab01", began=2.0, ended=3.0, code=0)
    assert records.find("ab00a") == first
    assert records.find() == first, "without a name, the newest running job"
    replace(first, ended=2.0, code=0).write()
    assert records.find() == second, "if no job runs, the newest job"
    for name in ("ab", "ab02", "*"):
        with pytest.raises(LaunchError, match="no background job matches"):
            records.find(name)
    made("ab00ffff")
    with pytest.raises(LaunchError, match=r"matches jobs ab00\w+ and ab00\w+\. Specify more digits"):
        records.find("ab00")


def test_stop_needs_no_name_where_one_job_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.stop([]) == 2
    assert "no job is running in the background" in capsys.readouterr().err
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *given: sent.append(given))
    monkeypatch.setattr(records.Record, "state", property(lambda self: "ended" if sent else "running"))
    job = made("1111")
    assert commands.stop([]) == 0
    assert sent == [(job.pid, signal.SIGTERM)]
    sent.clear()
    made("2222")
    assert commands.stop([]) == 2
    stderr = capsys.readouterr().err
    assert "several jobs are running. Specify one:" in stderr
    assert all(f"\n  {digit * 8}: " in stderr for digit in "12")
    assert not sent


def test_old_records_go_and_running_jobs_stay() -> None:
    made("ffff", began=0.0)
    for number in range(60):
        made(f"{number:04x}", began=float(number + 1), ended=1.0, code=0)
    kept = [record.job[:4] for record in records.load_all()]
    assert kept[0] == "ffff"
    assert len(kept) == 1 + 50 + 1  # the newest job had not ended when its record was made
    assert kept[-1] == f"{59:04x}"


def test_the_log_is_shown_as_it_comes() -> None:
    record = made("0000", machine="other boot", launcher_host="other")
    shown, write = os.pipe()
    kept = os.dup(1), os.dup(2)
    os.write(1, b"one\n")
    os.write(2, "tw\u00f6\n".encode()[:3])  # cut within a character
    log = os.dup(1)
    os.dup2(write, 1)

    def end() -> None:
        os.write(log, b"\xff")
        replace(record, ended=5.0, code=3).write()

    ending = threading.Timer(0.3, end)
    ending.start()
    assert commands.attach([]) == 3
    ending.join()
    assert os.read(shown, 100) == b"one\ntw\xc3\xff"
    for descriptor in (shown, write, log, *kept):
        os.close(descriptor)
    assert record.directory.stat().st_mode & 0o777 == 0o700


OTHER_USER = ("unshare", "--user", "--map-user=4194999")
HOMELESS = """
from ringdance.launch.background import records
from ringdance.host.system.machine import in_home
print(in_home("~"), in_home("~/data"), records.base())
"""


def test_a_user_that_does_not_exist_has_no_home_directory() -> None:
    with pytest.raises(FileNotFoundError, match="no such user on"):
        in_home("~nobody-here/data")


def test_without_a_home_directory_none_called_tilde_is_made(tmp_path: Path) -> None:
    """HOME is unset and the user is not in any list, as in a container run with `--user 4194999`."""
    if not shutil.which("unshare") or subprocess.run([*OTHER_USER, "true"], check=False).returncode:
        pytest.skip("needs user namespaces")
    environ = {k: v for k, v in os.environ.items() if k != "HOME" and not k.startswith("XDG_")}
    line = [*OTHER_USER, sys.executable, "-c", HOMELESS]
    done = subprocess.run(line, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    assert list(tmp_path.iterdir()) == []
    assert done.stdout == "/ /data /.local/state/ringdance/jobs\n"
