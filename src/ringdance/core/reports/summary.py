"""The summary at the end of a run: how fast it was, how long it waited, and which rank was slowest."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from ringdance.core.reports.judging import LITTLE, waiting
from ringdance.core.ring import Word, counters
from ringdance.core.transport.base import Identity

_UNKNOWN = (
    "exposed communication, slowest rank: unknown, because the script polled for results, or never waited "
    "for a result. Any other waiting in the script cannot be observed"
)
_FEW = 20  # minimum number of steps; in a shorter run, any rank may be the slowest by chance


class Figures(NamedTuple):
    """One rank's steps and waiting time in a period.

    Attributes:
        steps: Number of steps. For a whole run, 0 if they were not counted.
        seconds: Length of the period.
        waited: Seconds of the period in which training waited for results.
        known: True if ``waited`` covers all waiting. False if the script polled, or received all its results
            without an observed wait.
    """

    steps: int
    seconds: float
    waited: float
    known: bool = True

    @property
    def busy(self) -> float:
        """Seconds per step, or in total, that were not spent waiting."""
        return max(0.0, self.seconds - self.waited) / (self.steps or 1)

    @property
    def rate(self) -> float:
        """Steps per second."""
        return self.steps / self.seconds if self.seconds > 0 else 0.0

    @property
    def share(self) -> float:
        """Share of the time spent waiting."""
        return min(1.0, self.waited / self.seconds) if self.seconds > 0 else 0.0


class RunSummary:
    """Collects the figures of this rank and, on rank 0 at the end of the run, the figures of all ranks.

    Args:
        words: Words of this rank's ring.
        after: Minimum length, in seconds, of a run that gets a summary, or 0 for no summary.
        size: Number of ranks.

    Attributes:
        polled: True if the script has polled for a result before it was complete. In this case, the time that
            the script waits is unknown.
    """

    def __init__(self, words: Sequence[int], after: float, size: int) -> None:
        self._words, self._after, self._size = words, after, size
        self._began, self._waited = time.monotonic_ns(), words[Word.WAITED]
        self.polled = False
        self._shown: Figures | None = None
        self._others: dict[int, Figures] = {}

    @property
    def seconds(self) -> float:
        """Seconds that the run has lasted."""
        return (time.monotonic_ns() - self._began) / 1e9

    def wanted(self, tolerance: float = 1.0) -> bool:
        """Return True if the run has lasted for at least ``after`` seconds multiplied by ``tolerance``."""
        return self._after > 0 and self.seconds >= self._after * tolerance

    def figures(self) -> Figures:
        """Return this rank's figures, without its first step, which often includes compilation.

        If no steps were counted, return the figures for the whole run.
        """
        words, steps, seconds = self._words, 0, self.seconds
        waited = words[Word.WAITED] - self._waited
        if words[Word.STEPS] > 1:
            steps, seconds = words[Word.STEPS] - 1, (words[Word.LAST_STEP] - words[Word.FIRST_STEP]) / 1e9
            waited = words[Word.LAST_WAITED] - words[Word.FIRST_WAITED]
        known = not self.polled and (waited > 0 or not words[Word.BATCHES])
        return Figures(steps, seconds, waited / 1e9, known)

    def metrics(self) -> dict[str, Any]:
        """Return this rank's figures by name. "Recent" ones cover the time since the previous call."""
        now, then = self.figures(), self._shown
        recent = now
        if then is not None and (then.steps > 0) == (now.steps > 0) and then.steps <= now.steps:
            recent = Figures(now.steps - then.steps, now.seconds - then.seconds, now.waited - then.waited)
        self._shown = now
        return {
            "seconds": round(self.seconds, 3),
            "steps_per_second": round(now.rate, 4),
            "recent_steps_per_second": round(recent.rate, 4),
            "exposed_share": round(now.share, 4),
            "recent_exposed_share": round(recent.share, 4),
            **counters(self._words),
        }

    def on_note(self, rank: int, note: dict[str, Any]) -> None:
        """Store another rank's figures."""
        self._others[rank] = Figures(*note["figures"])

    @property
    def complete(self) -> bool:
        """True if the figures of all ranks have arrived."""
        return len(self._others) + 1 >= self._size

    def lines(self, identities: Sequence[Identity]) -> list[str]:
        """Return the lines of the summary, or [] if no summary is wanted. Called on rank 0."""
        if not self.wanted():
            return []
        return summary_lines(identities, {0: self.figures(), **self._others}, self.seconds)


def summary_lines(identities: Sequence[Identity], ranks: dict[int, Figures], seconds: float) -> list[str]:
    """Return the lines of the summary.

    Args:
        identities: All ranks.
        ranks: Known figures by rank, including rank 0's.
        seconds: Length of the run.
    """
    size, hosts = len(identities), len({peer.host for peer in identities})
    where = f"{size} rank{'s' * (size > 1)}" + f" on {hosts} hosts" * (hosts > 1)
    own, took = ranks[0], f"{int(seconds) // 60} min {int(seconds) % 60} s"
    if size == 1 and not own.steps:
        return []
    if own.steps:
        speed = f"{own.rate:.4g} steps/s ({_ms(own.seconds / own.steps)} each)"
        lines = [f"{where}, {took}: {own.steps + 1} steps, {speed}"]
    else:
        lines = [f"{where}, {took}: no steps were counted. Call hvd.mark_step() after each step"]
    if size == 1:
        return lines
    ranks = {rank: figures for rank, figures in ranks.items() if bool(figures.steps) == bool(own.steps)}
    if not all(figures.known for figures in ranks.values()):
        return [*lines, _UNKNOWN]
    share = statistics.mean(figures.share for figures in ranks.values())
    text = f"exposed communication: {share:.1%} of the time"
    if own.steps:
        by_step = [figures.waited / figures.steps for figures in ranks.values()]
        mean = statistics.mean(by_step)
        # The slowest rank never waits for another rank, so all of its waiting is communication.
        text += f", {_ms(mean)} per step; {_ms(mean - min(by_step))} of it waiting for slower ranks"
    lines.append(text)
    if missing := size - len(ranks):
        lines.append(f"slowest rank: unknown (no figures from {missing} rank{'s' * (missing > 1)})")
    elif 0 < own.steps < _FEW:
        lines.append(f"slowest rank: unknown ({own.steps + 1} steps are too few to tell)")
    else:
        lines.append(_slowest(identities, ranks, " per step" if own.steps else ""))
    return lines


def _slowest(identities: Sequence[Identity], ranks: dict[int, Figures], unit: str) -> str:
    waits = waiting([figures.share for figures in ranks.values()])
    slowest = list(ranks)[waits.slowest]
    if waits.longer - 1 <= LITTLE:
        return f"slowest rank: {identities[slowest]}, by {waits.longer - 1:.0%}: all are about equally fast"
    most = ranks[slowest].busy
    return (
        f"slowest rank: {identities[slowest]}, {waits.longer - 1:.0%} slower than the others: "
        f"{_ms(most)}{unit} without waiting, against {_ms(most / waits.longer)}"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.4g} s"
