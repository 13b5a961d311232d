"""Place ranks on hosts, and find the networks that the hosts share."""

from __future__ import annotations

import ipaddress
import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ringdance.errors import LaunchError
from ringdance.host.schedulers.hostfile import HostList, hosts_text

_PLACE = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


@dataclass(frozen=True)
class HostFacts:
    """Facts about a host.

    Attributes:
        name: Host name as reported by the host itself.
        identity: Identifier of the machine, independent of its names.
        python, executable: Version and path of the Python interpreter.
        version: Version of Ringdance.
        cores: Number of cores that the user's processes may use.
        devices: Names of the host's GPUs.
        visible_devices: Value of CUDA_VISIBLE_DEVICES on the host, None if unset.
        networks: Interface, IPv4 or IPv6 address, and prefix length for each network.
        reached: Address at which the host was reached, if known.
        infiniband: True if the host has InfiniBand devices.
        shared_memory: Free space in /dev/shm in bytes, -1 if unknown or if /dev/shm does not exist.
    """

    name: str = ""
    identity: str = ""
    python: str = ""
    executable: str = ""
    version: str = ""
    cores: int = 1
    devices: Sequence[str] = ()
    visible_devices: str | None = None
    networks: Sequence[tuple[str, str, int]] = ()
    reached: str = ""
    infiniband: bool = False
    shared_memory: int = -1

    @property
    def visible(self) -> Sequence[str]:
        """GPUs visible to processes. As in CUDA, an invalid ``visible_devices`` entry hides later ones."""
        if self.visible_devices is None:
            return self.devices
        known = ("GPU-", "MIG-", *map(str, range(len(self.devices))))
        shown = itertools.takewhile(lambda word: word.strip()[:4] in known, self.visible_devices.split(","))
        return [self.devices[0] for _ in shown] if self.devices else ()


def facts_from(found: Mapping[str, Any]) -> HostFacts:
    """Build the facts from an agent's message or ``machine.facts()``. Missing facts keep their defaults."""
    return HostFacts(**{entry.name: found[entry.name] for entry in fields(HostFacts) if entry.name in found})


@dataclass(frozen=True)
class Host:
    """A machine and the ranks placed on it.

    Attributes:
        name: Name by which the user refers to the host.
        slots: Maximum number of ranks.
        ranks: Global ranks, in order of local rank.
        local: True if the host is this machine.
        cores: Number of cores that the ranks may use, None if unknown.
        devices: Names of the GPUs that are visible to the ranks.
        interfaces: Names of the host's interfaces to the networks that all hosts share.
    """

    name: str
    slots: int
    ranks: tuple[int, ...]
    local: bool = False
    cores: int | None = None
    devices: Sequence[str] = ()
    interfaces: tuple[str, ...] = ()


def several(names: Sequence[str], most: int = 5) -> str:
    """Join names with commas. List only the first ``most`` names, followed by the number of omitted names."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def spans(numbers: Sequence[int]) -> str:
    """Format numbers as ranges: ``0-3,5`` for 0, 1, 2, 3, 5."""
    groups: list[list[int]] = []
    for number in sorted(numbers):
        if groups and number == groups[-1][1] + 1:
            groups[-1][1] = number
        else:
            groups.append([number, number])
    return ",".join(f"{low}-{high}" if high > low else str(low) for low, high in groups)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``1 rank`` or ``2 ranks``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def ranks_text(numbers: Sequence[int]) -> str:
    """Format rank numbers for a message: ``rank 3``, or ``ranks 0-3,5``."""
    return f"rank{'s' * (len(numbers) > 1)} {spans(numbers)}"


def assign_ranks(ranks: int, hosts: HostList) -> tuple[Host, ...]:
    """Place ranks on hosts, filling all slots of a host before the next. Omits hosts that get no ranks.

    Raises:
        LaunchError: There are fewer slots than ranks.
    """
    total = sum(slots for _, slots in hosts)
    if ranks > total:
        each = -(-ranks // len(hosts))
        raise LaunchError(
            f"-np {ranks} needs {ranks} slots, but the hosts given have {total}: "
            f"{several([hosts_text([host]) for host in hosts])}. Use -np {total}, or set {each} slots per "
            f"host: -H {hosts_text([(name, each) for name, _ in hosts[:5]])}{',...' * (len(hosts) > 5)}, "
            f"slots={each} in a host file, or as many tasks per host in a scheduler's job"
        )
    placed, first = [], 0
    for name, slots in hosts:
        here = min(slots, ranks - first)
        if here:
            placed.append(Host(name, slots, tuple(range(first, first + here))))
        first += here
    return tuple(placed)


def rank_numbers(hosts: Sequence[Host]) -> list[dict[str, int]]:
    """Return each rank's global, local and cross rank and size, by name.

    The cross rank is the rank's index among the ranks with the same local rank.
    """
    columns = Counter(local_rank for host in hosts for local_rank, _ in enumerate(host.ranks))
    size, before, places = columns.total(), Counter[int](), []
    for host in hosts:
        for local_rank, rank in enumerate(host.ranks):
            numbers = (rank, size, local_rank, len(host.ranks), before[local_rank], columns[local_rank])
            places.append(dict(zip(_PLACE, numbers, strict=True)))
            before[local_rank] += 1
    return places


def same_interfaces(hosts: Sequence[Host]) -> tuple[str, ...]:
    """Return the names of the interfaces if they are the same on all hosts, otherwise an empty tuple."""
    names = {host.interfaces for host in hosts}
    return names.pop() if len(names) == 1 else ()


@dataclass(frozen=True)
class Networks:
    """The networks that connect several hosts.

    Attributes:
        include: Networks ("10.0.0.0/24") or interfaces to use. Empty means all.
        exclude: Networks to avoid. All others may be used.
        interfaces: Names of the interfaces on each host.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    interfaces: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def ipv6(self) -> bool:
        """True if the networks to use are IPv6 networks."""
        return any(":" in net for net in self.include)


def shared_networks(facts: Mapping[str, HostFacts], wanted: Collection[str] = ()) -> Networks:
    """Choose the networks that all hosts share. IPv6 is used only if the hosts share no IPv4 network.

    Args:
        facts: Facts about each host with ranks, by host name.
        wanted: Names of the interfaces that the user selected, if any.

    Raises:
        LaunchError: A host has none of the selected interfaces.
    """
    if wanted:
        here = {}
        for name, host in facts.items():
            names = list(dict.fromkeys(interface for interface, _, _ in host.networks))
            here[name] = tuple(interface for interface in names if interface in wanted)
            if not here[name]:
                raise LaunchError(
                    f"host {name} has no network interface {' or '.join(sorted(wanted))}; "
                    f"it has {', '.join(names) or 'none'}"
                )
        return Networks(tuple(sorted(wanted)), (), here)
    nets = {name: addresses(host) for name, host in facts.items()}
    everywhere = set.intersection(*map(set, nets.values())) if nets else set()
    # If two hosts have the same address, it belongs to a bridge inside each host (docker0) and cannot be used
    # to reach another host. But if a host has no other address, the hosts presumably share a network stack.
    counts = Counter((net, address) for own in nets.values() for net, (_, address) in own.items())
    inner = {net for (net, _), count in counts.items() if count > 1}
    if any(own.keys() <= inner for own in nets.values()):
        inner = set()
    reached = {
        net
        for name, host in facts.items()
        for net, (_, address) in nets[name].items()
        if address == host.reached
    }
    common: set[str] = set()
    for version in (4, 6):
        usable = {net for net in everywhere - inner if ipaddress.ip_network(net).version == version}
        common = common or usable & reached or usable
    here = {
        name: tuple(sorted(interface for net, (interface, _) in own.items() if net in common))
        for name, own in nets.items()
    }
    return Networks(tuple(sorted(common)), () if common else tuple(sorted(inner)), here if common else {})


def addresses(facts: HostFacts) -> dict[str, tuple[str, str]]:
    """Return a host's interface and address by network. Prefers the address at which it was reached."""
    by_net: dict[str, tuple[str, str]] = {}
    for interface, address, bits in facts.networks:
        net = str(ipaddress.ip_interface(f"{address}/{bits}").network)
        if net not in by_net or address == facts.reached:
            by_net[net] = (interface, address)
    return by_net
