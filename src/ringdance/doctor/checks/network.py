"""Names, interfaces and ports of hosts; what is between two of them is in links.py."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Any

from ringdance.doctor.checks.sizes import several
from ringdance.doctor.compare import odd_ones
from ringdance.doctor.registry import ERROR, NOTE, WARNING, Case, Cases, Finding, host_check, hosts_check

_NAMED = (
    "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include",
    "PRTE_MCA_prte_if_include", "HOROVOD_GLOO_IFACE",
)  # fmt: skip


@host_check(
    "own-name",
    "network",
    ERROR,
    "whether the host's own name stands for one of its addresses: MPI and gRPC look it up",
)
def own_name(case: Case) -> Finding:
    """The host name."""
    found = case["network"]
    name, addresses = found["hostname"], found["own"]
    if not addresses:
        return Finding(
            f"the host's name {name} stands for no address", f"echo 127.0.1.1 {name} | sudo tee -a /etc/hosts"
        )
    if not found["own_is_here"]:
        return Finding(
            f"the host's name {name} stands for {several(addresses)}, which is another machine",
            f"correct {name} in /etc/hosts or in the name server",
        )
    return Finding(f"{name} is {several(addresses)}")


@host_check("localhost", "network", ERROR, "whether localhost stands for the loopback address")
def localhost(case: Case) -> Finding:
    """localhost."""
    addresses = case["network"]["localhost"]
    if any(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        return Finding(f"localhost is {several(addresses)}")
    return Finding(
        f"localhost stands for {several(addresses) or 'nothing'}",
        "echo 127.0.0.1 localhost | sudo tee -a /etc/hosts",
    )


@host_check(
    "loopback",
    "network",
    ERROR,
    "whether the loopback interface is up: ranks of one host, and debuggers, use it",
)
def loopback(case: Case) -> Finding | None:
    """lo."""
    found = [entry for entry in case["network"]["interfaces"] if entry["loopback"]]
    if not found:
        return None
    return (
        Finding("the loopback interface is up")
        if found[0]["up"]
        else Finding("the loopback interface is down", f"sudo ip link set {found[0]['name']} up")
    )


@host_check(
    "interface-named",
    "network",
    ERROR,
    "interfaces that variables of NCCL, Gloo or Open MPI name: are they there?",
    needs=("network", "environment"),
)
def interface_named(case: Case) -> Iterator[Finding]:
    """NCCL_SOCKET_IFNAME and its like."""
    names = {entry["name"] for entry in case["network"]["interfaces"]}
    for variable in _NAMED:
        value = case.variable(variable)
        words = [word.strip() for word in value.lstrip("=").split(",") if word.strip() and "/" not in word]
        if not words or value.startswith("^"):
            continue
        # NCCL takes a word as the beginning of names.
        missing = [
            w
            for w in words
            if not any(n == w or (variable.startswith("NCCL") and n.startswith(w)) for n in names)
        ]
        if len(missing) == len(words):
            yield Finding(
                f"{variable}={value}, but the interfaces here are {several(sorted(names))}",
                f"unset {variable}, or name one that is here",
            )
        else:
            yield Finding(f"{variable}={value}")


@host_check(
    "virtual-interfaces",
    "network",
    WARNING,
    "bridges such as docker0, whose address is the same on every host: MPI may try to reach others there",
    needs=("network", "environment"),
)
def virtual_interfaces(case: Case) -> Finding:
    """docker0 and its like."""
    found = [
        entry["name"]
        for entry in case["network"]["interfaces"]
        if entry["virtual"] and entry["up"] and entry["addresses"]
    ]
    if not found:
        return Finding("no bridges of containers or virtual machines have an address")
    chosen = case.variable("OMPI_MCA_btl_tcp_if_include") or case.variable("NCCL_SOCKET_IFNAME")
    if chosen or not _real(case):
        return Finding(f"{several(found)} {'(the interface is chosen by a variable)' if chosen else 'only'}")
    mend = (
        f"export OMPI_MCA_btl_tcp_if_include={_real(case)} NCCL_SOCKET_IFNAME={_real(case)} "
        "(`ringdance run -H` chooses by itself)"
    )
    return Finding(
        f"{several(found)} have addresses that lead to no other host", mend, "" if case.wanted.hosts else NOTE
    )


def _real(case: Case) -> str:
    """The first interface that may lead to other hosts."""
    for entry in case["network"]["interfaces"]:
        if entry["up"] and entry["addresses"] and not entry["virtual"] and not entry["loopback"]:
            return str(entry["name"])
    return ""


@host_check(
    "link-speed",
    "network",
    WARNING,
    "speed that interfaces have agreed on: below 1 Gbit/s, or half duplex, is a bad cable or port",
)
def link_speed(case: Case) -> Iterator[Finding]:
    """Ethernet's negotiation."""
    for entry in case["network"]["interfaces"]:
        if entry["up"] and entry["speed"] and not entry["virtual"]:
            text = f"{entry['name']}: {entry['speed']} Mbit/s"
            if entry["speed"] < 1000 or entry["half_duplex"]:
                text += ", half duplex" if entry["half_duplex"] else ""
                yield Finding(text, f"change the cable or the port, then: sudo ethtool -r {entry['name']}")
            else:
                yield Finding(text)


@host_check(
    "infiniband-port",
    "network",
    WARNING,
    "InfiniBand ports that are not active: traffic goes over Ethernet, or nowhere",
)
def infiniband_port(case: Case) -> Finding | None:
    """InfiniBand."""
    found = case["network"]
    if not found["infiniband"]:
        return None
    if found["infiniband_down"]:
        return Finding(
            f"InfiniBand ports that are not active: {several(found['infiniband_down'])}",
            "check the cable and the subnet manager: ibstat; sudo systemctl status opensm",
        )
    return Finding(f"InfiniBand: {several(found['infiniband'])}")


@host_check(
    "fork-safety",
    "network",
    WARNING,
    "InfiniBand with data loaders that fork: without RDMAV_FORK_SAFE a child may corrupt its parent's "
    "buffers",
    needs=("network", "environment"),
)
def fork_safety(case: Case) -> Finding | None:
    """RDMAV_FORK_SAFE."""
    if not case["network"]["infiniband"]:
        return None
    if case.variable("RDMAV_FORK_SAFE") or case.variable("IBV_FORK_SAFE"):
        return Finding("forks are safe beside InfiniBand")
    return Finding(
        "this host has InfiniBand, and processes that fork (data loaders) may corrupt pinned memory",
        "export RDMAV_FORK_SAFE=1",
    )


@host_check(
    "port-taken",
    "network",
    ERROR,
    "MASTER_PORT: another program listens there already",
    needs=("network", "environment"),
)
def port_taken(case: Case) -> Finding | None:
    """A port of torch.distributed."""
    if not case.variable("MASTER_PORT"):
        return None
    taken = case["network"]["port_taken"]
    if taken:
        return Finding(
            f"port {taken} (MASTER_PORT) is taken by another program",
            f"see by whom: ss -ltnp 'sport = :{taken}'; or choose another port",
        )
    return Finding(f"port {case.variable('MASTER_PORT')} (MASTER_PORT) is free")


@host_check(
    "port-range",
    "network",
    WARNING,
    "the range of ports for outgoing connections: N ranks need about N² of them over all hosts",
)
def port_range(case: Case) -> Finding | None:
    """ip_local_port_range."""
    found = case["network"]["port_range"]
    if len(found) != 2:
        return None
    count = found[1] - found[0] + 1
    text = f"{count} ports for connections ({found[0]} to {found[1]})"
    return (
        Finding(text)
        if count >= 4096
        else Finding(text, "sudo sysctl net.ipv4.ip_local_port_range='32768 60999'")
    )


@hosts_check(
    "names-agree", "network", ERROR, "whether every host finds every other host's name, at the same address"
)
def names_agree(cases: Cases) -> Iterator[Finding]:
    """Resolution, everywhere."""
    whole = True
    for host in next(iter(cases.values())).wanted.hosts:
        seen = {viewer: case["network"]["hosts"].get(host, []) for viewer, case in cases.items()}
        # A host may know itself as 127.0.1.1.
        others = {viewer: tuple(found) for viewer, found in seen.items() if viewer != host}
        blind = tuple(viewer for viewer, found in seen.items() if not found)
        if blind:
            whole = False
            yield Finding(
                f"the name {host} stands for nothing on {several(blind)}",
                f"add {host} to the name server, or to /etc/hosts there",
                hosts=blind,
            )
        elif len({found for viewer, found in others.items() if viewer not in blind}) > 1:
            whole = False
            yield from odd_ones(
                {v: f"{host} is {several(found)}" for v, found in others.items()},
                f"correct {host} in /etc/hosts, so that it is the same everywhere",
            )
    if whole:
        yield Finding("every host knows every host by the same address")


@hosts_check("common-network", "network", ERROR, "a network that all hosts have an interface in")
def common_network(cases: Cases) -> Finding:
    """IP networks."""
    networks = {host: set(_networks(case)) for host, case in cases.items()}
    common = set.intersection(*networks.values())
    if common:
        return Finding(f"all hosts are in {several(sorted(map(str, common)))}")
    words = "; ".join(
        f"{host}: {several(sorted(map(str, own))) or 'none'}" for host, own in list(networks.items())[:4]
    )
    return Finding(
        f"no network is common to all hosts ({words})",
        "make sure that routers lead from each to each, and give Open MPI's btl_tcp_if_include the networks",
        WARNING,
    )


def _networks(case: Case) -> Iterator[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    for entry in case["network"]["interfaces"]:
        if entry["up"] and not entry["virtual"] and not entry["loopback"]:
            for address, bits in entry["addresses"]:
                yield ipaddress.ip_interface(f"{address}/{bits}").network


@hosts_check(
    "same-mtu",
    "network",
    WARNING,
    "MTU of the interfaces in a common network: small packets pass, large ones vanish, and jobs hang "
    "in the first all-reduce",
)
def same_mtu(cases: Cases) -> Iterator[Finding]:
    """MTU."""
    common = set.intersection(*(set(_networks(case)) for case in cases.values()))
    for network in sorted(common, key=str):
        values = {host: f"MTU {_mtu(case, network)}" for host, case in cases.items()}
        yield from odd_ones(
            values,
            f"sudo ip link set INTERFACE mtu {min(_mtu(c, network) for c in cases.values())} on all hosts",
            f"{network}:",
        )


def _mtu(case: Case, network: Any) -> int:
    for entry in case["network"]["interfaces"]:
        for address, bits in entry["addresses"]:
            if ipaddress.ip_interface(f"{address}/{bits}").network == network:
                return int(entry["mtu"])
    return 0
