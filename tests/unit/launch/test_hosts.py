"""Hosts as people write them, and where the ranks go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringdance.errors import LaunchError
from ringdance.launch.hosts import local_names, parse_hostfile, parse_hosts, place


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("localhost:4", [("localhost", 4)]),
        ("a.b:1, c:2", [("a.b", 1), ("c", 2)]),
        ("[fe80::1]:2,10.0.0.1:3", [("fe80::1", 2), ("10.0.0.1", 3)]),
    ],
)
def test_hosts(text: str, hosts: list[tuple[str, int]]) -> None:
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize(
    "text", ["localhost", "localhost:", "localhost:0", "localhost:x", ":3", "-oProxy:2", "", "a b:2", "a:1,"]
)
def test_bad_hosts(text: str) -> None:
    with pytest.raises(LaunchError, match="HOST:SLOTS"):
        parse_hosts(text)


def test_a_host_file_with_comments_and_blank_lines(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# the machines\n\na slots=2   # a comment\n  b slots = 3\nc:1\nd max_slots=9 slots=4\n")
    assert parse_hostfile(str(file)) == [("a", 2), ("b", 3), ("c", 1), ("d", 4)]


@pytest.mark.parametrize("line", ["a", "a slots=", "a slots=0", "a slots=two", "-x slots=2", "a 4"])
def test_a_bad_line_of_a_host_file_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"ok slots=1\n{line}\n")
    with pytest.raises(LaunchError, match=r"line 2: .*HOST slots=N"):
        parse_hostfile(str(file))


@pytest.mark.parametrize(("text", "words"), [("# nothing\n", "names no host"), (None, "No such file")])
def test_host_files_that_say_nothing(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "hosts"
    if text is not None:
        file.write_text(text)
    with pytest.raises(LaunchError, match=words):
        parse_hostfile(str(file))


def test_names_of_this_machine() -> None:
    own = os.uname().nodename
    names = ["localhost", "127.0.0.1", "127.0.0.2", own, "no-such-host.invalid", "192.0.2.7"]
    assert {"localhost", "127.0.0.1", own} <= local_names(names) <= set(names[:4])


def test_ranks_fill_hosts_in_the_order_given() -> None:
    placed = place(5, [("a", 2), ("b", 4), ("c", 1)])
    assert [(host.name, host.ranks) for host in placed] == [("a", (0, 1)), ("b", (2, 3, 4))]
