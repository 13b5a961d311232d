"""Which hosts a command is about, and an agent on each."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ringdance.cluster.detect import detect
from ringdance.cluster.hostfile import NAME, HostList, merge, parse_hostfile, parse_hosts
from ringdance.errors import LaunchError
from ringdance.launch.hosts import local_names
from ringdance.launch.remote.connect import Remote, attempt
from ringdance.launch.remote.shell import RemoteShell, add_ssh_options, remote_shell_of

# A host that falls silent ends its ssh within 20 s, whatever the agent there does.
_KEEP_ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4")


@dataclass
class Members:
    """Hosts with their slots, in the order given.

    Attributes:
        slots: by name; 0 where none are given.
        source: who named them, for people.
        reach: how they are reached.
        remotes: the agents on those that answer.
        problems: what is wrong with the others.
    """

    slots: dict[str, int]
    source: str
    reach: RemoteShell
    remotes: dict[str, Remote] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """All hosts."""
        return list(self.slots)

    def connect(self, timeout: float) -> Members:
        """Start the agents, all at once; what is in the way of one is noted, not raised.

        Args:
            timeout: seconds for a host to answer.
        """
        found, self.problems = attempt(self.names, self.reach, timeout, _say)
        for host, remote in found.items():
            if host in self.problems:
                remote.close()
        self.remotes = {
            host: found[host] for host in self.names if host in found and host not in self.problems
        }
        return self

    def close(self) -> None:
        """End the agents."""
        for remote in self.remotes.values():
            remote.close()


def _say(text: str) -> None:
    print(f"ringdance hosts: {text}", file=sys.stderr, flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say which hosts, and how they are reached."""
    group = parser.add_argument_group("hosts")
    where = group.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="H1[:N],H2[:M]", help="these hosts")
    where.add_argument("--hostfile", metavar="FILE", help="the hosts of a file, as for `ringdance run`")
    add_ssh_options(group)
    add = group.add_argument
    add(
        "--connect-timeout",
        type=float,
        default=15.0,
        metavar="S",
        help="seconds for a host to answer (default 15)",
    )


def members_of(arguments: argparse.Namespace) -> Members:
    """The hosts that the arguments name, else those that a scheduler has given; nobody is asked yet.

    Raises:
        LaunchError: none are named, or not in a way that can be understood.
    """
    if not arguments.connect_timeout > 0:
        raise LaunchError(f"--connect-timeout {arguments.connect_timeout:g}: it must be more than 0 seconds")
    reach = remote_shell_of(arguments, _KEEP_ALIVE)
    hosts: HostList
    if arguments.hosts:
        hosts, source = names_or_slots(arguments.hosts), "-H"
    elif arguments.hostfile:
        hosts, source = parse_hostfile(arguments.hostfile), f"--hostfile {arguments.hostfile}"
    else:
        given = detect(os.environ)
        if given is None:
            raise LaunchError("which hosts? Name them, for example: -H node1,node2, or --hostfile FILE")
        hosts, source = given.hosts, given.source
        reach = replace(
            reach,
            method=given.method,
            arguments=(*reach.arguments, *given.ssh_arguments),
            start_timeout=given.start_timeout,
        )
    local = local_names(name for name, _ in hosts)
    slots: dict[str, int] = {}
    own = next((name for name, _ in hosts if name in local), "")
    for name, count in hosts:  # all names of this machine are one host
        name = own if name in local else name
        slots[name] = slots.get(name, 0) + count
    return Members(slots, source, replace(reach, local=frozenset(local)))


def names_or_slots(text: str) -> Sequence[tuple[str, int]]:
    """``"h1,h2:4"``: slots may be left out, and are 0 then.

    Raises:
        LaunchError: an entry is neither.
    """
    found: list[tuple[str, int]] = []
    for entry in text.split(","):
        name = entry.strip()
        found += [(name, 0)] if NAME.fullmatch(name) else parse_hosts(name)
    return merge(found)
