"""How compiled programs with exchanges keep their order, and are started without a detour.

Within a program an ordered effect keeps the exchanges in the order in which they are written, and keeps
those whose results nobody uses: JAX hands a token from one to the next, through loops, branches and nested
functions. Between programs JAX hands on a token, too; but it starts a program that takes tokens by its Python
code instead of its C++ code, which for hundreds of arrays takes longer than to exchange them.

Where all programs run on one CPU device that token says nothing new, for there a thread's programs run one
after the other, in the order in which they were started (``runtime_tokens`` of JAX relies on the same). So
there a program's effect ends where the program ends: before JAX lowers the recorded program, it becomes one
operation without an effect that makes the first token itself. JAX has no public place for that. Where the
one that is used here is missing, or does not do what is expected, programs are started in JAX's own way.
"""

from __future__ import annotations

import atexit
import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import jax
from jax._src import core, effects  # ordered effects cannot be declared by public names
from jax.interpreters import mlir

from ringdance import session
from ringdance.jax import ffi

__all__ = ["EFFECT", "by_address", "settle", "start_quickly"]

_log = logging.getLogger("ringdance")


class _ExchangeEffect(effects.Effect):  # type: ignore[misc]
    """Keeps exchanges in order."""

    __str__ = lambda self: "RingdanceExchange"  # noqa: E731


EFFECT = _ExchangeEffect()
for _allowed in (
    effects.ordered_effects, effects.shardable_ordered_effects, effects.lowerable_effects,
    effects.control_flow_allowed_effects, effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    _allowed.add_type(_ExchangeEffect)


def by_address() -> bool:
    """Return whether XLA on the CPU may call us with the addresses of its memory."""
    return session.engine().settings.jax_ffi != "off" and ffi.available()


# One operation for a whole program, without an effect.

_program = core.Primitive("ringdance_program")
_program.multiple_results = True
_program.def_abstract_eval(lambda *_, jaxpr: jaxpr.out_avals)


def _lower_program(ctx: Any, *operands: Any, jaxpr: Any) -> Any:
    """Lower what the program consists of, after a token of its own; nobody waits for the last one."""
    inner = ctx.replace(tokens_in=mlir.TokenSet.create([EFFECT]), tokens_out=None)
    return mlir.lower_fun(core.jaxpr_as_fun(jaxpr), multiple_results=True)(inner, *operands)


mlir.register_lowering(_program, _lower_program)


def _without_effect(jaxpr: Any) -> Any:
    """Return the recorded program as that operation."""
    arguments = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in jaxpr.in_avals]
    return jax.make_jaxpr(functools.partial(_program.bind, jaxpr=jaxpr))(*arguments)


# For each device whose programs JAX's own barrier overlooks: starts one more, and returns its result.
_last: dict[Any, Callable[[], jax.Array]] = {}
_PATIENCE = 10.0  # seconds


def _may_be_quick(jaxpr: Any, backend: Any) -> bool:
    """Return whether the order of programs is kept without tokens, and the program's effect is ours alone."""
    return (
        set(jaxpr.effects) == {EFFECT}
        and backend.platform == "cpu"
        and len(backend.local_devices()) == 1
        and by_address()
    )


def start_quickly() -> None:
    """Let programs that are compiled from now on be started by JAX's C++ code, where that is possible."""
    from jax._src.interpreters import pxla

    original: Callable[..., Any] | None = getattr(pxla, "_cached_lowering_to_hlo", None)
    if original is None:
        _log.debug("JAX %s: programs with exchanges are started by its Python code.", jax.__version__)
        return

    def lower(jaxpr: Any, *rest: Any, **named: Any) -> Any:
        if EFFECT in jaxpr.effects:
            try:
                backend = next(one for one in rest if hasattr(one, "local_devices"))
                if _may_be_quick(jaxpr, backend):
                    lowered = original(_without_effect(jaxpr), *rest, **named)
                    _watch(backend.local_devices()[0])
                    return lowered
            except Exception as error:
                # What is wrong with the program itself is said below, in terms of the program.
                _log.debug("JAX %s: a program is started by its Python code: %r", jax.__version__, error)
        return original(jaxpr, *rest, **named)

    pxla._cached_lowering_to_hlo = lower
    atexit.register(settle)  # before the job is joined: so it is called after the job has been left


def _watch(device: Any) -> None:
    """Wait for the programs of this device, too, from now on."""
    if device in _last:
        return
    with jax.ensure_compile_time_eval():
        zero = jax.device_put(0, device)
    program = jax.jit(jax.numpy.negative).lower(zero).compile()
    if not _last:
        atexit.register(_finish)  # called before the job is left
    _last[device] = lambda: program(zero)


def settle() -> None:
    """Wait until all exchanges in programs that this thread has started are over."""
    jax.effects_barrier()
    for start in tuple(_last.values()):
        start().block_until_ready()


def _finish() -> None:
    """Let a script end whose last program still runs: other ranks wait for its exchanges.

    Not for ever: where the others do not come to them, they shall hear that this rank has ended.
    """
    until = time.monotonic() + _PATIENCE
    for result in [start() for start in tuple(_last.values())]:
        while not result.is_ready() and time.monotonic() < until:
            time.sleep(0.001)
