"""Create the torch communicators that exchange tensors."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed

from ringdance.core.transport.nccl import environment
from ringdance.errors import RankLostError
from ringdance.training import session

dist: Any = torch.distributed  # Any, because the type stubs lack some of the names used here.
_FIRST_CALL = timedelta(minutes=5)  # Time limit for the ranks to connect.
# TIMEOUT applies to an exchange between GPUs that all ranks have enqueued. In all other cases, as with gloo,
# the engine detects missing ranks.
TIMEOUT, NO_TIMEOUT = timedelta(minutes=10), timedelta(days=365)


def supports_nccl() -> bool:
    """Return True if this torch was built with NCCL and has the methods used here."""
    names = ("abort", "eager_connect_single_device", "shutdown")
    return bool(dist.is_nccl_available()) and all(hasattr(dist.ProcessGroupNCCL, name) for name in names)


def nccl_built() -> int:
    """Return the version of NCCL used for GPU tensors, such as 22304 for 2.23.4, or 0 if there is none."""
    if not supports_nccl():
        return 0
    if session.is_initialized() and session.engine().settings.gpu_operations == "mpi":
        return 0
    version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    major, minor, patch = version[:3]
    return int(major * 10000 + minor * 100 + patch)


def filled(options: Any, **values: Any) -> Any:
    """Set attributes of a torch option object, and return the object."""
    for name, value in values.items():
        setattr(options, name, value)
    return options


def group_of(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    """Create a torch process group. Blocks until all ranks have called this with matching stores."""
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, NO_TIMEOUT)
    options = filled(dist.ProcessGroupNCCL.Options(), _timeout=timeout)
    # By default, NCCL connects an algorithm's channels in the first call that uses it, and the host then
    # waits for the peers. But a rank launches a bucket before it knows whether its peers will launch it too.
    # See Note [Direct buckets].
    # On errors, only abort the communicator. By default, torch also terminates the process.
    with environment(NCCL_RUNTIME_CONNECT="0", TORCH_NCCL_ASYNC_ERROR_HANDLING="2"):
        group = dist.ProcessGroupNCCL(store, rank, size, options)
        with torch.cuda.device(device):
            group.eager_connect_single_device(device)
    return group


def failure_of(group: Any) -> str:
    """Return the error that NCCL has reported, or an empty string if there is none."""
    error = group.get_error() if hasattr(group, "get_error") else None
    return "" if error is None or error.name == "SUCCESS" else str(error.name)


def host_and(namespace: str) -> str:
    """Return an identifier shared by processes in the same namespace ("pid" or "net") on the same host."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink(f"/proc/self/ns/{namespace}"))
    return " ".join(parts)


def serve(size: int, networks: Sequence[str]) -> tuple[Any, list[Any]]:
    """Return a store that this process serves on a free port, and the data that ``connect`` needs.

    The store listens on the loopback address if all ranks can reach it. Otherwise, it listens on all
    addresses, and only processes that know a random prefix can find the keys.

    Args:
        size: Number of ranks.
        networks: Each rank's ``host_and("net")``.
    """
    one_host = len(set(networks)) == 1
    both = not one_host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    place = ("127.0.0.1" if one_host else "", 0)
    listening = socket.create_server(place, family=family, dualstack_ipv6=both)
    port, prefix = listening.getsockname()[1], secrets.token_hex(16)
    options = {"wait_for_workers": False, "master_listen_fd": listening.detach()}
    store = dist.TCPStore("127.0.0.1", port, size, True, _FIRST_CALL, **options)
    places = [] if one_host else addresses()
    return dist.PrefixStore(prefix, store), [socket.gethostname(), port, prefix, *places]


def addresses() -> list[str]:
    """Return the addresses at which other hosts may reach this host, IPv4 first."""
    rows = [row for rows in psutil.net_if_addrs().values() for row in rows]
    known = [row.address for kind in (socket.AF_INET, socket.AF_INET6) for row in rows if row.family == kind]
    return [address for address in known if not address.startswith(("127.", "::1", "fe80:"))]


def connect(served: Sequence[Any], size: int) -> Any:
    """Connect to the store that another process serves with ``serve``, on this host or another one."""
    host, port, prefix, *places = served
    if host == socket.gethostname() or not places:
        places = [*places, "127.0.0.1"]
    for address in places:
        with contextlib.suppress(OSError):
            socket.create_connection((address, port), 3.0).close()
            store = dist.TCPStore(address, port, size, False, _FIRST_CALL, wait_for_workers=False)
            return dist.PrefixStore(prefix, store)
    raise RankLostError(
        f"Rank 0 of the process set, on host {host}, cannot be reached from host {socket.gethostname()} at "
        f"{', '.join(places)}, port {port}. Check that the hosts share a network, and that no firewall "
        "blocks the connection."
    )
