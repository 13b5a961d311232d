"""Unfinished lines of several ranks, on a terminal and in a file."""

from __future__ import annotations

import io
import re

import pytest

from ringdance.launch.output.screen import Screen


def seen(data: bytes) -> list[str]:
    """Return what a terminal shows. Supports carriage return, cursor up and erasing to the end."""
    lines, row, column = [""], 0, 0
    for up, word, text in re.findall(r"\x1b\[(\d*)([AJ])|([^\x1b])", data.decode()):
        if word == "A":
            row -= int(up)
        elif word == "J":
            lines = [*lines[:row], lines[row][:column]]
        elif text == "\r":
            column = 0
        elif text == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        else:
            lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + 1 :]
            column += 1
    return lines


def test_in_a_file_another_rank_begins_a_new_line() -> None:
    out, err = io.BytesIO(), io.BytesIO()
    screen = Screen((out.write, err.write))
    for stream, rank, data in [
        (0, 0, b"[0] a\n"), (0, 1, b"[1] b"), (1, 0, b"[0] e\n"), (0, 0, b"[0] c"), (0, 0, b"[0] d\n"),
        (0, 1, b"[1] 10%\r"), (0, 1, b"[1] 20%\r"), (0, 0, b"[0] 10%\r"),
    ]:  # fmt: skip
        screen.of(stream, rank)(data)
    screen.of(0)(b"the launcher\n")
    shown = b"[0] a\n[1] b\n[0] c[0] d\n[1] 10%\r[1] 20%\r\n[0] 10%\r\nthe launcher\n"
    assert (out.getvalue(), err.getvalue()) == (shown, b"[0] e\n")


def test_on_a_terminal_each_rank_has_a_line_for_its_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringdance.launch.output.screen._size", lambda descriptor: (20, 24))
    shown = io.BytesIO()
    screen = Screen((shown.write, shown.write), (True, True))

    def write(stream: int, rank: int, data: bytes) -> list[str]:
        screen.of(stream, rank)(data)
        return seen(shown.getvalue())

    assert write(1, 1, b"[1] 10%\r") == ["[1] 10%", ""]
    assert write(1, 0, b"[0] 10%\r[0] 20%\r") == ["[0] 20%", "[1] 10%", ""]
    assert write(0, 1, b"[1] epoch\n") == ["[1] epoch", "[0] 20%", "[1] 10%", ""]
    assert write(1, 1, b"[1] " + b"#" * 40 + b"\r")[2] == "[1] " + "#" * 15
    assert write(1, 0, b"[0] 30%\r[0] 100%\n") == ["[1] epoch", "[0] 100%", "[1] " + "#" * 15, ""]
    assert write(0, 0, b"[0] no end")[2:] == ["[0] no end", "[1] " + "#" * 15, ""]
    screen.freeze()
    assert write(1, -1, b"the launcher\n")[3:] == ["[1] " + "#" * 15, "the launcher", ""]
