"""Parse hosts and slots as users and schedulers write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringdance.errors import LaunchError
from ringdance.host.schedulers.hostfile import hosts_text, parse_hostfile, parse_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("localhost:4", [("localhost", 4)]),
        ("a.b:1, c:2", [("a.b", 1), ("c", 2)]),
        ("[fe80::1]:2,10.0.0.1:3", [("fe80::1", 2), ("10.0.0.1", 3)]),
        ("a:1,b:2,a:3", [("a", 4), ("b", 2)]),
        ("a,[fe80::1],b:2,a,2001:db8::5", [("a", 2), ("fe80::1", 1), ("b", 2), ("2001:db8::5", 1)]),
        ("1:2:3:4:5:6:7:8,1:2:3:4:5:6:7:9:2", [("1:2:3:4:5:6:7:8", 1), ("1:2:3:4:5:6:7:9", 2)]),
        ("[fd00::10:2],fe80::1%eth0", [("fd00::10:2", 1), ("fe80::1%eth0", 1)]),
        # Text that cannot be a slot count is part of the address. A number is not part of an interface name.
        ("fd00::a:b1,::ffff:1.2.3.4", [("fd00::a:b1", 1), ("::ffff:1.2.3.4", 1)]),
        ("2001:db8::1:ff,fe80::1%eth0:4", [("2001:db8::1:ff", 1), ("fe80::1%eth0", 4)]),
    ],
)
def test_hosts(text: str, hosts: list[tuple[str, int]]) -> None:
    assert parse_hosts(text) == hosts
    assert parse_hosts(hosts_text(hosts)) == hosts


@pytest.mark.parametrize(
    ("entry", "hint"),
    [
        ("fe80::1:4", r"Write \[fe80::1\]:4, or \[fe80::1:4\] if it has no slots"),
        ("me@h1:2", 'Pass the user to ssh: h1:2 with --ssh-args="-l me"'),
        ("me@h1", 'Pass the user to ssh: h1 with --ssh-args="-l me"'),
    ],
)
def test_what_is_probably_meant(tmp_path: Path, entry: str, hint: str) -> None:
    with pytest.raises(LaunchError, match=hint):
        parse_hosts(f"a,{entry}")
    for text in (entry, f"{entry}\nh2 slots=2"):
        with pytest.raises(LaunchError, match=hint):
            parse_hostfile(hostfile(tmp_path, text))


@pytest.mark.parametrize(
    "text",
    ["localhost:", "localhost:0", "localhost:x", ":3", "-oProxy:2", "", "a b:2", "a:1,", "a;b:1"]
    + ["$(id):1", "[a]:2", "a:٣", "a@b:1", "n:1:2", "[::1:2"],
)
def test_bad_hosts(text: str) -> None:
    with pytest.raises(LaunchError, match="HOST:SLOTS"):
        parse_hosts(text)


def test_slots_may_be_required() -> None:
    with pytest.raises(LaunchError, match="HOST:SLOTS"):
        parse_hosts("localhost:1,h2", slots=None)


def hostfile(directory: Path, text: str) -> str:
    path = directory / "hosts"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("# the machines\n\na slots=2   # a comment\n  b slots = 3\n", [("a", 2), ("b", 3)]),
        ("a:1\nb:4 binding=user:0,1\n", [("a", 1), ("b", 4)]),
        ("d max_slots=9 slots=4\nfe80::1 slots=2\n[fe80::2]:3\n", [("d", 4), ("fe80::1", 2), ("fe80::2", 3)]),
        ("a slots=1\nb slots=1\na slots=2\n", [("a", 3), ("b", 1)]),
        ("a\na\nb\n", [("a", 2), ("b", 1)]),
        ("fd00::2\n[fd00::10:2]\n", [("fd00::2", 1), ("fd00::10:2", 1)]),
    ],
)
def test_forms_of_host_files(tmp_path: Path, text: str, hosts: list[tuple[str, int]]) -> None:
    assert parse_hostfile(hostfile(tmp_path, text)) == hosts


def test_slots_for_hosts_that_have_none(tmp_path: Path) -> None:
    assert parse_hostfile(hostfile(tmp_path, "a\nb slots=3\n"), slots=2) == [("a", 2), ("b", 3)]


@pytest.mark.parametrize(
    "line", ["a", "a slots=", "a slots=0", "a slots=two", "-x slots=2", "a 4", "a slots=-1"]
)
def test_a_bad_line_of_a_host_file_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(LaunchError, match=r"line 2: .*HOST slots=N"):
        parse_hostfile(hostfile(tmp_path, f"ok slots=1\n{line}\n"))


@pytest.mark.parametrize(("text", "words"), [("# nothing\n", "lists no host"), (None, "No such file")])
def test_host_files_that_say_nothing(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "hosts"
    if text is not None:
        path.write_text(text)
    with pytest.raises(LaunchError, match=words):
        parse_hostfile(str(path))
