"""Waiting times appear in torch.profiler while it runs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch_nets import Net, loss_of, sgd

import ringdance.torch as hvd
from ringdance.training import session

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
PREFIX = "ringdance WAIT "


@pytest.mark.ranks(2, 3, 4)
def test_waits_are_spans(tmp_path: Path) -> None:
    directory = Path(hvd.broadcast_object(str(tmp_path), 0))
    net = Net()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters())
    hvd.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        rank_0_waits_first(directory / "late")
        hvd.allreduce(torch.ones(3), name="late")
        hvd.allreduce(torch.ones(3))
        rank_0_waits_first(directory / "gradients")
        loss_of(net, 0, RANK).backward()
        optimizer.step()
    hvd.allreduce(torch.ones(3), name="later")
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = {event["name"]: event["dur"] for event in events if event.get("name", "").startswith(PREFIX)}
    assert {f"{PREFIX}allreduce.late", f"{PREFIX}allreduce.noname"} < set(spans)
    assert f"{PREFIX}allreduce.later" not in spans
    if RANK == 0:
        assert spans[f"{PREFIX}allreduce.late"] > 0.1e6
        # It waits for the list of rank 1's gradients, and perhaps for the gradients, too.
        assert any("gradients of " in name for name in spans)
    rows = {average.key for average in profiler.key_averages()}
    assert set(spans) <= rows


def rank_0_waits_first(mark: Path) -> None:
    """Return at once on rank 0, and on the others after rank 0 has waited for them for 0.2 s."""
    if RANK == 0:
        Thread(target=make_when_waiting, args=[mark]).start()
        return
    while not mark.exists():
        time.sleep(0.01)
    time.sleep(0.2)


def make_when_waiting(mark: Path) -> None:
    while not session.engine().callers.waiting:
        time.sleep(0.01)
    mark.touch()


def test_without_the_private_name(monkeypatch: pytest.MonkeyPatch) -> None:
    running = session.engine().profilers[0].running
    assert not running()
    monkeypatch.delattr(torch.autograd.profiler, "_is_profiler_enabled")
    assert running()
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [SIZE] * 2
