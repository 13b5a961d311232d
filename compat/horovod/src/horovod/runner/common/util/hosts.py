"""Hosts with slots, and which rank goes where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ringdance.errors import LaunchError
from ringdance.host.schedulers import hostfile
from ringdance.launch.hosts import assign_ranks, rank_numbers

__all__ = ["HostInfo", "SlotInfo", "get_host_assignments", "parse_host_files", "parse_hosts"]


@dataclass(frozen=True)
class HostInfo:
    """A host's name and its number of slots."""

    hostname: str
    slots: int

    @staticmethod
    def from_string(host_string: str) -> HostInfo:
        """From ``"name:slots"``. Raises ValueError for anything else."""
        (host,) = parse_hosts(host_string)
        return host


@dataclass(frozen=True)
class SlotInfo:
    """Where one process runs, and its numbers."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int

    def to_dict(self) -> dict[str, str | int]:
        """The same by name."""
        return asdict(self)


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """The hosts of ``"h1:2,h2:4"``.

    Raises:
        ValueError: an entry is not ``name:slots``.
    """
    try:
        return [HostInfo(name, slots) for name, slots in hostfile.parse_hosts(hosts_string, slots=None)]
    except LaunchError as error:
        raise ValueError(str(error)) from None


def parse_host_files(filename: str) -> str:
    """The hosts of a file of lines ``name slots=N``, as ``"h1:2,h2:4"``; comments are skipped.

    Raises:
        ValueError: it cannot be read or understood.
    """
    try:
        found = hostfile.parse_hostfile(filename)
    except LaunchError as error:
        raise ValueError(str(error)) from None
    return hostfile.hosts_text(found)


def get_host_assignments(
    hosts: Sequence[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """A place for each process: all slots of a host before the next, `max_num_proc` at most.

    Raises:
        ValueError: there are fewer than `min_num_proc` slots.
    """
    total = sum(host.slots for host in hosts)
    if total < min_num_proc:
        raise ValueError(f"{min_num_proc} processes were asked for, but the hosts have only {total} slots")
    size = total if max_num_proc is None else min(total, max_num_proc)
    placed = assign_ranks(size, [(host.hostname, host.slots) for host in hosts])
    names = [host.name for host in placed for _ in host.ranks]
    return [
        SlotInfo(name, **{key.lower(): number for key, number in numbers.items()})
        for name, numbers in zip(names, rank_numbers(placed), strict=True)
    ]
