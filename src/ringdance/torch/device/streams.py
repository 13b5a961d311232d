"""The streams on which tensors are exchanged, and the events that order them. See Note [Streams]."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ringdance.core.request import DeviceResults


class Streams:
    """The stream on which tensors are exchanged, and events. See Note [Streams].

    Args:
        module: torch's module for the device, such as ``torch.cuda``.
        device: Device of the stream.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._device, self._stream = module, device, module.Stream(device)

    @contextlib.contextmanager
    def after(self, events: Sequence[Any], tensors: Sequence[Tensor]) -> Iterator[None]:
        """Enqueue the block's work on the tensors on the stream, after these events."""
        for event in events:
            self._stream.wait_event(event)
        with self._module.device(self._device), self._module.stream(self._stream):
            yield
        for tensor in tensors:
            tensor.record_stream(self._stream)

    def synchronize(self) -> None:
        """Make the host wait until the stream has finished its work."""
        self._stream.synchronize()

    def record(self) -> Any:
        """Return an event after the work enqueued on the stream so far."""
        event = self._module.Event()
        event.record(self._stream)
        return event


def module_of(device: torch.device) -> Any:
    """Return torch's module for a kind of device, such as ``torch.cuda``."""
    return getattr(torch, device.type)


def mark(tensor: Tensor) -> Any:
    """Return an event after the work enqueued on the current stream so far, or None on the CPU."""
    if tensor.is_cpu:
        return None
    module = module_of(tensor.device)
    event = module.Event()
    event.record(module.current_stream(tensor.device))
    return event


def wait_on_host(event: Any, seconds: float = 60.0) -> None:
    """Make the host wait for an event, if any. Limited, because the event never occurs if a peer is lost."""
    until = time.monotonic() + seconds
    while event is not None and not event.query() and time.monotonic() < until:
        time.sleep(1e-4)


def await_results(results: DeviceResults) -> list[Tensor]:
    """Return the results. The current stream waits until they are valid; the host does not."""
    if results.event is not None:
        stream = module_of(results[0].device).current_stream(results[0].device)
        stream.wait_event(results.event)
        for tensor in results:
            tensor.record_stream(stream)
    return results
