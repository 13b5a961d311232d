"""Search for the quickest values while a job trains: coordinate descent on noisy step times.

A pure function of the times that it is given: ranks that give it the same ones get the same answers, so it
uses no clock, no random numbers, and no function whose last bit depends on the machine.
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
# Passes over the dimensions: values at a time, and how often a point and the best one take turns at most.
_PASSES = (((2,), 1), ((2, 1), 1), ((2, 1), 2))
_RECENT = 12  # steps of a point that count, the latest ones: the machine's speed drifts
_LEAST_NOISE = 0.01  # of a step's time, whatever few steps show
_WORTH = 0.02  # a gain below this is none
_CLEAR = 0.25  # a gain that needs no second look
# Turns that decide: so many without a contradiction, or with a single one. By chance that is 1% of all cases.
_PAIRS = 8, 11
_TURN = 3  # steps of the start, and of the best point, in a turn at the end
_EXPOSED = 0.03  # share of a step in which training waits, from which on an exchange is worth tuning


@dataclass(frozen=True)
class Dimension:
    """One setting that can be tuned.

    Attributes:
        name: of the setting.
        values: ascending, for those that have an order; along them a step's time falls, then rises.
        start: index of the value that the job starts with.
        toward: 1 or -1, where to look first.
        skip: steps after a change that say nothing.
        of_exchange: it cannot win more than the time in which training waits for an exchange.
        usual: index of the value that suits most jobs; None if there is none.
    """

    name: str
    values: tuple[float, ...]
    start: int
    toward: int = 1
    skip: int = 1
    of_exchange: bool = True
    usual: int | None = None


class Trial(NamedTuple):
    """What to run next: the values of ``point``, for ``skip`` steps, then for ``steps`` that are measured."""

    point: Point
    skip: int
    steps: int


class Measured(NamedTuple):
    """The steps of a trial: seconds of each, and the share of them in which training waited."""

    times: Sequence[float]
    exposed: float


class Estimate(NamedTuple):
    """The difference of two medians as a share of the first, and its standard error."""

    difference: float
    error: float


@dataclass
class Outcome:
    """How a search ended.

    Attributes:
        point: the values to go on with.
        gain: share of a step's time that they save, against those at the start; 0.0 for the same ones.
        error: half the width of its interval.
    """

    point: Point
    gain: float = 0.0
    error: float = 0.0


class Judgment(NamedTuple):
    """What turns of two settings have shown.

    Attributes:
        gained: True if the second is surely quicker, False if that cannot be said, None for more turns.
        gain: share of the first one's time that it saves; median of the turns.
        error: half the width of the interval in which it is.
    """

    gained: bool | None
    gain: float = 0.0
    error: float = 0.0


def order(turn: int) -> tuple[int, int]:
    """Return which of two comes first in a turn: nothing that repeats itself always meets the same one.

    It is the sequence of Thue and Morse.
    """
    return (1, 0) if turn.bit_count() % 2 else (0, 1)


def judge(turns: Sequence[Sequence[float]]) -> Judgment:
    """Tell whether the second is quicker, by the times of the first and the second in turns.

    Their signs decide, since no distribution fits other programs, which take cores for seconds.
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
    """Estimate by how much the second times are longer than the first; medians, for noise that has peaks."""
    before, after = median(first), median(second)
    spreads = [abs(time / before - 1) for time in first]
    if len(second) > 3:
        spreads += [abs(time / after - 1) for time in second]
    noise = max(_LEAST_NOISE, 1.48 * median(spreads))
    return Estimate(after / before - 1, 1.25 * noise * sqrt(1 / len(first) + 1 / len(second)))


@dataclass
class Search:
    """The state of a search; ``run`` makes it.

    Args:
        dimensions: in the order in which they are tried.
        steps: that are measured of a point at a time, but for the first look.
        limit: of the steps before the comparison at the end.

    Attributes:
        best: the best point so far.
        used: steps so far.
        history: for each trial the point, its times and what came of it.
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
    _flat: set[str] = field(default_factory=set)  # dimensions that do not matter

    def run(self) -> Generator[Trial, Measured, Outcome]:
        """Yield what to run, take what was measured; return what is best."""
        start = self.best = self.start
        yield from self._measure(start, "start", 2 * self.steps)
        # From bad values all usual ones together win what noise does not hide, each by itself little.
        usual = tuple(one.start if one.usual is None else one.usual for one in self.dimensions)
        self._pairs = 3
        if usual != start and self.exposed >= _EXPOSED and (yield from self._try(usual)) == "better":
            self.best = usual
        for strides, pairs in _PASSES:
            moved = False
            for number, one in enumerate(self.dimensions):
                if one.name in self._flat or (one.of_exchange and self.exposed < _EXPOSED):
                    continue
                self._pairs = pairs
                moved |= yield from self._descend(number, strides)
            if not moved and (len(strides) > 1 or self.best == start):
                break  # two values on it is no quicker either way: what lies between wins little
        return (yield from self._verify())

    @property
    def start(self) -> Point:
        """The values that the job began with."""
        return tuple(one.start for one in self.dimensions)

    def _spent(self) -> bool:
        """Return True once there is no room for a change and a sample."""
        longest = self.steps + max((one.skip for one in self.dimensions), default=0)
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
        """Return how many steps say nothing after a change from one point to another."""
        changed = [d.skip for d, a, b in zip(self.dimensions, last, point, strict=True) if a != b]
        return max(changed, default=0)

    def _recent(self, point: Point) -> list[float]:
        return self._times[point][-_RECENT:]

    def _descend(self, number: int, strides: Sequence[int]) -> Generator[Trial, Measured, bool]:
        """Follow one dimension downhill, by so many values at a time; return whether it moved."""
        one, moved, last = self.dimensions[number], False, len(self.dimensions[number].values) - 1
        for stride in strides if last > 1 else (1,):
            verdicts = []
            for direction in (one.toward, -one.toward):
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
                if "better" in verdicts:  # then it is worse the other way
                    break
            seen = verdicts.count("same")
            if not moved and seen == len(verdicts) and seen > (stride > 1):  # at a border one may be luck
                self._flat.add(one.name)
                break
        return moved

    def _try(self, candidate: Point) -> Generator[Trial, Measured, str]:
        """Compare a point with the best one, taking turns; return "better", "same" or "worse"."""
        verdict = ""
        self._times[candidate].clear()  # what was measured beside another point says little
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
        """Return what is certain; "" for nothing yet. A first look of few steps must not be a peak's."""
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
        """Compare the best point with the start anew, whose first steps may have been slow by themselves."""
        turns: list[list[float]] = []
        while (found := judge(turns)).gained is None and self.best != self.start:
            turns.append([0.0, 0.0])
            for which in order(len(turns) - 1):
                yield from self._measure((self.start, self.best)[which], "verified", _TURN)
                turns[-1][which] = median(self.history[-1][1])
        if found.gained:
            return Outcome(self.best, found.gain, found.error)
        self.best = self.start
        return Outcome(self.start)
