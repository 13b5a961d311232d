"""The hosts that a command uses, and the agents on them."""

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

# ssh exits if its host has not answered for 20 s.
_KEEP_ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4")

Event = tuple[str, dict[str, Any] | None, bytes]
"""Host name, message from its agent (None if the connection was lost), and payload of the message."""


def _print(text: str) -> None:
    print(f"ringdance: {text}", file=sys.stderr, flush=True)  # shared by several commands


@dataclass
class HostSet:
    """Hosts in the order in which they were given, with their slots and agents.

    Attributes:
        slots: Number of slots by host name, or 0 if not specified.
        shell: Remote shell for reaching the hosts.
        agents: Agents by host name, for the hosts that answered.
        problems: Reason why a host cannot be used, by host name. Includes hosts that were lost later.
    """

    slots: dict[str, int]
    shell: RemoteShell
    agents: dict[str, Remote] = field(default_factory=dict)
    problems: dict[str, LaunchError] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Names of all hosts."""
        return list(self.slots)

    @property
    def connected(self) -> list[str]:
        """Names of the hosts with connected agents."""
        return [host for host in self.agents if host not in self.problems]

    def connect(self, timeout: float, log: Callable[[str], None] = _print) -> None:
        """Start missing agents in parallel. Hosts that cannot be used are added to ``problems``.

        Args:
            timeout: Maximum number of seconds to wait for a host to answer.
            log: Called periodically with a message about the hosts that have not answered yet.
        """
        missing = [host for host in self.names if host not in self.agents]
        started, self.problems = attempt(missing, self.shell, timeout, log)
        self.agents |= {host: started[host] for host in missing if host in started}
        for host in self.problems.keys() & started.keys():
            self.agents.pop(host).close()

    def close(self) -> None:
        """Stop the agents."""
        close_all(self.agents.values())

    def send(self, host: str, message: Mapping[str, Any], payload: bytes = b"") -> None:
        """Queue a message for a host's agent. ``step()`` reports it if the connection is lost."""
        if host not in self.problems:
            self.agents[host].frames.send(dict(message), payload)

    def unsent(self, host: str) -> int:
        """Return the number of bytes queued for a host, or 0 if the host is lost."""
        return 0 if host in self.problems else self.agents[host].frames.unsent

    def step(self, timeout: float) -> list[Event]:
        """Send queued data, and wait for messages. Returns the messages as soon as at least one arrives.

        Args:
            timeout: Maximum number of seconds to wait for messages.
        """
        with selectors.DefaultSelector() as selector:
            for host in self.connected:
                frames = self.agents[host].frames
                selector.register(frames.read_fd, selectors.EVENT_READ, host)
                if frames.unsent and frames.open:
                    selector.register(frames.write_fd, selectors.EVENT_WRITE, host)
            ready = [(key.data, events) for key, events in selector.select(timeout)]
        received: list[Event] = []
        for host, events in ready:
            if events & selectors.EVENT_WRITE:
                self.agents[host].frames.flush()
            else:
                received += self._receive(host)
        return received

    def _receive(self, host: str) -> list[Event]:
        agent, reason = self.agents[host], "connection closed"
        try:
            messages, alive = agent.frames.receive()
        except ValueError as error:
            messages, alive, reason = [], False, f"invalid message: {error}"
        events: list[Event] = [(host, message, payload) for message, payload in messages]
        if not alive:
            last = agent.last_words()
            self.problems[host] = LaunchError(f"host lost: {reason}" + (f" ({last})" if last else ""))
            events.append((host, None, b""))
        return events

    def ask(
        self, messages: Mapping[str, Mapping[str, Any]], payload: bytes = b"", timeout: float = 60.0
    ) -> dict[str, dict[str, Any]]:
        """Send each host its message and wait for the answers. All messages must have the same "task".

        Returns:
            The answers by host. The key "problem" of an answer is "" on success.
        """
        answers: dict[str, dict[str, Any]] = {
            host: {"problem": str(self.problems[host])} for host in messages if host in self.problems
        }
        for host, message in messages.items():
            self.send(host, message, payload)
        kinds = {(message["task"], message.get("do")) for message in messages.values()}
        deadline = time.monotonic() + timeout
        while len(answers) < len(messages):
            left = deadline - time.monotonic()
            for host, answer, _ in self.step(max(0.0, left)):
                if answer is None:
                    answers[host] = {"problem": str(self.problems[host])}
                elif (answer.get("answer"), answer.get("what")) in kinds:
                    answers[host] = answer
            if left <= 0:
                late = {"problem": f"no answer within {timeout:g} s"}
                answers = dict.fromkeys(messages, late) | answers
        return {host: answers[host] for host in messages}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that select hosts and specify how to reach them."""
    group = parser.add_argument_group("hosts")
    add_host_options(group)
    text = "seconds to wait for a host to respond (default: %(default)g)"
    group.add_argument("--connect-timeout", type=number, default=15.0, metavar="S", help=text)


def host_set(arguments: argparse.Namespace) -> HostSet:
    """Return the hosts in the arguments. Default: hosts allocated by a scheduler. Does not start agents.

    Raises:
        LaunchError: No hosts are given or allocated, or their names cannot be parsed.
    """
    shell = remote_shell_of(arguments, _KEEP_ALIVE)
    hosts = hosts_of(arguments, slots=0)
    if not hosts and (job := detect(os.environ)):
        hosts = job.hosts
        ssh = (*shell.arguments, *job.ssh_arguments)
        shell = replace(shell, method=job.method, arguments=ssh, start_timeout=job.start_timeout)
    if not hosts:
        raise LaunchError("no hosts were given. Pass -H node1,node2 or --hostfile FILE.")
    return of_hosts(hosts, shell)


def of_hosts(hosts: Sequence[tuple[str, int]], shell: RemoteShell) -> HostSet:
    """Create a host set from hosts and their slots. All names of this machine are merged into one host."""
    local = local_names(name for name, _ in hosts)
    first = next((name for name, _ in hosts if name in local), "")
    slots = dict(merge((first if name in local else name, count) for name, count in hosts))
    return HostSet(slots, replace(shell, local=frozenset(local)))
