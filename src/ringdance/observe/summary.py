"""Sum up a timeline: where the time of a step goes on each rank, and which tensors come late."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import numpy as np

from ringdance.observe.intervals import Array, Cover
from ringdance.observe.trace import Span, Trace

__all__ = ["PARTS", "RankTimes", "rank_row", "ranks_of", "summarize"]

PARTS = {
    "negotiate": "", "wait_for_data": "WAIT_FOR_DATA", "copy_in": "MEMCPY_IN_FUSION_BUFFER",
    "reduce": "MPI_ALLREDUCE", "copy_out": "MEMCPY_OUT_FUSION_BUFFER", "other": "",
}  # fmt: skip
"""What exposed communication consists of: names of the spans that tell."""

_RANK = re.compile(r"rank (\d+) on (.*) \(pid (\d+)\)")
_STEP = re.compile(r"step (\d+)")


@dataclass
class RankTimes:
    """The times of one rank, in seconds.

    Attributes:
        threads: spans by name of their thread.
        times: begin and end of the steps; step ``numbers[i]`` is from ``times[i]`` to ``times[i + 1]``.
        exposed: of each step.
        parts: of the exposed time of each step, see PARTS.
        hidden: exchanges of each step while the rank computed.
    """

    rank: int
    host: str
    pid: int
    threads: dict[str, list[Span]]
    times: Array
    numbers: list[int]
    exposed: Array = field(init=False)
    parts: dict[str, Array] = field(init=False)
    hidden: Array = field(init=False)

    def __post_init__(self) -> None:
        waits, batches = (Cover((a, b) for _, a, b in self.threads.get(k, ())) for k in ("waits", "batches"))
        self.exposed = waits.within(self.times)
        inside = waits.within(self.times, batches)
        self.hidden = batches.within(self.times) - inside
        phases: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for name, began, ended in self.threads.get("chunks", ()):
            phases[name].append((began, ended))
        self.parts = {
            part: waits.within(self.times, Cover(phases[name])) for part, name in PARTS.items() if name
        }
        other = inside - sum(self.parts.values(), np.zeros_like(inside))
        self.parts = {"negotiate": self.exposed - inside, **self.parts, "other": np.maximum(other, 0.0)}

    @property
    def steps(self) -> Array:
        """The length of each step."""
        return np.diff(self.times)

    @property
    def computed(self) -> Array:
        """The time of each step that is not exposed."""
        return self.steps - self.exposed


def ranks_of(trace: Trace) -> list[RankTimes]:
    """Return the ranks of a trace."""
    found = {pid: match for pid, name in trace.processes.items() if (match := _RANK.fullmatch(name))}
    threads: dict[int, dict[str, list[Span]]] = defaultdict(dict)
    marks: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for (pid, tid), name in trace.threads.items():
        if pid in found:
            threads[pid][name] = trace.spans.get((pid, tid), [])
            if name == "steps":
                instants = trace.instants.get((pid, tid), [])
                marks[pid] = [(int(m[1]), at) for text, at in instants if (m := _STEP.fullmatch(text))]
    every = [time for kinds in threads.values() for spans in kinds.values() for _, *t in spans for time in t]
    window = (min(every, default=0.0), max(every, default=0.0))
    ranks = []
    for pid, match in found.items():
        own = sorted(marks[pid], key=lambda mark: mark[1])
        if len(own) > 1:  # the first one begins before the file, or with what happens once
            times, numbers = [at for _, at in own], [number for number, _ in own[1:]]
        else:
            times, numbers = list(window), [0]
        ranks.append(RankTimes(
            int(match[1]), match[2], int(match[3]), threads[pid], np.array(times), numbers,
        ))  # fmt: skip
    return sorted(ranks, key=lambda one: one.rank)


def summarize(trace: Trace) -> dict[str, Any]:
    """Return a summary of a trace; times are in seconds, those of ranks means of their steps."""
    ranks = ranks_of(trace)
    tensors, unfinished = _tensors(trace)
    marked = any(one.numbers != [0] for one in ranks)
    rows = [rank_row(one) for one in ranks]
    keys = [key for key in (rows[0] if rows else ()) if key.endswith("_seconds")]
    return {
        "steps_marked": marked,
        "ranks": sorted(rows, key=lambda row: -row["compute_seconds"]),
        "mean": {key: fmean([row[key] for row in rows]) for key in keys},
        "steps": _steps(ranks) if marked else [],
        "tensors": tensors,
        "unfinished": unfinished,
    }


def rank_row(one: RankTimes) -> dict[str, Any]:
    """Return the means of a rank's times."""
    means = {f"{part}_seconds": float(times.mean()) for part, times in one.parts.items()}
    return {
        "rank": one.rank, "host": one.host, "pid": one.pid, "steps": len(one.numbers),
        "step_seconds": float(one.steps.mean()), "compute_seconds": float(one.computed.mean()),
        "exposed_seconds": float(one.exposed.mean()), **means, "hidden_seconds": float(one.hidden.mean()),
    }  # fmt: skip


def _steps(ranks: list[RankTimes]) -> list[dict[str, Any]]:
    """Return a row for each step that all ranks have ended."""
    places = [{number: place for place, number in enumerate(one.numbers)} for one in ranks]
    rows = []
    for number in sorted(set.intersection(*map(set, places))):
        steps = [one.steps[at[number]] for one, at in zip(ranks, places, strict=True)]
        exposed = [one.exposed[at[number]] for one, at in zip(ranks, places, strict=True)]
        computed = {one.rank: s - e for one, s, e in zip(ranks, steps, exposed, strict=True)}
        rows.append({
            "step": number, "seconds": float(fmean(steps)), "exposed_seconds": float(fmean(exposed)),
            "slowest_rank": (slowest := max(computed, key=lambda rank: computed[rank])),
            "slowest_seconds": float(computed[slowest] - median(computed.values())),
        })  # fmt: skip
    return rows


def _tensors(trace: Trace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return how late each tensor comes, and what some ranks have submitted for ever."""
    submitted: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
    pending: dict[str, dict[int, float]] = defaultdict(dict)
    for (pid, tid), thread in trace.threads.items():
        name, rank = trace.processes.get(pid, ""), thread.removeprefix("rank ")
        if not rank.isdigit():
            continue
        for text, began, ended in trace.spans.get((pid, tid), ()):
            if text.startswith("NEGOTIATE_"):
                submitted[name].append((ended, began, int(rank)))
        for text, began in trace.open.get((pid, tid), ()):
            if text.startswith("NEGOTIATE_"):
                pending[name][int(rank)] = began
    every = {rank for rounds in submitted.values() for _, _, rank in rounds} | {
        rank for ranks in pending.values() for rank in ranks
    }
    rows = [row for name, spans in submitted.items() if (row := _lateness(name, spans))]
    left = [
        {"tensor": name, "submitted_by": sorted(ranks), "missing": sorted(every - set(ranks)),
         "since_seconds": min(ranks.values())}
        for name, ranks in pending.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -row["late_seconds"]), left


def _lateness(name: str, spans: list[tuple[float, float, int]]) -> dict[str, Any] | None:
    """Return how long ranks wait for others to submit a tensor, and for whom most."""
    rounds: list[dict[int, tuple[float, float]]] = [{}]
    for ended, began, rank in sorted(spans):  # the ranks end a negotiation together
        if rank in rounds[-1]:
            rounds.append({})
        rounds[-1][rank] = began, ended
    late: Counter[int] = Counter()
    seconds: dict[int, float] = defaultdict(float)
    waits = []
    for members in rounds:
        begins = {rank: began for rank, (began, _) in members.items()}
        last = max(begins, key=lambda rank: begins[rank])
        waits.append(max(ended - began for began, ended in members.values()))
        if len(members) > 1:
            late[last] += 1
            seconds[last] += begins[last] - min(begins.values())
    if not seconds:
        return None
    rank = max(seconds, key=lambda one: seconds[one])
    total = sum(late.values())
    return {
        "tensor": name, "times": len(rounds), "negotiate_seconds": fmean(waits),
        "late_seconds": sum(seconds.values()), "late_rank": rank, "late_share": late[rank] / total,
    }  # fmt: skip
