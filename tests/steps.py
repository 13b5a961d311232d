"""Count the steps that optimizers mark, apart from those of other tests in the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ringdance import session
from ringdance.core.recorder import Recorder
from ringdance.core.ring import Word


@contextmanager
def counting_steps() -> Iterator[Callable[[], int]]:
    """Give a function that returns the number of steps since the beginning of the block."""
    engine = session.engine()
    kept, engine.recorder = engine.recorder, Recorder(8, "")
    words = engine.recorder.words
    try:
        yield lambda: words[Word.STEPS]
    finally:
        engine.recorder = kept
