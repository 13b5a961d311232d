"""Keep compiled programs with exchanges in order, and let JAX's C++ code start them.

Note [Programs without tokens]: Within a program, an ordered effect keeps the exchanges in order: JAX passes
a token from one exchange to the next, through loops, branches and nested functions. JAX also passes a token
from one program to the next. However, JAX starts such programs from its Python code instead of its C++ code.
With hundreds of arrays, this takes longer than the exchange itself.

If all programs run on one CPU device, the token between programs is redundant, because the programs of a
thread run one after another in the order in which they were started. (JAX's ``runtime_tokens`` also relies on
this.) In this case, we limit the effect to the program: before JAX lowers the traced program, we turn it into
a single operation without an effect, which creates its own first token. JAX has no public hook for this. See
``_private``.

Programs on a GPU keep their tokens. JAX may start them from several threads, so their order would otherwise
be undefined. The tokens order the calls on the host that submit exchanges, not the work on the GPU.
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

from ringdance.errors import CollectiveError, NotInitializedError, ShutDownError
from ringdance.jax import _private, ffi
from ringdance.jax._private import EFFECT
from ringdance.training import session
from ringdance.training.elastic import before_commit, remember

_log = logging.getLogger("ringdance")


def by_address() -> bool:
    """Return True if XLA can pass the addresses of its memory to our handler on the CPU."""
    has_token = _private.abstract_token is not None
    return has_token and session.engine().settings.jax_ffi != "off" and ffi.available()


def reporting(function: Callable[[], Any]) -> Any:
    """Call a function for a program. Reports its error, because JAX raises it only when a result is read."""
    try:
        result = function()
    except Exception as error:
        if isinstance(error, CollectiveError):
            remember(error)
        if not isinstance(error, (NotInitializedError, ShutDownError)):  # Both mean that the script ended.
            session.note_unseen(error)
        raise
    session.note_unseen(None)
    return result


# The (rank, size) with which programs were traced. Empty before the first init().
_world: list[tuple[int, int]] = []


def _forget_programs() -> None:
    """Make JAX retrace programs if the rank or size has changed. Shapes and exchanges depend on both."""
    _private.drop_tokens()
    engine = session.engine()
    world = engine.rank, engine.size
    if _world not in ([], [world]):
        jax.clear_caches()
    _world[:] = [world]


session.at_init(_forget_programs)

# An operation that has no effect and represents a whole program.

_program = core.Primitive("ringdance_program")
_program.multiple_results = True
_program.def_abstract_eval(lambda *_, jaxpr: jaxpr.out_avals)


def _lower_program(ctx: Any, *operands: Any, jaxpr: Any) -> Any:
    """Lower the program's operations. Creates the token for the first operation and drops the last token."""
    inner = ctx.replace(tokens_in=mlir.TokenSet.create([EFFECT]), tokens_out=None)
    return mlir.lower_fun(core.jaxpr_as_fun(jaxpr), multiple_results=True)(inner, *operands)


mlir.register_lowering(_program, _lower_program)


def _without_effect(jaxpr: Any) -> Any:
    """Return the traced program as a single ``_program`` operation."""
    arguments = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in jaxpr.in_avals]
    return jax.make_jaxpr(functools.partial(_program.bind, jaxpr=jaxpr))(*arguments)


# Keys: the devices that run programs for which jax.effects_barrier() does not wait. Values: functions that
# start a trivial program on the device and return its result.
_last: dict[Any, Callable[[], jax.Array]] = {}
_EXIT_SECONDS = 10.0


def _may_be_quick(jaxpr: Any, backend: Any) -> bool:
    """Return True if a program has only our effect and needs no tokens to keep its exchanges in order."""
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
        _log.debug(
            "JAX %s starts programs with exchanges from Python, because it lacks _cached_lowering_to_hlo.",
            jax.__version__,
        )
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
                # If the program itself is invalid, the call below raises an error that refers to the program.
                _log.debug(
                    "JAX %s starts a program from Python, because lowering it without an effect failed: %r",
                    jax.__version__,
                    error,
                )
        return original(jaxpr, *rest, **named)

    _private.replace_lowering_to_hlo(lower)
    atexit.register(settle)  # Registered before init(), so it runs after the rank has left the job.


def _watch(device: Any) -> None:
    """Make ``settle`` also wait for this device's programs from now on."""
    if device in _last:
        return
    with jax.ensure_compile_time_eval():
        zero = jax.device_put(0, device)
    program = jax.jit(jax.numpy.negative).lower(zero).compile()
    if not _last:
        atexit.register(_finish)  # Runs before the rank leaves the job.
    _last[device] = lambda: program(zero)


def settle() -> None:
    """Wait until all exchanges in programs started by this thread are complete.

    If one of them has failed in a program with tokens, its error is raised once.
    """
    try:
        jax.effects_barrier()
    except RuntimeError:
        _private.drop_tokens()
        raise
    for start in tuple(_last.values()):
        start().block_until_ready()


before_commit(settle)


def _finish() -> None:
    """Wait for running programs when the script ends, because other ranks need their exchanges.

    The wait is limited. If other ranks do not take part in the exchanges, this rank must exit so that the
    others notice.
    """
    until = time.monotonic() + _EXIT_SECONDS
    for result in [start() for start in tuple(_last.values())]:
        while not result.is_ready() and time.monotonic() < until:
            time.sleep(0.001)
