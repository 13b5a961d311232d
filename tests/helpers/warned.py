"""Collect the library's warnings in rank tests. Its logger does not propagate to pytest's handlers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def warned() -> Iterator[list[str]]:
    """Yield a list that receives this rank's warnings."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ringdance")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
