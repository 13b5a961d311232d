"""Search for the fastest values while a job trains, by coordinate descent on noisy step times.

The search is a pure function of the times that it receives. Ranks that pass the same times get the same
answers. So it uses no clock, no random numbers, and no function whose last bit depends on the machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import median
from typing import NamedTuple

Point = tuple[int, ...]  # an index into the values of each dimension

_PROBE = 2  # steps of the first look at a point
# Passes over the dimensions: strides through the values, and the maximum number of turns per comparison.
_PASSES = (((2,), 1), ((2, 1), 1), ((2, 1), 2))
_RECENT = 12  # only a point's latest steps count, because the machine's speed drifts
_LEAST_NOISE = 0.01  # share of a step's time that is assumed even if few steps show less
_WORTH = 0.02  # a smaller gain does not count
_CLEAR = 0.25  # a gain that does not need a second look
# Turns that decide without a contradiction, and with a single one. By chance this happens in 1% of cases.
_PAIRS = 8, 11
_TURN = 3  # steps of the start, and of the best point, per turn of the final comparison
_EXPOSED = 0.03  # share of a step that training waits, above which exchanges are worth tuning


@dataclass(frozen=True)
class Dimension:
    """One setting that can be tuned.

    Attributes:
        name: Name of the setting.
        values: Ascending if they are ordered. Along them, the step time falls and then rises.
        start: Index of the value with which the job starts.
        toward: Direction in which to look first, 1 or -1.
        skip: Steps to ignore after a change.
        of_exchange: True if a gain cannot exceed the time in which training waits for an exchange.
        usual: Index of the value that suits most jobs; None if unknown.
    """

    name: str
    values: tuple[float, ...]
    start: int
    toward: int = 1
    skip: int = 1
    of_exchange: bool = True
    usual: int | None = None


class Trial(NamedTuple):
    """The next trial: ``skip`` steps to ignore with the values of ``point``, then ``steps`` to measure."""

    point: Point
    skip: int
    steps: int


class Measured(NamedTuple):
    """The steps of a trial: seconds of each step, and the share of them in which training waited."""

    times: Sequence[float]
    exposed: float


class Estimate(NamedTuple):
    """The difference of two medians as a share of the first, and its standard error."""

    difference: float
    error: float


@dataclass
class Outcome:
    """Result of a search.

    Attributes:
        point: Values to continue with.
        gain: Share of a step's time that they save over those at the start; 0.0 if they are the same.
        error: Half the width of the gain's interval.
    """

    point: Point
    gain: float = 0.0
    error: float = 0.0


class Judgment(NamedTuple):
    """Result of comparing two settings in turns.

    Attributes:
        gained: True if the second is certainly faster, False if that cannot be said, None to take more turns.
        gain: Share of the first one's time that the second saves; median of the turns.
        error: Half the width of the gain's interval.
    """

    gained: bool | None
    gain: float = 0.0
    error: float = 0.0


def order(turn: int) -> tuple[int, int]:
    """Return which of two goes first in a turn, so that nothing periodic always meets the same one.

    This is the Thue-Morse sequence.
    """
    return (1, 0) if turn.bit_count() % 2 else (0, 1)


def judge(turns: Sequence[Sequence[float]]) -> Judgment:
    """Judge whether the second is faster, by the times of the first and the second in turns.

    The signs of the differences decide, because no distribution fits other programs, which take cores for
    seconds.
    """
    gains = sorted((first - second) / max(first, second) for first, second in turns)
    against = sum(gain <= 0 for gain in gains)
    if against > 1:
        return Judgment(False)
    if len(gains) < _PAIRS[against]:
        return Judgment(None)
    gain = median(gains)
    return Judgment(gain > _WORTH, gain, (gains[-1 - against] - gains[against]) / 2)


def compare(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Estimate how much longer the second times are than the first, by medians because noise has peaks."""
    before, after = median(first), median(second)
    spreads = [abs(time / before - 1) for time in first]
    if len(second) > 3:
        spreads += [abs(time / after - 1) for time in second]
    noise = max(_LEAST_NOISE, 1.48 * median(spreads))
    return Estimate(after / before - 1, 1.25 * noise * sqrt(1 / len(first) + 1 / len(second)))


@dataclass
class Search:
    """A search and its state. ``run`` performs it.

    Args:
        dimensions: Dimensions in the order in which to try them.
        steps: Steps to measure of a point at a time, except in the first look.
        limit: Maximum number of steps before the final comparison.

    Attributes:
        best: Best point so far.
        used: Steps so far.
        history: Point, times and verdict of each trial.
    """

    dimensions: Sequence[Dimension]
    steps: int = 4
    limit: int = 140
    best: Point = ()
    used: int = 0
    exposed: float = 1.0
    history: list[tuple[Point, Sequence[float], str]] = field(default_factory=list)
    _times: dict[Point, list[float]] = field(default_factory=lambda: defaultdict(list))
    _worse: set[Point] = field(default_factory=set)
    _pairs: int = 1
    _flat: set[str] = field(default_factory=set)  # dimensions that make no difference

    def run(self) -> Generator[Trial, Measured, Outcome]:
        """Yield trials, receive their measurements, and return the outcome."""
        start = self.best = self.start
        yield from self._measure(start, "start", 2 * self.steps)
        # From a bad start, the usual values gain more together than noise can hide. Each alone gains little.
        usual = tuple(dim.start if dim.usual is None else dim.usual for dim in self.dimensions)
        self._pairs = 3
        if usual != start and self.exposed >= _EXPOSED and (yield from self._try(usual)) == "better":
            self.best = usual
        for strides, pairs in _PASSES:
            moved = False
            for number, dim in enumerate(self.dimensions):
                if dim.name in self._flat or (dim.of_exchange and self.exposed < _EXPOSED):
                    continue
                self._pairs = pairs
                moved |= yield from self._descend(number, strides)
            if not moved and (len(strides) > 1 or self.best == start):
                break  # two values away it is not faster either way: values in between gain little
        return (yield from self._verify())

    @property
    def start(self) -> Point:
        """The values with which the job started."""
        return tuple(dim.start for dim in self.dimensions)

    def _spent(self) -> bool:
        """Return True once not enough steps are left for a change and a sample."""
        longest = self.steps + max((dim.skip for dim in self.dimensions), default=0)
        return self.limit - self.used < longest

    def _measure(self, point: Point, what: str, steps: int) -> Generator[Trial, Measured, None]:
        last = self.history[-1][0] if self.history else point
        skip = self.skipped(last, point)
        measured = yield Trial(point, skip, steps)
        self.used += skip + steps
        self._times[point].extend(measured.times)
        if point == self.best:
            self.exposed = measured.exposed
        self.history.append((point, measured.times, what))

    def skipped(self, last: Point, point: Point) -> int:
        """Return how many steps to ignore after a change from one point to another."""
        changed = [d.skip for d, a, b in zip(self.dimensions, last, point, strict=True) if a != b]
        return max(changed, default=0)

    def _recent(self, point: Point) -> list[float]:
        return self._times[point][-_RECENT:]

    def _descend(self, number: int, strides: Sequence[int]) -> Generator[Trial, Measured, bool]:
        """Follow one dimension downhill with the given strides. Returns True if the best point moved."""
        dim, moved, last = self.dimensions[number], False, len(self.dimensions[number].values) - 1
        for stride in strides if last > 1 else (1,):
            verdicts = []
            for direction in (dim.toward, -dim.toward):
                while True:
                    here = self.best[number]
                    there = min(max(here + direction * stride, 0), last)
                    if there == here or self._spent():
                        break
                    candidate = (*self.best[:number], there, *self.best[number + 1 :])
                    if candidate in self._worse:
                        break
                    verdicts.append((yield from self._try(candidate)))
                    if verdicts[-1] != "better":
                        break
                    moved, self.best = True, candidate
                if "better" in verdicts:  # then the other direction is worse
                    break
            seen = verdicts.count("same")
            # At a border there is a single verdict, which may be chance if the stride is long.
            if not moved and seen == len(verdicts) and seen > (stride > 1):
                self._flat.add(dim.name)
                break
        return moved

    def _try(self, candidate: Point) -> Generator[Trial, Measured, str]:
        """Compare a point with the best one, in turns. Returns "better", "same", "worse" or "unclear"."""
        verdict = ""
        self._times[candidate].clear()  # times measured next to another point say little
        turns = [(candidate, _PROBE), (candidate, self.steps), (self.best, self.steps)]
        for point, steps in turns + turns[1:] * (self._pairs - 1):
            yield from self._measure(point, "best" if point == self.best else "tried", steps)
            verdict = self._verdict(candidate)
            if verdict or self._spent():
                break
        if not verdict:
            difference, error = self._estimate(candidate)
            verdict = "better" if difference < -max(_WORTH, error) else "unclear"
        if verdict == "worse":
            self._worse.add(candidate)
        point, times, _ = self.history[-1]
        self.history[-1] = point, times, verdict
        return verdict

    def _estimate(self, candidate: Point) -> Estimate:
        return compare(self._recent(self.best), self._recent(candidate))

    def _verdict(self, candidate: Point) -> str:
        """Return what is certain, or "" if nothing is. In a short first look, a peak must not decide."""
        times = self._recent(candidate)
        few = len(times) < self.steps
        difference, error = compare(self._recent(self.best), [min(times)] if few else times)
        if difference > 2 * error:
            return "worse"
        if few:
            difference, error = compare(self._recent(self.best), [max(times)])
        if difference < -2 * error and difference < -(_CLEAR if few else _WORTH):
            return "better"
        if not few and difference - 1.5 * error > -_WORTH:
            return "same"
        return ""

    def _verify(self) -> Generator[Trial, Measured, Outcome]:
        """Compare the best point with the start again, because the first steps may just have been slow."""
        turns: list[list[float]] = []
        while (judgment := judge(turns)).gained is None and self.best != self.start:
            turns.append([0.0, 0.0])
            for which in order(len(turns) - 1):
                yield from self._measure((self.start, self.best)[which], "verified", _TURN)
                turns[-1][which] = median(self.history[-1][1])
        if judgment.gained:
            return Outcome(self.best, judgment.gain, judgment.error)
        self.best = self.start
        return Outcome(self.start)
