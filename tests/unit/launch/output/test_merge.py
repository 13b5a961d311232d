"""Equal lines of many ranks are shown once."""

from __future__ import annotations

import time

import pytest

from ringdance.launch.output.merge import MOST, WAIT_S, LineMerger, spans


@pytest.mark.parametrize(
    ("numbers", "text"), [([0], "0"), ([3, 1, 2], "1-3"), ([0, 2, 3, 9], "0,2-3,9"), ([4, 5], "4-5")]
)
def test_spans(numbers: list[int], text: str) -> None:
    assert spans(numbers) == text


class Screen:
    def __init__(self, ranks: int) -> None:
        self.now, self.shown = 0.0, b""
        self.merger = LineMerger(self.write, ranks, lambda: self.now)

    def write(self, data: bytes) -> None:
        self.shown += data


def test_lines_of_all_ranks_wait_for_nobody() -> None:
    screen = Screen(3)
    for rank in (2, 0, 1):
        assert screen.shown == b""
        screen.merger.sink_of(rank)(b"epoch 1\n")
    assert screen.shown == b"[0-2] epoch 1\n"
    assert screen.merger.due() is None


def test_what_only_some_say_is_shown_after_a_moment() -> None:
    screen = Screen(3)
    screen.merger.sink_of(1)(b"mine\nepoch 1\n")
    screen.merger.sink_of(0)(b"epoch 1\n")
    assert screen.merger.due() == WAIT_S
    screen.merger.flush()
    assert screen.shown == b""
    screen.now = WAIT_S
    screen.merger.flush()
    assert screen.shown == b"[1] mine\n[0-1] epoch 1\n"


def test_each_ranks_lines_keep_their_order() -> None:
    screen = Screen(2)
    screen.merger.sink_of(0)(b"a\nb\na\n")
    screen.merger.sink_of(1)(b"b\na\na\n")
    screen.merger.flush(everything=True)
    assert screen.shown == b"[0] a\n[0-1] b\n[0-1] a\n[1] a\n"
    screen.merger.sink_of(0)(b"no end")
    screen.merger.flush(everything=True)
    assert screen.shown.endswith(b"[0] no end\n")


@pytest.mark.parametrize("text", ["{}\n", "same\n"], ids=["different", "equal"])
def test_the_work_for_a_line_does_not_grow_with_the_lines_held(text: str) -> None:
    screen, lines = Screen(3), [text.format(number).encode() for number in range(20_000)]
    began = time.process_time()
    for rank in (0, 1):
        for at in range(0, len(lines), 500):
            screen.merger.sink_of(rank)(b"".join(lines[at : at + 500]))
    assert time.process_time() - began < 3
    held = 2 * len(lines) - screen.shown.count(b"\n")
    assert held <= 2 * MOST, "lines that wait for others are bounded, in memory too"
    screen.merger.flush(everything=True)
    shown = screen.shown.splitlines()
    assert shown[0].startswith(b"[0] ")
    assert shown[-1].startswith(b"[1] ") or shown[-1].startswith(b"[0-1] ")
