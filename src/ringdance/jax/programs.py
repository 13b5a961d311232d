"""Keep compiled programs with exchanges in order, and start them from JAX's C++ code.

Note [Programs without tokens]: Within a program, an ordered effect keeps the exchanges in order. JAX passes
a token from one exchange to the next, through loops, branches and nested functions. JAX passes a token
between programs too. But then it starts a program from its Python code instead of its C++ code, and for
hundreds of arrays this takes longer than the exchange.

If all programs run on one CPU device, the token between programs is redundant: a thread's programs run one
after the other, in the order in which they were started (JAX's ``runtime_tokens`` relies on this too). So in
this case we end the effect where the program ends. Before JAX lowers the traced program, we turn it into one
operation without an effect, which creates the first token itself. JAX has no public hook for this: see
``_private``.
"""

from __future__ import annotations

import atexit
import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import mlir

from ringdance.jax import _private, ffi
from ringdance.jax._private import EFFECT
from ringdance.training import session

_log = logging.getLogger("ringdance")


def by_address() -> bool:
    """Return True if XLA on the CPU may call back with the addresses of its memory."""
    has_token = _private.abstract_token is not None
    return has_token and session.engine().settings.jax_ffi != "off" and ffi.available()


# The rank and size for which programs have been traced.
_world: list[tuple[int, int]] = []


def _forget_programs() -> None:
    """If rank or size changed, make JAX retrace programs: shapes differ, and one rank exchanges nothing."""
    _private.drop_tokens()
    engine = session.engine()
    world = engine.rank, engine.size
    if _world not in ([], [world]):
        jax.clear_caches()
    _world[:] = [world]


session.at_init(_forget_programs)

# One operation for a whole program, without an effect.

_program = core.Primitive("ringdance_program")
_program.multiple_results = True
_program.def_abstract_eval(lambda *_, jaxpr: jaxpr.out_avals)


def _lower_program(ctx: Any, *operands: Any, jaxpr: Any) -> Any:
    """Lower the program's operations. Creates a token for the first one, and drops the last token."""
    inner = ctx.replace(tokens_in=mlir.TokenSet.create([EFFECT]), tokens_out=None)
    return mlir.lower_fun(core.jaxpr_as_fun(jaxpr), multiple_results=True)(inner, *operands)


mlir.register_lowering(_program, _lower_program)


def _without_effect(jaxpr: Any) -> Any:
    """Return the traced program as a single ``_program`` operation."""
    arguments = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in jaxpr.in_avals]
    return jax.make_jaxpr(functools.partial(_program.bind, jaxpr=jaxpr))(*arguments)


# For each device whose programs jax.effects_barrier() does not wait for: a function that starts one more
# program and returns its result.
_last: dict[Any, Callable[[], jax.Array]] = {}
_EXIT_SECONDS = 10.0


def _may_be_quick(jaxpr: Any, backend: Any) -> bool:
    """Return True if a program that has only this effect keeps its order without tokens."""
    return (
        set(jaxpr.effects) == {EFFECT}
        and backend.platform == "cpu"
        and len(backend.local_devices()) == 1
        and by_address()
    )


def start_quickly() -> None:
    """Let JAX's C++ code start the programs that are compiled from now on, if possible."""
    original = _private.lowering_to_hlo()
    if original is None:
        _log.debug("JAX %s: its Python code starts programs with exchanges.", jax.__version__)
        return

    def lower(jaxpr: Any, *rest: Any, **named: Any) -> Any:
        if EFFECT in jaxpr.effects:
            try:
                backend = next(argument for argument in rest if hasattr(argument, "local_devices"))
                if _may_be_quick(jaxpr, backend):
                    lowered = original(_without_effect(jaxpr), *rest, **named)
                    _watch(backend.local_devices()[0])
                    return lowered
            except Exception as error:
                # If the error is the program's own, the call below raises it again in terms of the program.
                _log.debug("JAX %s: its Python code starts a program because of %r", jax.__version__, error)
        return original(jaxpr, *rest, **named)

    _private.replace_lowering_to_hlo(lower)
    atexit.register(settle)  # Registered before the job is joined, so it runs after the job has been left.


def _watch(device: Any) -> None:
    """Include this device's programs in ``settle`` from now on."""
    if device in _last:
        return
    with jax.ensure_compile_time_eval():
        zero = jax.device_put(0, device)
    program = jax.jit(jax.numpy.negative).lower(zero).compile()
    if not _last:
        atexit.register(_finish)  # Runs before the job is left.
    _last[device] = lambda: program(zero)


def settle() -> None:
    """Wait until all exchanges in programs started by this thread are complete.

    If they have tokens and one has failed, raise its error once.
    """
    try:
        jax.effects_barrier()
    except RuntimeError:
        _private.drop_tokens()
        raise
    for start in tuple(_last.values()):
        start().block_until_ready()


def _finish() -> None:
    """Wait for programs still running when the script ends: other ranks are waiting for their exchanges.

    The wait is limited: if other ranks do not join in the exchanges, they must see that this rank has exited.
    """
    until = time.monotonic() + _EXIT_SECONDS
    for result in [start() for start in tuple(_last.values())]:
        while not result.is_ready() and time.monotonic() < until:
            time.sleep(0.001)
