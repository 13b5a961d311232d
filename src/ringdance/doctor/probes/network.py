"""Names, addresses, interfaces and ports."""

from __future__ import annotations

import errno
import glob
import os
import socket
from typing import Any

from ringdance.doctor.probes import files
from ringdance.doctor.registry import Wanted
from ringdance.launch.system import machine

_NET = "/sys/class/net"
# Bridges and ends of tunnels that carry the same address on every host.
_VIRTUAL = (
    "docker",
    "br-",
    "virbr",
    "veth",
    "cni",
    "flannel",
    "lxc",
    "lxd",
    "podman",
    "tunl",
    "vmnet",
    "kube-",
)


def look(wanted: Wanted) -> dict[str, Any]:
    """Own name and what it stands for; interfaces; the other hosts' addresses as seen from here."""
    own = socket.gethostname()
    return {
        "hostname": own,
        "own": resolve(own),
        "own_is_here": _is_here(resolve(own)),
        "localhost": resolve("localhost"),
        "hosts": {host: resolve(host) for host in wanted.hosts},
        "interfaces": _interfaces(),
        "infiniband": [os.path.basename(path) for path in glob.glob("/sys/class/infiniband/*")],
        "infiniband_down": _ports_down(),
        "port_taken": _port_taken(os.environ.get("MASTER_PORT", "")),
        "port_range": [int(word) for word in files.text("/proc/sys/net/ipv4/ip_local_port_range").split()],
    }


def resolve(name: str) -> list[str]:
    """Addresses that a name stands for; none if it stands for nothing."""
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except (OSError, UnicodeError):
        return []


def _is_here(addresses: list[str]) -> bool:
    """Whether a socket of this machine can have one of these addresses."""
    for address in addresses:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as sock:
            try:
                sock.bind((address, 0))
                return True
            except OSError:
                continue
    return False


def _interfaces() -> list[dict[str, Any]]:
    """Each interface: name, whether it is up, IPv4 networks, MTU, speed in Mbit/s (0: not known)."""
    addresses: dict[str, list[list[Any]]] = {}
    for name, address, bits in machine.networks():
        addresses.setdefault(name, []).append([address, bits])
    return [
        {
            "name": name,
            "up": bool(int(files.text(f"{_NET}/{name}/flags") or "0", 16) & 1),
            "loopback": files.text(f"{_NET}/{name}/type") == "772",
            "virtual": name.startswith(_VIRTUAL),
            "addresses": addresses.get(name, []),
            "mtu": files.number(f"{_NET}/{name}/mtu") or 0,
            "speed": max(0, files.number(f"{_NET}/{name}/speed") or 0),
            "half_duplex": files.text(f"{_NET}/{name}/duplex") == "half",
        }
        for name in files.listed(_NET)
        if os.path.isdir(f"{_NET}/{name}")
    ]


def _ports_down() -> list[str]:
    """InfiniBand ports that are not active."""
    return [
        path.removeprefix("/sys/class/infiniband/").removesuffix("/state")
        for path in glob.glob("/sys/class/infiniband/*/ports/*/state")
        if "ACTIVE" not in files.text(path)
    ]


def _port_taken(text: str) -> str:
    """The port, if another program listens there."""
    if not text.isdigit() or not 0 < int(text) < 65536:
        return ""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("", int(text)))
        except OSError as error:
            return text if error.errno == errno.EADDRINUSE else ""
    return ""
