"""Run by mpiexec in place of ssh: ask the launcher to have the agent on another host start a command.

This way, each host has only one connection, and the command is a child of the agent there. ``arguments``: the
agent's socket, ssh's options (ignored), the host, and the words of the command. Standard library only.
"""

from __future__ import annotations

import os
import signal
import sys

from ..messages import Channel
from ..system.signals import STOPPING

_WITH_VALUE = ("-p", "-i", "-l", "-o", "-F", "-J")


def main(arguments: list[str]) -> None:
    """Run the command and exit with its exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # See Note [Signals to all processes]
    path, words = arguments[0], arguments[1:]
    while words and words[0].startswith("-"):
        del words[: 2 if words[0] in _WITH_VALUE else 1]
    if len(words) < 2:
        sys.exit("ringdance: mpiexec must pass a host and a command to run there")
    try:
        channel = Channel.connect(path)
    except OSError:  # the agent has exited
        os._exit(255)
    channel.send({"rsh": words[0], "command": " ".join(words[1:])})
    alive = True
    while alive:
        messages, _, alive = channel.receive()
        for message in messages:
            code = message["code"]
            os._exit(code if code >= 0 else 128 - code)
    os._exit(255)
