"""Reduce gradients without a round of agreement. See Note [Direct buckets]."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ringdance.core.exchange.base import Context
from ringdance.core.request import Description, Request
from ringdance.torch.device.communicators import NO_TIMEOUT, dist
from ringdance.torch.device.exchange import TorchExchange
from ringdance.torch.device.streams import mark
from ringdance.training.collectives import Call

if TYPE_CHECKING:
    from ringdance.core.engine import Engine


class Launched:
    """A reduction that was started without a round of agreement. Used like the engine's ``Work``.

    Args:
        exchange: The exchange. All of its members start the same reductions in the same order.
        call: Call that defines the operation and the scale factors.
        tensors: Tensors to reduce in place.
    """

    def __init__(self, exchange: TorchExchange, call: Call, tensors: Sequence[Tensor]) -> None:
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        d = Description(call.kind, (), shapes, call.operation, call.prescale, call.postscale)
        inputs: Any = tuple(tensors)
        request = Request(d, inputs, inputs, call.full_name, ready=mark(inputs[0]))
        self._steps = exchange.execute([(d, request)], ())
        self.result: Any = None
        self.done()

    def done(self) -> bool:
        """Return True if the results are available or, on a GPU, enqueued."""
        if self.result is None:
            try:
                next(self._steps)
            except StopIteration as end:
                self.result = end.value[0]
        return self.result is not None

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until ``done``."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        while not self.done() and time.monotonic() < until:
            time.sleep(5e-5)
        return self.result


def direct_exchange(engine: Engine, set_id: int, kind: str, name: str) -> TorchExchange | None:
    """Create a second communicator for a process set. Blocks until all of its members have called this.

    Returns None on all ranks if the set has not yet exchanged tensors on the device type ``kind``.

    Raises:
        CollectiveError: The engine ended before all members were connected.
    """
    state = engine.sets.find(set_id).state
    common: Any = None if state is None else state.exchange.devices.get(kind)
    if state is None or common is None:
        return None
    place = SimpleNamespace(rank=state.exchange.rank, size=state.exchange.size, context=Context())
    connected: Future[TorchExchange] = Future()

    def connect() -> None:
        try:
            store = dist.PrefixStore(name, common.store)
            connected.set_result(TorchExchange(store, common.device, place, NO_TIMEOUT))
        except BaseException as error:
            connected.set_exception(error)

    threading.Thread(target=connect, name="ringdance connect", daemon=True).start()
    while not connected.done():
        if engine.closed:
            raise engine.end.error()
        time.sleep(1e-3)
    exchange = connected.result()
    # Replace the dictionary instead of modifying it, because the engine thread may be reading it.
    state.exchange.devices = {**state.exchange.devices, name: exchange}
    return exchange
