"""Hosts of a command, with an agent on each."""

from __future__ import annotations

import argparse
import os
import selectors
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ringdance.errors import LaunchError
from ringdance.host.schedulers.detect import detect
from ringdance.host.schedulers.hostfile import merge
from ringdance.host.schedulers.this_machine import local_names
from ringdance.launch.parser import number
from ringdance.launch.remote.connect import Remote, attempt, close_all
from ringdance.launch.remote.shell import RemoteShell, add_host_options, hosts_of, remote_shell_of

# ssh ends 20 s after its host stops answering.
_KEEP_ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4")

Event = tuple[str, dict[str, Any] | None, bytes]
"""A host, its agent's message (None: the connection is lost), and the bytes that belong to the message."""


def _print(text: str) -> None:
    print(f"ringdance hosts: {text}", file=sys.stderr, flush=True)


@dataclass
class HostSet:
    """Hosts with their slots, in the order given, and the agents on them.

    Attributes:
        slots: by name; 0 where none are given.
        shell: how the hosts are reached.
        agents: on the hosts that answered.
        problems: why the others cannot be used, also those that were lost since.
    """

    slots: dict[str, int]
    shell: RemoteShell
    agents: dict[str, Remote] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """All hosts."""
        return list(self.slots)

    @property
    def connected(self) -> list[str]:
        """Hosts with an agent that is not lost."""
        return [host for host in self.agents if host not in self.problems]

    def connect(self, timeout: float, log: Callable[[str], None] = _print) -> None:
        """Start the agents that are missing, all at once; note hosts that cannot be used in `problems`.

        Args:
            timeout: seconds for a host to answer.
            log: is called now and then with the hosts that are still waited for.
        """
        missing = [host for host in self.names if host not in self.agents]
        found, self.problems = attempt(missing, self.shell, timeout, log)
        self.agents |= {host: found[host] for host in missing if host in found}
        for host in self.problems.keys() & found.keys():
            self.agents.pop(host).close()

    def close(self) -> None:
        """End the agents."""
        close_all(self.agents.values())

    def send(self, host: str, message: Mapping[str, Any], payload: bytes = b"") -> None:
        """Send to an agent without waiting; `step` reports whether it is lost."""
        if host not in self.problems:
            self.agents[host].frames.send(dict(message), payload)

    def unsent(self, host: str) -> int:
        """Bytes that wait to be sent to a host, 0 if it is lost."""
        return 0 if host in self.problems else self.agents[host].frames.unsent

    def step(self, timeout: float | None) -> list[Event]:
        """Send what waits, and return messages as soon as there are some.

        Args:
            timeout: seconds to wait for messages; None: until there are some.
        """
        with selectors.DefaultSelector() as selector:
            for host in self.connected:
                frames = self.agents[host].frames
                selector.register(frames.read_fd, selectors.EVENT_READ, host)
                if frames.unsent and frames.open:
                    selector.register(frames.write_fd, selectors.EVENT_WRITE, host)
            ready = [(key.data, events) for key, events in selector.select(timeout)]
        found: list[Event] = []
        for host, events in ready:
            if events & selectors.EVENT_WRITE:
                self.agents[host].frames.flush()
            else:
                found += self._receive(host)
        return found

    def _receive(self, host: str) -> list[Event]:
        agent, reason = self.agents[host], "connection closed"
        try:
            messages, alive = agent.frames.receive()
        except ValueError as error:
            messages, alive, reason = [], False, f"invalid message: {error}"
        found: list[Event] = [(host, message, payload) for message, payload in messages]
        if not alive:
            last = agent.last_words()
            self.problems[host] = f"host lost: {reason}" + (f" ({last})" if last else "")
            found.append((host, None, b""))
        return found

    def ask(
        self, messages: Mapping[str, Mapping[str, Any]], payload: bytes = b"", timeout: float = 60.0
    ) -> dict[str, dict[str, Any]]:
        """Send each host its message, all of the same task, and wait for the answers.

        Returns:
            By host; an answer's "problem" is "" if there is none.
        """
        found: dict[str, dict[str, Any]] = {
            host: {"problem": self.problems[host]} for host in messages if host in self.problems
        }
        for host, message in messages.items():
            self.send(host, message, payload)
        kinds = {(message["task"], message.get("do")) for message in messages.values()}
        deadline = time.monotonic() + timeout
        while len(found) < len(messages):
            left = deadline - time.monotonic()
            for host, answer, _ in self.step(max(0.0, left)):
                if answer is None:
                    found[host] = {"problem": self.problems[host]}
                elif (answer.get("answer"), answer.get("what")) in kinds:
                    found[host] = answer
            if left <= 0:
                late = {"problem": f"no answer within {timeout:g} s"}
                found = dict.fromkeys(messages, late) | found
        return {host: found[host] for host in messages}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the hosts and the way to reach them."""
    group = parser.add_argument_group("hosts")
    add_host_options(group)
    text = "seconds for a host to answer (default %(default)g)"
    group.add_argument("--connect-timeout", type=number, default=15.0, metavar="S", help=text)


def host_set(arguments: argparse.Namespace) -> HostSet:
    """Return the hosts that the arguments name, else those allocated by a scheduler; connects to none.

    Raises:
        LaunchError: no hosts are named, or the names cannot be parsed.
    """
    shell = remote_shell_of(arguments, _KEEP_ALIVE)
    hosts = hosts_of(arguments, slots=0)
    if not hosts and (given := detect(os.environ)):
        hosts = given.hosts
        ssh = (*shell.arguments, *given.ssh_arguments)
        shell = replace(shell, method=given.method, arguments=ssh, start_timeout=given.start_timeout)
    if not hosts:
        raise LaunchError("missing hosts: give -H node1,node2, or --hostfile FILE")
    return of_hosts(hosts, shell)


def of_hosts(hosts: Sequence[tuple[str, int]], shell: RemoteShell) -> HostSet:
    """Return hosts with their slots; all names of this machine are one host."""
    local = local_names(name for name, _ in hosts)
    first = next((name for name, _ in hosts if name in local), "")
    slots = dict(merge((first if name in local else name, count) for name, count in hosts))
    return HostSet(slots, replace(shell, local=frozenset(local)))
