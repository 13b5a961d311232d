"""Decide what can be tuned in a job and which values to try.

In addition to the engine's values, the tuner can change the values that a binding adds to ``tunables``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ringdance.training.tuning.search import Dimension

_CYCLES = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0)
_SKIPS = {"overlap": 4}  # Number of steps until gradients can take the fast path again after a change.


class Tunable(NamedTuple):
    """A value in this process that can be changed between two steps.

    Attributes:
        get: Returns the value (a number), or None if this process cannot change it.
        set: Changes the value from the next step on. Called on the thread that ends a step.
        most: Returns the largest value to try.
    """

    get: Callable[[], int | None]
    set: Callable[[int], None]
    most: Callable[[], int]


tunables: dict[str, Tunable] = {}
"""Tunables by name: ``overlap`` (0 or 1) and ``threads``."""


def dimensions_of(
    answers: Sequence[Mapping[str, Any]], file: Mapping[str, float], largest: tuple[int, int, int],
    rooms: Mapping[str, int], small: int, hosts: bool,
) -> list[Dimension]:
    """Return the dimensions to tune, the most effective first. The result is the same on all ranks.

    Each dimension starts with the job's current value, even if that is not one of the usual values.

    Args:
        answers: Each rank's answer (see ``Autotuner._hello``). Rank 0's settings apply to all ranks.
        file: Values from the file that was passed as ``--tuned``.
        largest: Largest number of all-reduces and of bytes in a round, and of bytes in a batch, so far.
        rooms: Upper bounds, in bytes, for ``chunk_bytes`` and ``wire_bytes``.
        small: Maximum size, in bytes, of batches that are not split.
        hosts: True if the stage within hosts can be skipped.
    """
    requests, in_round, in_batch = largest
    job = answers[0]["values"]
    now = {**job, "hierarchical": not job["flat"], **file}
    dimensions = []
    if requests > 1 and in_round:
        whole, start = 1 << (in_round - 1).bit_length(), now["fusion_threshold"]
        dimensions.append(_dimension("fusion_threshold", _sizes(1 << 16, whole, start), start, whole))
    for name, most in rooms.items():
        if now[name] and in_batch > max(small, 1 << 15):
            grid = _sizes(max(small, 1 << 14), 1 << (in_batch - 1).bit_length(), now[name])
            dimensions.append(_dimension(name, [size for size in grid if size <= most], now[name], 384 << 10))
    if hosts:
        dimensions.append(_dimension("hierarchical", (0, 1), now["hierarchical"], 1))
    for name in ("overlap", "threads"):
        settings = [what["tunables"].get(name, [None, 0]) for what in answers]
        if any(current is None for current, _ in settings):
            continue
        # A single value for all ranks replaces each rank's own value, which may differ.
        start = file.get(name, min(current for current, _ in settings))
        most = max(start, min(most for _, most in settings))
        powers = (0, 1) if name == "overlap" else (*_powers(1, int(most)), most)
        dimensions.append(_dimension(name, powers, start, most, of_exchange=name == "overlap"))
    if any(what["eager"] for what in answers):
        dimensions.append(_dimension("cycle_time", _CYCLES, now["cycle_time"], 1.0))
    return [dim for dim in dimensions if len(dim.values) > 1 and dim.name not in answers[0]["fixed"]]


def _powers(least: int, most: int) -> tuple[int, ...]:
    return tuple(1 << n for n in range(least.bit_length() - 1, most.bit_length()) if least <= 1 << n <= most)


def _sizes(least: int, whole: int, start: float) -> tuple[int, ...]:
    """Return the sizes to try. Sizes from ``whole`` up are equivalent, so ``start`` can stand for them."""
    return tuple(size for size in _powers(least, whole) if size < whole or start < whole)


def _dimension(
    name: str, grid: Sequence[float], start: float, usual: float, of_exchange: bool = True
) -> Dimension:
    values = tuple(sorted({*grid, start}))
    toward = 1 if start < usual or start == values[0] else -1
    near = min(range(len(values)), key=lambda at: abs(values[at] - usual))
    known = near if len(values) > 2 and of_exchange else None
    return Dimension(name, values, values.index(start), toward, _SKIPS.get(name, 1), of_exchange, known)
