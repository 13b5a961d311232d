"""Collect what the library warns of, for tests on ranks: its logger passes nothing on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def warned() -> Iterator[list[str]]:
    """Give a list to which this rank's warnings are added."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ringdance")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
