"""NaN and infinities pass through every reduction, for any size, type, rank and data path."""

from __future__ import annotations

import numpy as np
import pytest
from loopback_job import job
from not_numbers import OPS, cases, check
from sampled import sampled

import ringdance.numpy as hvd
from ringdance.core.engine import Engine
from ringdance.settings import Settings

WAYS = [("aaa", True), ("aabb", True), ("abb", True), ("aabb", False)]


@pytest.mark.parametrize("way", sampled("not numbers", WAYS, 2), ids=str)
def test_max_min_and_sum(way: tuple[str, bool]) -> None:
    hosts, window = way
    table = list(cases(len(hosts), (1, 2, 33, 1000, 5000, 30_000)))

    def program(engine: Engine) -> None:
        for dtype, operation, culprit, inputs in table:
            with np.errstate(invalid="ignore"):
                got = hvd.allreduce(inputs[engine.rank], op=OPS[operation])
            check(got, inputs, operation, f"{operation} of {inputs[0].size} {dtype}, NaN on rank {culprit}")

    job(len(hosts), program, Settings(window=window, chunk_bytes=1 << 16), hosts=tuple(hosts))
