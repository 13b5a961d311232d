"""Leave the job and join it again with other settings, within one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import ringdance.numpy as hvd


@contextmanager
def other_settings(environ: dict[str, str]) -> Iterator[None]:
    """Run the block as a job with these settings, and restore the usual ones afterwards."""
    hvd.shutdown()
    os.environ.update(environ)
    hvd.init()
    try:
        yield
    finally:
        hvd.shutdown()
        for name in environ:
            del os.environ[name]
        hvd.init()
