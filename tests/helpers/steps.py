"""Count the steps that optimizers mark, and gradient exchanges, separately from other tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from ringdance.core.recorder import Recorder
from ringdance.core.ring import Word
from ringdance.training import session
from ringdance.training.gradients.exchange import GradientExchange


@contextmanager
def counting_steps() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the number of steps since the start of the block."""
    engine = session.engine()
    kept, engine.recorder = engine.recorder, Recorder()
    words = engine.recorder.words
    try:
        yield lambda: words[Word.STEPS]
    finally:
        engine.recorder = kept


@contextmanager
def counting_exchanges() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the number of gradient exchanges since the start of the block."""
    number, exchange = 0, GradientExchange._exchange

    def counted(self: GradientExchange) -> None:
        nonlocal number
        number += 1
        exchange(self)

    with patch.object(GradientExchange, "_exchange", counted):
        yield lambda: number
