"""How the launcher handles hosts that fall silent, and equal problems of many hosts."""

from __future__ import annotations

import fcntl
import os
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from unittest.mock import Mock

import pytest

from ringdance.host.messages import Frames
from ringdance.launch import agents as module
from ringdance.launch.agents import Agents
from ringdance.launch.remote.connect import Remote, folded, start_local


class Reports:
    """Handlers that record their calls."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_ready(self) -> None:
        pass

    def on_silence(self, host: str, text: str) -> None:
        self.texts.append(f"{host}: {text}")

    def on_host_failed(self, host: str, text: str, lost: bool) -> None:
        self.texts.append(f"{host} lost: {text}")


def remote(host: str) -> tuple[Remote, Frames]:
    ours, theirs = socket.socketpair()
    frames = Frames(theirs.fileno(), theirs.fileno())
    files = (ours, ours.dup())
    return Remote(host, Frames(*(file.fileno() for file in files)), (*files, theirs)), frames


@pytest.mark.parametrize("failed", [False, True])
def test_silence_is_shown_and_ends_a_job_only_later(monkeypatch: pytest.MonkeyPatch, failed: bool) -> None:
    monkeypatch.setattr(module, "_SHOWN_S", 0.2)
    (local, _), (other, there) = remote("here"), remote("node2")
    local.local = True
    reports, selector = Reports(), selectors.DefaultSelector()
    agents = Agents(local, [other], selector, reports, 0.8)  # type: ignore[arg-type]

    def during(seconds: float) -> list[str]:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            agents.check(failed)
            for key, _ in selector.select(0.02):
                key.data()
        return reports.texts

    agents.begin({"job": "x"}, {"job": "x"}, {})
    there.send({"ready": True, "problem": "", "port": 1})
    assert during(0.1) == []
    if failed:
        assert during(0.3) == ["node2 lost: no heartbeat for 0.2 s (host or network down)"]
        return
    shown = "node2: no heartbeat for 0.2 s. After 0.8 s (--host-timeout), the host is considered lost"
    assert during(0.3) == [shown]
    there.send({"pong": True})
    assert during(0.1) == [shown, "node2: heartbeats have resumed after 0 s"]
    assert during(1.2)[2:] == [shown, "node2 lost: no heartbeat for 0.8 s (host or network down)"]


def test_pings_need_no_file_system() -> None:
    other, there = remote("node2")
    local = start_local("here", dict(os.environ), -1, [other])
    try:
        received: list[object] = []
        until = time.monotonic() + 20.0
        while {"ping": True} not in received and time.monotonic() < until:
            received += [message for message, _ in there.receive()[0]]
            time.sleep(0.02)
        assert {"ping": True} in received
        assert other.frames.shared
        assert os.readlink(f"/proc/self/fd/{other.frames.shared[0]}").startswith("/memfd:")
        fcntl.lockf(other.frames.shared[0], fcntl.LOCK_EX, 1, 0)
    finally:
        local.kill()
        local.close()


def test_equal_problems_of_many_hosts_are_one_line() -> None:
    problems = {f"n{number}": "down" for number in range(40)} | {"a": "full"}
    assert folded(problems) == ["hosts n0, n1, n2, n3, n4 and 35 more: down", "host a: full"]


@pytest.fixture
def remotes() -> Iterator[list[Remote]]:
    """Yield the agents of h1, the launcher's host, and of three others. None of them ever answers."""
    with ExitStack() as stack:
        made = []
        for number in range(1, 5):
            near, far = map(stack.enter_context, socket.socketpair())
            frames = Frames(near.fileno(), stack.enter_context(near.dup()).fileno())
            made.append(Remote(f"h{number}", frames, [far], ready=True, local=number == 1))
        yield made


@pytest.mark.parametrize(
    ("silent", "blamed"),
    [
        ((7.0, 1.0, 0.0), ["h2"]),
        ((7.0, 6.5, 0.0), ["h2", "h3"]),
        ((6.1, 5.7, 5.5), ["h1", "h2", "h3", "h4"]),
    ],
)
def test_the_launchers_own_network(
    remotes: list[Remote], silent: tuple[float, ...], blamed: list[str]
) -> None:
    listener = Mock()
    agents = Agents(remotes[0], remotes[1:], selectors.DefaultSelector(), listener, 6.0)
    for remote, seconds in zip(remotes[1:], silent, strict=True):
        remote.heard -= seconds
    agents.check(False)
    calls = listener.on_host_failed.call_args_list
    assert [call.args[0] for call in calls] == blamed
    own = "no heartbeat from any other host for 6 s: this host's own network may be down"
    assert (calls[0].args[1] == own) == (blamed[0] == "h1")


def test_a_launcher_that_was_stopped_has_missed_the_answers(remotes: list[Remote]) -> None:
    listener = Mock()
    agents = Agents(remotes[0], remotes[1:], selectors.DefaultSelector(), listener, 6.0)
    for remote in remotes[1:]:
        remote.heard -= 7.0
    agents._checked -= 7.0
    agents.check(False)
    listener.on_host_failed.assert_not_called()
