"""What can be tuned in a job, and the values that are tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ringdance.training.tuning.search import Dimension

_CYCLES = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0)
_SKIPS = {"overlap": 4}  # steps until the gradients' fast path is open again


def dimensions_of(
    answers: Sequence[Mapping[str, Any]], file: Mapping[str, float], largest: tuple[int, int, int],
    rooms: Mapping[str, int], small: int, hosts: bool,
) -> list[Dimension]:
    """Return what can be tuned, in the order of its expected effect; the same on all ranks.

    Each begins with the value that the job has, whatever that is.

    Args:
        answers: what each rank has said of itself; the first one's settings are those of all.
        file: values that the job has from a file.
        largest: most all-reduces and bytes of a round, and bytes of a batch.
        rooms: bytes up to which ``chunk_bytes`` and ``wire_bytes`` can grow.
        small: bytes up to which a batch is not cut.
        hosts: whether the stage within hosts can be left out.
    """
    requests, in_round, in_batch = largest
    job = answers[0]["values"]
    now = {**job, "hierarchical": not job["flat"], **file}
    found = []
    if requests > 1 and in_round:
        whole, start = 1 << (in_round - 1).bit_length(), now["fusion_threshold"]
        found.append(_dimension("fusion_threshold", _sizes(1 << 16, whole, start), start, whole))
    for name, most in rooms.items():
        if now[name] and in_batch > max(small, 1 << 15):
            grid = _sizes(max(small, 1 << 14), 1 << (in_batch - 1).bit_length(), now[name])
            found.append(_dimension(name, [size for size in grid if size <= most], now[name], 384 << 10))
    if hosts:
        found.append(_dimension("hierarchical", (0, 1), now["hierarchical"], 1))
    for name in ("overlap", "threads"):
        given = [what["tunables"].get(name, [None, 0]) for what in answers]
        if any(current is None for current, _ in given):
            continue
        # In place of each rank's own, which may differ.
        start = file.get(name, min(current for current, _ in given))
        most = max(start, min(most for _, most in given))
        powers = (0, 1) if name == "overlap" else (*_powers(1, int(most)), most)
        found.append(_dimension(name, powers, start, most, of_exchange=name == "overlap"))
    if any(what["eager"] for what in answers):
        found.append(_dimension("cycle_time", _CYCLES, now["cycle_time"], 1.0))
    return [one for one in found if len(one.values) > 1 and one.name not in answers[0]["fixed"]]


def _powers(least: int, most: int) -> tuple[int, ...]:
    return tuple(1 << n for n in range(least.bit_length() - 1, most.bit_length()) if least <= 1 << n <= most)


def _sizes(least: int, whole: int, start: float) -> tuple[int, ...]:
    """Return sizes to be tried. From ``whole`` on all are the same: ``start`` is enough, if it is there."""
    return tuple(size for size in _powers(least, whole) if size < whole or start < whole)


def _dimension(
    name: str, grid: Sequence[float], start: float, usual: float, of_exchange: bool = True
) -> Dimension:
    values = tuple(sorted({*grid, start}))
    toward = 1 if start < usual or start == values[0] else -1
    near = min(range(len(values)), key=lambda at: abs(values[at] - usual))
    known = near if len(values) > 2 and of_exchange else None
    return Dimension(name, values, values.index(start), toward, _SKIPS.get(name, 1), of_exchange, known)
