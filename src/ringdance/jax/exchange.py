"""Exchanges of JAX arrays: eager, or as primitives in compiled programs.

A ``JaxCall`` describes an exchange, both in eager and in compiled calls. It contains only static values. An
eager call runs immediately on views of the arrays. Within ``jit``, a call becomes a primitive with an ordered
effect: the calls in a program keep their order, which must be the same on all ranks, and calls whose results
are unused are not removed. On the CPU, the primitive is lowered to a call through XLA's foreign function
interface (``ffi``), which reads and writes XLA's memory in place. On accelerators, and if the layout of XLA's
structures is unknown, it is lowered to a Python callback that receives arrays. ``programs`` describes how
programs are started.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback
from jax.extend import core
from jax.interpreters import mlir

from ringdance.core.recorder import Profiler
from ringdance.errors import ArgumentError, CollectiveError
from ringdance.jax import _private, device, ffi
from ringdance.jax._private import EFFECT
from ringdance.jax.memory import array_of, from_array
from ringdance.jax.programs import by_address, reporting, settle, start_quickly
from ringdance.training import session
from ringdance.training.collectives import Call
from ringdance.training.gradients import weights

Array = np.ndarray[Any, Any]
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class JaxCall:
    """Hashable description of a collective call: all values that are static in a JAX program.

    Args:
        call: The collective and its options.
        splits: Number of rows to send to each rank of the set. Only for an alltoall outside of programs.
        rows: Number of rows in each input. Only for collectives that change the number of rows.
    """

    call: Call
    splits: tuple[int, ...] | None = None
    rows: tuple[int, ...] = ()


# Run an exchange on NumPy arrays.


def run(
    what: JaxCall, inputs: tuple[Array, ...], outputs: tuple[Array, ...] | None = None,
    shapes: Shapes | None = None,
) -> list[Array]:
    """Run an exchange of NumPy arrays and return its results.

    Args:
        what: The exchange.
        inputs: Contiguous arrays.
        outputs: Arrays to write the results to. By default, new arrays are allocated.
        shapes: Shapes that the results must have. By default, all shapes are accepted.

    Raises:
        CollectiveError: The exchange failed, or a result's shape differs from the one that compiled code
            expects.
    """
    engine, call = session.engine(), what.call
    if call.weights:
        if weights.due(engine, call.set_id, call.name or ""):
            weights.compare(engine, call, inputs[0])
        return []
    splits = None if what.splits is None else np.array(what.splits, np.int64)
    work = call.submit(engine, inputs, outputs if call.keeps_shapes else None, (splits,))
    results: list[Array] = work.wait()
    if work.received_splits is not None:
        results = [*results, work.received_splits[0].astype(np.int32)]
    for result, shape in zip(results, shapes or (), strict=False):
        if result.shape != shape:
            raise CollectiveError(
                f"{call.kind.name.lower()} {call.name or ''} returned shape {result.shape}, but the compiled "
                f"program expects {shape}. Within jit, the first dimension must have the same size on all "
                "ranks. If the sizes differ, call the collective outside of jit."
            )
    if outputs is not None:
        for result, output in zip(results, outputs, strict=True):
            if result is not output:
                output[...] = result
    call.completed()
    return results


def _run_compiled(
    what: JaxCall, inputs: tuple[Array, ...], outputs: tuple[Array, ...] | None, shapes: Shapes
) -> list[Array]:
    results: list[Array] = reporting(lambda: run(what, inputs, outputs, shapes))
    return results


# Calls from JAX: eager, or as part of a compiled program.


def is_traced(values: Sequence[Any]) -> bool:
    """Return True if any of the values is a tracer, which has no contents until the program runs."""
    return any(isinstance(value, jax.core.Tracer) for value in values)


def in_program(values: Sequence[Any]) -> bool:
    """Return True if an exchange of these values, even of constants, becomes part of a traced program."""
    return is_traced(values) or (not _private.no_trace() and is_traced([jax.numpy.zeros(())]))


def eager(what: JaxCall, values: Sequence[Any], shapes: Shapes) -> list[Any]:
    """Run an exchange immediately, after waiting for running programs so that the calls stay in order."""
    settle()
    if what.call.keeps_shapes and device.on_device(values) and device.supported(what.call, values):
        return device.eager(what.call, values, shapes)
    results = run(what, tuple([array_of(value) for value in values]))
    devices = [*values, *[None] * (len(results) - len(values))][: len(results)]
    return [from_array(result, like) for result, like in zip(results, devices, strict=True)]


# In JAX 0.7, emit_python_callback does not have the argument returns_token and always returns the token.
_known = inspect.signature(mlir.emit_python_callback).parameters
_RETURNS_TOKEN = {"returns_token": True} if "returns_token" in _known else {}

_primitive = core.Primitive("ringdance_exchange")
_primitive.multiple_results = True


def _abstract(*avals: Any, what: JaxCall, shapes: Shapes, dtypes: tuple[Any, ...]) -> Any:
    return [jax.core.ShapedArray(*pair) for pair in zip(shapes, dtypes, strict=True)], {EFFECT}


_primitive.def_impl(lambda *values, what, shapes, **_: eager(what, values, shapes))
_primitive.def_effectful_abstract_eval(_abstract)


def compiled(what: JaxCall, values: Sequence[Any], shapes: Shapes, dtypes: Sequence[Any]) -> tuple[Any, ...]:
    """Add an exchange to the program that is being traced.

    Args:
        what: The exchange.
        values: Traced arrays.
        shapes: Shapes of the results.
        dtypes: Dtypes of the results.
    """
    kinds = tuple(np.dtype(kind) for kind in dtypes)
    if EFFECT is None:
        results = [jax.ShapeDtypeStruct(shape, kind) for shape, kind in zip(shapes, kinds, strict=True)]
        return tuple(io_callback(_callback(what, shapes), tuple(results), *values, ordered=True))
    return tuple(_primitive.bind(*values, what=what, shapes=tuple(shapes), dtypes=kinds))


def _callback(what: JaxCall, shapes: Shapes) -> Any:
    """Return a callback that runs the exchange on the arrays it receives."""
    return lambda *arrays: tuple(_run_compiled(what, tuple([array_of(arr) for arr in arrays]), None, shapes))


def _sharding(ctx: Any) -> Any:
    """Return the sharding with which a multi-device program calls Python once, or None for one device."""
    context = ctx.module_context.axis_context
    if isinstance(context, _private.SPMDAxisContext):
        raise ArgumentError(
            "A collective cannot be called within shard_map or pmap, because each device of this process "
            "would call it, in undefined order. Call it in the enclosing jit, where it gets the whole array "
            "even if the array is sharded."
        )
    if _devices(ctx) == 1:
        return None
    # Before JAX 0.10, XLA's partitioner cannot place the token that keeps exchanges in order.
    if jax.__version_info__ < (0, 10) or _private.one_device_of is None:
        raise ArgumentError(
            "With this version of JAX, a program that contains a collective can use only one device per "
            "process. Upgrade to JAX 0.10 or newer, or keep the arrays on one device."
        )
    return _private.one_device_of(context, None, ctx.avals_out)


def _devices(ctx: Any) -> int:
    return getattr(ctx.module_context.axis_context, "num_devices", 2)


def _by_callback(ctx: Any, *operands: Any, what: JaxCall, shapes: Shapes, **_: Any) -> Any:
    """Lower to a Python callback. Used on accelerators, or if the layout of XLA's structures is unknown."""
    results, token, _ = mlir.emit_python_callback(
        ctx, _callback(what, shapes), ctx.tokens_in.get(EFFECT), list(operands), ctx.avals_in, ctx.avals_out,
        has_side_effect=True, sharding=_sharding(ctx), **_RETURNS_TOKEN,
    )
    ctx.set_tokens_out(mlir.TokenSet({EFFECT: token}))
    return results


def _by_nccl(ctx: Any, *operands: Any, what: JaxCall, shapes: Shapes, **rest: Any) -> Any:
    """Lower to an exchange with NCCL if possible."""
    if _devices(ctx) > 1 or what.splits is not None or not device.supported(what.call, ctx.avals_in):
        return _by_callback(ctx, *operands, what=what, shapes=shapes, **rest)
    return device.lower(ctx, *operands, call=what.call, shapes=shapes)


def _by_ffi(ctx: Any, *operands: Any, what: JaxCall, shapes: Shapes, **rest: Any) -> Any:
    """Lower to a call that receives the addresses of XLA's buffers, and works in place if possible."""
    if _devices(ctx) > 1 or not by_address():
        return _by_callback(ctx, *operands, what=what, shapes=shapes, **rest)
    aliases = {index + 1: index + 1 for index in range(len(operands)) if what.call.keeps_shapes}
    token = _private.abstract_token
    inner = ctx.replace(avals_in=[token, *ctx.avals_in], avals_out=[token, *ctx.avals_out])
    memory = [
        [(aval.shape, np.dtype(aval.dtype).name) for aval in avals] for avals in (ctx.avals_in, ctx.avals_out)
    ]
    _register()
    token, *results = jax.ffi.ffi_lowering(_TARGET, has_side_effect=True, operand_output_aliases=aliases)(
        inner, ctx.tokens_in.get(EFFECT), *operands, what=what.call.text(), shapes=json.dumps(memory)
    )
    ctx.set_tokens_out(mlir.TokenSet({EFFECT: token}))
    return results


def _call_from_xla(
    attributes: dict[str, str], addresses_in: ffi.Addresses, addresses_out: ffi.Addresses, _: Any
) -> None:
    # The first input and output are the token that keeps the order.
    inputs, outputs = ffi.views_at(attributes["shapes"], addresses_in[1:], addresses_out[1:])
    shapes = tuple([output.shape for output in outputs])
    _run_compiled(JaxCall(Call.from_text(attributes["what"])), tuple(inputs), tuple(outputs), shapes)


_TARGET = "ringdance_exchange"


@functools.cache
def _register() -> None:
    ffi.register(_TARGET, _call_from_xla, "cpu")


_Span = jax.profiler.TraceAnnotation
# is_enabled is undocumented. Without it, each wait creates a span, which itself checks whether the profiler
# is recording.
session.add_profiler(Profiler(getattr(_Span, "is_enabled", lambda: True), _Span))
mlir.register_lowering(_primitive, _by_callback)
mlir.register_lowering(_primitive, _by_ffi, platform="cpu")
mlir.register_lowering(_primitive, _by_nccl, platform=device.PLATFORM)
start_quickly()
