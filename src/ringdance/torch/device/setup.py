"""Connect a process set's members when they first exchange tensors on a given device type."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from ringdance.core.exchange.base import Exchange, Steps
from ringdance.core.exchange.nccl import check_devices
from ringdance.torch.device import communicators
from ringdance.torch.device.exchange import TorchExchange
from ringdance.torch.device.streams import mark, module_of
from ringdance.training import session

_last: dict[str, torch.device] = {}  # Device of this rank's last tensor, by device type.


def submitted(tensor: Tensor) -> Any:
    """Store a tensor's device for ``make_exchange``. Returns the event after which the tensor is ready."""
    _last[tensor.device.type] = tensor.device
    return mark(tensor)


def make_exchange(exchange: Exchange, kind: str) -> Steps:
    """Create a process set's exchange for tensors on a given device type."""
    assert exchange.context.on_thread is not None
    on_thread, device = exchange.context.on_thread, torch.device(kind)
    if kind != "cpu":
        module = module_of(device)
        place = session.engine().local_rank % module.device_count()  # Default if this rank has sent nothing.
        device = _last.get(kind, torch.device(kind, place))  # Explicit, as this thread's device is GPU 0.
        about = module.get_device_properties(device)
        advice = "Call torch.cuda.set_device(hvd.local_rank()) after hvd.init()"
        yield from check_devices(exchange, str(getattr(about, "uuid", device.index)), advice)
    networks = yield from exchange.gather_bytes(communicators.host_and("net").encode())
    server, served = communicators.serve(exchange.size, networks) if exchange.rank == 0 else (None, [])
    served = json.loads((yield from exchange.broadcast_bytes(json.dumps(served).encode(), 0)))

    def connect() -> TorchExchange:
        store = server or communicators.connect(served, exchange.size)
        return TorchExchange(store, device, exchange)

    return (yield from on_thread(connect))
