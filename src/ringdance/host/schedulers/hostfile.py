"""Parse hosts and slots from the command line and from host files."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence

from ringdance.errors import LaunchError

HostList = Sequence[tuple[str, int]]
"""Host names, each with its number of slots, in the user's order."""

NAME = re.compile(r"(?!-)[A-Za-z0-9_.-]{1,253}|(?=.*:.*:)[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?")
"""A host's name or address. It never matches an ssh option, or text that a shell would split."""


def merge(hosts: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Merge repeated names at the position of their first occurrence, and add up their slots."""
    merged: dict[str, int] = {}
    for name, slots in hosts:
        merged[name] = merged.get(name, 0) + slots
    return list(merged.items())


def hosts_text(hosts: HostList) -> str:
    """Format hosts as ``"h1:2,[fe80::1]:4"``, which ``parse_hosts`` reads."""
    return ",".join(f"[{name}]:{slots}" if ":" in name else f"{name}:{slots}" for name, slots in hosts)


def parse_hosts(text: str, slots: int | None = 1) -> list[tuple[str, int]]:
    """Parse ``"h1:2,h2:4"`` as names and slots. IPv6 addresses may be in brackets.

    Args:
        text: Entries separated by commas.
        slots: Default for a host without slots. If None, such a host is an error.

    Raises:
        LaunchError: An entry is not valid.
    """
    hosts = []
    for entry in map(str.strip, text.split(",")):
        bare = slots is not None and _has_no_slots(entry)
        host = _host(entry, "1" if bare else "")
        if host is None:
            problem = f"{entry!r} must have the form HOST:SLOTS, for example localhost:4"
            raise LaunchError(f"-H {text}: {problem}{_hint(entry)}")
        hosts.append((host[0], slots or 0) if bare else host)
    return merge(hosts)


def parse_hostfile(path: str, option: str = "--hostfile", slots: int | None = None) -> list[tuple[str, int]]:
    """Parse a host file in any common format. ``#`` starts a comment.

    The formats are ``NAME slots=N`` (Horovod and Open MPI, with optional words such as ``max_slots=``),
    ``NAME:N`` (MPICH and Intel MPI), and plain names, one per slot, as schedulers write them.

    Args:
        path: Path of the file.
        option: Option or variable that holds the path, for errors.
        slots: Default for a host without slots. If None, such a host is an error, unless no line has slots.
            In that case, each line is one slot.

    Raises:
        LaunchError: The file cannot be read or parsed, or does not list any hosts.
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
        count = next((word[6:] for word in words if word.startswith("slots=")), "")
        default = str(slots) if slots and _has_no_slots(name) else ""
        host = _host(name, count or default)
        if host is None or (words and not any("=" in word for word in words)):
            raise LaunchError(
                f"{option} {path}, line {number}: {line!r} must have the form `HOST slots=N`, "
                f"for example: localhost slots=4{_hint(name)}"
            )
        hosts.append(host)
    if not hosts:
        raise LaunchError(f"{option} {path}: the file lists no hosts")
    return merge(hosts)


def _has_no_slots(entry: str) -> bool:
    name, _, slots = entry.rpartition(":")
    with_slots = slots.isdecimal() and _is_address(name)
    return not with_slots and bool(NAME.fullmatch(entry) or entry.endswith("]"))


def _is_address(text: str) -> bool:
    """Return True if a text is an IPv6 address, optionally followed by a colon and a number of slots."""
    try:
        return ipaddress.ip_address(text).version == 6 and bool(NAME.fullmatch(text))
    except ValueError:
        return False


def _hint(entry: str) -> str:
    """Return a hint for an entry that cannot be parsed: how to write what the user probably meant."""
    user, _, host = entry.rpartition("@")
    if user and host:
        return f'. Pass the user to ssh: {host} with --ssh-args="-l {user}"'
    name, _, slots = entry.rpartition(":")
    return f". Write [{name}]:{slots}, or [{entry}] if it has no slots" if _is_address(entry) else ""


def _host(name: str, slots: str) -> tuple[str, int] | None:
    """Return a host's name and slots. ``name`` may be ``NAME:N``. Returns None if either is invalid."""
    if not slots:
        entry, (name, _, slots) = name, name.rpartition(":")
        if _is_address(name) and _is_address(entry):  # ambiguous
            return None
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
        if ":" not in name:
            return None
    if not NAME.fullmatch(name) or not slots.isascii() or not slots.isdigit() or int(slots) < 1:
        return None
    return name, int(slots)
