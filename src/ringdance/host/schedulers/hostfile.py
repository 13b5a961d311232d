"""Parse hosts and slots from the command line and from host files."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence

from ringdance.errors import LaunchError

HostList = Sequence[tuple[str, int]]
"""Names with their numbers of slots, in the order given."""

NAME = re.compile(r"(?!-)[A-Za-z0-9_.-]{1,253}|(?=.*:.*:)[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?")
"""A host's name or address; never an option of ssh, or more than one word of a shell."""


def merge(hosts: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Merge repeated names, at the position of the first, with the sum of their slots."""
    found: dict[str, int] = {}
    for name, slots in hosts:
        found[name] = found.get(name, 0) + slots
    return list(found.items())


def hosts_text(hosts: HostList) -> str:
    """Return ``"h1:2,[fe80::1]:4"``, which :func:`parse_hosts` reads."""
    return ",".join(f"[{name}]:{slots}" if ":" in name else f"{name}:{slots}" for name, slots in hosts)


def parse_hosts(text: str, slots: int | None = 1) -> list[tuple[str, int]]:
    """Parse ``"h1:2,h2:4"`` as names and slots; an IPv6 address may stand in brackets.

    Args:
        text: entries with commas between them.
        slots: of a host for which none are given; None: that is an error.

    Raises:
        LaunchError: an entry is wrong.
    """
    hosts = []
    for entry in map(str.strip, text.split(",")):
        bare = slots is not None and _has_no_slots(entry)
        found = _host(entry, "1" if bare else "")
        if found is None:
            problem = f"{entry!r} is not HOST:SLOTS, for example localhost:4"
            raise LaunchError(f"-H {text}: {problem}{_hint(entry)}")
        hosts.append((found[0], slots or 0) if bare else found)
    return merge(hosts)


def parse_hostfile(path: str, option: str = "--hostfile", slots: int | None = None) -> list[tuple[str, int]]:
    """Parse a host file, in any of the forms in use; ``#`` begins a comment.

    Horovod's and Open MPI's ``NAME slots=N`` (with more words such as ``max_slots=``), MPICH's and Intel
    MPI's ``NAME:N``, and names alone, one for each slot, as schedulers write them.

    Args:
        path: the file.
        option: where the path comes from, for errors.
        slots: of a host for which none are given; None: that is an error, unless no line has any.

    Raises:
        LaunchError: the file cannot be read or parsed, or names no host.
    """
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.partition("#")[0].strip() for line in file.read().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"{option} {path}: {getattr(error, 'strerror', None) or error}") from None
    if slots is None and all(_has_no_slots(line) for line in lines if line):
        slots = 1
    hosts = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        name, *words = re.sub(r"\s*=\s*", "=", line).split()
        given = next((word[6:] for word in words if word.startswith("slots=")), "")
        default = str(slots) if slots and _has_no_slots(name) else ""
        found = _host(name, given or default)
        if found is None or (words and not any("=" in word for word in words)):
            raise LaunchError(
                f"{option} {path}, line {number}: {line!r} is not `HOST slots=N`, "
                f"for example: localhost slots=4{_hint(name)}"
            )
        hosts.append(found)
    if not hosts:
        raise LaunchError(f"{option} {path}: it names no host")
    return merge(hosts)


def _has_no_slots(entry: str) -> bool:
    name, _, slots = entry.rpartition(":")
    with_slots = slots.isdecimal() and _is_address(name)
    return not with_slots and bool(NAME.fullmatch(entry) or entry.endswith("]"))


def _is_address(text: str) -> bool:
    """Return whether a text is an IPv6 address; what follows it after a colon is a number of slots."""
    try:
        return ipaddress.ip_address(text).version == 6 and bool(NAME.fullmatch(text))
    except ValueError:
        return False


def _hint(entry: str) -> str:
    """Return how to write what is probably meant by an entry that cannot be read."""
    user, _, host = entry.rpartition("@")
    if user and host:
        return f'. Give the user to ssh: {host} with --ssh-args="-l {user}"'
    name, _, slots = entry.rpartition(":")
    return f". Write [{name}]:{slots}, or [{entry}] for an address alone" if _is_address(entry) else ""


def _host(name: str, slots: str) -> tuple[str, int] | None:
    """Return a name with its slots, which may be part of it as ``NAME:N``; None if one is invalid."""
    if not slots:
        entry, (name, _, slots) = name, name.rpartition(":")
        if _is_address(name) and _is_address(entry):  # it could be either
            return None
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
        if ":" not in name:
            return None
    if not NAME.fullmatch(name) or not slots.isascii() or not slots.isdigit() or int(slots) < 1:
        return None
    return name, int(slots)
