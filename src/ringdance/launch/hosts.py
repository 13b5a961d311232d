"""Hosts and slots: from what people write to names and numbers, and which names are this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ringdance.errors import LaunchError

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")

HostList = Sequence[tuple[str, int]]
"""Names with their numbers of slots, in the order given."""


@dataclass(frozen=True)
class Host:
    """A machine and the ranks on it.

    Attributes:
        name: as given by the user.
        slots: places for ranks.
        ranks: global ranks, in order of local rank.
    """

    name: str
    slots: int
    ranks: tuple[int, ...]


def parse_hosts(text: str) -> list[tuple[str, int]]:
    """``"h1:2,h2:4"`` as names and slots, in the order given; an IPv6 address may stand in brackets.

    Raises:
        LaunchError: an entry has no slot count or a bad one.
    """
    hosts = []
    for entry in text.split(","):
        name, _, count = entry.strip().rpartition(":")
        if not _good(name) or not count.isdigit() or int(count) < 1:
            raise LaunchError(f"-H {text}: {entry.strip()!r} is not HOST:SLOTS, for example localhost:4")
        hosts.append((name.strip("[]"), int(count)))
    return hosts


def parse_hostfile(path: str) -> list[tuple[str, int]]:
    """Hosts of a file with a line ``NAME slots=N`` or ``NAME:N`` for each; ``#`` begins a comment.

    Raises:
        LaunchError: the file cannot be read, a line cannot be understood, or it names no host.
    """
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"--hostfile {path}: {getattr(error, 'strerror', None) or error}") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].replace(" =", "=").replace("= ", "=").split()
        if not words:
            continue
        name, count = words[0], next((word[6:] for word in words[1:] if word.startswith("slots=")), "")
        if len(words) == 1:
            name, _, count = name.rpartition(":")
        if not _good(name) or not count.isdigit() or int(count) < 1:
            raise LaunchError(
                f"--hostfile {path}, line {number}: {line.strip()!r} is not `HOST slots=N`, "
                "for example: localhost slots=4"
            )
        hosts.append((name.strip("[]"), int(count)))
    if not hosts:
        raise LaunchError(f"--hostfile {path}: it names no host")
    return hosts


def _good(name: str) -> bool:
    return bool(name) and not name.startswith("-") and not any(sign in name for sign in " \t/,'\"$`;|&<>")


def local_names(names: Iterable[str]) -> frozenset[str]:
    """Those of `names` that are this machine: its own name, short or long, or one of its addresses."""
    own = os.uname().nodename
    known = {*LOCAL_NAMES, own, own.partition(".")[0]}
    return frozenset(name for name in names if name in known or _is_own_address(name))


def _is_own_address(name: str) -> bool:
    """Whether `name` stands for an address that a socket of this machine can have."""
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as sock:
                sock.bind(address)
                return True
        except OSError:
            continue
    return False


def place(ranks: int, hosts: HostList) -> tuple[Host, ...]:
    """Put `ranks` ranks on hosts: all slots of a host before the next; hosts left empty are left out.

    Raises:
        LaunchError: there are fewer slots than ranks.
    """
    total = sum(slots for _, slots in hosts)
    if ranks > total:
        raise LaunchError(
            f"-np {ranks} needs {ranks} slots, but the hosts given have {total}: "
            + ", ".join(f"{name}:{slots}" for name, slots in hosts)
            + "; raise a host's number of slots"
        )
    placed, first = [], 0
    for name, slots in hosts:
        here = min(slots, ranks - first)
        if here:
            placed.append(Host(name, slots, tuple(range(first, first + here))))
        first += here
    return tuple(placed)
