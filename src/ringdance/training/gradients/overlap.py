"""Let the tuner choose whether exchanges overlap with backward passes."""

from __future__ import annotations

from ringdance.training import session
from ringdance.training.gradients.exchange import GradientExchange, exchanges
from ringdance.training.tuning.dimensions import Tunable


def _of_all_ranks() -> list[GradientExchange]:
    engine = session.engine()
    return [exchange for exchange in list(exchanges) if exchange.engine is engine and exchange.set_id == 0]


def _overlaps() -> int | None:
    """Return 1 if this rank's exchanges over the global process set should overlap with the backward pass.

    Return 0 if they should not, or None if the tuner cannot change this.
    """
    ours = _of_all_ranks()
    free = all(item.early and item.passes == 1 and not item.source.on_device for item in ours)
    if not ours or not free or ours[0].engine.settings.overlap != "auto":
        return None
    return int(any(exchange.wants_overlap for exchange in ours))


def _set_overlap(value: int) -> None:
    for exchange in _of_all_ranks():
        if exchange.early and not exchange.source.on_device:
            exchange.choose_overlap(bool(value))


OVERLAP = Tunable(_overlaps, _set_overlap, lambda: 1)
"""1 if all gradient exchanges over the global process set overlap with the backward pass, otherwise 0."""
