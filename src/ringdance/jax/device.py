"""Exchange the arrays of compiled programs on a GPU with NCCL, without copies to host memory.

A collective becomes four operations of the program:

- XLA's own code packs the arrays: it scales them and copies them into one flat array for each dtype.
- A call of ``_start`` submits the exchange. It returns without waiting.
- A call of ``_finish`` waits until the exchange is enqueued, and makes XLA's stream wait for the results.
- XLA's own code unpacks the results.

XLA's stream can run other operations between the two calls. See Note [Streams of an exchange] in
``core/exchange/nccl.py``. The token of the program, whose order is the same on all ranks, orders the calls of
``_start``. ``_finish`` receives the flat arrays too, so that XLA does not reuse their memory during the
exchange. XLA does not record these calls in command buffers (CUDA graphs), because the handlers do not
declare that they support it.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from ringdance.core.exchange import nccl
from ringdance.core.request import Collective, Work
from ringdance.jax import _private, ffi
from ringdance.jax._private import EFFECT
from ringdance.jax.programs import by_address, reporting
from ringdance.training import session
from ringdance.training.collectives import Call

Addresses = tuple[int, ...]
Shapes = Sequence[tuple[int, ...]]

_log = logging.getLogger("ringdance")
_START, _FINISH = "ringdance_start", "ringdance_finish"
_REDUCTIONS = (Collective.ALLREDUCE, Collective.REDUCESCATTER)
_HALVES = (jnp.float16, jnp.bfloat16)
PLATFORM = "cuda"  # XLA's platform whose memory NCCL can access.

# Calls that have been started, by the address of their first result, which no other call can use until the
# result has been read.
_started: dict[int, tuple[Call, Work]] = {}


@functools.cache
def _has_nccl() -> bool:
    """Return True if NCCL can be used. Registers the handlers on the first call."""
    if not nccl.nccl.version:
        _log.warning(
            "The exchanges of JAX arrays on GPUs go through host memory, because NCCL or its Python packages "
            "cannot be loaded. To exchange them with NCCL, install ringdance[gpu]."
        )
        return False
    ffi.register(_START, _start, PLATFORM)
    ffi.register(_FINISH, _finish, PLATFORM)
    return True


def nccl_built() -> int:
    """Return the version of NCCL used for arrays on GPUs, such as 22304 for 2.23.4, or 0 if there is none."""
    if session.is_initialized() and session.engine().settings.gpu_operations == "mpi":
        return 0
    return nccl.nccl.version


def accesses(one: Any) -> bool:
    """Return True if NCCL can access the memory of a JAX device."""
    return PLATFORM in (one.platform, *one.client.platform_version.split())


def supported(call: Call, shapes: Shapes, dtypes: Sequence[Any]) -> bool:
    """Return True if NCCL exchanges arrays on a GPU with these shapes and dtypes.

    The result is the same on all ranks that make the same call.
    """
    engine = session.engine()
    if call.tables or call.weights or engine.settings.gpu_operations == "mpi":
        return False
    if engine.sets.find(call.set_id).alone or not by_address() or not _has_nccl():
        return False
    size, scales = len(engine.members(call.set_id)), (call.prescale, call.postscale)
    divided = call.kind in (Collective.REDUCESCATTER, Collective.ALLTOALL)
    return all(
        np.prod(shape) > 0
        and not (divided and (not shape or shape[0] % size))
        and not jnp.issubdtype(dtype, jnp.complexfloating)
        and nccl.exchanges(call.kind, call.operation, scales, np.dtype(dtype).name)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )


@dataclass(frozen=True)
class _Packing:
    """How the arrays of a call are copied next to each other.

    Args:
        call: The call.
        size: Number of ranks in its process set.
        shapes: Shape of each array.
        dtypes: Dtype of each array.
        results: Shape of each result.
    """

    call: Call
    size: int
    shapes: Shapes
    dtypes: Sequence[np.dtype[Any]]
    results: Shapes

    @functools.cached_property
    def runs(self) -> list[list[int]]:
        """The indices of the arrays of each dtype."""
        return [
            [index for index, other in enumerate(self.dtypes) if other == dtype]
            for dtype in dict.fromkeys(self.dtypes)
        ]

    def avals(self, shapes: Shapes) -> list[Any]:
        """Return the types of the flat arrays that hold arrays with these shapes."""
        return [
            jax.core.ShapedArray((sum(int(np.prod(shapes[index])) for index in run),), self.dtypes[run[0]])
            for run in self.runs
        ]

    def text(self) -> str:
        """Return the shapes and dtypes of all arrays, in the order in which they are packed."""
        order = [index for run in self.runs for index in run]
        return json.dumps([(self.shapes[i], self.results[i], self.dtypes[i].name) for i in order])

    def pack(self, *arrays: Any) -> list[Any]:
        """Return the flat arrays to exchange."""
        rows = self.size if self.call.kind is Collective.REDUCESCATTER else 1
        scaled = [self._scaled(array, self.call.prescale) for array in arrays]
        return [
            jnp.concatenate([scaled[index].reshape(rows, -1) for index in run], axis=1).reshape(-1)
            for run in self.runs
        ]

    def unpack(self, *flats: Any) -> list[Any]:
        """Return the results from the exchanged flat arrays."""
        rows = self.size if self.call.kind is Collective.ALLGATHER else 1
        results: dict[int, Any] = {}
        for flat, run in zip(flats, self.runs, strict=True):
            widths = [int(np.prod(self.results[index])) // rows for index in run]
            parts = jnp.split(flat.reshape(rows, -1), np.cumsum(widths)[:-1], axis=1)
            for index, part in zip(run, parts, strict=True):
                results[index] = self._scaled(part.reshape(self.results[index]), self.call.postscale)
        received = []
        if self.call.kind is Collective.ALLTOALL:
            received = [jnp.full((self.size,), self.shapes[0][0] // self.size, jnp.int32)]
        return [results[index] for index in range(len(results))] + received

    def _scaled(self, array: Any, factor: float) -> Any:
        if factor == 1.0 or self.call.kind not in _REDUCTIONS:
            return array
        if array.dtype in _HALVES:
            return (array.astype(jnp.float32) * factor).astype(array.dtype)
        return array * jnp.asarray(factor, array.dtype)


def lower(ctx: Any, *operands: Any, call: Call, shapes: Shapes) -> Any:
    """Lower a collective to calls of the handlers. ``shapes``: shapes of the results."""
    avals = ctx.avals_in
    size, dtypes = len(session.engine().members(call.set_id)), [np.dtype(aval.dtype) for aval in avals]
    packing = _Packing(call, size, [aval.shape for aval in avals], dtypes, list(shapes)[: len(avals)])
    inputs, outputs = packing.avals(packing.shapes), packing.avals(packing.results)
    pure = functools.partial(ctx.replace, primitive=None, tokens_in=mlir.TokenSet(), tokens_out=None)
    flats = mlir.lower_fun(packing.pack, multiple_results=True)(
        pure(avals_in=avals, avals_out=inputs), *operands
    )
    token = _private.abstract_token
    same = {index: index for index in range(len(inputs))} if call.keeps_shapes else {}
    token_out, *started = jax.ffi.ffi_lowering(
        _START, has_side_effect=True, operand_output_aliases={i + 1: o + 1 for i, o in same.items()}
    )(
        ctx.replace(avals_in=[token, *inputs], avals_out=[token, *outputs]), ctx.tokens_in.get(EFFECT),
        *_flat(flats), what=call.text(), shapes=packing.text(),
    )
    # Without aliases, the inputs are passed too, so that XLA keeps their memory.
    kept = [] if same else list(zip(inputs, _flat(flats), strict=True))
    finished = jax.ffi.ffi_lowering(
        _FINISH, has_side_effect=True, operand_output_aliases={index: index for index in range(len(outputs))}
    )(
        ctx.replace(avals_in=[*outputs, *[aval for aval, _ in kept]], avals_out=outputs),
        *started, *[value for _, value in kept],
    )
    ctx.set_tokens_out(mlir.TokenSet({EFFECT: token_out}))
    return mlir.lower_fun(packing.unpack, multiple_results=True)(
        pure(avals_in=outputs, avals_out=ctx.avals_out), *_flat(finished)
    )


def _flat(values: Sequence[Any]) -> list[Any]:
    """Return MLIR values, without the lists in which JAX puts them."""
    return [one for value in values for one in (value if isinstance(value, (list, tuple)) else [value])]


@functools.lru_cache(maxsize=1024)
def _tensors(text: str) -> tuple[Any, Any, Any]:
    shapes, results, names = zip(*json.loads(text), strict=True)
    return [tuple(s) for s in shapes], [tuple(s) for s in results], [np.dtype(name) for name in names]


@functools.lru_cache(maxsize=256)  # XLA reuses the same memory.
def _buffers(text: str, inputs: Addresses, outputs: Addresses) -> tuple[Any, Any]:
    shapes, results, dtypes = _tensors(text)
    return nccl.buffers_at(inputs, shapes, dtypes), nccl.buffers_at(outputs, results, dtypes)


def _start(
    attributes: dict[str, str], inputs: Addresses, outputs: Addresses, stream: Callable[[], int]
) -> None:
    """Submit an exchange. The first input and output are the token."""

    def submit() -> None:
        call = Call.from_text(attributes["what"])
        sources, targets = _buffers(attributes["shapes"], inputs[1:], outputs[1:])
        event = nccl.ready(stream())
        work = call.submit(session.engine(), sources, targets, None, True, nccl.DEVICE, event)
        _started[outputs[1]] = call, work

    reporting(submit)


def _finish(_: dict[str, str], inputs: Addresses, __: Addresses, stream: Callable[[], int]) -> None:
    """Wait until an exchange is enqueued, and let XLA's stream wait for the results."""

    def wait() -> None:
        call, work = _started.pop(inputs[0])
        nccl.wait(stream(), work.wait())
        call.completed()

    reporting(wait)


def _at_init() -> None:
    engine = session.engine()
    _started.clear()
    engine.context.make_device[nccl.DEVICE] = lambda exchange, _: nccl.make_exchange(
        exchange, engine.local_rank
    )


session.at_init(_at_init)
