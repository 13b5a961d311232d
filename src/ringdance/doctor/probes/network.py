"""Names, addresses and interfaces."""

from __future__ import annotations

import glob
import ipaddress
import os
import socket
from typing import Any

import psutil

from ringdance.doctor.check import Usage
from ringdance.doctor.probes import files

# Bridges and ends of tunnels that have the same address on every host.
_VIRTUAL = (
    "docker", "br-", "virbr", "veth", "cni", "flannel", "lxc", "lxd", "podman", "tunl", "vmnet", "kube-",
)  # fmt: skip


def collect(usage: Usage) -> dict[str, Any]:
    """Own name and its addresses; interfaces; the other hosts' addresses as this host resolves them."""
    name = socket.gethostname()
    own = resolve(name)
    interfaces = [_interface(*entry) for entry in psutil.net_if_addrs().items()]
    here = {address for entry in interfaces for address, _ in entry["addresses"]}
    return {
        "hostname": name,
        "own": own,
        "own_is_here": any(address in here or _ip(address).is_loopback for address in own),
        "localhost": resolve("localhost"),
        "localhost_is_loopback": any(_ip(address).is_loopback for address in resolve("localhost")),
        "hosts": {host: resolve(host) for host in usage.hosts},
        "interfaces": interfaces,
        "infiniband": [os.path.basename(path) for path in glob.glob("/sys/class/infiniband/*")],
        "infiniband_down": [
            path.removeprefix("/sys/class/infiniband/").removesuffix("/state")
            for path in glob.glob("/sys/class/infiniband/*/ports/*/state")
            if "ACTIVE" not in files.text(path)
        ],
    }


def resolve(name: str) -> list[str]:
    """Return the addresses of a name; none if it does not resolve."""
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except (OSError, UnicodeError):
        return []


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address.partition("%")[0])


def _interface(name: str, addresses: list[Any]) -> dict[str, Any]:
    """Describe an interface: [address, prefix length] pairs, MTU, speed in Mbit/s (0: not known)."""
    pairs = [
        [entry.address, int(_ip(entry.netmask)).bit_count()]
        for entry in addresses
        if entry.family in (socket.AF_INET, socket.AF_INET6) and entry.netmask
        if not _ip(entry.address).is_link_local
    ]
    state = psutil.net_if_stats().get(name)
    return {
        "name": name,
        "up": bool(state and state.isup),
        "loopback": any(_ip(address).is_loopback for address, _ in pairs) or name == "lo",
        "virtual": name.startswith(_VIRTUAL),
        "addresses": pairs,
        "mtu": state.mtu if state else 0,
        "speed": state.speed if state else 0,
        "half_duplex": bool(state and state.duplex == psutil.NIC_DUPLEX_HALF),
    }
