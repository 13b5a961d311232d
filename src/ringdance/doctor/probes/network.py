"""Names, addresses and interfaces."""

from __future__ import annotations

import glob
import ipaddress
import socket
from collections.abc import Iterable
from typing import Any

import psutil

from ringdance.doctor.check import Usage

# Bridges and ends of tunnels that have the same address on every host.
_VIRTUAL = (
    "docker", "br-", "virbr", "veth", "cni", "flannel", "lxc", "lxd", "podman", "tunl", "vmnet", "kube-",
)  # fmt: skip


def collect(usage: Usage) -> dict[str, Any]:
    """Own name and its addresses; interfaces; the other hosts' addresses as this host resolves them."""
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
        "infiniband": bool(glob.glob("/sys/class/infiniband/*")),
    }


def resolve(name: str) -> list[str]:
    """Return the addresses of a name; none if it does not resolve."""
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except (OSError, UnicodeError):
        return []


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _interfaces() -> list[dict[str, Any]]:
    """Describe interfaces: addresses and MTU."""
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
    """Return [address, prefix length] of those that may lead to other hosts."""
    return [
        [entry.address, int(ipaddress.ip_address(entry.netmask)).bit_count()]
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and entry.netmask
        if not _is_loopback(entry.address) and "%" not in entry.address  # %eth0: link-local
    ]
