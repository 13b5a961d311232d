"""Agents that fall silent, seen from the launcher."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from unittest.mock import Mock

import pytest

from ringdance.launch.agents import Agents
from ringdance.launch.messages import Frames
from ringdance.launch.remote.connect import Remote


@pytest.fixture
def remotes() -> Iterator[list[Remote]]:
    """The agents of h1, the launcher's host, and three others; none ever answers."""
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
    agents.check()
    calls = listener.on_host_failed.call_args_list
    assert [call.args[0] for call in calls] == blamed
    own = "no heartbeat from any other host for 6 s: this host's own network may be down"
    assert (calls[0].args[1] == own) == (blamed[0] == "h1")
