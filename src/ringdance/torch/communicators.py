"""Make the communicators of torch's that exchange tensors, and the streams on which they do so."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed
from torch import Tensor

from ringdance import session
from ringdance.errors import RankLostError

dist: Any = torch.distributed  # whose stubs lack what is used here
_FIRST_CALL = timedelta(minutes=5)  # for all ranks to connect
# Of an exchange between GPUs that all ranks have enqueued. Of others, and by gloo, the engine finds the ranks
# that are missing.
TIMEOUT, NO_TIMEOUT = timedelta(minutes=10), timedelta(days=365)


class Streams:
    """The stream on which tensors are exchanged, and events. See Note [Streams].

    Args:
        module: such as ``torch.cuda``.
        device: whose stream it is.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._device, self._stream = module, device, module.Stream(device)

    @contextlib.contextmanager
    def after(self, events: Sequence[Any], tensors: Sequence[Tensor]) -> Iterator[None]:
        """Enqueue on the stream what the block does with the tensors, behind these events."""
        for event in events:
            self._stream.wait_event(event)
        with self._module.device(self._device), self._module.stream(self._stream):
            yield
        for tensor in tensors:
            tensor.record_stream(self._stream)

    def synchronize(self) -> None:
        """Let the host wait until the stream has done what it was given."""
        self._stream.synchronize()

    def record(self) -> Any:
        """Return an event behind what the stream has been given."""
        event = self._module.Event()
        event.record(self._stream)
        return event


def module_of(device: torch.device) -> Any:
    """Return torch's module for a kind of device, such as ``torch.cuda``."""
    return getattr(torch, device.type)


def mark(tensor: Tensor) -> Any:
    """Return an event behind what the current stream has been given; None on the CPU."""
    if tensor.is_cpu:
        return None
    module = module_of(tensor.device)
    event = module.Event()
    event.record(module.current_stream(tensor.device))
    return event


def wait_on_host(event: Any, seconds: float = 60.0) -> None:
    """Let the host wait for an event, if there is one; it does not come where a peer was lost meanwhile."""
    until = time.monotonic() + seconds
    while event is not None and not event.query() and time.monotonic() < until:
        time.sleep(1e-4)


def supports_nccl() -> bool:
    """Return whether this torch has NCCL, with the calls that are used here."""
    names = ("abort", "eager_connect_single_device", "shutdown")
    return bool(dist.is_nccl_available()) and all(hasattr(dist.ProcessGroupNCCL, name) for name in names)


def nccl_built() -> int:
    """Return the version of NCCL that exchanges tensors on GPUs, such as 22304 for 2.23.4; 0 for none."""
    if not supports_nccl():
        return 0
    if session.is_initialized() and session.engine().settings.gpu_operations == "mpi":
        return 0
    version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    major, minor, patch = version[:3]
    return int(major * 10000 + minor * 100 + patch)


def group_of(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    """Return a group of torch's; blocks until all ranks have called this with stores that belong together."""
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, NO_TIMEOUT)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # NCCL would connect an algorithm's channels in the first call that uses it, where the host waits for the
    # peers: a bucket is launched before it is known that they launch it too (Note [Direct buckets]).
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    name, before = "TORCH_NCCL_ASYNC_ERROR_HANDLING", os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    os.environ[name] = before or "2"  # abort the communicator; torch's default ends the process too
    try:
        group = dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        if before is None:
            os.environ.pop(name, None)
    with torch.cuda.device(device):
        group.eager_connect_single_device(device)
    return group


def failure_of(group: Any) -> str:
    """Return what NCCL has reported, "" for nothing."""
    error = group.get_error() if hasattr(group, "get_error") else None
    return "" if error is None or error.name == "SUCCESS" else str(error.name)


def serve(size: int) -> Any:
    """Return a store of which this process is the server, at any free port."""
    return dist.TCPStore("0.0.0.0", 0, size, True, _FIRST_CALL, wait_for_workers=False)


def addresses() -> list[str]:
    """Return this host's IPv4 addresses, without that of the loopback."""
    found = [
        one.address for rows in psutil.net_if_addrs().values() for one in rows if one.family == socket.AF_INET
    ]
    return [address for address in found if not address.startswith("127.")]


def connect(places: Sequence[str], port: int, size: int) -> Any:
    """Return the store that is served at one of these addresses, or on this host."""
    host, *places = places
    for address in [*places, *(["127.0.0.1"] if host == socket.gethostname() else [])]:
        with contextlib.suppress(OSError):
            socket.create_connection((address, port), 3.0).close()
            return dist.TCPStore(address, port, size, False, _FIRST_CALL, wait_for_workers=False)
    raise RankLostError(
        f"Rank 0 of the process set cannot be reached at {', '.join(places)}, port {port}: see whether a "
        "firewall is between the hosts."
    )
