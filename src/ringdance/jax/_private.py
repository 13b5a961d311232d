"""Private JAX names that the JAX binding uses.

All names exist in JAX 0.6 to 0.12. They are looked up when this module is imported. If a name is missing, the
binding uses a fallback. The comments explain what each name is for and what the fallback is. The tests also
cover the fallbacks.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def _find(module: str, name: str, default: Any = None) -> Any:
    try:
        return getattr(import_module(f"jax._src.{module}"), name)
    except (ImportError, AttributeError):
        return default


# jax._src.effects: an ordered effect keeps exchanges in program order, and prevents JAX from removing those
# whose results are unused. Without it, programs call exchanges through jax.experimental.io_callback.
_SETS = (
    "ordered_effects", "shardable_ordered_effects", "lowerable_effects", "control_flow_allowed_effects",
    "custom_derivatives_allowed_effects", "remat_allowed_effects",
)


def _declare_effect() -> Any:
    base, sets = _find("effects", "Effect"), [_find("effects", name) for name in _SETS]
    if base is None or not all(hasattr(effects, "add_type") for effects in sets):
        return None
    kind = type("ExchangeEffect", (base,), {"__str__": lambda self: "RingdanceExchange"})
    for effects in sets:
        effects.add_type(kind)
    return kind()


EFFECT = _declare_effect()

# jax._src.core.abstract_token: the type of the token that an ordered effect passes from one operation to the
# next. Calls through XLA's foreign function interface need it. Without it, programs use a Python callback.
abstract_token: Any = _find("core", "abstract_token")

# jax._src.dispatch.runtime_tokens: the tokens that this thread's next program waits for. After an exchange
# has failed in a program with tokens, later programs fail too until the tokens are dropped. Without this
# name, the tokens cannot be dropped, so all later programs fail.
drop_tokens: Callable[[], Any] = getattr(_find("dispatch", "runtime_tokens"), "clear", int)

# jax._src.core.trace_state_clean: a fast check of whether JAX is tracing. Without it, each eager call
# takes a few microseconds longer.
no_trace: Callable[[], bool] = _find("core", "trace_state_clean", bool)

# jax._src.sharding_impls.SPMDAxisContext: the axis context in which shard_map and pmap lower a program.
# Without it, a collective within either of them fails with an error from JAX instead of our own message.
SPMDAxisContext: Any = _find("sharding_impls", "SPMDAxisContext", ())

# jax._src.callback._callback_op_sharding: lets a program for several devices of this process call Python
# only once, with whole arrays. Without it, such programs are rejected.
one_device_of: Callable[..., Any] | None = _find("callback", "_callback_op_sharding")


# jax._src.interpreters.pxla._cached_lowering_to_hlo: lowers a traced program. See programs.py. Without it,
# JAX starts programs with exchanges from its Python code instead of its C++ code.
def lowering_to_hlo() -> Callable[..., Any] | None:
    """Return the function with which JAX lowers a program, or None if this version of JAX lacks it."""
    return _find("interpreters.pxla", "_cached_lowering_to_hlo")


def replace_lowering_to_hlo(function: Callable[..., Any]) -> None:
    """Make JAX lower programs with ``function``."""
    vars(import_module("jax._src.interpreters.pxla"))["_cached_lowering_to_hlo"] = function
