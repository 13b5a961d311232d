"""Make the communicators of torch's that exchange tensors, and the streams on which they do so."""

from __future__ import annotations

import contextlib
import os
import socket
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
_TIMEOUT = timedelta(minutes=10)  # of an exchange between GPUs that all ranks have enqueued


def nccl_built() -> int:
    """Return the version of NCCL that exchanges tensors on GPUs, such as 22304 for 2.23.4; 0 for none."""
    if not dist.is_nccl_available():
        return 0
    if session.is_initialized() and session.engine().settings.gpu_operations == "mpi":
        return 0
    version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    major, minor, patch = version[:3]
    return int(major * 10000 + minor * 100 + patch)


class Streams:
    """The stream on which tensors are exchanged, and events. See Note [Streams].

    Args:
        module: such as ``torch.cuda``.
        device: whose stream it is.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._stream = module, module.Stream(device)

    @contextlib.contextmanager
    def after(self, events: Sequence[Any], tensors: Sequence[Tensor]) -> Iterator[None]:
        """Enqueue on the stream what the block does with the tensors, behind these events."""
        for event in events:
            self._stream.wait_event(event)
        with self._module.stream(self._stream):
            yield
        for tensor in tensors:
            tensor.record_stream(self._stream)

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


def group_of(store: Any, rank: int, size: int, device: torch.device) -> Any:
    """Return a group of torch's; blocks until all ranks have called this with stores that belong together."""
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, timedelta(days=365))  # the engine finds missing ranks
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    name, before = "TORCH_NCCL_ASYNC_ERROR_HANDLING", os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    os.environ[name] = before or "2"  # abort the communicator; torch's default ends the process too
    try:
        group = dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        if before is None:
            del os.environ[name]
    with torch.cuda.device(device):
        group.eager_connect_single_device(device)
    return group


def serve(size: int) -> Any:
    """Return a store of which this process is the server, at any free port."""
    return dist.TCPStore("0.0.0.0", 0, size, True, _FIRST_CALL, wait_for_workers=False)


def addresses() -> list[str]:
    """Return this host's IPv4 addresses, that of the loopback last."""
    found = [
        one.address for rows in psutil.net_if_addrs().values() for one in rows if one.family == socket.AF_INET
    ]
    return sorted(found, key=lambda address: address.startswith("127."))


def connect(places: Sequence[str], port: int, size: int) -> Any:
    """Return the store that is served at one of these addresses."""
    for address in places:
        with contextlib.suppress(OSError):
            socket.create_connection((address, port), 3.0).close()
            return dist.TCPStore(address, port, size, False, _FIRST_CALL, wait_for_workers=False)
    raise RankLostError(
        f"Rank 0 of the process set cannot be reached at {', '.join(places)}, port {port}: see whether a "
        "firewall is between the hosts."
    )
