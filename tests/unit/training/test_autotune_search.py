"""The search for the fastest values, on made-up costs with noise. Seeds are fixed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from ringdance.training.tuning.search import Dimension, Measured, Outcome, Point, Search

CHUNKS = tuple(1 << n for n in range(14, 23))
GRID = (
    Dimension("chunk_bytes", CHUNKS, 0),
    Dimension("fusion_threshold", CHUNKS, 8),
    Dimension("overlap", (0, 1), 0, skip=4),
)


def cost(point: Point) -> float:
    """Chunks are best at 256K, overlap saves a tenth, and batches do not matter."""
    return 1.0 + 0.06 * (point[0] - 4) ** 2 + 0.1 * (1 - point[2])


def search(
    start: Point, noise: float, seed: int, cost: Callable[[Point], float] = cost, exposed: float = 0.5,
    drift: float = 0.0, slow: int = 0, other: float = 0.0,
) -> tuple[Search, Outcome, float]:
    """Run a search. Also returns its extra cost compared with the start, in steps with the start's values.

    Step times vary by ``noise``, and their level drifts by ``drift`` from step to step. In each step, a tenth
    of the drift wears off. The first ``slow`` steps take three times as long. If ``other`` (seconds per step)
    is set, another program uses a core every other second, and steps then take twice as long.
    """
    luck, extra, level, made = random.Random(seed), 0.0, 0.0, 0
    now = 2 * luck.random()
    search_ = Search([replace(one, start=at) for one, at in zip(GRID, start, strict=True)])
    run = search_.run()
    trial = next(run)
    while True:
        quick = cost(trial.point)
        extra += (trial.skip + trial.steps) * (quick / cost(start) - 1)
        times = []
        for _ in range(trial.skip + trial.steps):
            made += 1
            level = 0.9 * level + luck.gauss(0, drift)
            time = quick * luck.lognormvariate(0, noise) * (1 + max(-0.3, level)) * (3 if made <= slow else 1)
            end, left = now, time * other
            while left > 0:  # until the other program starts or stops
                pace = 2 if end % 2 < 1 else 1
                part = min(left * pace, 1 - end % 1 + 1e-9)
                end, left = end + part, left - part / pace
            times.append((end - now) / other if other else time)
            now = end
        del times[: trial.skip]
        if luck.random() < 0.2:  # other programs take the cores for a moment
            times[luck.randrange(len(times))] *= 3
        try:
            trial = run.send(Measured(times, exposed))
        except StopIteration as end:
            return search_, end.value, extra


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_from_bad_values_it_reaches_the_best(noise: float) -> None:
    shares, right = [], 0
    for seed in range(20):
        finished, outcome, _ = search((0, 0, 0), noise, seed)
        assert finished.used <= 275
        shares.append(cost((4, 0, 1)) / cost(outcome.point))
        true = 1 - cost(outcome.point) / cost((0, 0, 0))
        right += abs(outcome.gain - true) <= outcome.error
    assert right >= 18
    assert sum(share >= 0.95 for share in shares) >= 18
    assert min(shares) > 0.85


def test_usual_values_win_though_each_by_itself_is_hidden_by_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.GRID", tuple(replace(dimension, usual=4) for dimension in GRID[:2]))

    def small(point: Point) -> float:
        return 1.0 + 0.01 * sum(abs(at - 4) for at in point)

    points = [search((0, 0), 0.03, seed, small)[1].point for seed in range(20)]
    assert sum(1 / small(point) >= 0.95 for point in points) >= 18


def test_from_good_values_it_costs_little_and_stays() -> None:
    outcomes = [search((4, 4, 1), 0.02, seed) for seed in range(20)]
    assert median(extra for *_, extra in outcomes) < 0.03 * 200
    assert median(found.used for found, *_ in outcomes) < 80
    assert all(outcome.point[0] == 4 and outcome.point[2] == 1 for _, outcome, _ in outcomes)
    assert all(outcome.gain == 0.0 for _, outcome, _ in outcomes if outcome.point == (4, 4, 1))


def test_a_drifting_machine_is_hardly_taken_for_a_gain() -> None:
    outcomes = [search((4, 4, 1), 0.1, seed, drift=0.03)[1] for seed in range(120)]
    assert sum(outcome.gain > 0 for outcome in outcomes) <= 6


NOISE: list[dict[str, float]] = [
    {"slow": 15}, {"slow": 22}, {"slow": 100}, *({"other": step} for step in (0.005, 0.02, 0.1, 0.2, 0.35))
]  # fmt: skip


@pytest.mark.parametrize("noise", NOISE, ids=str)
def test_equal_settings_are_not_a_gain(noise: dict[str, float]) -> None:
    """Slow first steps, or another program that runs half of the time, must not look like a gain."""
    options: Any = noise
    outcomes = [search((4, 4, 1), 0.03, seed, lambda point: 1.0, **options)[1] for seed in range(150)]
    assert sum(outcome.gain > 0 for outcome in outcomes) <= 3


@pytest.mark.parametrize("noise", [{"slow": 22}, {"other": 0.02}], ids=str)
def test_nor_do_they_hide_one(noise: dict[str, float]) -> None:
    options: Any = noise
    outcomes = [search((0, 0, 0), 0.03, seed, **options)[1] for seed in range(40)]
    assert sum(outcome.gain > 0.3 for outcome in outcomes) >= 30
    for outcome in outcomes:
        assert outcome.gain == pytest.approx(1 - cost(outcome.point) / cost((0, 0, 0)), abs=0.2)


def test_a_dimension_that_does_not_matter_is_given_up() -> None:
    finished, outcome, _ = search((4, 4, 1), 0.01, 1, lambda point: 1.0)
    assert outcome.point == (4, 4, 1)
    assert finished.used < 120  # dimensions without an effect are not visited again
    assert {point[1] for point, *_ in finished.history} <= {2, 4, 6}


def test_where_training_does_not_wait_no_exchange_is_tuned() -> None:
    finished, outcome, extra = search((0, 8, 0), 0.05, 1, exposed=0.01)
    assert len(finished.history) == 1
    assert outcome == Outcome((0, 8, 0))
    assert extra == 0


def test_a_gain_that_does_not_last_is_undone() -> None:
    """The machine becomes faster on its own while another value is tried."""
    seen = 0

    def quicker(point: Point) -> float:
        nonlocal seen
        seen += 1
        return 1.0 if seen < 5 else 0.7

    _, outcome, _ = search((4, 4, 1), 0.01, 3, quicker)
    assert outcome == Outcome((4, 4, 1))


def test_the_same_times_lead_to_the_same_end() -> None:
    first, second = (search((0, 8, 0), 0.1, 7) for _ in range(2))
    assert first[0].history == second[0].history
    assert first[1] == second[1]
