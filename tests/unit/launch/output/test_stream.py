"""Lines from streams, tracebacks that are held back, and mpiexec's own epilogue."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ringdance.launch.output.stream import Lines, MpiexecOutput, Stream, Style, guarded, open_files


def test_lines_are_cut_at_their_ends() -> None:
    lines = Lines()
    assert lines.feed(b"one\ntw") == [b"one\n"]
    assert lines.feed(b"o") == []
    assert lines.feed(b"\nthree\r\nbar 1\rbar 2") == [b"two\n", b"three\r\n", b"bar 1\r"]
    assert lines.end() == [b"bar 2"]
    assert lines.end() == []


def test_any_cut_of_a_stream_gives_the_same_lines() -> None:
    text = b"a\r\nb\n\nc\rd\r\re\r\n\r\nlast"
    expected = [b"a\r\n", b"b\n", b"\n", b"c\r", b"d\r", b"\r", b"e\r\n", b"\r\n", b"last"]
    for seed in range(500):
        chance = random.Random(seed)
        lines, received, at = Lines(), [], 0
        while at < len(text):
            size = chance.randint(1, 5)
            received += lines.feed(text[at : at + size])
            at += size
        assert received + lines.end() == expected, f"seed {seed}"


def test_every_line_carries_its_rank_and_a_last_one_gets_an_end(tmp_path: Path) -> None:
    shown = io.BytesIO()
    file, other = open_files(tmp_path, 3, 12)
    other.close()
    stream = Stream(shown.write, Style("[3] "), file)
    stream.feed(b"a\nb")
    assert shown.getvalue() == b"[3] a\n"
    stream.end()
    assert shown.getvalue() == b"[3] a\n[3] b\n"
    assert (tmp_path / "rank.03" / "stdout").read_bytes() == b"[3] a\n[3] b\n"


def test_without_prefix_the_text_is_as_written() -> None:
    shown = io.BytesIO()
    stream = Stream(shown.write, Style(""))
    stream.feed(b"a\nb\r\n")
    assert shown.getvalue() == b"a\nb\r\n"


HOROVOD = Style("[1]<stdout>:", closes=False)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"one\ntwo\n"], b"[1]<stdout>:one\n[1]<stdout>:two\n"),
        ([b"one\n\ntwo"], b"[1]<stdout>:one\n[1]<stdout>:\n[1]<stdout>:two"),
        ([b"a\rb\rc\n"], b"[1]<stdout>:a\r[1]<stdout>:b\r[1]<stdout>:c\n"),
        ([b"\xc3", b"\xa9 \xe2\x82", b"\xac\n"], "[1]<stdout>:é €\n".encode()),
        ([b"par", b"t one ", b"and two"], b"[1]<stdout>:part one and two"),
        ([b"x" * 100000, b"y\n"], b"[1]<stdout>:" + b"x" * 100000 + b"y\n"),
        ([b"end\r"], b"[1]<stdout>:end\r"),
        ([], b""),
    ],
)
def test_a_style_that_leaves_the_last_piece_as_it_is(
    pieces: list[bytes], expected: bytes, tmp_path: Path
) -> None:
    shown = io.BytesIO()
    stream = Stream(shown.write, HOROVOD, open(tmp_path / "copy", "wb", buffering=0))  # noqa: SIM115
    for piece in pieces:
        stream.feed(piece)
    stream.end()
    assert shown.getvalue() == expected
    assert (tmp_path / "copy").read_bytes() == expected


def test_a_sink_that_fails_is_given_up_but_not_one_whose_reader_leaves() -> None:
    def full(data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def left(data: bytes) -> None:
        raise BrokenPipeError

    warnings: list[bytes] = []
    write = guarded("stdout", full, warnings.append)
    write(b"one")
    write(b"two")
    assert len(warnings) == 1
    assert b"cannot write to stdout: No space left on device" in warnings[0]
    with pytest.raises(BrokenPipeError):
        guarded("stdout", left, warnings.append)(b"one")


def test_lines_are_shown_as_they_come() -> None:
    shown = io.BytesIO()
    stream = Stream(shown.write, HOROVOD)
    stream.feed(b"one\ntw")
    assert shown.getvalue() == b"[1]<stdout>:one\n"


def test_the_time_stands_before_the_prefix() -> None:
    shown = io.BytesIO()
    stream = Stream(shown.write, replace(HOROVOD, clock=True))
    before = time.time()
    stream.feed(b"one\ntwo")
    stream.end()
    for line in shown.getvalue().decode().splitlines():
        stamp, bracket, rest = line.partition("[1]<stdout>:")
        assert bracket
        assert rest in ("one", "two")
        # ctime() reads a clock that is some milliseconds late
        assert before - 1.1 <= time.mktime(time.strptime(stamp)) <= time.time()


TRACEBACK = b"Traceback (most recent call last):\n  File x, line 1\nValueError: boom\n"


def test_a_traceback_waits_and_can_be_dropped() -> None:
    shown = io.BytesIO()
    stream = Stream(shown.write, Style(""), holds=True)
    stream.feed(b"before\n" + TRACEBACK + b"other words\n")
    assert shown.getvalue() == b"before\n"
    assert stream.last_words().startswith("Traceback")
    stream.drop(TRACEBACK.decode())
    assert shown.getvalue() == b"before\nother words\n"


def test_a_traceback_that_was_handled_is_shown() -> None:
    shown = io.BytesIO()
    stream = Stream(shown.write, Style("[0] "), holds=True)
    stream.feed(TRACEBACK)
    stream.release()
    assert shown.getvalue().count(b"[0] ") == 3
    assert stream.last_words() == ""


def test_marked_lines_are_understood_and_not_shown() -> None:
    shown = io.BytesIO()
    stream = Stream(shown.write, Style(""), holds=True)
    mark = {"rank": 1, "host": "h", "pid": 5, "time": 2.5, "kind": "exception", "message": "ValueError: x"}
    stream.feed(b"::ringdance-cause:: " + json.dumps(mark).encode() + b"\n::ringdance-cause:: nonsense\n")
    assert shown.getvalue() == b"::ringdance-cause:: nonsense\n"
    assert [(cause.rank, cause.message) for cause in stream.marks] == [(1, "ValueError: x")]


RULE = b"-" * 74 + b"\n"


@pytest.mark.parametrize(
    "text",
    [
        RULE + b"prterun detected that one or more processes exited with non-zero status,\nthus ...\n" + RULE,
        RULE + b"MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n" + RULE,
        b"=" * 70
        + b"\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   EXIT CODE: 9\n"
        + b"=" * 70,
        b"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n",
    ],
)
def test_epilogues_of_mpiexec_are_dropped(text: bytes) -> None:
    shown = io.BytesIO()
    banner = MpiexecOutput(shown.write)
    for at in range(0, len(text), 7):
        banner.feed(text[at : at + 7])
    banner.end()
    assert shown.getvalue() == b""


def test_what_mpiexec_says_otherwise_is_kept() -> None:
    text = b"some warning\n" + RULE + b"There are not enough slots available\n" + RULE + b"unfinished"
    shown = io.BytesIO()
    banner = MpiexecOutput(shown.write)
    banner.feed(text)
    banner.end()
    assert shown.getvalue() == text + b"\n"
