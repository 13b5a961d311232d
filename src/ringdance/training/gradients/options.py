"""Check the arguments of distributed optimizers, for all bindings."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ringdance.core.request import ReduceOp
from ringdance.errors import ArgumentError
from ringdance.host.limits import shared_cores
from ringdance.training import session

if TYPE_CHECKING:
    from ringdance.core.engine import Engine


def share_of_cores() -> int:
    """Return the number of threads for this rank: ``OMP_NUM_THREADS``, or its share of the cores."""
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(threads) if threads.isdigit() and int(threads) else max(1, own_cores())


def own_cores() -> int:
    """Return this rank's share of the usable cores, which may be 0. Before ``init()``, return all of them."""
    return shared_cores(session.engine().local_pids if session.is_initialized() else ())


def wants_overlap(engine: Engine, threads: int) -> bool:
    """Return True if this rank, computing with ``threads`` threads, should exchange while it computes."""
    wanted = engine.settings.overlap
    return wanted == "on" or (wanted == "auto" and shared_cores(engine.local_pids) > threads)


def check_passes(passes: int) -> None:
    """Raise ArgumentError for a wrong ``backward_passes_per_step``."""
    if passes <= 0:
        raise ArgumentError(f"backward_passes_per_step must be at least 1, got {passes}.")


class UseOrder:
    """Numbers objects that would have the same name, in the order of their first use since ``init()``."""

    def __init__(self) -> None:
        self._known: dict[Any, list[tuple[weakref.ref[Any], threading.Thread, set[threading.Thread]]]] = {}
        self._lock = threading.Lock()
        session.at_init(self._known.clear)  # A rank that failed may have numbered more objects than others.

    def number(self, key: Any, owner: Any) -> int:
        """Return the number of ``owner`` among the owners with this key, from 0. Keeps a weak reference.

        Raises:
            ArgumentError: Threads that run in parallel use several owners, so the order may differ by rank.
        """
        thread = threading.current_thread()
        with self._lock:
            known = self._known.setdefault(key, [])
            for number, (user, *_) in enumerate(known):
                if user() is owner:
                    return number
            if any(user() is not None and _uncertain(thread, first, there) for user, first, there in known):
                raise ArgumentError(
                    f"Two threads reduce the gradients of equal models ({key}), possibly in another order on "
                    "other ranks. Pass a unique name= to each DistributedOptimizer or tape."
                )
            known.append((weakref.ref(owner), thread, set(threading.enumerate())))
            return len(known) - 1


def _uncertain(thread: threading.Thread, user: threading.Thread, there: set[threading.Thread]) -> bool:
    """Return True if ``thread`` may be first on other ranks. ``there``: threads alive at ``user``'s use."""
    # A thread that was started later comes second on all ranks. So does the main thread after joining others.
    return user is not thread in there and (user.is_alive() or thread is not threading.main_thread())


def pattern_of(kinds: Sequence[str]) -> str:
    """Return the gradients that a step has, as text that the ranks compare, or "" if all are dense.

    Args:
        kinds: "dense", "rows" or "none" for each variable.
    """
    by_kind = {kind: [at for at, value in enumerate(kinds) if value == kind] for kind in ("none", "rows")}
    return "; ".join(
        f"{kind} for variable {', '.join(map(str, numbers))} (of {len(kinds)})"
        for kind, numbers in by_kind.items() if numbers
    )


def scales_of(operation: ReduceOp, predivide: float) -> tuple[float, float]:
    """Return pre- and postscale for ``gradient_predivide_factor``, a divisor before the sum."""
    if predivide == 1.0:
        return 1.0, 1.0
    if operation is not ReduceOp.AVERAGE:
        raise ArgumentError("gradient_predivide_factor needs op=Average.")
    return 1.0 / predivide, predivide


def reduce_shared(
    reduce: Callable[[list[Any], list[Any]], list[Any]], gradients: Sequence[Any], variables: Sequence[Any],
    is_local: Callable[[Any], bool], local_factor: float, factor: float = 1.0,
) -> list[Any]:
    """Reduce gradients. Gradients of local variables stay this rank's own.

    Args:
        reduce: Reduces a list of gradients, called with their variables.
        gradients: Tensors, ``tf.IndexedSlices`` or ``None``.
        variables: One variable for each gradient.
        is_local: Returns True for a local variable.
        local_factor: Factor for gradients of local variables.
        factor: Factor for reduced gradients.
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


def check_groups(
    groups: Any, order: Sequence[int], index_of: Callable[[Any], int | None]
) -> list[tuple[int, ...]]:
    """Return groups of parameter indices from a user's ``groups`` argument.

    Args:
        groups: ``None``, a positive number, or lists of parameters.
        order: Indices of the parameters that are trained.
        index_of: Returns the index of a parameter, or ``None`` if the optimizer does not have it.

    Raises:
        ArgumentError: ``groups`` has another type, or a parameter of the optimizer appears twice.
    """
    if groups is None or groups == 0:
        return []
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        return [tuple(part.tolist()) for part in np.array_split(np.array(order, int), groups) if len(part)]
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, Iterable) for group in groups):
        raise ArgumentError(f"groups={groups!r} must be a positive number or a list of lists of parameters.")
    result: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for group in groups:
        # Parameters that the optimizer does not have are skipped, as with named_parameters.
        members = tuple(index for index in map(index_of, group) if index is not None)
        if len(set(members)) != len(members) or seen.intersection(members):
            raise ArgumentError("groups: a parameter may appear in one group only, and only once.")
        seen.update(members)
        if members:
            result.append(members)
    return result
