"""Random programs of torch.distributed calls, compared with gloo: see ``torch_programs``."""

from __future__ import annotations

import itertools
import os
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sampled import sampled
from torch_programs import GLOO_DTYPES, Interpreter, Step, differences, program

import ringdance.torch as hvd
from ringdance.training.torch_entry_point import register

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")]


@pytest.fixture(scope="module")
def gloo() -> dict[tuple[int, ...], Any]:
    """Return gloo's groups by their ranks."""
    register()
    hvd.init()
    if not dist.is_initialized():
        path = hvd.broadcast_object(os.path.join(tempfile.mkdtemp(), "store") if hvd.rank() == 0 else None)
        store = dist.FileStore(path, hvd.size())
        dist.init_process_group("ringdance", store=store, rank=hvd.rank(), world_size=hvd.size())
    sizes = range(1, hvd.size() + 1)
    subsets = [ranks for size in sizes for ranks in itertools.combinations(range(hvd.size()), size)]
    return {members: dist.new_group(list(members), backend="gloo") for members in subsets}


def _known_to_gloo(step: Step) -> bool:
    valid = step.fault in ("", "late") and step.kind not in ("functional", "coalesced", "destroy")
    known = step.dtype in GLOO_DTYPES and step.operation in ("SUM", "MIN", "MAX", "PRODUCT")
    return valid and known and step.layout == "plain"


def _run(seed: int, gloo: dict[tuple[int, ...], Any]) -> list[str]:
    steps = program(seed, hvd.size())
    ours = Interpreter(dist.group.WORLD, lambda members: dist.new_group(list(members)))
    results = ours.run(steps)
    problems = differences(steps, results, hvd.rank())
    ours.close()
    theirs = Interpreter(gloo[tuple(range(hvd.size()))], gloo.__getitem__)
    valid = [step for step in steps if step.kind == "make" or _known_to_gloo(step)]
    problems += [f"gloo: {difference}" for difference in differences(valid, theirs.run(valid), hvd.rank())]
    everyone: list[Any] = [None] * hvd.size()
    dist.all_gather_object(everyone, problems, group=theirs.groups[0])
    return [f"seed {seed}: {problem}" for problems in everyone for problem in problems]


@pytest.mark.parametrize("first", sampled("programs of torch.distributed", range(20), 1))
def test_random_programs(first: int, gloo: dict[tuple[int, ...], Any]) -> None:
    """Results equal gloo's. A call that is wrong on one rank raises on all, and later calls still match."""
    problems = [problem for seed in range(15 * first, 15 * first + 15) for problem in _run(seed, gloo)]
    assert not problems, "\n".join(problems[:5])
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == hvd.size()
