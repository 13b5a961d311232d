"""Reduce the gradients of a step as one list. Used by the bindings for TensorFlow, Keras and JAX.

The ranks match the lists of several optimizers or tapes by name (``UseOrder``), and check that all ranks have
the same gradients (``pattern_of``). Gradients of local variables are not exchanged (``reduce_shared``).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ringdance.errors import ArgumentError
from ringdance.training import session


class UseOrder:
    """Numbers objects that would otherwise share a name, in the order of their first use since ``init()``."""

    def __init__(self) -> None:
        self._known: dict[Any, list[tuple[weakref.ref[Any], threading.Thread, set[threading.Thread]]]] = {}
        self._lock = threading.Lock()
        session.at_init(self._known.clear)  # After a failure, the ranks' numberings may no longer agree.

    def number(self, key: Any, owner: Any) -> int:
        """Return the number, from 0, of ``owner`` among the owners with this key. Keeps a weak reference.

        Raises:
            ArgumentError: Parallel threads use several owners, so their order may differ between ranks.
        """
        thread = threading.current_thread()
        with self._lock:
            known = self._known.setdefault(key, [])
            for number, (user, *_) in enumerate(known):
                if user() is owner:
                    return number
            if any(user() is not None and _uncertain(thread, first, there) for user, first, there in known):
                raise ArgumentError(
                    f"Two threads reduce the gradients of identical models ({key}), but other ranks may use "
                    "a different order. Pass a unique name= to each DistributedOptimizer or tape."
                )
            known.append((weakref.ref(owner), thread, set(threading.enumerate())))
            return len(known) - 1


def _uncertain(thread: threading.Thread, user: threading.Thread, there: set[threading.Thread]) -> bool:
    """Return True if ``thread`` may come before ``user`` on other ranks.

    ``there`` contains the threads that were alive when ``user`` first used its owner.
    """
    # A thread that starts later comes second on all ranks, as does the main thread after joining others.
    return user is not thread in there and (user.is_alive() or thread is not threading.main_thread())


def pattern_of(kinds: Sequence[str]) -> str:
    """Return text that describes a step's gradients, to compare between ranks, or "" if all are dense.

    Args:
        kinds: "dense", "rows" or "none" for each variable.
    """
    by_kind = {kind: [at for at, value in enumerate(kinds) if value == kind] for kind in ("none", "rows")}
    return "; ".join(
        f"{kind} for variable {', '.join(map(str, numbers))} (of {len(kinds)})"
        for kind, numbers in by_kind.items() if numbers
    )


def reduce_shared(
    reduce: Callable[[list[Any], list[Any]], list[Any]], gradients: Sequence[Any], variables: Sequence[Any],
    is_local: Callable[[Any], bool], local_factor: float, factor: float = 1.0,
) -> list[Any]:
    """Reduce gradients over the ranks, except those for local variables, which this rank keeps.

    Args:
        reduce: Function that reduces a list of gradients. Called with the gradients and their variables.
        gradients: Tensors, ``tf.IndexedSlices`` or ``None``.
        variables: One variable for each gradient.
        is_local: Function that returns True for a local variable.
        local_factor: Factor by which to multiply the gradients of local variables.
        factor: Factor by which to multiply the reduced gradients.
    """
    local = [is_local(variable) for variable in variables]
    shared = [index for index, here in enumerate(local) if not here]
    reduced = iter(reduce([gradients[index] for index in shared], [variables[index] for index in shared]))
    return [
        _times(gradient, local_factor) if here else _times(next(reduced), factor)
        for gradient, here in zip(gradients, local, strict=True)
    ]


def _times(gradient: Any, factor: float) -> Any:
    if gradient is None or factor == 1.0:
        return gradient
    if hasattr(gradient, "indices") and hasattr(gradient, "dense_shape"):  # tf.IndexedSlices
        return type(gradient)(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor
