"""Private JAX names that the binding uses, the reason for each, and the behavior without it.

Present in JAX 0.6 to 0.12. Each name is looked up when this module is imported. If one is missing, the
binding uses the alternative, which the tests cover too.
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


# jax._src.effects: an ordered effect keeps exchanges in program order, and keeps exchanges whose results are
# not used. Without it, programs exchange through jax.experimental.io_callback.
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
# next, for XLA's foreign function interface. Without it, programs call Python with arrays.
abstract_token: Any = _find("core", "abstract_token")

# jax._src.dispatch.runtime_tokens: the tokens that this thread's next program waits for. After an exchange
# has failed in a program with tokens, later programs fail too until the tokens are dropped. Without this
# name, they fail forever.
drop_tokens: Callable[[], Any] = getattr(_find("dispatch", "runtime_tokens"), "clear", int)

# jax._src.core.trace_state_clean: tells quickly whether JAX is tracing at all. Without it, calls outside
# of programs need some microseconds more to find out.
no_trace: Callable[[], bool] = _find("core", "trace_state_clean", bool)

# jax._src.sharding_impls.SPMDAxisContext: how a program is lowered within shard_map and pmap. Without it, a
# collective there fails with JAX's own error instead of our explanation.
SPMDAxisContext: Any = _find("sharding_impls", "SPMDAxisContext", ())

# jax._src.callback._callback_op_sharding: lets a program for several devices of this process call Python
# once, with whole arrays. Without it, such programs are refused.
one_device_of: Callable[..., Any] | None = _find("callback", "_callback_op_sharding")


# jax._src.interpreters.pxla._cached_lowering_to_hlo: where JAX lowers a recorded program. See ``programs``.
# Without it, JAX's Python code starts programs with exchanges.
def lowering_to_hlo() -> Callable[..., Any] | None:
    """Return JAX's function that lowers a program, or None if it is unknown."""
    return _find("interpreters.pxla", "_cached_lowering_to_hlo")


def replace_lowering_to_hlo(function: Callable[..., Any]) -> None:
    """Make JAX lower programs with ``function``."""
    vars(import_module("jax._src.interpreters.pxla"))["_cached_lowering_to_hlo"] = function
