"""The parts of `ringdance hosts` that need no other host."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from ringdance.errors import LaunchError
from ringdance.host.copy.received_file import DONE, ReceivedFile, partials_in
from ringdance.host.schedulers.hostfile import parse_hosts
from ringdance.host.system import tcp
from ringdance.launch.hosts import HostFacts
from ringdance.launch.remote.shell import RemoteShell
from ringdance.tools.hosts import files
from ringdance.tools.hosts.chain import addresses
from ringdance.tools.hosts.progress import CopyProgress

# --- files to copy ------------------------------------------------------------------------------


def test_where_things_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "file").write_text("x")
    monkeypatch.chdir(tmp_path)

    def places(what: str, where: str) -> list[str]:
        collection = files.collect(what, where)
        return [os.path.join(collection.root, entry.path).rstrip("/") for entry in collection.entries]

    assert places("directory", "/there") == ["/there", "/there/file"]
    assert places("directory/", "/there/") == ["/there/directory", "/there/directory/file"]
    assert places("directory/file", "/there") == ["/there"]
    assert places("directory/file", "/there/") == ["/there/file"]
    assert places("directory/file", "~/there/") == ["~/there/file"]
    assert places("directory/file", "here") == [str(tmp_path / "here")]


def test_what_cannot_be_copied_is_reported(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert files.collect(str(tmp_path), "/x").skipped == (str(tmp_path / "pipe"),)
    with pytest.raises(LaunchError, match="neither a file nor a directory"):
        files.collect(str(tmp_path / "pipe"), "/x")
    with pytest.raises(FileNotFoundError):
        files.collect(str(tmp_path / "nothing"), "/x")


# --- a received file ----------------------------------------------------------------------------

DATA = bytes(range(256)) * 40
DIGEST = hashlib.sha256(DATA).hexdigest()


def target(directory: Path) -> ReceivedFile:
    return ReceivedFile(str(directory / "file"), len(DATA), 0o640, 1_700_000_000_123_456_789)


def test_a_file_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    file = target(tmp_path)
    assert file.check(set()) == 0
    assert file.write(0, DATA[:1000]) == 1000
    assert file.write(0, DATA[:1000]) == 0
    assert not (tmp_path / "file").exists()
    (draft,) = tmp_path.iterdir()
    assert draft.stat().st_mode & 0o777 == 0o600
    with pytest.raises(OSError, match="expected the chunk at byte 1000, got"):
        file.write(2000, DATA[2000:])
    file.close()

    again = target(tmp_path)
    assert again.check(partials_in(str(tmp_path))) == 1000
    assert again.write(500, DATA[500:]) == len(DATA) - 1000
    assert not again.ready
    again.digest = DIGEST
    assert again.ready
    assert again.finish()
    assert (tmp_path / "file").read_bytes() == DATA
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert target(tmp_path).check(set()) == DONE


def test_what_is_not_what_was_sent_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("as it was")
    file = target(tmp_path)
    file.check(set())
    file.write(0, b"?" + DATA[1:])
    file.digest = DIGEST
    assert not file.finish()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "as it was"}


def test_the_rest_of_another_state_of_the_file_is_removed(tmp_path: Path) -> None:
    old = ReceivedFile(str(tmp_path / "file"), 10**6, 0o600, 5)
    old.check(set())
    old.write(0, b"x" * 1000)
    busy = target(tmp_path)
    assert busy.check(partials_in(str(tmp_path))) == 0
    assert len(list(tmp_path.iterdir())) == 1, "the other copy is still being written"
    old.close()
    assert target(tmp_path).check(partials_in(str(tmp_path))) == 0
    assert not list(tmp_path.iterdir())


def test_two_copies_do_not_write_the_same_file(tmp_path: Path) -> None:
    first, second = target(tmp_path), target(tmp_path)
    first.check(set())
    first.write(0, DATA[:10])
    second.check(partials_in(str(tmp_path)))
    for copy in (second, first):
        copy.write(0, DATA)
        copy.digest = DIGEST
        assert copy.finish()
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [DATA]


@pytest.mark.parametrize("how", ["owner", "mode", "link", "pipe"])
def test_what_others_could_have_put_there_is_not_gone_on_with(tmp_path: Path, how: str) -> None:
    file = target(tmp_path)
    file.check(set())
    file.write(0, DATA[:1000])
    file.close()
    (draft,) = tmp_path.iterdir()
    if how == "owner":
        if os.getuid():
            pytest.skip("needs root")
        os.chown(draft, 12345, -1)
    elif how == "mode":
        draft.chmod(0o666)
    elif how == "link":
        os.link(draft, tmp_path / "another name")
    else:
        draft.unlink()
        os.mkfifo(draft)
    again = target(tmp_path)
    assert again.check(partials_in(str(tmp_path))) == 0
    again.write(0, DATA)
    again.digest = DIGEST
    assert again.finish()
    assert draft.name not in {path.name for path in tmp_path.iterdir() if path.samefile(tmp_path / "file")}
    assert (tmp_path / "file").stat().st_uid == os.getuid()


def test_no_one_can_know_the_name_of_a_half_copied_file(tmp_path: Path) -> None:
    drafts = set()
    for directory in (tmp_path / "a", tmp_path / "b"):
        directory.mkdir()
        file = target(directory)
        file.check(set())
        file.write(0, DATA[:1000])
        drafts |= {path.name for path in directory.iterdir()}
    assert len(drafts) == 2


# --- from host to host --------------------------------------------------------------------------


def meet(own: bytes, theirs: bytes) -> tuple[socket.socket | None, socket.socket | None, str]:
    """Return a listener's and a caller's connection, and the caller's error message."""
    accepted: list[socket.socket | None] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: accepted.append(tcp.accept(listener, own)))
        thread.start()
        try:
            called, message = tcp.connect(["127.0.0.1"], listener.getsockname()[1], theirs), ""
        except OSError as error:
            called, message = None, str(error)
        thread.join()
    return accepted[0], called, message


def test_hosts_that_know_the_token_meet() -> None:
    heard, called, _ = meet(b"t" * 32, b"t" * 32)
    assert heard is not None
    assert called is not None
    heard.setblocking(True)
    called.sendall(b"word")
    assert heard.recv(4) == b"word"
    heard.close()
    called.close()


def test_others_do_not() -> None:
    assert meet(b"t" * 32, b"u" * 32) == (None, None, "127.0.0.1: another program answers there")


def test_the_token_is_never_sent() -> None:
    heard = []

    def listen(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            sock.settimeout(1.0)
            heard.append(sock.recv(4096))

    token = b"t" * 32
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        threading.Thread(target=listen, args=(stranger,), daemon=True).start()
        with pytest.raises(OSError, match=r"127\.0\.0\.1: another program answers there"):
            tcp.connect(["127.0.0.1"], stranger.getsockname()[1], token)
    assert heard[0]
    assert token[:16] not in heard[0]


def test_shared_networks_come_first() -> None:
    facts = {
        "a": HostFacts(
            networks=(("docker0", "172.17.0.1", 16), ("eth0", "10.0.0.1", 24)), reached="10.0.0.1"
        ),
        "b": HostFacts(networks=(("docker0", "172.17.0.1", 16), ("eth0", "10.0.0.2", 24)), reached="fe80::2"),
        "c": HostFacts(networks=(("eth0", "10.0.0.3", 24),)),
    }
    assert addresses(facts) == {
        "a": ["10.0.0.1", "172.17.0.1"],
        "b": ["10.0.0.2", "172.17.0.1", "fe80::2"],
        "c": ["10.0.0.3"],
    }


# --- host names ---------------------------------------------------------------------------------


def test_hosts_with_and_without_slots() -> None:
    assert parse_hosts("a, b:2,[fe80::1]:3,10.0.0.1", 0) == [
        ("a", 0),
        ("b", 2),
        ("fe80::1", 3),
        ("10.0.0.1", 0),
    ]
    for text in ("-oProxyCommand=x", "a;b", "a,,b", "a b"):
        with pytest.raises(LaunchError):
            parse_hosts(text, 0)


def test_this_machine_needs_no_ssh() -> None:
    assert RemoteShell(local={"me"}).command("me", ["x", "y z"]) == ["x", "y z"]
    assert RemoteShell(local={"me"}).command("you", ["x"])[0] == "ssh"
    with pytest.raises(LaunchError):
        RemoteShell(local={"-oX"}).command("-oX", ["x"])


# --- progress -----------------------------------------------------------------------------------


def test_the_bar_shows_the_slowest_host(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    progress = CopyProgress(1_000_000_000)
    progress.show({})
    progress.show({"a": 500_000_000, "b": 250_000_000})
    progress.stop()
    shown = capsys.readouterr().err
    assert "0.2/1.0 GB" in shown or "0.3/1.0 GB" in shown
    assert "(b is behind)" in shown


def test_nothing_is_shown_where_there_is_no_terminal(capsys: Any) -> None:
    progress = CopyProgress(100)
    progress.show({"a": 50})
    progress.stop()
    assert capsys.readouterr().err == ""
