"""Run one command on every host and collect its output."""

from __future__ import annotations

import os
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringdance.hosts.host_set import HostSet
from ringdance.launch.directories import OWN_DIRECTORY, bases
from ringdance.launch.output.stream import Lines

TIMED_OUT, NOT_REACHED = 124, 255


@dataclass
class Result:
    """How a command ended on a host.

    Attributes:
        code: its exit code; 128 + n if signal n killed it, 124 for the timeout, 255 if it did not run.
        output: its stdout and stderr, in the order in which they were written.
        problem: why it has no exit code of its own, or "".
        seconds: duration.
    """

    code: int = NOT_REACHED
    output: bytearray = field(default_factory=bytearray)
    problem: str = ""
    seconds: float = 0.0


def shell_line(words: Sequence[str], directory: str, python: str = sys.executable) -> str:
    """Write the shell script: a single word is a line of shell, several are a program and its arguments.

    It starts in `directory` ("" for the home directory) and finds the commands beside `python` first.
    """
    command = words[0] if len(words) == 1 else shlex.join(words)
    home = directory.startswith("~/") or directory in ("", "~")
    # The shell does not expand a quoted tilde.
    target = f'"$HOME"/{shlex.quote(directory[2:])}' if home else shlex.quote(directory)
    path = shlex.quote(os.path.dirname(python))
    return f"PATH={path}:$PATH; export PATH\ncd -- {target} || exit 1\n{command}\n"


class Run:
    """One command on several hosts.

    Args:
        hosts: connected.
        on_line: called with a host and each line of its output; None: output is only collected.
    """

    def __init__(self, hosts: HostSet, on_line: Callable[[str, bytes], None] | None = None) -> None:
        self._hosts, self._on_line = hosts, on_line
        self._lines = {host: Lines() for host in hosts.agents}
        self.running = list(hosts.connected)
        self.results = {host: Result(problem=hosts.problems.get(host, "")) for host in hosts.names}

    def start(self, words: Sequence[str], directory: str = "") -> None:
        """Start the command `words` on all hosts, in `directory`."""
        job: dict[str, Any] = {
            "job": uuid.uuid4().hex, "bases": bases(os.environ), "cwd": "/", "needed": [], "environ": {},
            "heartbeat_timeout": None,
        }  # fmt: skip
        for host in self.running:
            script = shell_line(words, directory, self._hosts.agents[host].facts.executable)
            self._hosts.send(host, job)
            self._hosts.send(host, {"put": "command"}, script.encode())
            self._hosts.send(host, {"spawn": 0, "command": f"exec /bin/sh {OWN_DIRECTORY}/command"})

    def wait(self, timeout: float | None, on_wait: Callable[[Sequence[str]], None]) -> dict[str, Result]:
        """Wait until the command has ended everywhere, end what is left of it, and return the results.

        Args:
            timeout: seconds after which the command is ended.
            on_wait: called repeatedly with the hosts on which it still runs.
        """
        start = time.monotonic()
        while self.running and (timeout is None or time.monotonic() - start < timeout):
            for host, message, data in self._hosts.step(min(0.2, timeout) if timeout else 1.0):
                if message and "output" in message:
                    self.results[host].output += data
                    self._show(host, self._lines[host].feed(data))
                elif self._ended(host, message):
                    self.results[host].seconds = time.monotonic() - start
                    self.running.remove(host)
            on_wait(self.running)
        for host in self.running:
            result = self.results[host]
            result.code, result.problem = TIMED_OUT, f"ended after {timeout:g} s (--timeout)"
        for host, lines in self._lines.items():
            self._show(host, lines.end())
        self._clean()
        return self.results

    def _ended(self, host: str, message: Mapping[str, object] | None) -> bool:
        """Note the end of the command on a host, if `message` reports one."""
        result = self.results[host]
        if message is None:
            result.problem = self._hosts.problems[host]
        elif message.get("problem"):
            result.problem = str(message["problem"])
        elif isinstance(code := message.get("code"), int):
            result.code = code if code >= 0 else 128 - code
        else:
            return False
        return host in self.running

    def _show(self, host: str, lines: Sequence[bytes]) -> None:
        if self._on_line:
            for line in lines:
                self._on_line(host, line)

    def _clean(self) -> None:
        """End all processes of the command and remove its files."""
        left = set(self._hosts.connected)
        for host in left:
            self._hosts.send(host, {"clean": True, "failed": False})
        deadline = time.monotonic() + 6.0
        while left and time.monotonic() < deadline:
            for host, message, _ in self._hosts.step(0.2):
                if message is None or "cleaned" in message:
                    left.discard(host)


def grouped(results: Mapping[str, Result]) -> list[tuple[list[str], Result]]:
    """Group the hosts with equal results, in the order of the first of each group."""
    groups: dict[tuple[int, bytes, str], list[str]] = {}
    for host, result in results.items():
        groups.setdefault((result.code, bytes(result.output), result.problem), []).append(host)
    return [(hosts, results[hosts[0]]) for hosts in groups.values()]


def exit_code(results: Mapping[str, Result]) -> int:
    """Return 0 if all exit codes are; the failed hosts' code if they agree, else 1."""
    codes = {result.code for result in results.values() if result.code}
    return codes.pop() if len(codes) == 1 else int(bool(codes))
