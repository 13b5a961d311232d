"""Waiting times appear in JAX's profiler while it runs."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import ringdance.jax as hvd

hvd.init()
PREFIX = "ringdance WAIT "


@pytest.mark.ranks(2, 3, 4)
def test_waits_are_spans(tmp_path: Path) -> None:
    in_jit = jax.jit(lambda x: hvd.allreduce(x, name="in_jit"))
    in_jit(jnp.ones(3)).block_until_ready()
    hvd.barrier()
    with jax.profiler.trace(str(tmp_path)):
        if hvd.rank():
            time.sleep(0.2)  # so that rank 0 waits
        in_jit(jnp.ones(3)).block_until_ready()
        hvd.allreduce(jnp.ones(3), name="at_once")
    hvd.allreduce(jnp.ones(3), name="later")
    (path,) = tmp_path.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    spans = {event["name"]: event["dur"] for event in events if event.get("name", "").startswith(PREFIX)}
    assert set(spans) == {f"{PREFIX}allreduce.in_jit", f"{PREFIX}allreduce.at_once"}
    if hvd.rank() == 0:
        assert spans[f"{PREFIX}allreduce.in_jit"] > 0.1e6
