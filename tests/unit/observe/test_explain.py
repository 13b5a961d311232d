"""What `ringdance explain DIR` makes of files that are damaged or cannot be read."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ringdance import explain
from ringdance.launch.system import linux

FLIGHT = {"rank": 1, "host": "node2", "pid": 7, "pending": ["a"], "records": [], "reason": "an error"}


@pytest.mark.parametrize("name", ["stall-rank0-1", "flight-rank0-1", "outcome"])
@pytest.mark.parametrize(
    ("text", "place"),
    [
        *((text, "") for text in ("{}", "[]", "null", '{"time": 3}', "[" * 100_000)),
        ('{"a', ", line 1"),
        ("", ", line 1"),
    ],
)
def test_damaged_files_are_named_and_left_out(
    tmp_path: Path, name: str, text: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"ringdance-{name}.json"
    path.write_text(text)
    (tmp_path / "ringdance-flight-rank1-7.json").write_text(json.dumps(FLIGHT))
    assert explain.main([str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.err.startswith(f"ringdance explain: {path}{place} is left out: ")
    assert said.err.count("\n") == 1
    assert said.out == "rank 1 on host node2 (pid 7): pending 'a'\nan error\n"


def test_files_that_cannot_be_read_are_left_out_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inner, pipe, loop = (tmp_path / f"ringdance-flight-rank{rank}-7.json" for rank in range(3))
    inner.mkdir()
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    (tmp_path / "ringdance-flight-rank3-7.json").write_text(json.dumps(FLIGHT))
    assert explain.main([str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        f"ringdance explain: {inner}: Is a directory; it is left out",
        f"ringdance explain: {pipe} is no regular file: copy what comes from it into one; it is left out",
        f"ringdance explain: {loop}: Too many levels of symbolic links; it is left out",
    ]
    assert "pending 'a'" in said.out


STALL = {"ranks": [], "culprits": [], "time": 0.0, "seconds": 4.0, "name": "loss"}
CAUSE = {"rank": 10, "host": "n", "pid": 7, "time": 0.0, "kind": "exception", "message": "ValueError: b"}


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        ({"code": 0, "cause": None}, ["waited", "The job ended well at "]),
        ({"code": 130, "cause": None}, ["The job was ended by SIGINT to its launcher at ", "waited"]),
        ({"code": 1, "cause": CAUSE}, ["rank 10 on host n (pid 7) failed first: ValueError: b"]),
        ({"code": 1, "cause": CAUSE | {"message": "StallError: b"}}, ["failed first: StallError", "waited"]),
        (None, ["waited"]),
    ],
)
def test_an_error_that_may_have_been_caught_is_no_verdict(
    tmp_path: Path, outcome: dict[str, object] | None, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (2, 10):
        (tmp_path / f"rank.{rank}").mkdir()
        (tmp_path / f"rank.{rank}/stderr").write_text(f"Traceback\nKeyError: {rank}\nnone: went on\n")
    (tmp_path / "ringdance-stall-rank0-1.json").write_text(json.dumps(STALL))
    if outcome:
        (tmp_path / "ringdance-outcome.json").write_text(json.dumps(outcome | {"time": 3.0}))
    assert explain.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(said), lines
    assert all(words in line for words, line in zip(said, lines, strict=True)), lines


def test_rank_10_comes_after_rank_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (10, 2, 1):
        (tmp_path / f"ringdance-flight-rank{rank}-7.json").write_text(json.dumps(FLIGHT | {"rank": rank}))
        (tmp_path / f"ringdance-stacks-rank{rank}-7.txt").touch()
    assert explain.main([str(tmp_path)]) == 0
    assert re.findall(r"^rank (\d+)|rank(\d+)-", capsys.readouterr().out, re.MULTILINE) == [
        *((rank, "") for rank in ("1", "2", "10")), *(("", rank) for rank in ("1", "2", "10"))
    ]  # fmt: skip


def test_how_long_other_hosts_may_take_is_a_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main(["-H", "localhost", "--timeout", "0.01"]) == 2
    assert "localhost: ended after 0.01 s (--timeout)" in capsys.readouterr().err


def test_operations_of_one_label_are_told_apart() -> None:
    names = ["tape.1f.0", "tape.1f.0", "tape.2a.0"]
    ranks = [
        explain._Rank(rank, "node1", rank + 7, 3, "job", "9 steps", "gradients of w", 3.0, operation=name)
        for rank, name in enumerate(names)
    ]
    assert explain._culprit(ranks[:2], []).startswith("All ranks here wait for 'gradients of w'")
    assert explain._culprit(ranks, []) == (
        "The ranks wait for different operations, rank 2 on host node1 (pid 9) for 'gradients of w' "
        "(tape.2a.0); the others for 'gradients of w' (tape.1f.0)."
    )


def test_ranks_that_end_while_they_are_looked_at_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of any job on the host: another one's end must not end this."""
    with subprocess.Popen(["sleep", "60"]) as child:
        gone = psutil.Process(child.pid)
        child.kill()
    environ = {linux.MARKER: "other", "RINGDANCE_RANK": "0", "RINGDANCE_SIZE": "1"}
    monkeypatch.setattr(explain.records, "rank_processes", lambda: iter([(gone, environ)]))
    assert [rank for rank in explain._ranks_here("other") if rank.pid == gone.pid] == []
    reader = SimpleNamespace(who=(0, "here", gone.pid))
    assert explain._rank_of(reader) is None  # type: ignore[arg-type]
    assert not explain._is_below(gone.pid, os.getpid())
