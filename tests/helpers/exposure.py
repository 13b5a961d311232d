"""The sockets on which a job's processes listen, compared with docs/explanation/exposure.md."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from socket import AF_INET6, IPPROTO_IPV6, IPV6_V6ONLY

from ringdance.host.agent.loopback import device_of, listening_sockets

PAGE = Path(__file__).resolve().parents[2] / "docs/explanation/exposure.md"
_NAMES = {"prterun": "mpiexec", "prted": "prted"}
_ROW = re.compile(r"^\| `?(mpiexec|prted|rank)`? \| ([\w ]+) \| `([^`]+)` \|", re.M)

Found = set[tuple[str, str]]


def documented(several: bool) -> Found:
    """Return the table's processes and addresses, for a job on one host or on several."""
    job = "several" if several else "one"
    return {(process, address) for process, where, address in _ROW.findall(PAGE.read_text()) if job in where}


def listening(pids: Iterable[int]) -> tuple[Found, set[int]]:
    """Return what running Open MPI processes listen on, and the ports open to other hosts over IPv4."""
    sockets: Found = set()
    ports: set[int] = set()
    for pid in pids:
        try:
            name = Path(f"/proc/{pid}/comm").read_text().strip()
        except FileNotFoundError:
            continue
        for sock in listening_sockets(pid):
            address, port = sock.getsockname()[:2]
            kind = {"0.0.0.0": "all addresses", "::": "all addresses"}.get(address, address)
            device = device_of(sock)
            sockets.add((_NAMES.get(name, "rank"), f"{kind}, device {device}" if device else kind))
            only_ipv6 = sock.family == AF_INET6 and sock.getsockopt(IPPROTO_IPV6, IPV6_V6ONLY)
            if kind == "all addresses" and not device and not only_ipv6:
                ports.add(port)
    return sockets, ports
