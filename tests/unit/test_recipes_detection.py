"""The batches and presets of the detection recipe, which need no framework."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ringdance.recipes.detection
from ringdance.recipes.detection import presets
from ringdance.recipes.detection.batches import EpochSteps, Part
from ringdance.training.schedules import Schedule

RATIOS = np.random.RandomState(0).uniform(0.4, 2.5, 101)


def steps(size: int, done: int = 0, epoch: int = 3, batch_size: int = 4) -> list[list[Part]]:
    """Return the parts of all ranks, step by step."""
    plans = [EpochSteps(RATIOS, batch_size, 7, epoch, rank, size, done) for rank in range(size)]
    assert len({len(plan) for plan in plans}) == 1
    return [list(parts) for parts in zip(*plans, strict=True)]


def used(parts: list[list[Part]]) -> list[int]:
    return [number for step in parts for part in step if part.weight for number in part.numbers]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_each_image_is_used_once_among_those_of_its_orientation(size: int) -> None:
    all_steps = steps(size)
    assert sorted(used(all_steps)) == list(range(len(RATIOS)))
    for step in all_steps:
        count = sum(len(part.numbers) for part in step if part.weight)
        assert {(part.count, part.position) for part in step} == {(count, step[0].position)}
        assert sum(part.weight for part in step) == pytest.approx(size), "weights must give the overall mean"
        for part in step:
            assert len({bool(RATIOS[number] >= 1) for number in part.numbers}) == 1
    assert all_steps[-1][0].position == EpochSteps(RATIOS, 4, 7, 3, 0, size).end == len(RATIOS)
    assert used(steps(size, epoch=4)) != used(all_steps)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (5, 2)])
def test_another_number_of_ranks_uses_what_is_left(before: int, after: int) -> None:
    first = steps(before)[:3]
    rest = steps(after, first[-1][0].position)
    assert sorted(used(first) + used(rest)) == list(range(len(RATIOS)))
    assert steps(after, len(RATIOS)) == []


def test_a_rank_without_images_takes_part_with_weight_0() -> None:
    parts = [next(iter(EpochSteps(np.ones(2), 1, 0, 0, rank, 3))) for rank in range(3)]
    assert [part.weight for part in parts] == [1.5, 1.5, 0]
    assert all(len(part.numbers) == 1 for part in parts)


def test_presets_are_complete() -> None:
    for name, one in presets.PRESETS.items():
        assert one.source, name
        assert one.expected, name
        assert all(0 < epoch < one.epochs for epoch in one.milestones), name
        Schedule(one.rate, one.epochs, "step" if one.milestones else "cosine", 0, milestones=one.milestones)
        if name.startswith("mlperf-"):
            assert one.batch_size * one.devices == int(name.removeprefix("mlperf-")), name
            assert one.rate == pytest.approx(0.00125 * min(128, one.batch_size * one.devices), rel=0.51), name


def test_the_page_has_the_table_of_the_presets() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tutorials" / "detection.md").read_text()
    rows = []
    for name, p in presets.PRESETS.items():
        decays = f"a tenth at {', '.join(f'{epoch:.3g}' for epoch in p.milestones)}"
        rows.append(
            f"| `{name}` | {p.batch_size * p.devices} = {p.devices} × {p.batch_size} | "
            f"{p.optimizer}, {p.rate:g} | {p.epochs:g}: {decays if p.milestones else 'cosine'} "
            f"({p.warmup_steps}) | {p.expected} |\n"
        )
    assert "".join(rows) in page


def test_what_goes_with_an_option() -> None:
    options = Namespace(epochs=13, batch_size=4, image_size=400)
    preset = presets.PRESETS["8xV100"].overridden(options)
    assert preset.milestones == (8.5, 11.5)
    assert (preset.longest, preset.rate) == (666, 0.04)
    assert preset.rate_for(4 * 16) == 0.08


def test_without_torchvision_a_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    directory = str(Path(ringdance.recipes.detection.__file__).parent)
    monkeypatch.syspath_prepend(directory)
    hidden: Any = None  # Python's way to mark a module that cannot be imported
    monkeypatch.setitem(sys.modules, "torchvision", hidden)
    for name in ("train", "coco", "batches", "presets"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SystemExit, match=r"requires faster-coco-eval.*pip install torchvision"):
        __import__("train")
    for name in ("coco", "batches", "presets"):
        sys.modules.pop(name, None)
