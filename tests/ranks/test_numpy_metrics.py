"""The metrics that a script can query."""

from __future__ import annotations

import time

import numpy as np
import pytest

import ringdance.numpy as hvd


@pytest.mark.ranks(1, 3)
def test_metrics_count_what_this_rank_has_done() -> None:
    before = hvd.metrics()
    assert (before["rank"], before["size"]) == (hvd.rank(), hvd.size())
    for _ in range(20):
        time.sleep(0.005)
        hvd.allreduce(np.ones(1000, np.float32), name="metrics")
        hvd.mark_step()
    after = hvd.metrics()
    done = {name: after[name] - before[name] for name in ("steps", "batches", "tensors", "bytes")}
    if hvd.size() == 1:
        assert done["steps"] == 20
    else:
        assert done == {"steps": 20, "batches": 20, "tensors": 20, "bytes": 80_000}
        assert after["exposed_seconds"] > before["exposed_seconds"]
        assert 0 < after["recent_exposed_share"] <= 1
    assert 0 < after["recent_steps_per_second"] < 1 / 0.005
    assert 0 < after["steps_per_second"] < 1 / 0.005
    time.sleep(0.01)
    idle = hvd.metrics()
    assert idle["recent_steps_per_second"] == 0
    assert idle["seconds"] > after["seconds"]
    assert {name: idle[name] for name in done} == {name: after[name] for name in done}
