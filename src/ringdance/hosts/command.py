"""``ringdance hosts run``: one command on every host, and what it said, equal outputs once."""

from __future__ import annotations

import os
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringdance.hosts.members import Members
from ringdance.hosts.talk import Talk
from ringdance.launch.directories import OWN_FOLDER, bases
from ringdance.launch.output.stream import Lines

TIMED_OUT, NOT_REACHED = 124, 255


@dataclass
class Ran:
    """A command on a host.

    Attributes:
        code: its exit code, 128 + n if signal n killed it, 124 if its time was over, 255: it did not run.
        output: what it wrote to stdout and stderr, in the order in which it did.
        problem: why it has no exit code of its own, or "".
        seconds: it took.
    """

    code: int = NOT_REACHED
    output: bytearray = field(default_factory=bytearray)
    problem: str = ""
    seconds: float = 0.0


def shell_line(words: Sequence[str], folder: str, python: str = sys.executable) -> str:
    """The program for the shell: one word is a line of its language, several are a program and its arguments.

    It begins in `folder` ("" for the home folder) and finds the commands beside `python` first.
    """
    command = words[0] if len(words) == 1 else shlex.join(words)
    home = folder.startswith("~/") or folder in ("", "~")
    # A tilde in quotes is none.
    place = f'"$HOME"/{shlex.quote(folder[2:])}' if home else shlex.quote(folder)
    path = shlex.quote(os.path.dirname(python))
    return f"PATH={path}:$PATH; export PATH\ncd -- {place} || exit 1\n{command}\n"


def run(
    members: Members,
    words: Sequence[str],
    *,
    folder: str = "",
    timeout: float | None = None,
    live: Callable[[str, bytes], None] | None = None,
    waiting: Callable[[Sequence[str]], None] = lambda hosts: None,
) -> dict[str, Ran]:
    """Run a command on all hosts at once, until it has ended everywhere.

    Args:
        members: the hosts, connected.
        words: the command.
        folder: where it begins.
        timeout: seconds after which it is ended.
        live: is given a host and each whole piece of its output at once.
        waiting: is told, now and then, on which hosts it still runs.
    """
    found = {host: Ran(problem=members.problems.get(host, "")) for host in members.names}
    talk = Talk(members.remotes)
    job = uuid.uuid4().hex
    order: dict[str, Any] = {
        "job": job, "bases": bases(os.environ), "cwd": "/", "needed": [], "environ": {},
        "silence": None,
    }  # fmt: skip
    lines = {host: Lines() for host in members.remotes}
    running = set(members.remotes)
    began = time.monotonic()
    for host, remote in members.remotes.items():
        line = shell_line(words, folder, remote.facts.executable)
        talk.send(host, order)
        talk.send(host, {"put": "command"}, line.encode())
        talk.send(host, {"spawn": 0, "command": f"exec /bin/sh {OWN_FOLDER}/command"})
    while running and (timeout is None or time.monotonic() - began < timeout):
        for host, said, data in talk.step(0.2 if timeout else 1.0):
            ran = found[host]
            if said is None or said.get("problem"):
                ran.problem = talk.lost[host] if said is None else said["problem"]
            elif "said" in said:
                ran.output += data
                if live:
                    for piece in lines[host].feed(data):
                        live(host, piece)
                continue
            elif "spawned" in said:
                code = said["code"]
                ran.code = code if code >= 0 else 128 - code
            else:
                continue
            ran.seconds = time.monotonic() - began
            running.discard(host)
        waiting([host for host in members.names if host in running])
    for host in running:
        found[host].code, found[host].problem = TIMED_OUT, f"it was ended after {timeout:g} s (--timeout)"
    if live:
        for host, last in lines.items():
            for piece in last.end():
                live(host, piece)
    _clean(talk)
    return found


def _clean(talk: Talk) -> None:
    """Nothing of the command is left on any host."""
    asked = talk.there
    for host in asked:
        talk.send(host, {"clean": True, "failed": False})
    until = time.monotonic() + 6.0
    left = set(asked)
    while left - talk.lost.keys() and time.monotonic() < until:
        for host, said, _ in talk.step(0.2):
            if said is None or "cleaned" in said:
                left.discard(host)
    talk.close()


def grouped(found: Mapping[str, Ran]) -> list[tuple[list[str], Ran]]:
    """Hosts with the same outcome together, in the order of the first of each."""
    groups: list[tuple[list[str], Ran]] = []
    for host, ran in found.items():
        for hosts, other in groups:
            if (ran.code, ran.output, ran.problem) == (other.code, other.output, other.problem):
                hosts.append(host)
                break
        else:
            groups.append(([host], ran))
    return groups


def exit_code(found: Mapping[str, Ran]) -> int:
    """0 if all are; the one of those that failed if they agree, else 1."""
    codes = {ran.code for ran in found.values() if ran.code}
    return codes.pop() if len(codes) == 1 else int(bool(codes))
