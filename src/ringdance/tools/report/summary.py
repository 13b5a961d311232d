"""Summarize a timeline: how each rank spends the time in a step, and which tensors are submitted late."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringdance.core.monitor.chrome import END
from ringdance.tools.report.trace import Key, Span, Trace

PARTS = {
    "negotiate": "", "wait_for_data": "WAIT_FOR_DATA", "copy_in": "MEMCPY_IN_FUSION_BUFFER",
    "reduce": "MPI_ALLREDUCE", "copy_out": "MEMCPY_OUT_FUSION_BUFFER", "other": "",
}  # fmt: skip
"""Components of the exposed communication time, with the names of the spans that measure them."""

Array = NDArray[np.float64]
Members = dict[int, tuple[float, float]]
"""Start and end of one negotiation, by rank."""

_LATE = 0.05  # a rank is late if it lags behind the others by more than this fraction of a step
_OFTEN = 0.3  # fraction of steps above which a late rank is reported
_RANK = re.compile(r"rank (\d{1,9}) on (.*) \(pid (\d{1,9})\)")
_THREAD = re.compile(r"rank (\d{1,9})")
_STEP = re.compile(r"step (\d{1,18})")
_LOST = re.compile(r"(\d{1,18}) records lost")


class Cover:
    """A union of time spans.

    Args:
        spans: Start and end of each span, in any order.
    """

    def __init__(self, spans: Iterable[tuple[float, float]]) -> None:
        self.spans = sorted(spans)
        edges, lengths = [0.0], [0.0]
        for began, ended in self.spans:
            began = max(began, edges[-1])
            if ended > began:
                edges += [began, ended]
                lengths += [lengths[-1], lengths[-1] + ended - began]
        self._edges, self._lengths = np.array(edges), np.array(lengths)

    def until(self, times: Sequence[float] | Array) -> Array:
        """Return how much time is covered before each of the given times."""
        return np.interp(times, self._edges, self._lengths)

    def within(self, times: Sequence[float] | Array, other: Cover | None = None) -> Array:
        """Return the covered time between successive ``times``. If given, ``other`` must also cover it."""
        covered = self.until(times)
        if other is not None:  # |A and B| = |A| + |B| - |A or B|
            covered = covered + other.until(times) - Cover([*self.spans, *other.spans]).until(times)
        return np.diff(covered)


@dataclass
class RankTimes:
    """The timeline of one rank. All times are in seconds.

    Attributes:
        threads: Spans by thread name.
        times: Times of the step boundaries.
        numbers, steps: Numbers and durations of the steps. Steps in which records were lost are left out. If
            records were lost in every step, all steps are included, and their durations exclude the gaps.
        uncertainty: Uncertainty of the rank's clock.
        lost: Number of lost records.
        exposed: Time in each step during which the rank waited for exchanges.
        parts: Components of the exposed time in each step, by the keys of ``PARTS``.
        hidden: Time in each step during which batches were exchanged while the rank computed.
    """

    rank: int
    host: str
    pid: int
    threads: dict[str, list[Span]]
    times: Array
    numbers: list[int]
    uncertainty: float = 0.0
    lost: int = field(init=False)
    steps: Array = field(init=False)
    exposed: Array = field(init=False)
    parts: dict[str, Array] = field(init=False)
    hidden: Array = field(init=False)

    def __post_init__(self) -> None:
        spans = self.threads.get("steps", ())
        lost = [(int(m[1]), a, b) for text, a, b in spans if (m := _LOST.fullmatch(text))]
        gaps, self.lost = Cover((a, b) for _, a, b in lost), sum(count for count, _, _ in lost)
        whole = gaps.within(self.times) == 0
        whole |= not whole.any()  # if every step has gaps, include all steps without the gaps

        def cover(thread: str, name: str = "") -> Cover:
            """Return a thread's spans, or only those called ``name``, on a clock that skips the gaps."""
            spans = np.array([(a, b) for text, a, b in self.threads.get(thread, ()) if name in ("", text)])
            return Cover((spans - gaps.until(spans)).tolist())

        times = self.times - gaps.until(self.times)
        waits, batches = cover("waits"), cover("batches")
        self.numbers = [number for number, is_whole in zip(self.numbers, whole, strict=True) if is_whole]
        self.steps = np.diff(times)[whole]
        self.exposed = waits.within(times)[whole]
        inside = waits.within(times, batches)[whole]
        self.hidden = batches.within(times)[whole] - inside
        self.parts = {
            part: waits.within(times, cover("chunks", name))[whole] for part, name in PARTS.items() if name
        }
        other = inside - sum(self.parts.values(), np.zeros_like(inside))
        self.parts = {"negotiate": self.exposed - inside, **self.parts, "other": np.maximum(other, 0.0)}

    @property
    def computed(self) -> Array:
        """Time in each step during which the rank did not wait for exchanges."""
        return self.steps - self.exposed


def ranks_of(trace: Trace) -> list[RankTimes]:
    """Return the timeline of each rank in a trace, sorted by rank."""
    matches = {pid: match for pid, name in trace.processes.items() if (match := _RANK.fullmatch(name))}
    threads: dict[int, dict[str, list[Span]]] = defaultdict(dict)
    marks: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for (pid, tid), name in trace.threads.items():
        if pid in matches:
            threads[pid][name] = trace.spans.get((pid, tid), [])
            if name == "steps":
                instants = trace.instants.get((pid, tid), [])
                marks[pid] = [(int(m[1]), at) for text, at in instants if (m := _STEP.fullmatch(text))]
    every = [time for kinds in threads.values() for spans in kinds.values() for _, *t in spans for time in t]
    window = (min(every, default=0.0), max(every, default=0.0))
    ranks = []
    for pid, match in matches.items():
        own = sorted(marks[pid], key=lambda mark: mark[1])
        if len(own) > 1:  # skip the first step, which includes one-time work or began before the timeline
            times, numbers = [at for _, at in own], [number for number, _ in own[1:]]
        else:
            times, numbers = list(window), [0]
        ranks.append(RankTimes(
            int(match[1]), match[2], int(match[3]), threads[pid], np.array(times), numbers,
            trace.uncertainties.get(pid, 0.0),
        ))  # fmt: skip
    return sorted(ranks, key=lambda rank: rank.rank)


def summarize(trace: Trace) -> dict[str, Any]:
    """Summarize a trace. All times are in seconds. A rank's times are means over its steps."""
    ranks = ranks_of(trace)
    tensors, unfinished = _tensors(trace, {rank.rank: rank for rank in ranks})
    marked = any(rank.numbers != [0] for rank in ranks)
    rows = [rank_row(rank) for rank in ranks]
    keys = [key for key in (rows[0] if rows else ()) if key.endswith("_seconds")]
    steps = _steps(ranks) if marked else []
    return {
        "sentence": _sentence(steps, {rank.rank: rank.host for rank in ranks}),
        "steps_marked": marked,
        "notes": [*notes(ranks), *_incomplete(trace)],
        "ranks": sorted(rows, key=lambda row: -row["compute_seconds"]),
        "mean": {key: fmean([row[key] for row in rows]) for key in keys},
        "steps": steps,
        "tensors": tensors,
        "unfinished": unfinished,
    }


def rank_row(one: RankTimes) -> dict[str, Any]:
    """Return the summary of one rank. Its times are means over the steps."""
    means = {f"{part}_seconds": float(times.mean()) for part, times in one.parts.items()}
    return {
        "rank": one.rank, "host": one.host, "pid": one.pid, "steps": len(one.numbers),
        "step_seconds": float(one.steps.mean()), "compute_seconds": float(one.computed.mean()),
        "exposed_seconds": float(one.exposed.mean()), **means, "hidden_seconds": float(one.hidden.mean()),
        "records_lost": one.lost, "clock_uncertainty": one.uncertainty,
    }  # fmt: skip


def notes(ranks: Sequence[RankTimes]) -> list[str]:
    """Return sentences about lost records and clock accuracy in a timeline."""
    lost = ", ".join(f"{rank.lost} of rank {rank.rank}" for rank in ranks if rank.lost)
    known = {r.host: f"{r.host} to {r.uncertainty * 1e6:,.0f} us" for r in ranks if r.uncertainty}
    gaps = f"Records were overwritten before they were read: {lost}. The summary skips the time they cover."
    clocks = f"Clock accuracy: {', '.join(known.values())}. Smaller delays between ranks are not reported."
    return [gaps] * bool(lost) + [clocks] * bool(known)


def _incomplete(trace: Trace) -> list[str]:
    ends = [text.removeprefix(END) for text, _ in trace.instants.get((0, 0), ()) if text.startswith(END)]
    ends = ends or ["its end: the job is still running, its monitor was killed, or the disk was full"]
    return [f"The file lacks {text}." for text in ends if text != "complete"]


def _steps(ranks: list[RankTimes]) -> list[dict[str, Any]]:
    """Return one row for each step that all ranks have completed."""
    places = [{number: place for place, number in enumerate(rank.numbers)} for rank in ranks]
    rows = []
    for number in sorted(set.intersection(*map(set, places))):
        steps = [rank.steps[at[number]] for rank, at in zip(ranks, places, strict=True)]
        exposed = [rank.exposed[at[number]] for rank, at in zip(ranks, places, strict=True)]
        computed = {rank.rank: s - e for rank, s, e in zip(ranks, steps, exposed, strict=True)}
        slowest = max(computed, key=lambda rank: computed[rank])
        others = [seconds for rank, seconds in computed.items() if rank != slowest]
        rows.append({
            "step": number, "seconds": float(fmean(steps)), "exposed_seconds": float(fmean(exposed)),
            "slowest_rank": slowest,
            "slowest_seconds": float(computed[slowest] - median(others or [computed[slowest]])),
        })  # fmt: skip
    return rows


def _sentence(steps: Sequence[dict[str, Any]], hosts: Mapping[int, str]) -> str:
    """Return a sentence about what the ranks wait for in a step, or "" if the timeline has no steps."""
    if not steps:
        return ""
    whole, exposed = (fmean([row[key] for row in steps]) for key in ("seconds", "exposed_seconds"))
    late = [row for row in steps if row["slowest_seconds"] > _LATE * whole]
    by_rank = Counter(row["slowest_rank"] for row in late)
    if len(hosts) > 1 and late and by_rank.most_common(1)[0][1] > _OFTEN * len(steps):
        ((rank, times),) = by_rank.most_common(1)
        behind = fmean([row["slowest_seconds"] for row in late if row["slowest_rank"] == rank])
        return (
            f"Rank {rank} on {hosts[rank]} is late in {times / len(steps):.0%} of the steps, by "
            f"{behind * 1000:.3g} ms of {whole * 1000:.3g}: the others wait for it."
        )
    if len(hosts) > 1 and len(late) > _OFTEN * len(steps):
        return f"Different ranks take turns being late, in {len(late) / len(steps):.0%} of the steps."
    return f"No rank is late. Waiting for exchanges takes {exposed / (whole or 1.0):.0%} of a step."


def _tensors(trace: Trace, ranks: dict[int, RankTimes]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return how late each tensor is submitted, and which tensors only some of the ranks have submitted."""
    rounds: dict[str, dict[Key, Members]] = defaultdict(lambda: defaultdict(dict))
    pending: dict[str, dict[int, float]] = defaultdict(dict)
    for (pid, tid), thread in trace.threads.items():
        name, match = trace.processes.get(pid, ""), _THREAD.fullmatch(thread)
        if match is None or (rank := int(match[1])) not in ranks:
            continue
        for number, began, ended in trace.rounds.get((pid, tid), ()):
            rounds[name][number][rank] = began, ended
        for text, began in trace.open.get((pid, tid), ()):
            if text.startswith("NEGOTIATE_"):
                pending[name][rank] = began
    every = {rank for by_round in rounds.values() for members in by_round.values() for rank in members} | {
        rank for waiting in pending.values() for rank in waiting
    }
    rows = [row for name, by_round in rounds.items() if (row := _lateness(name, by_round.values(), ranks))]
    left = [
        {"tensor": name, "submitted_by": sorted(waiting), "missing": sorted(every - set(waiting)),
         "since_seconds": min(waiting.values())}
        for name, waiting in pending.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -row["late_seconds"]), left


def _lateness(name: str, rounds: Collection[Members], ranks: dict[int, RankTimes]) -> dict[str, Any] | None:
    """Return how long ranks wait for other ranks to submit a tensor, and for which rank they wait longest.

    Returns None if no rank is measurably late.
    """
    late: Counter[int] = Counter()
    seconds: dict[int, float] = defaultdict(float)
    waits = []
    for members in rounds:
        begins = {rank: began for rank, (began, _) in members.items()}
        first, last = (pick(begins, key=lambda rank: begins[rank]) for pick in (min, max))
        behind = begins[last] - begins[first]
        a, b = ranks[first], ranks[last]
        waits.append(max(ended - began for began, ended in members.values()))
        if first != last and behind > (a.host != b.host) * (a.uncertainty + b.uncertainty):
            late[last] += 1
            seconds[last] += behind
    if not seconds:
        return None
    rank = max(seconds, key=lambda one: seconds[one])
    total = sum(late.values())
    return {
        "tensor": name, "times": len(rounds), "negotiate_seconds": fmean(waits),
        "late_seconds": sum(seconds.values()), "late_rank": rank, "late_share": late[rank] / total,
    }  # fmt: skip
