"""Messages between hosts, and the command lines that connect them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ringdance.errors import LaunchError
from ringdance.host.messages import Frames
from ringdance.launch.remote.shell import RemoteShell


def pair(after: bytes = b"") -> tuple[Frames, Frames]:
    (one_reads, other_writes), (other_reads, one_writes) = os.pipe(), os.pipe()
    return Frames(one_reads, one_writes, after), Frames(other_reads, other_writes)


def test_messages_come_whole_however_they_are_cut() -> None:
    ours, theirs = pair()
    payload = bytes(range(256)) * 2000  # more than a pipe holds
    theirs.send({"a": 1})
    theirs.send({"b": "ü"}, payload)
    theirs.send({"c": None})
    received = []
    while len(received) < 3:
        theirs.flush()
        messages, alive = ours.receive()
        assert alive
        received += messages
    assert received == [({"a": 1}, b""), ({"b": "ü"}, payload), ({"c": None}, b"")]
    assert theirs.unsent == 0


def test_another_process_sees_whether_a_message_is_under_way(tmp_path: Path) -> None:
    ours, theirs = pair()
    other = "import fcntl, sys; fcntl.lockf(0, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 3)"
    with open(tmp_path / "between", "wb") as file:
        theirs.shared = file.fileno(), 3

        def may_send() -> bool:
            done = subprocess.run(
                [sys.executable, "-c", other], stdin=file, stderr=subprocess.PIPE, check=False
            )
            return done.returncode == 0

        assert may_send()
        theirs.send({}, b"x" * 200_000)
        assert theirs.unsent
        assert not may_send()
        while theirs.unsent:
            ours.receive()
            theirs.flush()
        assert may_send()


def test_nobody_waits_for_a_reader_that_does_not_read() -> None:
    _, theirs = pair()
    for _ in range(100):
        assert theirs.send({}, b"x" * 10000)
    assert theirs.unsent > 500_000


def test_what_a_login_shell_says_first_is_no_message() -> None:
    ours, theirs = pair(after=b"\n::here::\n")
    os.write(theirs.write_fd, b"Welcome!\nToday's motd\n::he")
    assert ours.receive() == ([], True)
    os.write(theirs.write_fd, b"re::\n")
    theirs.send({"a": 1})
    assert ours.receive() == ([({"a": 1}, b"")], True)
    assert ours.preamble == b"Welcome!\nToday's motd"


def test_the_end_and_rubbish_are_seen() -> None:
    ours, theirs = pair()
    os.write(theirs.write_fd, b"bash: something is wrong here")
    with pytest.raises(ValueError, match="bash: something"):
        ours.receive()
    ours, theirs = pair()
    os.close(theirs.write_fd)
    assert ours.receive() == ([], False)
    os.close(ours.read_fd)
    assert theirs.open
    os.close(theirs.read_fd)
    theirs.write_fd = os.open(os.devnull, os.O_RDONLY)
    assert not theirs.send({"a": 1})


@pytest.mark.skipif(not shutil.which("ssh"), reason="needs ssh")
@pytest.mark.parametrize(("own", "found"), [("", "accept-new"), ("yes", "true"), ("no", "false")])
def test_keys_of_new_hosts_are_accepted_unless_ssh_is_set_otherwise(
    tmp_path: Path, own: str, found: str
) -> None:
    (tmp_path / "own").write_text(f"Host node*\n    StrictHostKeyChecking {own}\n" if own else "")
    line = RemoteShell(arguments=("-F", f"{tmp_path}/own")).command("node1", ["true"])
    line.insert(1, "-G")
    shown = subprocess.run(line, check=True, capture_output=True, text=True).stdout
    assert f"stricthostkeychecking {found}\n" in shown


def test_ssh_never_asks() -> None:
    line = RemoteShell().command("node1", ["true"])
    assert line[-3:] == ["--", "node1", "true"]
    text = " ".join(line)
    assert "-o BatchMode=yes" in text


def test_the_users_own_options_of_ssh_come_first() -> None:
    line = RemoteShell(port=2222, identity="/k y", arguments=["-o", "LogLevel=INFO", "-F", "own"]).command(
        "n", ["true"]
    )
    assert line.index("LogLevel=INFO") < line.index("LogLevel=ERROR")
    assert line[line.index("-F") + 1] == "own"
    assert line[line.index("-p") + 1] == "2222"
    assert line[line.index("-i") + 1] == "/k y"


def test_the_shell_over_there_gets_the_words_as_they_are() -> None:
    words = ["/a b/python", "-c", "import sys;print('$HOME `id` \"x\"')", "*", "", "-x", "a\nb"]
    assert shlex.split(RemoteShell().command("n", words)[-1]) == words


@pytest.mark.parametrize(
    "name", ["-oProxyCommand=x", "a b", "a;b", "$(id)", "", "a\nb", "x@y", "a/b", "`id`", "a'b"]
)
def test_names_that_are_no_hosts(name: str) -> None:
    for way in ("ssh", "srun"):
        with pytest.raises(LaunchError, match="not a valid host name"):
            RemoteShell(method=way).command(name, ["true"])


def test_a_payload_of_any_size_comes_whole() -> None:
    """The payload is larger than a frame may claim, and the sender does not copy it."""
    ours, theirs = pair()
    payload = bytes(range(256)) * (70 << 12)
    theirs.send({"a": 1}, payload)
    theirs.send({"b": 2})
    received = []
    while len(received) < 2:
        theirs.flush()
        received += ours.receive()[0]
    assert [message for message, _ in received] == [{"a": 1}, {"b": 2}]
    assert received[0][1] == payload
    assert theirs.unsent == 0
