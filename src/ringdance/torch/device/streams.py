"""The streams on which tensors are exchanged, and the events that order them. See Note [Streams]."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ringdance.core.request import DeviceResults


def module_of(device: torch.device) -> Any:
    """Return torch's module for a device type, such as ``torch.cuda``."""
    return getattr(torch, device.type)


@contextlib.contextmanager
def enqueue(stream: Any, events: Sequence[Any], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Enqueue the block's work, which uses ``tensors``, on ``stream``, to run after ``events``."""
    for event in events:
        stream.wait_event(event)
    module = module_of(stream.device)
    with module.device(stream.device), module.stream(stream):
        yield
    for tensor in tensors:
        tensor.record_stream(stream)


def mark(tensor: Tensor) -> Any:
    """Record an event after the current stream's work so far, and return it. Returns None on the CPU."""
    return None if tensor.is_cpu else module_of(tensor.device).current_stream(tensor.device).record_event()


def wait_on_host(event: Any, seconds: float = 60.0) -> None:
    """Block the host until an event completes, but not longer than ``seconds``, as a peer may be lost."""
    until = time.monotonic() + seconds
    while event is not None and not event.query() and time.monotonic() < until:
        time.sleep(1e-4)


def await_results(results: DeviceResults) -> list[Tensor]:
    """Return the results after making the current stream, but not the host, wait until they are valid."""
    if results.event is not None:
        stream = module_of(results[0].device).current_stream(results[0].device)
        stream.wait_event(results.event)
        for tensor in results:
            tensor.record_stream(stream)
    return results
