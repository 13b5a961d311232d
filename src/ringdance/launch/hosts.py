"""Which rank goes to which host, and which networks hosts share."""

from __future__ import annotations

import ipaddress
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ringdance.errors import LaunchError
from ringdance.host.schedulers.hostfile import HostList, hosts_text

_PLACE = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


@dataclass(frozen=True)
class HostFacts:
    """Facts about a host.

    Attributes:
        name: as it calls itself.
        identity: of the machine, whatever its names.
        python, executable: version and path of the interpreter.
        version: of ringdance.
        cores: that the user's processes may use.
        devices: names of its GPUs.
        visible_devices: CUDA_VISIBLE_DEVICES there, None if it is not set.
        networks: interface, IPv4 or IPv6 address, prefix length of each.
        reached: the address by which it was reached, or "".
        infiniband: whether it has such devices.
        shared_memory: free bytes of its /dev/shm, -1 if there is none or it is not known.
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
        """The GPUs that processes there see; CUDA ignores what follows a wrong entry of the variable."""
        if self.visible_devices is None:
            return self.devices
        known = ("GPU-", "MIG-", *map(str, range(len(self.devices))))
        shown = itertools.takewhile(lambda word: word.strip()[:4] in known, self.visible_devices.split(","))
        return [self.devices[0] for _ in shown] if self.devices else ()


def facts_from(found: Mapping[str, Any]) -> HostFacts:
    """Build them from what an agent sends, or from ``machine.facts``; what is not known is left out."""
    return HostFacts(**{entry.name: found[entry.name] for entry in fields(HostFacts) if entry.name in found})


@dataclass(frozen=True)
class Host:
    """A machine and the ranks on it.

    Attributes:
        name: as given by the user.
        slots: maximum number of ranks.
        ranks: global ranks, in order of local rank.
        local: whether it is this machine.
        cores: that its ranks may use, None if it is not known.
        devices: names of the GPUs that its ranks see.
        interfaces: its network interfaces in the networks that all hosts share.
    """

    name: str
    slots: int
    ranks: tuple[int, ...]
    local: bool = False
    cores: int | None = None
    devices: Sequence[str] = ()
    interfaces: tuple[str, ...] = field(default=())


def several(names: Sequence[str], most: int = 5) -> str:
    """Join names with commas; of many, the first and how many more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def spans(numbers: Sequence[int]) -> str:
    """Return ``0-3,5`` for 0, 1, 2, 3, 5."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(f"{low}-{high}" if high > low else str(low) for low, high in found)


def assign_ranks(ranks: int, hosts: HostList) -> tuple[Host, ...]:
    """Put `ranks` ranks on hosts: all slots of a host before the next; hosts left empty are left out.

    Raises:
        LaunchError: there are fewer slots than ranks.
    """
    total = sum(slots for _, slots in hosts)
    if ranks > total:
        each = -(-ranks // len(hosts))
        raise LaunchError(
            f"-np {ranks} needs {ranks} slots, but the hosts given have {total}: "
            f"{several([hosts_text([host]) for host in hosts])}. Use -np {total}, or give each {each} slots: "
            f"-H {hosts_text([(name, each) for name, _ in hosts[:5]])}{',...' * (len(hosts) > 5)}, "
            f"slots={each} in a host file, or tasks in a scheduler's job"
        )
    placed, first = [], 0
    for name, slots in hosts:
        here = min(slots, ranks - first)
        if here:
            placed.append(Host(name, slots, tuple(range(first, first + here))))
        first += here
    return tuple(placed)


def rank_numbers(hosts: Sequence[Host]) -> list[dict[str, int]]:
    """Return the numbers of each rank; a cross rank counts the hosts that have the same local rank."""
    columns = Counter(local_rank for host in hosts for local_rank, _ in enumerate(host.ranks))
    size, before, found = columns.total(), Counter[int](), []
    for host in hosts:
        for local_rank, rank in enumerate(host.ranks):
            numbers = (rank, size, local_rank, len(host.ranks), before[local_rank], columns[local_rank])
            found.append(dict(zip(_PLACE, numbers, strict=True)))
            before[local_rank] += 1
    return found


def same_interfaces(hosts: Sequence[Host]) -> tuple[str, ...]:
    """Return the names of the interfaces, if they are the same on all hosts."""
    names = {host.interfaces for host in hosts}
    return names.pop() if len(names) == 1 else ()


@dataclass(frozen=True)
class Networks:
    """Networks between several hosts.

    Attributes:
        include: networks ("10.0.0.0/24") or interfaces to use; empty for all.
        exclude: networks not to use, where all others are.
        interfaces: their names on each host.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    interfaces: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def ipv6(self) -> bool:
        """Whether they are IPv6 networks."""
        return any(":" in net for net in self.include)


def shared_networks(facts: Mapping[str, HostFacts], wanted: Collection[str] = ()) -> Networks:
    """Choose the networks that all hosts share: IPv4 ones, or IPv6 ones where there are none.

    Args:
        facts: of each host with ranks, by name.
        wanted: names of the interfaces to use, if the user gives them.

    Raises:
        LaunchError: a host has none of the wanted interfaces.
    """
    if wanted:
        here = {}
        for name, found in facts.items():
            names = list(dict.fromkeys(interface for interface, _, _ in found.networks))
            here[name] = tuple(interface for interface in names if interface in wanted)
            if not here[name]:
                raise LaunchError(
                    f"host {name} has no network interface {' or '.join(sorted(wanted))}; "
                    f"it has {', '.join(names) or 'none'}"
                )
        return Networks(tuple(sorted(wanted)), (), here)
    nets = {name: addresses(found) for name, found in facts.items()}
    everywhere = set.intersection(*map(set, nets.values())) if nets else set()
    # The same address on two hosts is a bridge inside each (docker0), which leads nowhere; unless it is
    # all they have: then they share more than a network.
    every = set().union(*map(set, nets.values()))
    inner = {net for net in every if _repeats([found.get(net) for found in nets.values()])}
    if any(found.keys() <= inner for found in nets.values()):
        inner = set()
    reached = {
        net
        for name, found in facts.items()
        for net, (_, address) in nets[name].items()
        if address == found.reached
    }
    common: set[str] = set()
    for version in (4, 6):
        usable = {net for net in everywhere - inner if ipaddress.ip_network(net).version == version}
        common = common or usable & reached or usable
    here = {
        name: tuple(sorted(interface for net, (interface, _) in found.items() if net in common))
        for name, found in nets.items()
    }
    return Networks(tuple(sorted(common)), () if common else tuple(sorted(inner)), here if common else {})


def addresses(facts: HostFacts) -> dict[str, tuple[str, str]]:
    """Return interface and address by network, preferring the address by which the host was reached."""
    found: dict[str, tuple[str, str]] = {}
    for interface, address, bits in facts.networks:
        net = str(ipaddress.ip_interface(f"{address}/{bits}").network)
        if net not in found or address == facts.reached:
            found[net] = (interface, address)
    return found


def _repeats(entries: Iterable[tuple[str, str] | None]) -> bool:
    addresses = [entry[1] for entry in entries if entry]
    return len(set(addresses)) < len(addresses)
