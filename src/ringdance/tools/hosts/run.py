"""Run one command on every host and collect its output."""

from __future__ import annotations

import os
import shlex
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringdance.host.directories import OWN_DIRECTORY, bases
from ringdance.tools.hosts.host_set import HostSet


@dataclass
class Result:
    """The result of a command on a host.

    Attributes:
        output: The command's stdout and stderr, interleaved as they were written.
        problem: Reason why the command did not run or did not finish, or "".
    """

    output: bytearray = field(default_factory=bytearray)
    problem: str = ""


def run_everywhere(hosts: HostSet, words: Sequence[str], timeout: float) -> dict[str, Result]:
    """Run a command on all hosts, stop any processes it leaves behind, and return the results by host.

    The command runs in the home directory, with the programs of this Python environment first in its PATH.

    Args:
        hosts: Connected hosts.
        words: Program and its arguments.
        timeout: Seconds after which the command is stopped.
    """
    job: dict[str, Any] = {
        "job": uuid.uuid4().hex, "bases": bases(os.environ), "cwd": "/", "needed": [], "environ": {},
        "heartbeat_timeout": None,
    }  # fmt: skip
    running = list(hosts.connected)
    for host in running:
        path = shlex.quote(os.path.dirname(hosts.agents[host].facts.executable))
        script = f"PATH={path}:$PATH; export PATH\ncd || exit 1\n{shlex.join(words)}\n"
        hosts.send(host, job)
        hosts.send(host, {"put": "command"}, script.encode())
        hosts.send(host, {"spawn": 0, "command": f"exec /bin/sh {OWN_DIRECTORY}/command"})
    results = {host: Result(problem=hosts.problems.get(host, "")) for host in hosts.names}
    deadline = time.monotonic() + timeout
    while running and time.monotonic() < deadline:
        for host, message, data in hosts.step(min(0.2, timeout)):
            if message and "output" in message:
                results[host].output += data
            elif _ended(hosts, host, message, results[host]) and host in running:
                running.remove(host)
    for host in running:
        results[host].problem = f"it did not answer within {timeout:g} s"
    _clean(hosts)
    return results


def _ended(hosts: HostSet, host: str, message: Mapping[str, object] | None, result: Result) -> bool:
    """Return True if ``message`` reports that the command has ended on a host. Stores why it failed."""
    if message is None:
        result.problem = hosts.problems[host]
    elif message.get("problem"):
        result.problem = str(message["problem"])
    return message is None or bool(message.get("problem")) or "code" in message


def _clean(hosts: HostSet) -> None:
    """Stop all processes started by the command, and remove its temporary files."""
    left = set(hosts.connected)
    for host in left:
        hosts.send(host, {"clean": True, "failed": False})
    deadline = time.monotonic() + 6.0
    while left and time.monotonic() < deadline:
        for host, message, _ in hosts.step(0.2):
            if message is None or "cleaned" in message:
                left.discard(host)
