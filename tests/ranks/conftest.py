"""Lets the rank tests import the helpers in the folder above, and run again with other settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

WAYS = {
    "window": {},
    "tiny": {"RINGDANCE_PIECE_BYTES": "4096", "RINGDANCE_SMALL_BYTES": "64"},
    "messages": {"RINGDANCE_WINDOW": "0"},
    "tiny-messages": {"RINGDANCE_WINDOW": "0", "RINGDANCE_PIECE_BYTES": "4096", "RINGDANCE_SMALL_BYTES": "64"},
}


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """How bytes move: shared memory or MPI's messages, pieces of usual size or tiny ones."""
    with settings_of(WAYS[request.param]):
        yield request.param


class settings_of:  # noqa: N801
    """Leave the job, join it again with some settings; afterwards again with the usual ones."""

    def __init__(self, environ: dict[str, str]) -> None:
        self.environ = environ

    def __enter__(self) -> None:
        self.again(self.environ)

    def __exit__(self, *raised: object) -> None:
        for name in self.environ:
            del os.environ[name]
        self.again({})

    @staticmethod
    def again(environ: dict[str, str]) -> None:
        import ringdance.numpy as hvd

        hvd.shutdown()
        os.environ.update(environ)
        hvd.init()
