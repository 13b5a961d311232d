"""Checkpoints in one process: which are kept, which are read, and what remains of an unfinished save."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import ringdance.numpy as hvd
from ringdance.errors import ArgumentError
from ringdance.training import checkpoint_files


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def text(value: object) -> Callable[[Path], object]:
    """Return a function that writes a value."""
    return lambda path: path.write_text(str(value))


def table_of(value: float, rows: int = 4) -> hvd.EmbeddingTable:
    table = hvd.EmbeddingTable(rows, 2)
    table.values[:] = value
    return table


def pair(saved: hvd.Checkpoints, number: int | None = None) -> tuple[int, str, float]:
    """Return a checkpoint's number, its content, and the single value in its table."""
    table = table_of(-1)
    checkpoint = saved.read(number, table)
    assert checkpoint is not None
    (value,) = np.unique(table.values).tolist()
    return checkpoint[0], checkpoint[1].decode(), value


def triple(saved: hvd.Checkpoints, number: int) -> tuple[int, str, float | None]:
    """Return the same as ``pair``, with None as the value if the checkpoint has no table."""
    with contextlib.suppress(hvd.CheckpointError):
        return pair(saved, number)
    checkpoint = saved.read(number)
    assert checkpoint is not None
    return checkpoint[0], checkpoint[1].decode(), None


def shown(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if not name.startswith("."))


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    saved = hvd.Checkpoints(tmp_path / "new", keep=2, suffix=".bin")
    assert saved.read() is None
    for number in (5, 10, 123456789):
        saved.save(number, lambda path, number=number: path.write_bytes(b"x" * (number % 1000)))
    assert saved.read() == (123456789, b"x" * 789)
    assert saved.numbers() == [10, 123456789]
    assert saved.read(10) == (10, b"x" * 10)
    assert shown(saved.directory) == ["checkpoint-00000010.bin", "checkpoint-123456789.bin"]
    with pytest.raises(hvd.CheckpointError, match=r"rank 0 on .*no complete checkpoint 7.*Complete: 10, 1"):
        saved.read(7)
    with pytest.raises(hvd.CheckpointError, match="checkpoint 10 has no table, because"):
        saved.read(10, table_of(0))
    saved.close()


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    saved = hvd.Checkpoints(tmp_path, keep=2)
    saved.save(100, text("whole"))
    saved.wait()
    before = os.listdir(tmp_path)

    def full(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(path))

    saved.save(100, full, table_of(1))
    with pytest.raises(hvd.CheckpointError, match=r"rank 0 on .*No space left on device"):
        saved.save(300, text(""))
    assert saved.read() == (100, b"whole")
    assert os.listdir(tmp_path) == before
    saved.close()
    for number, message in ((-1, "must not be negative"), (1.5, "integer")):
        with pytest.raises((ArgumentError, TypeError), match=message):
            saved.save(number, text(""))  # type: ignore[arg-type]
    for name, suffix in (("a/b", ""), ("a", ".npy")):
        with pytest.raises(ArgumentError, match=r"must not contain '/', and suffix must not end with .npy"):
            hvd.Checkpoints(tmp_path, 1, name, suffix)


def test_managers_in_one_directory_leave_each_other_alone(tmp_path: Path) -> None:
    """Managers ignore each other's files and foreign files, even if their names are similar."""
    foreign = ["model-best.npy", "model-7", "model-1.npy", "model-0000000x", ".model-00000001.partial-x"]
    for name in foreign:
        (tmp_path / name).write_text("of the user")
    kinds = [
        ("model", ""), ("model-best", ""), ("model", ".pt"), ("m.v2", ""), ("m.v2", ".tar.gz"), ("m*[a]", ""),
    ]  # fmt: skip
    every = [hvd.Checkpoints(tmp_path, 1, *kind) for kind in kinds]
    for number in (1, 2):
        for place, saved in enumerate(every):
            saved.save(number, text(f"{place} {number}"), table_of(10 * place + number))
        for saved in every:
            saved.wait()
    for place, saved in enumerate(every):
        assert (pair(saved), saved.numbers()) == ((2, f"{place} 2", 10 * place + 2), [2])
        saved.close()
    assert all((tmp_path / name).read_text() == "of the user" for name in foreign)
    assert len(shown(tmp_path)) == 2 * len(kinds) + 4
    saved = hvd.Checkpoints(tmp_path, 3, "m.v2")
    saved.save(3, text(3), table_of(3))
    assert (pair(saved, 2)[2], pair(saved)) == (32, (3, "3", 3))
    saved.close()


def test_after_going_back_the_one_saved_last_counts(tmp_path: Path) -> None:
    saved = hvd.Checkpoints(tmp_path, keep=2)
    for number in (10, 20, 30):
        saved.save(number, text(number))
    assert saved.read(20) == (20, b"20")
    for number in (22, 24, 24):
        saved.save(number, text(f"anew {number}"))
        assert saved.read() == (number, f"anew {number}".encode())
    assert saved.numbers() == [22, 24]
    saved.save(1, text(1))
    assert saved.read() == (1, b"1")
    single = hvd.Checkpoints(tmp_path, keep=1)
    single.save(0, text(0))
    assert (single.read(), single.numbers()) == ((0, b"0"), [0])
    single.close()
    saved.close()


def limit_calls(monkeypatch: pytest.MonkeyPatch, last: int) -> list[bool]:
    """Simulate a process that ends at call ``last`` of those that change a directory or wait for the disk."""
    ended, calls = [False], iter(range(1000))

    def limited(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            if ended[0] or next(calls) == last:
                ended[0] = True  # later calls, such as the removal after an error, do nothing either
                raise SystemExit
            return real(*arguments)

        return call

    for name in ("replace", "unlink", "fsync"):
        monkeypatch.setattr(os, name, limited(getattr(os, name)))
    return ended


def test_a_save_that_ends_anywhere_leaves_whole_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for last in range(100):
        saved = hvd.Checkpoints(tmp_path / str(last), keep=2)
        saved.save(1, text("first"), table_of(1))
        saved.save(2, text("second"))
        saved.wait()
        ended = limit_calls(monkeypatch, last)
        with contextlib.suppress(SystemExit):
            for number, content, table in ((2, "third", 3), (1, "fourth", None), (3, "fifth", 5)):
                saved.save(number, text(content), None if table is None else table_of(table))
                saved.wait()
        monkeypatch.undo()
        monkeypatch.setattr(checkpoint_files, "tokens", set())  # from here on, as in another process
        again = hvd.Checkpoints(tmp_path / str(last), keep=2)
        state = tuple(triple(again, number) for number in again.numbers())
        if state not in seen:
            seen.append(state)
        again.save(9, text("more"))
        again.wait()
        assert again.numbers() == [state[-1][0], 9]
        assert triple(again, state[-1][0]) == state[-1]
        assert not [name for name in os.listdir(again.directory) if "partial" in name]
        again.close()
        monkeypatch.undo()
        if not ended[0]:
            break
    assert last > 20
    first, second, third = (1, "first", 1), (2, "second", None), (2, "third", 3)
    fourth, fifth = (1, "fourth", None), (3, "fifth", 5)
    kept = [(first, second), (first, third), (third, fourth), (third, fourth, fifth), (fourth, fifth)]
    assert seen == kept


def test_a_file_that_another_manager_writes_is_not_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved, go, begun = hvd.Checkpoints(tmp_path), threading.Event(), threading.Event()

    def write(path: Path) -> None:
        path.write_text("slow")
        begun.set()
        assert go.wait(30)

    saved.save(1, write)
    assert begun.wait(30)
    other = hvd.Checkpoints(tmp_path)
    other.save(2, text("other"))
    other.wait()
    go.set()
    assert saved.read() == (1, b"slow")
    assert other.numbers() == [2, 1]
    other.close()
    saved.close()
    assert not caplog.records


SAVING = """
import sys, time
import ringdance.numpy as hvd
hvd.init()
saved = hvd.Checkpoints(sys.argv[1])
saved.save(1, lambda path: path.write_text("first"))
def write(path):
    path.write_text("second")
    print(path, flush=True)
    sys.stdin.read()
saved.save(2, write)
saved.close()
"""


def saving(directory: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start a process that is writing its second checkpoint. Returns the process and the path of the file."""
    words = [sys.executable, "-c", SAVING, str(directory)]
    process = subprocess.Popen(words, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_directory_that_is_made_again_is_locked_again(tmp_path: Path) -> None:
    """A lock on a removed file keeps no other writer away."""
    for _ in range(2):
        with contextlib.closing(hvd.Checkpoints(tmp_path / "one")) as saved:
            saved.save(1, text("first"))
        (lock,) = (tmp_path / "one").glob(".*.lock")
        assert checkpoint_files._locks[lock].fileno() in [
            int(name) for name in os.listdir("/proc/self/fd")
            if Path(f"/proc/self/fd/{name}").exists() and lock.samefile(f"/proc/self/fd/{name}")
        ]  # fmt: skip
        shutil.rmtree(tmp_path / "one")


def test_what_another_process_writes_stays_until_that_is_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process, partial = saving(tmp_path)
    assert partial.exists()
    saved = hvd.Checkpoints(tmp_path)
    assert saved.read() == (1, b"first")
    saved.save(3, text("third"))
    saved.wait()
    (warned,) = caplog.messages
    assert (
        f"another process, perhaps on another host, is writing the checkpoints checkpoint-* in {tmp_path}"
        in warned
    )
    saved.close()
    process.communicate("")
    assert saved.numbers() == [1, 3, 2]

    process, partial = saving(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    saved = hvd.Checkpoints(tmp_path)
    assert saved.read() == (1, b"first")
    assert partial.exists()
    saved.save(4, text("fourth"))
    saved.wait()
    assert not partial.exists()
    assert saved.numbers() == [2, 1, 4]
    assert len(caplog.records) == 1
    saved.close()


@pytest.mark.parametrize(
    "content", ["[" * 60_000, "", '{"serial": 3, "tok', "[]", "{}", "null", '{"serial": "x"}']
)
def test_a_damaged_checkpoint_is_left_out_with_a_warning(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = hvd.Checkpoints(tmp_path)
    for number in (1, 2, 3):
        saved.save(number, text(number), table_of(number))
    saved.wait()
    (manifest,) = tmp_path.glob(".*-00000003.json")
    manifest.write_text(content)
    assert pair(saved) == (2, "2", 2)
    assert caplog.messages == [
        f"ringdance: reading checkpoint 2. Skipping damaged checkpoints: 3 ({manifest} is damaged)."
    ]
    (tmp_path / "checkpoint-00000002.npy").unlink()
    assert saved.read() == (1, b"1")
    assert saved.numbers() == [1]
    with pytest.raises(hvd.CheckpointError, match=r"checkpoint 2\. Complete: 1\. Damaged: .*npy is missing"):
        saved.read(2)
    (tmp_path / "checkpoint-00000001").unlink()  # as a user may remove it
    with pytest.raises(hvd.CheckpointError, match=r"no complete checkpoint\. Complete: none\. Damaged: 3 "):
        saved.read()
    saved.save(3, text("anew"))
    assert saved.read() == (3, b"anew")
    saved.save(4, text(4))
    saved.save(5, text(5))
    saved.wait()
    assert saved.numbers() == [3, 4, 5]
    assert shown(tmp_path) == [f"checkpoint-0000000{number}" for number in (3, 4, 5)]
    saved.close()


@pytest.mark.parametrize(("name", "suffix"), [("checkpoint", ".npz"), ("checkpoint", ""), ("m.v2", "")])
def test_copies_without_manifests_are_read(name: str, suffix: str, tmp_path: Path) -> None:
    table = table_of(0)
    for number in (8, 9):
        path = tmp_path / f"{name}-{number:08}{suffix}"
        path.write_text(str(number))
        table.values[:] = number
        table.save(path.with_name(f"{path.name}.npy"))
    saved = hvd.Checkpoints(tmp_path, 2, name, suffix)
    assert pair(saved) == (9, "9", 9)
    assert pair(saved, 8) == (8, "8", 8)
    saved.save(4, text("new"), table_of(4))
    assert pair(saved) == (4, "new", 4)
    assert saved.numbers() == [9, 4]
    left = [f"{name}-0000000{number}{suffix}{end}" for number in (4, 9) for end in ("", ".npy")]
    assert shown(tmp_path) == sorted(left)
    saved.close()


def test_a_table_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    saved = hvd.Checkpoints(tmp_path)
    saved.save(1, text(1), table_of(1))
    with pytest.raises(ArgumentError, match=r"1\.npy has a table of shape \(4, 2\) instead of \(5, 2\)"):
        saved.read(1, table_of(0, rows=5))
    saved.close()


@pytest.mark.parametrize("end", ["", ".npy"])
def test_a_file_that_was_cut_is_not_read(
    end: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = hvd.Checkpoints(tmp_path)
    for number in (1, 2):
        saved.save(number, text(f"content {number}"), table_of(number))
    saved.wait()
    path = tmp_path / f"checkpoint-00000002{end}"
    os.truncate(path, 5)
    assert pair(saved) == (1, "content 1", 1)
    assert f"{path} has 5 bytes instead of" in caplog.text
    os.truncate(tmp_path / f"checkpoint-00000001{end}", 0)
    with pytest.raises(hvd.CheckpointError, match="has 0 bytes instead of"):
        saved.read()
    saved.close()
    with pytest.raises(ArgumentError, match=r"after close\(\)"):
        saved.save(3, text(3))


@pytest.mark.parametrize("end", ["", ".npy"])
def test_a_file_with_another_byte_is_not_read(
    end: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = hvd.Checkpoints(tmp_path)
    for number in (1, 2, 3):
        saved.save(number, text(f"content {number}"), table_of(number))
    saved.wait()
    path = tmp_path / f"checkpoint-00000003{end}"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert pair(saved) == (2, "content 2", 2)
    damaged = f"3 ({path} is damaged: its checksum does not match)"
    assert caplog.messages == [f"ringdance: reading checkpoint 2. Skipping damaged checkpoints: {damaged}."]
    with pytest.raises(hvd.CheckpointError, match=r"no complete checkpoint 3.*Complete: 1, 2\. Damaged: 3 "):
        saved.read(3)
    saved.close()


def test_the_last_one_that_fails_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The script may end without another call."""

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    saved = hvd.Checkpoints(tmp_path)
    saved.save(7, full)
    with pytest.raises(hvd.CheckpointError, match="No space left"):
        saved.close()
    message = f"checkpoint-00000007 could not be written: No space left on device: {tmp_path}/"
    assert message in caplog.text
    assert "MB are free in" in caplog.text


def test_a_directory_is_refused_at_once(tmp_path: Path) -> None:
    saved = hvd.Checkpoints(tmp_path)
    saved.save(1, lambda path: path.mkdir())
    with pytest.raises(hvd.CheckpointError, match="wrote a directory"):
        saved.wait()
    assert shown(tmp_path) == []
    saved.close()


def test_this_process_keeps_the_lock(tmp_path: Path) -> None:
    first, second = hvd.Checkpoints(tmp_path), hvd.Checkpoints(tmp_path)
    for number, saved in enumerate((first, second)):
        saved.save(number, text(number))
        saved.wait()
    first.close()
    second.close()
    code = "import fcntl,sys; fcntl.lockf(open(sys.argv[1], 'ab'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    (lock,) = tmp_path.glob("*.lock")
    command = [sys.executable, "-c", code, str(lock)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "BlockingIOError" in done.stderr


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, other = hvd.Checkpoints(tmp_path), hvd.Checkpoints(tmp_path)
    saved.save(1, text("old"), table_of(1))
    saved.wait()
    load = hvd.EmbeddingTable.load

    def late(table: hvd.EmbeddingTable, path: Path) -> None:
        monkeypatch.undo()
        other.save(1, text("new"), table_of(2))
        other.wait()
        load(table, path)

    monkeypatch.setattr(hvd.EmbeddingTable, "load", late)
    assert pair(saved) == (1, "new", 2)
    saved.close()
    other.close()
