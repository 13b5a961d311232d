"""Exchange the agreed batches of a process set through torch's communicators."""

from __future__ import annotations

import math
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ringdance.core.exchange.base import Context, Steps
from ringdance.core.exchange.chunks import even_rows
from ringdance.core.exchange.nccl import nccl_failure, unfinished
from ringdance.core.request import Collective, Description, DeviceResults, ReduceOp, Request
from ringdance.errors import RankLostError, ShutDownError
from ringdance.torch._private import renamed
from ringdance.torch.device import communicators
from ringdance.torch.device.communicators import dist, filled
from ringdance.torch.device.streams import enqueue, module_of
from ringdance.training.checks import know_dtypes

Pairs = Sequence[tuple[Description, Request | None]]
# Started calls, and a function that returns each request's results once the calls are complete.
Started = tuple[list[Any], Callable[[], list[list[Tensor]]]]

_DTYPES = know_dtypes(torch)
_SUMMED = frozenset({torch.uint8, torch.int8, torch.int32, torch.int64})
_HALVES = frozenset({torch.float16, torch.bfloat16})
_aborted: list[Any] = []  # Keeps aborted groups alive, because their unfinished calls still use tensors.


def exchanges(kind: Collective, operation: ReduceOp, scales: tuple[float, float], dtype: torch.dtype) -> bool:
    """Return True if torch's communicators give the same results as the engine for calls of this kind.

    The communicators do not average integers exactly, and may drop NaN in Min and Max.
    """
    if kind in (Collective.ALLREDUCE, Collective.REDUCESCATTER):
        if dtype.is_floating_point or dtype.is_complex:
            return operation in (ReduceOp.SUM, ReduceOp.AVERAGE)
        return dtype in _SUMMED and operation is ReduceOp.SUM and scales == (1.0, 1.0)
    if kind in (Collective.ALLGATHER, Collective.BROADCAST, Collective.ALLTOALL):
        return dtype in _DTYPES
    raise AssertionError(f"exchanges() does not support the collective {kind.name}.")


class TorchExchange:
    """The ``DeviceExchange`` of a process set. The constructor blocks until all members have called it.

    Args:
        store: Store of the set's members.
        device: Device of this rank's tensors. Tensors on other devices are copied to it.
        exchange: The engine's exchange for the set. Gathers values that differ by member, such as row counts.
        timeout: Timeout of an exchange between GPUs.
    """

    def __init__(
        self, store: Any, device: torch.device, exchange: Any, timeout: timedelta = communicators.TIMEOUT
    ) -> None:
        self.store, self.device = store, device
        self._exchange, self._size, self._rank = exchange, exchange.size, exchange.rank
        self._stream = None if device.type == "cpu" else module_of(device).Stream(device)
        self.group = communicators.group_of(store, exchange.rank, exchange.size, device, timeout)
        self._under_way: deque[tuple[Any, str]] = deque()  # GPU only: (event, request names).

    def execute(self, pairs: Pairs, members: Sequence[int]) -> Steps:
        """Run a batch. See ``DeviceExchange``."""
        if self.group is None:
            raise ShutDownError("The communicator for these tensors is closed, so they cannot be exchanged.")
        d = pairs[0][0]
        if d.kind is Collective.ALLREDUCE:
            return (yield from self._run(pairs, lambda: self._allreduce(pairs)))
        if d.kind is Collective.BROADCAST:
            return (yield from self._run(pairs, lambda: self._broadcast(pairs, members.index(d.root))))
        results = []
        for pair in pairs:
            results += yield from getattr(self, f"_{d.kind.name.lower()}")(*pair)
        return results

    def _run(self, pairs: Pairs, start: Callable[[], Started]) -> Steps:
        """Start calls and return their results. On a GPU, only the stream waits for them, not the host."""
        context = self._exchange.context
        requests = [request for _, request in pairs if request is not None]
        if self._stream is None:
            calls, finish = start()
            yield from self._completed(calls, context)
            context.achieved += 1
            return [DeviceResults(results) for results in finish()]
        inputs: list[Any] = [tensor for request in requests for tensor in request.inputs]
        with enqueue(self._stream, [request.ready for request in requests], inputs):
            calls, finish = start()
            for call in calls:
                call.wait()  # Makes the stream wait.
            results = [DeviceResults(tensors) for tensors in finish()]
        event = self._stream.record_event()
        for result in results:
            result.event = event
        names = ", ".join(str(request.name or request.description.kind.name.lower()) for request in requests)
        self._under_way.append((event, names))
        context.achieved += 1
        return results

    def _completed(self, calls: Sequence[Any], context: Context) -> Steps:
        context.in_transit += 1
        try:
            while not all(call.is_completed() for call in calls):
                yield
        finally:
            context.in_transit -= 1
        try:
            for call in calls:
                call.wait()
        except RuntimeError as error:
            where = f"rank {self._rank} (host {socket.gethostname()})"
            raise RankLostError(
                f"gloo could not exchange tensors on {where}: {error}. Look for the first rank that exited."
            ) from error

    def _tensors(self, d: Description, request: Request | None) -> list[Tensor]:
        """Return the tensors to send, or zeros for a rank that has joined."""
        if request is None:
            dtypes = [getattr(torch, name) for name in d.dtypes]
            pairs = zip(d.shapes, dtypes, strict=True)
            return [torch.zeros(shape, dtype=dtype, device=self.device) for shape, dtype in pairs]
        inputs: Any = request.inputs
        return [tensor.to(self.device) for tensor in inputs]

    def _allreduce(self, pairs: Pairs) -> Started:
        sent = [tensor for pair in pairs for tensor in self._tensors(*pair)]
        outputs = _outputs(pairs)
        calls, finishes = [], []
        for dtype in dict.fromkeys(tensor.dtype for tensor in sent):
            chosen = [index for index, tensor in enumerate(sent) if tensor.dtype is dtype]
            targets = [outputs[index] for index in chosen]
            call, finish = self._reduce_flat([sent[index] for index in chosen], targets, pairs[0][0])
            calls.append(call)
            finishes.append((chosen, finish))

        def results() -> list[list[Tensor]]:
            by_index: dict[int, Tensor] = {}
            for chosen, finish in finishes:
                by_index.update(zip(chosen, finish(), strict=True))
            return _by_request(pairs, [by_index[index] for index in range(len(sent))])

        return calls, results

    def _reduce_flat(
        self, tensors: list[Tensor], outputs: list[Any], d: Description
    ) -> tuple[Any, Callable[[], list[Tensor]]]:
        """Start reducing tensors of one dtype as one flat tensor. ``outputs`` come from ``_outputs``."""
        lone = len(tensors) == 1 and outputs[0] is not None and outputs[0].data_ptr() == tensors[0].data_ptr()
        flat = tensors[0].reshape(-1) if lone else torch.cat([tensor.reshape(-1) for tensor in tensors])
        wire, operation = self._prepared(flat, d)
        call = self.group.allreduce([wire], filled(dist.AllreduceOptions(), reduceOp=operation))

        def finish() -> list[Tensor]:
            self._deliver(wire, flat, d)
            if lone:
                return outputs
            parts = torch.split(flat, [tensor.numel() for tensor in tensors])
            views = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
            return _written(views, outputs)

        return call, finish

    def _prepared(self, flat: Tensor, d: Description) -> tuple[Tensor, Any]:
        """Return the scaled tensor to reduce, and the torch operation to use.

        For gloo, 16-bit floats are converted to float32, because gloo would round each partial sum. NCCL
        averages 16-bit floats itself, because a sum might overflow. Complex numbers are sent as float pairs.
        """
        half = flat.dtype in _HALVES
        wire = flat.float() if half and self._stream is None else flat
        if flat.is_complex():
            wire = torch.view_as_real(flat).view(-1)
        if d.prescale != 1.0:
            wire.mul_(d.prescale)
        native = half and wire is flat and d.operation is ReduceOp.AVERAGE
        return wire, dist.ReduceOp.AVG if native else dist.ReduceOp.SUM

    def _deliver(self, wire: Tensor, flat: Tensor, d: Description) -> None:
        """Scale the reduced tensor ``wire``, and copy it to ``flat`` if the two do not share memory."""
        native = wire.dtype in _HALVES
        divisor = self._size if d.operation is ReduceOp.AVERAGE and not native else 1
        if d.postscale == 1.0 and divisor & (divisor - 1):
            wire.div_(divisor)
        elif d.postscale != divisor:  # The reciprocal of a power of two is exact.
            wire.mul_(d.postscale / divisor)
        if wire is not flat and not flat.is_complex():
            flat.copy_(wire)

    def _broadcast(self, pairs: Pairs, root: int) -> Started:
        sent = [tensor for pair in pairs for tensor in self._tensors(*pair)]
        flat = torch.cat([_bytes(tensor) for tensor in sent])
        call = self.group.broadcast([flat], filled(dist.BroadcastOptions(), rootRank=root))
        return [call], lambda: _by_request(pairs, _written(_views(flat, sent), _outputs(pairs)))

    def _allgather(self, d: Description, request: Request | None) -> Steps:
        assert request is not None
        table = yield from self._exchange.gather_words([tensor.shape[0] for tensor in request.inputs])

        def start() -> Started:
            calls, outputs = [], []
            for tensor, rows in zip(self._tensors(d, request), zip(*table, strict=True), strict=True):
                output = tensor.new_empty((sum(rows), *tensor.shape[1:]))
                outputs.append(output)
                if output.numel() and len(set(rows)) == 1:
                    calls.append(renamed(self.group, "all_gather_single")(_bytes(output), _bytes(tensor)))
                    continue
                for rank, part in enumerate(torch.split(output, list(rows))):
                    if rank == self._rank:
                        part.copy_(tensor)
                    if part.numel():
                        options = filled(dist.BroadcastOptions(), rootRank=rank)
                        calls.append(self.group.broadcast([_bytes(part)], options))
            return calls, lambda: [outputs]

        return (yield from self._run([(d, request)], start))

    def _alltoall(self, d: Description, request: Request | None) -> Steps:
        assert request is not None
        assert request.splits is not None
        all_splits, n = request.splits, self._size
        table = yield from self._exchange.gather_words([int(number) for row in all_splits for number in row])
        received = [[row[index * n + self._rank] for row in table] for index in range(len(all_splits))]

        def start() -> Started:
            calls, outputs = [], []
            for tensor, splits, rows in zip(self._tensors(d, request), all_splits, received, strict=True):
                output = tensor.new_empty((sum(rows), *tensor.shape[1:]))
                width = math.prod(tensor.shape[1:]) * tensor.element_size()
                sent = [int(number) * width for number in splits]
                taken, row = [number * width for number in rows], _bytes(tensor)[: sum(sent)]
                calls.append(renamed(self.group, "all_to_all_single")(_bytes(output), row, taken, sent))
                outputs.append(output)
            return calls, lambda: [outputs]

        results = yield from self._run([(d, request)], start)
        results[0].received = received
        return results

    def _reducescatter(self, d: Description, request: Request | None) -> Steps:
        def start() -> Started:
            calls, finishes = [], []
            for tensor in self._tensors(d, request):
                rows = even_rows(tensor.shape[0], self._size)
                width = math.prod(tensor.shape[1:])
                padded = tensor.new_zeros((self._size, rows[0] * width))
                first = list(accumulate(rows, initial=0))
                for rank, count in enumerate(rows):
                    padded[rank, : count * width] = tensor[first[rank] : first[rank] + count].reshape(-1)
                wire, operation = self._prepared(padded.view(-1), d)
                total = wire.new_empty(len(wire) // self._size)
                if self._stream is None:  # gloo's reduce_scatter completes only if a thread waits.
                    parts = wire.view(self._size, total.numel())
                    total = parts[self._rank]
                    for rank, part in enumerate(parts if total.numel() else ()):
                        options = filled(dist.ReduceOptions(), reduceOp=operation, rootRank=rank)
                        calls.append(self.group.reduce([part], options))
                else:
                    options = filled(dist.ReduceScatterOptions(), reduceOp=operation)
                    calls.append(renamed(self.group, "reduce_scatter_single")(total, wire, options))
                own = total if total.dtype is tensor.dtype else tensor.new_empty(total.shape)
                if tensor.is_complex():
                    own = total.view(tensor.dtype)
                shape = (rows[self._rank], *tensor.shape[1:])
                finishes.append((total, own, shape))

            def results() -> list[list[Tensor]]:
                for total, own, _ in finishes:
                    self._deliver(total, own, d)
                return [[own[: math.prod(shape)].view(shape) for _, own, shape in finishes]]

            return calls, results

        return (yield from self._run([(d, request)], start))

    def check(self) -> None:
        """Raise RankLostError if NCCL has failed. Its kernels are then aborted, so their events complete."""
        group = self.group
        if group is None or self._stream is None:
            return
        if failure := communicators.failure_of(group):
            where = f"rank {self._rank} (host {socket.gethostname()}, {self.device})"
            names = self._under_way[0][1] if self._under_way else "a bucket"
            raise RankLostError(nccl_failure(group.name(), where, names, failure))
        while self._under_way and self._under_way[0][0].query():
            self._under_way.popleft()

    def in_flight(self) -> bool:
        """Return True if an exchange has been enqueued, but is not complete."""
        return unfinished(self._under_way, lambda event: event.query())

    def close(self, agreed: bool) -> None:
        """Free the communicator. Unless all ranks ``agreed`` to this, abort it in a background thread."""
        group, self.group = self.group, None
        self._under_way.clear()
        if group is None or (agreed and self._stream is None):
            return
        if self._stream is not None and agreed:
            self._stream.synchronize()  # Without this, enqueued calls would be aborted.
            group.shutdown()
            return
        _aborted.append(group)
        if self._stream is not None:
            threading.Thread(target=group.abort, name="ringdance abort", daemon=True).start()


def _outputs(pairs: Pairs) -> list[Any]:
    """Return, for each result, the tensor to which it must be copied, or None if there is no such tensor."""
    return [out for d, r in pairs for out in ((r and r.outputs) or [None] * len(d.shapes))]


def _written(results: Sequence[Tensor], outputs: Sequence[Tensor | None]) -> list[Tensor]:
    """Copy each result to its output, if it has one. Returns the tensors that hold the results."""
    return [
        result if output is None else output.copy_(result)
        for result, output in zip(results, outputs, strict=True)
    ]


def _by_request(pairs: Pairs, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Divide the tensors of a batch into lists, one for each request."""
    remaining = iter(tensors)
    return [[next(remaining) for _ in d.shapes] for d, _ in pairs]


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as a flat tensor, which is a view if possible."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split bytes into tensors with the dtypes and shapes of ``like``."""
    parts = torch.split(flat, [tensor.nbytes for tensor in like])
    return [
        (part if part.storage_offset() % tensor.element_size() == 0 else part.clone())
        .view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(parts, like, strict=True)
    ]  # fmt: skip
