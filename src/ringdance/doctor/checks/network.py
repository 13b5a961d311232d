"""Names and interfaces of hosts."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Any

from ringdance.doctor.check import ERROR, WARNING, Check, Finding, Host, Hosts
from ringdance.doctor.rows import limit, outliers, several

_NAMED = (
    "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include",
    "PRTE_MCA_prte_if_include", "HOROVOD_GLOO_IFACE",
)  # fmt: skip
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def _own_name(host: Host) -> Finding:
    found = host["network"]
    name, addresses = found["hostname"], several(found["own"])
    if not addresses:
        return Finding(
            f"the host's name {name} does not resolve", f"echo 127.0.1.1 {name} | sudo tee -a /etc/hosts"
        )
    if not found["own_is_here"]:
        fix = f"correct {name} in /etc/hosts or in the name server"
        return Finding(f"the host's name {name} is {addresses}, which is another machine", fix)
    return Finding(f"{name} is {addresses}")


def _interface_named(host: Host) -> Iterator[Finding]:
    names = {entry["name"] for entry in host["network"]["interfaces"]}
    for variable in _NAMED:
        value = host.variable(variable)
        words = [word.strip() for word in value.lstrip("=").split(",") if word.strip() and "/" not in word]
        if not words or value.startswith("^"):
            continue
        prefix = variable.startswith("NCCL")  # NCCL takes a word as the beginning of names
        if not any(name == word or (prefix and name.startswith(word)) for word in words for name in names):
            yield Finding(
                f"{variable}={value}, but the interfaces here are {several(sorted(names))}",
                f"unset {variable}, or name an interface of this host",
            )


def _names_agree(hosts: Hosts) -> Iterator[Finding]:
    for name in next(iter(hosts.values())).usage.hosts:
        asked = {viewer: host["network"]["hosts"] for viewer, host in hosts.items()}
        seen = {viewer: found[name] for viewer, found in asked.items() if name in found}
        blind = tuple(viewer for viewer, addresses in seen.items() if not addresses)
        # A host may know itself as 127.0.1.1.
        others = {v: f"{name} is {several(found)}" for v, found in seen.items() if v != name}
        if blind:
            fix = f"add {name} to the name server, or to /etc/hosts there"
            yield Finding(f"the name {name} does not resolve on {several(blind)}", fix, hosts=blind)
        elif len(set(others.values())) > 1:
            yield from outliers(others, f"correct {name} in /etc/hosts, so that it is the same everywhere")


def _networks(host: Host) -> dict[Network, int]:
    """Return the MTU by network of the interfaces that may lead to other hosts."""
    return {
        ipaddress.ip_interface(f"{address}/{bits}").network: entry["mtu"]
        for entry in host["network"]["interfaces"]
        if not entry["virtual"]
        for address, bits in entry["addresses"]
    }


def _common(hosts: Hosts) -> set[Any]:
    return set.intersection(*(set(_networks(host)) for host in hosts.values()))


def _common_network(hosts: Hosts) -> Finding:
    common = _common(hosts)
    if common:
        return Finding(f"all hosts are in {several(sorted(map(str, common)))}")
    words = [f"{name}: {several(list(map(str, _networks(host)))) or 'none'}" for name, host in hosts.items()]
    return Finding(
        f"no network is common to all hosts ({'; '.join(words[:4])})",
        "route all hosts to each other, and give Open MPI's btl_tcp_if_include the networks",
    )


def _same_mtu(hosts: Hosts) -> Iterator[Finding]:
    for network in sorted(_common(hosts), key=str):
        sizes = {name: _networks(host)[network] for name, host in hosts.items()}
        fix = f"sudo ip link set INTERFACE mtu {min(sizes.values())} on all hosts"
        yield from outliers({name: f"MTU {mtu}" for name, mtu in sizes.items()}, fix, f"{network}:")


CHECKS = (
    Check("own-name", "network", ERROR,
          "whether the host's own name resolves to one of its addresses: MPI and gRPC look it up", _own_name),
    Check("localhost", "network", ERROR, "whether localhost resolves to the loopback address",
          limit("localhost is {network[localhost]!l}",
                lambda host: not host["network"]["localhost_is_loopback"],
                "echo 127.0.0.1 localhost | sudo tee -a /etc/hosts",
                problem="localhost is {network[localhost]!l}, not the loopback address")),
    Check("interface-named", "network", ERROR,
          "whether the interfaces that variables of NCCL, Gloo or Open MPI name exist",
          _interface_named, ("network", "environment")),
    Check("names-agree", "network", ERROR,
          "whether hosts resolve each other's names to the same address; each host is asked for the 16 hosts "
          "after it in the list",
          _names_agree, compares=True),
    Check("common-network", "network", WARNING,
          "a network that all hosts have an interface in", _common_network, compares=True),
    Check("same-mtu", "network", WARNING,
          "MTU of the interfaces in a common network: small packets pass, large ones vanish, and jobs hang "
          "in the first all-reduce", _same_mtu, compares=True),
)  # fmt: skip
