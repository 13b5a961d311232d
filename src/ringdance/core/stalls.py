"""Detect stalls: ranks that have waited too long for other ranks.

A rank that has waited for some seconds, or has had an asynchronous request pending for that long, asks all
ranks for their status. Engine threads answer, even while main threads are computing. The waiting rank
with the lowest number then reports which ranks have not submitted which requests, and where their threads
are. If a process on this host does not answer, it is examined from outside.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ringdance.core import labels
from ringdance.core.callers import Callers
from ringdance.core.process_sets.registry import ProcessSets
from ringdance.core.process_sets.state import ProcessSetState
from ringdance.core.recorder import Recorder
from ringdance.core.reports.deadlock import deadlocked_for
from ringdance.core.reports.dump import main_frames, own_lines, stacks_of
from ringdance.core.reports.procfs import CpuSample, describe_threads, sample_cpu
from ringdance.core.reports.stacks import place_of, thread_locations
from ringdance.core.reports.stall_message import Stall, stall_message
from ringdance.core.request import Work
from ringdance.core.ring import Word
from ringdance.core.transfers import Transfer
from ringdance.core.transport.base import Transport
from ringdance.errors import DeadlockError, StallError
from ringdance.settings import Settings

_DEADLOCK = (
    "All ranks are waiting, each for an operation that another rank has not submitted, and no rank has "
    "submitted anything for {:g} s (setting deadlock_time), so none of them can ever continue."
)
_ANSWER_TIMEOUT = 0.5
_BUSY_TIMEOUT = 1.5  # timeout for a process that may have to wait for a core, or is on another host
_LOOK_TIMEOUT = 4.0  # timeout for a rank on another host to examine a silent rank there
_SAME_ANSWER = 0.1  # how long an answer is reused, because examining all threads takes about 20 ms
_RECHECK = 1.0  # seconds until the next inquiry after an exchange was found to be in progress
_MOST_PATIENCE = 120.0
_Report = tuple[str | None, type[StallError] | None]


@dataclass
class _Inquiry:
    """An inquiry about a request, and this rank's state when the inquiry was sent."""

    asked: float
    state: ProcessSetState
    work: Work | Transfer
    seconds: float
    rounds: int
    count: int
    cpu: dict[int, CpuSample | None] = field(default_factory=dict)
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    # Description of each silent rank on another host, made by a rank there. None until it arrives.
    seen: dict[int, dict[str, Any] | None] = field(default_factory=dict)


class StallWatch:
    """Detects stalls of operations that this rank is waiting for.

    Args:
        transport: Connects all ranks and carries the notes.
        settings: The engine's settings. Stalls are reported after ``stall_check_time`` (see Note [Patience])
            and again after two and four times as long. This rank gives up after ``stall_shutdown_time``, or
            after ``deadlock_time`` if no rank can ever continue.
        sets: The process sets.
        callers: The threads that are waiting.
        recorder: Counts batches and steps.

    Attributes:
        pauses: Marks set by ``pause_stall_check``, by rank: the name of the work, and the time (monotonic)
            until which no stalls are reported.
        reported: The last stall that was reported.

    Note [Patience]
        With the default ``stall_check_time``, other ranks may be late by the longest of three times: the
        median of the last nine step times, 1.5 times this rank's longest computation between two exchanges
        (among the last 16), and the time that this rank computed before it started to wait. For example, if
        all ranks compile for a minute, some need a few seconds longer than others. The allowance is at most
        two minutes.
    """

    def __init__(
        self, transport: Transport, settings: Settings, sets: ProcessSets, callers: Callers,
        recorder: Recorder,
    ) -> None:
        self._transport = transport
        self._sets, self._callers = sets, callers
        self._settings = settings
        self._next_report: dict[tuple[int, str], float] = {}
        self._quiet_until = 0.0  # after a report, later requests are not reported until this time
        self._inquiry: _Inquiry | None = None
        self._status: tuple[float, dict[str, Any]] = -1.0, {}
        self._moved: dict[int, tuple[int, float]] = {}  # per set: last ``_count``, and when it changed
        self._recorder, self._words = recorder, recorder.words
        self._adaptive = settings.origin("stall_check_time") == "default"
        self._last_batch, self._last_step = (0, time.monotonic(), 0), (0, time.monotonic())
        self._step_times, self._gaps = deque[float](maxlen=9), deque[float](maxlen=16)
        self.pauses: dict[int, tuple[str, float]] = {}
        self._resumed = 0.0
        self.reported: Stall | None = None

    def status(self) -> dict[str, Any]:
        """Return this rank's answer to an inquiry. The answer is reused for a tenth of a second.

        Its fields: ``pending``: Set and name of each request. ``labels``: See ``labels_of``. ``due``: Sets in
        which this rank is in a round or will enter one. ``waiting``: True if a thread of this rank is
        waiting. ``joined``: True if a join is pending. ``threads``: See ``stacks.thread_locations``.
        ``after``: See ``Recorder.steps_text``. ``blocked``, ``still`` and ``quiet``: See ``Callers.status``.
        """
        if time.monotonic() < self._status[0] + _SAME_ANSWER:
            return self._status[1]
        sets = self._sets.states()
        messages = [(transfer.state.set_id, transfer) for transfer in list(self._callers.transfers.values())]
        works: list[tuple[int, Work | Transfer]] = [*messages]
        works += [(s.set_id, t) for s in sets for t in s.pending.in_flight() if t.refusal is None]
        status = {
            "kind": "status",
            "pending": [(number, work.name) for number, work in works],
            "labels": labels.labels_of(work.name for _, work in works),
            "due": [s.set_id for s in sets if s.next_due() is not None] + [number for number, _ in messages],
            "waiting": bool(messages) or any(self._callers.waits_in(s.set_id) for s in sets),
            "joined": any(s.pending.join is not None for s in sets),
            "threads": thread_locations({work.thread for _, work in works}),
            "after": self._recorder.steps_text(),
            **self._callers.status(),
        }
        self._status = time.monotonic(), status
        return status

    def on_status(self, sender: int, note: dict[str, Any]) -> None:
        """Store another rank's answer to the current inquiry."""
        labels.adopt(note.get("labels", {}))
        if self._inquiry is not None:
            self._inquiry.answers[sender] = note

    def check(self) -> _Report:
        """Return a warning and the type of the error to fail with. Either may be None."""
        now, sets = time.monotonic(), self._sets.states()
        oldest = self._oldest(sets, now)
        joins = [("join", now - s.pending.join.submitted) for s in sets if s.pending.join is not None]
        name, age = (oldest[1].name, oldest[2]) if oldest else (joins or [("", now)])[0]
        self._recorder.ring.pending_name(name)
        self._words[Word.PENDING] = self._recorder.ring.label(labels.label_of(name)) if name else 0
        self._words[Word.PENDING_SINCE] = int(1e9 * (now - age))
        if self._settings.stall_check_disable:
            return None, None
        for state in sets:
            count = _count(state)
            if self._moved.get(state.set_id, (-1, 0.0))[0] != count:
                self._moved[state.set_id] = count, now
        self._note_pace(now)
        if any(now < until for _, until in list(self.pauses.values())):
            self._inquiry, self._resumed = None, now
            return None, None
        if self._inquiry is not None:
            return self._conclude(self._inquiry, now)
        if oldest is not None and self._due(*oldest, now):
            self._ask(*oldest, now)
        return None, None

    def _note_pace(self, now: float) -> None:
        batches, steps, waited = (self._words[word] for word in (Word.BATCHES, Word.STEPS, Word.WAITED))
        batches += self._callers.messages
        if batches != self._last_batch[0]:
            self._gaps.append(now - self._last_batch[1] - (waited - self._last_batch[2]) / 1e9)
            self._last_batch = batches, now, waited
        if steps != self._last_step[0]:
            self._step_times.append(now - self._last_step[1])
            self._last_step = steps, now

    def _limit(self, since: float) -> float:
        """Return the age at which to report a request that became pending at the time ``since``."""
        limit = self._settings.stall_check_time
        if not self._adaptive:
            return limit
        usual = sorted(self._step_times)[len(self._step_times) // 2] if self._step_times else 0.0
        computed = max(1.5 * max(self._gaps, default=0.0), since - self._last_batch[1])
        return max(limit, min(_MOST_PATIENCE, max(usual, computed)))

    def _oldest(
        self, sets: list[ProcessSetState], now: float
    ) -> tuple[ProcessSetState, Work | Transfer, float] | None:
        """Return the request or message with the longest wait, with its set and age, or None."""
        waiting: list[tuple[ProcessSetState, Work | Transfer, float]] = [
            (t.state, t, now - t.waited_since) for t in list(self._callers.transfers.values())
        ]
        waiting += [
            (state, work, now - since)
            for state in sets
            for work in state.pending.in_flight()
            if work.refusal is None and work is not state.pending.join
            if (since := self._pending_since(state, work)) is not None
        ]
        if not waiting:
            self._next_report.clear()
            return None
        return max(waiting, key=lambda item: item[2])

    def _pending_since(self, state: ProcessSetState, work: Work) -> float | None:
        """Return the time a thread started waiting for a request.

        For an asynchronous request, this is the time it was submitted.
        """
        if work.waited_since and self._callers.waits_in(state.set_id):
            return work.waited_since
        return work.submitted if state.pending.eager_since is not None else None

    def _due(self, state: ProcessSetState, work: Work | Transfer, age: float, now: float) -> bool:
        """Return True if a report on a request is due."""
        counted = min(age, now - self._resumed)
        ends = 0 < self._settings.stall_shutdown_time <= counted
        at = self._next_report.get((state.set_id, work.name), 0.0 if ends else self._quiet_until)
        # The inquiry starts early, so that the report is on time.
        limit = 0.0 if ends else self._limit(now - age)
        return now >= at and counted >= limit - min(_ANSWER_TIMEOUT, limit / 8)

    def _ask(self, state: ProcessSetState, work: Work | Transfer, age: float, now: float) -> None:
        inquiry = self._inquiry = _Inquiry(now, state, work, age, state.rounds, _count(state))
        limits = [
            limit - age
            for limit in (self._settings.stall_shutdown_time, self._settings.deadlock_time)
            if limit > age
        ]
        again = 2 * max(age, self._settings.stall_check_time) - age
        self._next_report[(state.set_id, work.name)] = now + min([again, *limits])
        for rank in range(self._transport.size):
            if rank != self._transport.rank:
                inquiry.cpu[rank] = self._sample(rank)
                self._transport.post(rank, json.dumps({"kind": "ask"}).encode())

    def _sample(self, rank: int) -> CpuSample | None:
        pid = self._transport.identities[rank].pid
        here = self._transport.state(rank) == "running" and pid != os.getpid()
        return sample_cpu(pid) if here else None

    def _conclude(self, inquiry: _Inquiry, now: float) -> _Report:
        state, work = inquiry.state, inquiry.work
        if work.complete or state not in self._sets.states():
            self._inquiry = None
            return None, None
        own = self._transport.rank
        others = [rank for rank in getattr(work, "peers", state.members) if rank != own]
        silent = [p for p in range(self._transport.size) if p != own and p not in inquiry.answers]
        busy = any(self._transport.state(rank) in ("running", "unknown") for rank in silent)
        elapsed = now - inquiry.asked
        looking = elapsed >= _ANSWER_TIMEOUT and self._ask_neighbours(inquiry, silent)
        timeout = _BUSY_TIMEOUT if busy else _ANSWER_TIMEOUT
        if silent and elapsed < (_LOOK_TIMEOUT if looking else timeout):
            return None, None
        self._inquiry = None
        waited = min(inquiry.seconds, inquiry.asked - self._resumed) + 0.001
        give_up = 0 < self._settings.stall_shutdown_time <= waited
        lower = [inquiry.answers[p] for p in others if p < own and p in inquiry.answers]
        if not give_up and any(answer["waiting"] and not answer["joined"] for answer in lower):
            return None, None  # a lower rank, not in join(), is waiting too and will report the stall
        stall = self._describe(inquiry, now, others)
        self.reported = stall
        if self._deadlocked(inquiry, stall, now):
            return f"{_DEADLOCK.format(self._settings.deadlock_time)} {stall_message(stall)}", DeadlockError
        if stall.under_way(self._settings.stall_check_time):
            give_up = False
            if inquiry.seconds < 4 * self._settings.stall_check_time:
                self._next_report[(state.set_id, work.name)] = now + _RECHECK
                return None, None
        self._quiet_until = now + self._settings.stall_check_time
        more = " This rank gave up (setting stall_shutdown_time)." if give_up else ""
        return stall_message(stall) + more, StallError if give_up else None

    def _deadlocked(self, inquiry: _Inquiry, stall: Stall, now: float) -> bool:
        """Return True if no rank can ever continue. If that is not certain yet, check again soon."""
        limit = self._settings.deadlock_time
        statuses = {**inquiry.answers, self._transport.rank: stall.status}
        if not 0 < limit <= inquiry.seconds + 0.001 or len(statuses) < self._transport.size:
            return False
        seconds = deadlocked_for(self._sets.ranks(), statuses)
        # All ranks must have been blocked for longer than this inquiry took, and thus at the same time.
        quiet = min(status["quiet"] for status in statuses.values())
        if quiet >= limit and seconds > max(limit / 4, now - inquiry.asked):
            return True
        if seconds >= 0:
            self._next_report[(inquiry.state.set_id, inquiry.work.name)] = now + limit / 3
        return False

    def _describe(self, inquiry: _Inquiry, now: float, others: list[int]) -> Stall:
        state, work, transport = inquiry.state, inquiry.work, self._transport
        window = state.transport.window
        group = state.transport.host_group
        behind = window.missing() if window is not None and state.in_round else []
        stacks: dict[int, str] = {}
        message = isinstance(work, Transfer)
        return Stall(
            identities=transport.identities,
            rank=transport.rank,
            status=self.status(),
            seconds=inquiry.seconds,
            waits=message or bool(work.waited_since and self._callers.waits_in(state.set_id)),
            name=work.name,
            set_id=state.set_id,
            others=others,
            answers=inquiry.answers,
            unanswered={r: self._outside(r, inquiry, stacks) for r in others if r not in inquiry.answers},
            stacks=stacks,
            in_round=state.in_round,
            behind=[state.members[group[index]] for index in behind],
            idle=now - self._moved[state.set_id][1],
            # Only progress within one round counts: a series of rounds that achieve nothing moves no data.
            moving=inquiry.answers.keys() >= set(others)  # a message moves while both ranks are waiting
            if message
            else state.in_round and state.rounds == inquiry.rounds and _count(state) != inquiry.count,
            pauses={rank: what for rank, (what, _) in self.pauses.copy().items()},
        )

    def look(self, rank: int, before: CpuSample | None = None) -> dict[str, Any]:
        """Examine the process of another rank on this host from outside.

        Returns a note with a description (``text``) and the rank's ``stacks``, which are "" if unknown.
        """
        state, pid = self._transport.state(rank), self._transport.identities[rank].pid
        here = state == "running" and pid != os.getpid()
        # Describe the threads before calling stacks_of, whose signal wakes the process.
        text = describe_threads(pid, before) if here else ""
        stacks = stacks_of(pid) if here else ""
        frames = own_lines(main_frames(stacks))
        place = f", at {place_of(frames)}" if frames else ""
        if state == "gone":
            text = "its process has exited"
        elif state == "stopped":
            text = f"its process is stopped (SIGSTOP or a debugger); `kill -CONT {pid}` resumes it"
        else:
            text = text or "its main thread is probably in a call that holds the GIL"
            main, mark, others = text.partition("; ")
            text = f"{main}{place}{mark}{others}"
            text += "" if place else f"; `py-spy dump --pid {pid}` on that host shows its stack"
        return {"kind": "seen", "rank": rank, "text": text, "stacks": stacks}

    def _ask_neighbours(self, inquiry: _Inquiry, silent: list[int]) -> bool:
        """Ask ranks that answered to examine silent ranks on their hosts.

        Returns True while any of their replies is missing.
        """
        who = self._transport.identities
        for rank in silent:
            neighbours = [p for p in inquiry.answers if who[p].host == who[rank].host]
            if neighbours and rank not in inquiry.seen and self._transport.state(rank) == "unknown":
                inquiry.seen[rank] = None
                self._transport.post(neighbours[0], json.dumps({"kind": "look", "rank": rank}).encode())
        return any(inquiry.seen.get(rank, inquiry) is None for rank in silent)

    def on_seen(self, note: dict[str, Any]) -> None:
        """Store a rank's report about a silent rank on the same host."""
        if self._inquiry is not None:
            self._inquiry.seen[note["rank"]] = note

    def _outside(self, rank: int, inquiry: _Inquiry, stacks: dict[int, str]) -> str:
        """Describe a rank that does not answer, and add its stacks to ``stacks``."""
        if rank not in inquiry.seen and self._transport.state(rank) == "unknown":
            stacks[rank], host = "", self._transport.identities[rank].host
            return (
                f"no rank on its host answers: {host} is down or unreachable (`ping {host}`), or the rank's "
                "process is stopped or in a call that holds the GIL"
            )
        report = inquiry.seen.get(rank) or self.look(rank, inquiry.cpu[rank])
        stacks[rank] = report["stacks"]
        return str(report["text"])


def _count(state: ProcessSetState) -> int:
    """Return a number that grows while the set's rounds and exchanges make progress."""
    window = state.transport.window
    if window is not None and state.transport.one_host:
        return window.count
    return state.exchange.context.achieved  # shared by all sets: a set across hosts has no counter
