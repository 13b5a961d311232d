"""Check host names, addresses and network interfaces."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Iterator
from typing import Any

import psutil

from ringdance.launch.hosts import several
from ringdance.tools.doctor.check import (
    ERROR,
    WARNING,
    Check,
    Finding,
    HostFacts,
    Hosts,
    Usage,
    limit,
    outliers,
)
from ringdance.tools.doctor.machine import INTERFACES

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
# Name prefixes of bridges and tunnel endpoints. These have the same address on every host.
_VIRTUAL = (
    "docker", "br-", "virbr", "veth", "cni", "flannel", "lxc", "lxd", "podman", "tunl", "vmnet", "kube-",
)  # fmt: skip

# --- facts -----------------------------------------------------------------------------------------


def network_facts(usage: Usage) -> dict[str, Any]:
    """Collect the host's name, addresses and interfaces, and the addresses of other hosts' names."""
    name = socket.gethostname()
    own = resolve(name)
    interfaces = _interfaces()
    here = {address for entry in interfaces for address, _ in entry["addresses"]}
    return {
        "hostname": name,
        "own": own,
        "own_is_here": any(address in here or _is_loopback(address) for address in own),
        "localhost": resolve("localhost"),
        "localhost_is_loopback": any(map(_is_loopback, resolve("localhost"))),
        "hosts": {host: resolve(host) for host in usage.hosts},
        "interfaces": interfaces,
    }


def resolve(name: str) -> list[str]:
    """Return the addresses that a name resolves to, or an empty list if it does not resolve."""
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except (OSError, UnicodeError):
        return []


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _interfaces() -> list[dict[str, Any]]:
    """Return each interface's name, addresses and MTU, and whether it is virtual."""
    addresses = psutil.net_if_addrs()
    return [
        {
            "name": name,
            "virtual": name.startswith(_VIRTUAL),
            "addresses": _addresses(addresses.get(name, ())) if state.isup else [],
            "mtu": state.mtu,
        }
        for name, state in psutil.net_if_stats().items()
    ]


def _addresses(entries: Iterable[Any]) -> list[list[Any]]:
    """Return [address, prefix length] for each address through which other hosts may be reachable."""
    return [
        [entry.address, int(ipaddress.ip_address(entry.netmask)).bit_count()]
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and entry.netmask
        if not _is_loopback(entry.address) and "%" not in entry.address  # skip link-local addresses
    ]


# --- checks ----------------------------------------------------------------------------------------


def _own_name(host: HostFacts) -> Finding:
    network = host["network"]
    name, addresses = network["hostname"], several(network["own"])
    if not addresses:
        return Finding(
            f"the host name {name} does not resolve", f"echo 127.0.1.1 {name} | sudo tee -a /etc/hosts"
        )
    if not network["own_is_here"]:
        fix = f"correct {name} in /etc/hosts or in the name server"
        return Finding(
            f"the host name {name} resolves to {addresses}, but this host has other addresses", fix
        )
    return Finding(f"{name} resolves to {addresses}")


def _interface_named(host: HostFacts) -> Iterator[Finding]:
    names = {entry["name"] for entry in host["network"]["interfaces"]}
    for variable in INTERFACES:
        value = host.variable(variable)
        words = [word.strip() for word in value.lstrip("=").split(",") if word.strip() and "/" not in word]
        if not words or value.startswith("^"):
            continue
        prefix = variable.startswith("NCCL")  # NCCL matches each word as a prefix of interface names
        if not any(name == word or (prefix and name.startswith(word)) for word in words for name in names):
            yield Finding(
                f"{variable}={value}, but this host has the interfaces {several(sorted(names))}",
                f"unset {variable}, or set it to an interface of this host",
            )


def _names_agree(hosts: Hosts) -> Iterator[Finding]:
    asked = {viewer: host["network"]["hosts"] for viewer, host in hosts.items()}
    for name in dict.fromkeys(name for known in asked.values() for name in known):
        seen = {viewer: known[name] for viewer, known in asked.items() if name in known}
        blind = tuple(viewer for viewer, addresses in seen.items() if not addresses)
        # A host may resolve its own name to 127.0.1.1.
        others = {v: f"{name} resolves to {several(known)}" for v, known in seen.items() if v != name}
        if blind:
            fix = f"add {name} to the name server, or to /etc/hosts on these hosts"
            yield Finding(f"the name {name} does not resolve on {several(blind)}", fix, hosts=blind)
        elif len(set(others.values())) > 1:
            fix = f"correct {name} in /etc/hosts, so that it resolves to the same address on all hosts"
            yield from outliers(others, fix)


def _networks(host: HostFacts) -> dict[Network, int]:
    """Return the MTU of each network through which other hosts may be reachable."""
    return {
        ipaddress.ip_interface(f"{address}/{bits}").network: entry["mtu"]
        for entry in host["network"]["interfaces"]
        if not entry["virtual"]
        for address, bits in entry["addresses"]
    }


def _same_mtu(hosts: Hosts) -> Iterator[Finding]:
    networks = {name: _networks(host) for name, host in hosts.items()}
    common: set[Any] = set.intersection(*map(set, networks.values()))
    for network in sorted(common, key=str):
        sizes = {name: mtus[network] for name, mtus in networks.items()}
        fix = f"sudo ip link set INTERFACE mtu {min(sizes.values())} on all hosts"
        yield from outliers({name: f"MTU {mtu}" for name, mtu in sizes.items()}, fix, f"{network}:")


CHECKS = (
    Check("own-name", "network", ERROR,
          "the host's own name must resolve to one of its addresses: MPI and gRPC look it up", _own_name),
    Check("localhost", "network", ERROR, "localhost must resolve to the loopback address",
          limit("localhost resolves to {network[localhost]:names}",
                lambda host: not host["network"]["localhost_is_loopback"],
                "echo 127.0.0.1 localhost | sudo tee -a /etc/hosts",
                problem="localhost resolves to {network[localhost]:names}, not the loopback address")),
    Check("interface-named", "network", ERROR,
          "the interfaces in environment variables for NCCL, Gloo or Open MPI must exist",
          _interface_named, ("network", "environment")),
    Check("names-agree", "network", ERROR,
          "hosts must resolve each other's names to the same address. Each host resolves the names of the 16 "
          "hosts after it in the list", _names_agree, compares=True),
    Check("same-mtu", "network", WARNING,
          "all hosts of a network must have the same MTU: otherwise small packets pass but large ones "
          "vanish, and jobs hang in the first all-reduce", _same_mtu, compares=True),
)  # fmt: skip
