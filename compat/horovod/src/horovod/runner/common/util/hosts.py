"""Hosts with slots, and the assignment of ranks to hosts."""

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
        """Parse ``"name:slots"``. Raises ValueError for anything else."""
        (host,) = parse_hosts(host_string)
        return host


@dataclass(frozen=True)
class SlotInfo:
    """A process's host and its rank numbers."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int

    def to_dict(self) -> dict[str, str | int]:
        """Return the fields as a dictionary."""
        return asdict(self)


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """Return the hosts in ``"h1:2,h2:4"``.

    Raises:
        ValueError: An entry is not ``name:slots``.
    """
    try:
        return [HostInfo(name, slots) for name, slots in hostfile.parse_hosts(hosts_string, slots=None)]
    except LaunchError as error:
        raise ValueError(str(error)) from None


def parse_host_files(filename: str) -> str:
    """Return the hosts in a file with lines ``name slots=N`` as ``"h1:2,h2:4"``. Comments are skipped.

    Raises:
        ValueError: The file cannot be read or parsed.
    """
    try:
        found = hostfile.parse_hostfile(filename)
    except LaunchError as error:
        raise ValueError(str(error)) from None
    return hostfile.hosts_text(found)


def get_host_assignments(
    hosts: Sequence[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """Assign a place to each process. Fills all slots of a host before the next, up to ``max_num_proc``.

    Raises:
        ValueError: There are fewer than ``min_num_proc`` slots.
    """
    total = sum(host.slots for host in hosts)
    if total < min_num_proc:
        raise ValueError(f"{min_num_proc} processes were requested, but the hosts have only {total} slots")
    size = total if max_num_proc is None else min(total, max_num_proc)
    placed = assign_ranks(size, [(host.hostname, host.slots) for host in hosts])
    names = [host.name for host in placed for _ in host.ranks]
    return [
        SlotInfo(name, **{key.lower(): number for key, number in numbers.items()})
        for name, numbers in zip(names, rank_numbers(placed), strict=True)
    ]
