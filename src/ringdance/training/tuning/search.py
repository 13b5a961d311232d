"""Search for the fastest values while a job trains, by coordinate descent on noisy step times.

The search is a pure function of the times that it receives, so ranks that pass the same times get the same
answers. It therefore uses no clock, no random numbers, and no function whose results may differ between
machines in the last bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import median
from typing import NamedTuple

Point = tuple[int, ...]  # One index per dimension, into the dimension's values.

_PROBE = 2  # Number of steps to measure when a point is first tried.
# Passes over the dimensions: the strides through the values, and the maximum number of turns per comparison.
_PASSES = (((2,), 1), ((2, 1), 1), ((2, 1), 2))
_RECENT = 12  # Number of recent steps of a point that count, because the machine's speed drifts.
_LEAST_NOISE = 0.01  # Minimum noise, as a share of the step time. A few steps may have less by chance.
_WORTH = 0.02  # Minimum gain. Smaller gains are ignored.
_CLEAR = 0.25  # Gains of at least this size need no confirmation.
# Number of turns needed if all agree, and if one disagrees. Either happens by chance in 1% of cases.
_PAIRS = 8, 11
_TURN = 3  # Number of steps at the start point, and at the best point, in each turn of the final comparison.
_EXPOSED = 0.03  # Exchanges are worth tuning if waiting takes at least this fraction of a step.


@dataclass(frozen=True)
class Dimension:
    """One setting that can be tuned.

    Attributes:
        name: Name of the setting.
        values: The values to try, in ascending order. In this order, step times are assumed to fall,
            then rise.
        start: Index of the value that the job starts with.
        toward: Direction to try first, 1 or -1.
        skip: Number of steps to ignore after a change.
        of_exchange: True if a gain cannot exceed the time that training waits for exchanges.
        usual: Index of the value that suits most jobs, or None if unknown.
    """

    name: str
    values: tuple[float, ...]
    start: int
    toward: int = 1
    skip: int = 1
    of_exchange: bool = True
    usual: int | None = None


class Trial(NamedTuple):
    """The next trial: use the values of ``point``, ignore ``skip`` steps, then measure ``steps`` steps."""

    point: Point
    skip: int
    steps: int


class Measured(NamedTuple):
    """A trial's measurements: the duration of each step in seconds, and the share that was spent waiting."""

    times: Sequence[float]
    exposed: float


class Estimate(NamedTuple):
    """The relative difference between two medians, and its standard error."""

    difference: float
    error: float


@dataclass
class Outcome:
    """Result of a search.

    Attributes:
        point: Values with which to continue.
        gain: Share of the step time saved compared with the start values. 0.0 if the values are the same.
        error: Half the width of the gain's confidence interval.
    """

    point: Point
    gain: float = 0.0
    error: float = 0.0


class Judgment(NamedTuple):
    """Result of a comparison in which two settings ran alternately.

    Attributes:
        gained: True if the second setting is certainly faster, False if not, None if more turns are needed.
        gain: Share of the first setting's time that the second saves (median over the turns).
        error: Half the width of the gain's confidence interval.
    """

    gained: bool | None
    gain: float = 0.0
    error: float = 0.0


def order(turn: int) -> tuple[int, int]:
    """Return the order of two settings in a turn, so that periodic noise does not always affect the same one.

    The order follows the Thue-Morse sequence.
    """
    return (1, 0) if turn.bit_count() % 2 else (0, 1)


def judge(turns: Sequence[Sequence[float]]) -> Judgment:
    """Judge whether the second setting is faster, given the times of both settings in each turn.

    This is a sign test, because times follow no known distribution: other programs may use
    cores for several seconds.
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
    """Estimate how much longer the second times are than the first. Uses medians because of outliers."""
    before, after = median(first), median(second)
    spreads = [abs(time / before - 1) for time in first]
    if len(second) > 3:
        spreads += [abs(time / after - 1) for time in second]
    noise = max(_LEAST_NOISE, 1.48 * median(spreads))
    return Estimate(after / before - 1, 1.25 * noise * sqrt(1 / len(first) + 1 / len(second)))


@dataclass
class Search:
    """A search and its state. ``run`` performs the search.

    Args:
        dimensions: Dimensions, in the order in which to try them.
        steps: Number of steps to measure each time, except when a point is first tried.
        limit: Maximum number of steps before the final comparison.

    Attributes:
        best: Best point so far.
        used: Number of steps used so far.
        history: Point, step times and verdict of each trial.
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
    _flat: set[str] = field(default_factory=set)  # Names of dimensions that make no difference.

    def run(self) -> Generator[Trial, Measured, Outcome]:
        """Yield trials, receive their measurements, and return the outcome."""
        start = self.best = self.start
        yield from self._measure(start, "start", 2 * self.steps)
        # From a bad start, changing all values to the usual ones at the same time gains more than the noise.
        # Changing one value at a time gains little.
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
                break  # Values at a distance of two are not faster in either direction.
        return (yield from self._verify())

    @property
    def start(self) -> Point:
        """The values with which the job started."""
        return tuple(dim.start for dim in self.dimensions)

    def _spent(self) -> bool:
        """Return True if too few steps are left for another change and measurement."""
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
        """Return the number of steps to ignore after a change from one point to another."""
        changed = [d.skip for d, a, b in zip(self.dimensions, last, point, strict=True) if a != b]
        return max(changed, default=0)

    def _recent(self, point: Point) -> list[float]:
        return self._times[point][-_RECENT:]

    def _descend(self, number: int, strides: Sequence[int]) -> Generator[Trial, Measured, bool]:
        """Descend along one dimension with the given strides. Return True if the best point moved."""
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
                if "better" in verdicts:  # The other direction must be worse.
                    break
            seen = verdicts.count("same")
            # At either end, there is only one verdict, which may be due to chance if the stride is long.
            if not moved and seen == len(verdicts) and seen > (stride > 1):
                self._flat.add(dim.name)
                break
        return moved

    def _try(self, candidate: Point) -> Generator[Trial, Measured, str]:
        """Compare a point with the best one, alternately. Return "better", "same", "worse" or "unclear"."""
        verdict = ""
        self._times[candidate].clear()  # Earlier times were compared with a different point.
        turns = [(candidate, _PROBE), (candidate, self.steps), (self.best, self.steps)]
        for point, steps in turns + turns[1:] * (self._pairs - 1):
            yield from self._measure(point, "best" if point == self.best else "tried", steps)
            verdict = self._verdict(candidate)
            if verdict or self._spent():
                break
        if not verdict:
            difference, error = compare(self._recent(self.best), self._recent(candidate))
            verdict = "better" if difference < -max(_WORTH, error) else "unclear"
        if verdict == "worse":
            self._worse.add(candidate)
        point, times, _ = self.history[-1]
        self.history[-1] = point, times, verdict
        return verdict

    def _verdict(self, candidate: Point) -> str:
        """Return the verdict, or "" if uncertain. A single outlier must not decide a short first trial."""
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
        """Compare the best point with the start again, because the first steps may have been slow."""
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
