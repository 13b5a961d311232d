"""Run collective calls on torch tensors, synchronously or asynchronously, and record them for autograd."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ringdance.core.recorder import Profiler
from ringdance.core.request import Collective, DeviceResults, Work
from ringdance.errors import ArgumentError
from ringdance.torch._private import compiler_disable, divided_by, has_run_backward, profiler_running
from ringdance.torch.device.communicators import dist, supports_nccl
from ringdance.torch.device.exchange import exchanges
from ringdance.torch.device.setup import make_exchange, submitted
from ringdance.torch.device.streams import await_results
from ringdance.torch.memory import Array, Compression, array_of, block_of, check_in_place, from_array
from ringdance.training import handles, session
from ringdance.training.checks import UnsupportedOperationError
from ringdance.training.collectives import Call, Keep
from ringdance.training.gradients.cores import own_cores
from ringdance.training.gradients.overlap import OVERLAP
from ringdance.training.tuning.dimensions import Tunable, tunables

if TYPE_CHECKING:
    from ringdance.core.engine import Engine

Tensors = Sequence[Tensor]

# Errors that the conversion of an invalid argument may raise. See Note [Refused calls].
WRONG_ARGUMENT = (ArgumentError, TypeError, ValueError, IndexError, AttributeError)

compiler_disable(session.mark_step)  # Keras compiles whole steps, including this call.
session.add_profiler(Profiler(profiler_running, torch.profiler.record_function))
session.watch_training(has_run_backward)
tunables["threads"] = Tunable(torch.get_num_threads, torch.set_num_threads, lambda: max(1, own_cores()))
tunables["overlap"] = OVERLAP


def submit(
    call: Call, tensors: Tensors, in_place: bool = False, wake: bool = False, splits: Any = None
) -> Work:
    """Submit a call. The result of the returned work is a list of arrays, one for each tensor.

    Args:
        call: Call to submit.
        tensors: Tensors of a grouped call, or one tensor.
        in_place: If True, the results overwrite the tensors. For GPU tensors, call ``copy_back`` afterwards.
        wake: If True, wake the engine thread to start the call. Callers that wait immediately pass False.
        splits: Splits of an alltoall: integers, an int32 tensor, or ``None`` for equal shares.

    Raises:
        ArgumentError: A tensor or argument is invalid. The other ranks get an error with the same message.
    """
    engine = session.engine()
    try:
        rows = None if splits is None else (_array_of_splits(splits),)
        if (_by_torch["cpu"] or not getattr(tensors[0], "is_cpu", True)) and stays(call, tensors, engine):
            return _submit_device(call, engine, tensors, in_place, wake, rows)
        if len(tensors) == 1:  # Avoids the cost of a comprehension, which is 0.3 µs.
            views: tuple[Array, ...] = (array_of(tensors[0], in_place),)
        else:
            views = tuple([array_of(tensor, in_place) for tensor in tensors])
    except WRONG_ARGUMENT as error:
        call.refuse(engine, error)
        raise
    outputs: tuple[Array, ...] | None = None
    if in_place:
        outputs = views
    elif call.keeps_shapes:
        # NumPy's alignment is sufficient for torch. Allocation by the engine would take 2 µs more.
        first = np.empty(views[0].shape, views[0].dtype)
        outputs = (first,) if len(views) == 1 else (first, *map(np.empty_like, views[1:]))
    return call.submit(engine, views, outputs, rows, wake)


def _submit_device(
    call: Call, engine: Engine, tensors: Tensors, in_place: bool, wake: bool, rows: Sequence[Array] | None
) -> Work:
    """Submit a call on tensors that stay on their device."""
    if in_place:
        for tensor in tensors:
            check_in_place(tensor)
    plain: Any = tuple(map(block_of, tensors))
    outputs = plain if in_place else None
    return call.submit(engine, plain, outputs, rows, wake, tensors[0].device.type, submitted(plain[0]))


def stays(call: Call, tensors: Tensors, engine: Engine) -> bool:
    """Return True if torch's communicator exchanges the tensors. The result is the same on all ranks."""
    scales, kind = (call.prescale, call.postscale), getattr(tensors[0], "device", torch.device("meta")).type
    return (
        _by_torch.get(kind, False) and not engine.sets.find(call.set_id).alone
        and all([
            isinstance(tensor, Tensor) and tensor.device.type == kind and tensor.layout is torch.strided
            and divided_by(tensor) is None
            and exchanges(call.kind, call.operation, scales, tensor.dtype)
            for tensor in tensors
        ])
    )  # fmt: skip


def any_by_torch(tensors: Tensors) -> bool:
    """Return True if torch's communicator exchanges tensors on the first tensor's device type."""
    return bool(tensors) and _by_torch.get(tensors[0].device.type, False)


# For each device type, True if its tensors are exchanged through torch.distributed.
_by_torch = {"cpu": False, "cuda": False}


def _at_init() -> None:
    engine = session.engine()
    engine.context.make_device |= dict.fromkeys(_by_torch, make_exchange)
    _by_torch["cpu"] = engine.settings.cpu_operations == "gloo" and dist.is_gloo_available()
    _by_torch["cuda"] = engine.settings.gpu_operations != "mpi" and supports_nccl()


session.at_init(_at_init)


def _listed(call: Call, tensors: Iterable[Tensor], compression: Any = Compression.none) -> list[Any]:
    """Return a call's tensors as a list, or as (compressed tensor, context) pairs if compression is used."""
    try:
        listed = list(tensors)
        if not listed:
            raise IndexError("A group needs at least one tensor.")
        if any([tensor.is_cpu != listed[0].is_cpu for tensor in listed]):
            raise UnsupportedOperationError(
                "The group contains tensors on the CPU and on a GPU. Move all of them to one type of device."
            )
        if compression is not Compression.none:
            return [compression.compress(tensor) for tensor in listed]
    except WRONG_ARGUMENT as error:
        call.refuse(session.engine(), error)
        raise
    return listed


def _array_of_splits(splits: Any) -> Array:
    """Return splits as an array. Raises ArgumentError for a tensor of any dtype other than int32."""
    if not isinstance(splits, Tensor):
        return np.asarray(splits)
    if splits.dtype is not torch.int32:
        raise ArgumentError(f"splits must be a list or an int32 tensor, but got a {splits.dtype} tensor.")
    return splits.detach().cpu().numpy()


def _results(work: Work, like: Tensors, splits: Any = None) -> list[Tensor]:
    """Return results as tensors on the devices of ``like``. For an alltoall, append the received splits."""
    received: Sequence[Any] | None = work.received_splits
    if isinstance(work.result, DeviceResults):
        results, received = list(await_results(work.result)), work.result.received
    else:
        results = [from_array(work.result[0])] if len(like) == 1 else list(map(from_array, work.result))
    if not like[0].is_cpu:
        results = [result.to(tensor.device) for result, tensor in zip(results, like, strict=True)]
    if received is not None:
        rows = torch.tensor(received[0], dtype=torch.int32, device="cpu")
        results.append(rows.to(splits.device) if isinstance(splits, Tensor) else rows)
    return results


def copy_back(tensors: Tensors, work: Work) -> None:
    """After an in-place call on GPU tensors, copy the results from pinned memory to the GPU."""
    if isinstance(work.result, DeviceResults):
        await_results(work.result)
    elif not tensors[0].is_cpu:
        for tensor, array in zip(tensors, work.result, strict=True):
            tensor.detach().copy_(from_array(array))


def run(
    call: Call, tensors: Tensors, compression: Any = Compression.none, splits: Any = None
) -> list[Tensor]:
    """Run a call and return its results. Autograd records the call if a tensor requires a gradient.

    Args:
        call: Call to run.
        tensors: Tensors of a grouped call, or one tensor.
        compression: Compressor that casts the tensors for the exchange, and casts the results back.
        splits: Splits of an alltoall.
    """
    if compression is not Compression.none:
        packed = _listed(call, tensors, compression)
        reduced = run(call, [small for small, _ in packed])
        return [compression.decompress(small, packed[index][1]) for index, small in enumerate(reduced)]
    if call.grouped:
        tensors = _listed(call, tensors)
    for tensor in tensors:
        if getattr(tensor, "requires_grad", False) and torch.is_grad_enabled():
            recorded: Any = _Recorded.apply
            return list(recorded(call, splits, *tensors))
    work = submit(call, tensors, splits=splits)
    work.wait()
    return _results(work, tensors, splits)


def run_in_place(call: Call, tensors: Tensors) -> Any:
    """Run a call whose results overwrite the tensors, and return the tensors."""
    if call.grouped:
        tensors = _listed(call, tensors)
    work = submit(call, tensors, True)
    work.wait()
    copy_back(tensors, work)
    return tensors


def start(call: Call, tensors: Tensors, in_place: bool = False, splits: Any = None) -> int:
    """Start a call and return a handle. ``synchronize`` returns the result, or a tuple for a grouped call."""
    if call.grouped:
        tensors = _listed(call, tensors)

    def finish(done: Work) -> Any:
        results: Tensors = tensors
        if in_place:
            copy_back(tensors, done)
        else:
            results = _results(done, tensors, splits)
        return tuple(results) if call.grouped or call.kind is Collective.ALLTOALL else results[0]

    return handles.hold(submit(call, tensors, in_place, True, splits), finish)


class _Recorded(torch.autograd.Function):
    """A collective in the autograd graph. ``Call.backward`` defines its gradient."""

    @staticmethod
    def forward(ctx: Any, call: Call, splits: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.received = call, None
        ctx.rows = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        results = run(call, tensors, splits=splits)
        if call.kind is Collective.ALLTOALL:
            ctx.received = results[1].cpu()
            ctx.mark_non_differentiable(results[1])
        return tuple(results)

    @staticmethod
    @compiler_disable
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, *_gradients(ctx.call, gradients[: len(ctx.rows)], ctx.rows, ctx.received)


def _gradients(call: Call, given: Tensors, rows: list[int], received: Tensor | None) -> list[Tensor]:
    """Compute the gradients of a call's inputs from the gradients of its results.

    ``rows`` contains the number of rows of each input.
    """
    engine = session.engine()
    back = call.backward(engine)
    scaled = [tensor * back.scale for tensor in given] if back.scale != 1.0 else given
    results = run(back.call, scaled, splits=received)
    if back.keep is Keep.OWN_ROWS:
        counts = Call(Collective.ALLGATHER, set_id=call.set_id).submit(engine, (np.array([rows]),)).wait()[0]
        starts = counts[: engine.members(call.set_id).index(engine.rank)].sum(axis=0).tolist()
        return [part[start : start + count] for part, start, count in zip(results, starts, rows, strict=True)]
    if back.keep is Keep.ROOT:
        return results if engine.rank == call.root else [torch.zeros_like(tensor) for tensor in results]
    if back.keep is Keep.PADDED:
        missing = results[0].new_zeros((rows[0] - results[0].shape[0], *results[0].shape[1:]))
        return [torch.cat([results[0], missing]) if len(missing) else results[0]]
    return results
