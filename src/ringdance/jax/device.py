"""Exchange the arrays of compiled programs on a GPU with NCCL, without copies to host memory.

A collective becomes four operations of the program:

- XLA's own code packs the arrays: it scales them and copies them into one flat array for each dtype.
- A call of ``_start`` submits the exchange. It returns without waiting.
- A call of ``_finish`` waits until the exchange is enqueued, and makes XLA's stream wait for the results.
- XLA's own code unpacks the results.

XLA's stream can run other operations between the two calls. See Note [Streams of an exchange] in
``core/exchange/nccl.py``. ``_finish`` receives the flat arrays too, so that XLA does not reuse their memory
during the exchange. The token of the program orders all calls, so only one exchange of a program is in flight
at a time: after an error in one exchange, XLA would free the memory of the others. XLA does not record the
calls in command buffers (CUDA graphs), because the handlers do not declare that they support it.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
_HALVES = (jnp.float16, jnp.bfloat16)
PLATFORM = "cuda"  # XLA's platform whose memory NCCL can access.

# Calls that have been started, by the address of their first result, which no other call can use until the
# result has been read.
_started: dict[int, tuple[Call, Work]] = {}


@functools.cache
def _has_nccl() -> bool:
    """Return True if NCCL can be used. Registers the handlers on the first call."""
    if not nccl.nccl.version:
        log = _log.warning if session.engine().local_rank == 0 else _log.debug
        log(
            "JAX arrays on GPUs are exchanged through host memory, because NCCL cannot be used (%s). To use "
            "NCCL, install the extra gpu.", nccl.nccl.problem,
        )  # fmt: skip
        return False
    ffi.register(_START, _start, PLATFORM)
    ffi.register(_FINISH, _finish, PLATFORM)
    return True


def nccl_built() -> int:
    """Return the version of NCCL used for arrays on GPUs, such as 22304 for 2.23.4, or 0 if there is none."""
    if session.is_initialized() and session.engine().settings.gpu_operations == "mpi":
        return 0
    return nccl.nccl.version


def on_device(values: Sequence[Any]) -> bool:
    """Return True if all values are arrays on one device whose memory NCCL can access."""
    if not all(isinstance(value, jax.Array) for value in values):
        return False
    devices = {one for value in values for one in value.devices()}
    one = devices.pop()
    return not devices and PLATFORM in (one.platform, *one.client.platform_version.split())


def supported(call: Call, arrays: Sequence[Any]) -> bool:
    """Return True if NCCL exchanges such arrays on a GPU. Equal on all ranks, if all or none have NCCL."""
    engine = session.engine()
    if call.tables or call.weights or engine.settings.gpu_operations == "mpi":
        return False
    if engine.sets.find(call.set_id).alone or not by_address() or not _has_nccl():
        return False
    size, scales = len(engine.members(call.set_id)), (call.prescale, call.postscale)
    divided = call.kind in (Collective.REDUCESCATTER, Collective.ALLTOALL)
    return all(
        array.size > 0
        and not (divided and (not array.ndim or array.shape[0] % size))
        and not jnp.issubdtype(array.dtype, jnp.complexfloating)
        and nccl.exchanges(call.kind, call.operation, scales, np.dtype(array.dtype).name)
        for array in arrays
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
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype[Any], ...]
    results: tuple[tuple[int, ...], ...]

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
        """Return the shapes and dtypes of all arrays."""
        return json.dumps([self.shapes, self.results, [dtype.name for dtype in self.dtypes]])

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
        if factor == 1.0 or self.call.kind not in nccl.REDUCTIONS:
            return array
        if array.dtype in _HALVES:
            return (array.astype(jnp.float32) * factor).astype(array.dtype)
        return array * jnp.asarray(factor, array.dtype)


def _packing(call: Call, arrays: Sequence[Any], results: Shapes) -> _Packing:
    shapes, dtypes = [array.shape for array in arrays], [np.dtype(array.dtype) for array in arrays]
    size = len(session.engine().members(call.set_id))
    return _Packing(call, size, tuple(shapes), tuple(dtypes), tuple(results)[: len(shapes)])


def lower(ctx: Any, *operands: Any, call: Call, shapes: Shapes) -> Any:
    """Lower a collective to calls of the handlers. ``shapes``: shapes of the results."""
    avals = ctx.avals_in
    packing = _packing(call, avals, shapes)
    inputs, outputs = packing.avals(packing.shapes), packing.avals(packing.results)
    pure = functools.partial(ctx.replace, primitive=None, tokens_in=mlir.TokenSet(), tokens_out=None)
    flats = mlir.lower_fun(packing.pack, multiple_results=True)(
        pure(avals_in=avals, avals_out=inputs), *operands
    )
    token = _private.abstract_token
    same = {index: index for index in range(1, len(inputs) + 1)} if call.keeps_shapes else {}
    started = jax.ffi.ffi_lowering(_START, has_side_effect=True, operand_output_aliases=same)(
        ctx.replace(avals_in=[token, *inputs], avals_out=[token, *outputs]), ctx.tokens_in.get(EFFECT),
        *_flat(flats), what=call.text(), shapes=packing.text(),
    )
    # Without aliases, the inputs are passed too, so that XLA keeps their memory.
    kept = [] if same else list(zip(inputs, _flat(flats), strict=True))
    alias = {index: index for index in range(1, len(outputs) + 1)}
    token_out, *finished = jax.ffi.ffi_lowering(_FINISH, has_side_effect=True, operand_output_aliases=alias)(
        ctx.replace(avals_in=[token, *outputs, *[aval for aval, _ in kept]], avals_out=[token, *outputs]),
        *started, *[value for _, value in kept],
    )
    ctx.set_tokens_out(mlir.TokenSet({EFFECT: token_out}))
    return mlir.lower_fun(packing.unpack, multiple_results=True)(
        pure(avals_in=outputs, avals_out=ctx.avals_out), *_flat(finished)
    )


def _flat(values: Sequence[Any]) -> list[Any]:
    """Return MLIR values, without the lists in which JAX puts them."""
    return [one for value in values for one in (value if isinstance(value, (list, tuple)) else [value])]


@functools.lru_cache(maxsize=256)  # XLA reuses the same memory.
def _buffers(text: str, inputs: Addresses, outputs: Addresses) -> tuple[Any, Any]:
    *shapes, names = json.loads(text)
    before, after = ([tuple(shape) for shape in side] for side in shapes)
    dtypes = [np.dtype(name) for name in names]
    return nccl.buffers_at(inputs, before, dtypes), nccl.buffers_at(outputs, after, dtypes)


def _submit(call: Call, inputs: Any, outputs: Any, event: Any = None) -> Work:
    engine = session.engine()
    try:
        nccl.check_device(inputs[0].address)
    except Exception as error:
        call.refuse(engine, error)
        raise
    return call.submit(engine, inputs, outputs, None, True, nccl.DEVICE, event)


@functools.lru_cache(maxsize=256)
def _compiled(packing: _Packing) -> tuple[Any, Any]:
    # The copies belong to the exchange, which writes to them. Without a copy, JAX may return an argument.
    def pack(*arrays: Any) -> list[Any]:
        return [jnp.copy(flat) for flat in packing.pack(*arrays)]

    return jax.jit(pack), jax.jit(packing.unpack)


def eager(call: Call, arrays: Sequence[Any], shapes: Shapes) -> list[Any]:
    """Exchange arrays in a collective that keeps their ``shapes``. Waits on the host."""
    engine, packing = session.engine(), _packing(call, arrays, shapes)
    unnamed = Call(call.kind, None, call.operation, call.prescale, call.postscale)
    pack, unpack = _compiled(replace(packing, call=unnamed))
    flats = jax.block_until_ready(pack(*arrays))
    addresses = [flat.unsafe_buffer_pointer() for flat in flats]
    buffers = nccl.buffers_at(addresses, packing.shapes, packing.dtypes, owner=flats)
    results = _submit(call, buffers, buffers).wait()
    while not results.event.is_done and engine.end.broken is None:
        time.sleep(5e-5)
    if engine.end.broken is not None:
        raise engine.end.error()
    call.completed()
    return list(unpack(*flats))


def _start(
    attributes: dict[str, str], inputs: Addresses, outputs: Addresses, stream: Callable[[], int]
) -> None:
    """Submit an exchange. The first input and output are the token."""

    def submit() -> None:
        call = Call.from_text(attributes["what"])
        sources, targets = _buffers(attributes["shapes"], inputs[1:], outputs[1:])
        _started[outputs[1]] = call, _submit(call, sources, targets, nccl.ready(stream()))

    reporting(submit)


def _finish(_: dict[str, str], inputs: Addresses, __: Addresses, stream: Callable[[], int]) -> None:
    """Wait until an exchange is enqueued, and let XLA's stream wait for the results."""

    def wait() -> None:
        call, work = _started.pop(inputs[1])
        interrupt: KeyboardInterrupt | None = None
        while not work.complete:
            try:
                work.wait()
            except KeyboardInterrupt as error:  # After an error, XLA would free the memory of the exchange.
                interrupt = error
        nccl.wait(stream(), work.wait())
        call.completed()
        if interrupt is not None:
            raise interrupt

    reporting(wait)


def _at_init() -> None:
    engine = session.engine()
    _started.clear()
    nccl.forget_device()
    advice = 'Call jax.config.update("jax_cuda_visible_devices", str(hvd.local_rank())) after hvd.init()'
    make = functools.partial(nccl.make_exchange, advice, engine.local_rank)
    engine.context.make_device[nccl.DEVICE] = make


session.at_init(_at_init)
