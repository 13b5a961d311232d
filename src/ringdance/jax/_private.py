"""Private names of JAX that the binding uses: why, and what happens without each.

Seen in JAX 0.6 to 0.12. Each is looked up when this module is imported; where one is missing, the way
without it is taken, which the tests try too.
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


# jax._src.effects: an ordered effect keeps exchanges in the order in which they are written, and keeps
# those whose results are not used. Without it programs exchange by jax.experimental.io_callback.
_SETS = (
    "ordered_effects", "shardable_ordered_effects", "lowerable_effects", "control_flow_allowed_effects",
    "custom_derivatives_allowed_effects", "remat_allowed_effects",
)


def _declare_effect() -> Any:
    base, sets = _find("effects", "Effect"), [_find("effects", name) for name in _SETS]
    if base is None or not all(hasattr(one, "add_type") for one in sets):
        return None
    kind = type("ExchangeEffect", (base,), {"__str__": lambda self: "RingdanceExchange"})
    for one in sets:
        one.add_type(kind)
    return kind()


EFFECT = _declare_effect()

# jax._src.core.abstract_token: the type of what an ordered effect passes from one operation to the next,
# for XLA's foreign function interface. Without it programs call Python with arrays.
abstract_token: Any = _find("core", "abstract_token")

# jax._src.dispatch.runtime_tokens: what the next program of this thread waits for. After an exchange has
# failed in a program with tokens, later ones fail too until these are dropped; without this name, for ever.
drop_tokens: Callable[[], Any] = getattr(_find("dispatch", "runtime_tokens"), "clear", int)

# jax._src.core.trace_state_clean: whether JAX traces nothing at all, at once. Without it calls outside of
# programs take some microseconds longer to find that out.
no_trace: Callable[[], bool] = _find("core", "trace_state_clean", bool)

# jax._src.sharding_impls.SPMDAxisContext: how a program is lowered within shard_map and pmap. Without it a
# collective there is not refused with an explanation, but fails in JAX's own way.
SPMDAxisContext: Any = _find("sharding_impls", "SPMDAxisContext", ())

# jax._src.callback._callback_op_sharding: lets a program for several devices of this process call Python
# once, with whole arrays. Without it such programs are refused.
one_device_of: Callable[..., Any] | None = _find("callback", "_callback_op_sharding")


# jax._src.interpreters.pxla._cached_lowering_to_hlo: where JAX lowers a recorded program; see ``programs``.
# Without it programs with exchanges are started by JAX's Python code.
def lowering_to_hlo() -> Callable[..., Any] | None:
    """Return JAX's function that lowers a program, None if it is unknown."""
    return _find("interpreters.pxla", "_cached_lowering_to_hlo")


def replace_lowering_to_hlo(function: Callable[..., Any]) -> None:
    """Let JAX lower programs by ``function``."""
    vars(import_module("jax._src.interpreters.pxla"))["_cached_lowering_to_hlo"] = function
