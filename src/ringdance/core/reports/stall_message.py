"""The warning about a stall: who waits for what, which ranks are late, what they are doing, and advice."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ringdance.core.labels import quoted
from ringdance.core.reports.stacks import place_of
from ringdance.core.transport.base import Identity
from ringdance.errors import UNEVEN_STEPS

_MOST_NAMES = 6
_MOST_THREADS = 3
# Matches function names and thread descriptions that suggest work which is often done by a single rank.
_ONE_RANK_WORK = re.compile(r"eval|valid|checkpoint|save|export|predict|score", re.IGNORECASE)
_IN_FILE = ("pending", "waiting", "joined", "after", "threads")


@dataclass
class Stall:
    """A request that has been pending for a long time.

    Attributes:
        identities: All ranks.
        rank: The rank that reports the stall.
        status: Status of the reporting rank, from ``StallWatch.status``.
        seconds: Seconds that this rank has waited or, unless ``waits``, since it submitted the request.
        waits: True if a thread of the reporting rank is waiting for this request.
        name: Name of the request.
        set_id: Process set of the request.
        others: Ranks of the other members.
        answers: Status of the ranks that have answered.
        unanswered: Descriptions of the ranks that have not answered.
        in_round: True if a round of the process set is in progress on the reporting rank.
        behind: Members on this host that have not signaled in that round.
        idle: Seconds since anything made progress.
        moving: True if data are moving.
        pauses: Work that ranks have marked with ``pause_stall_check``.
        stacks: Stacks of ranks that have not answered, if they are known.
    """

    identities: tuple[Identity, ...]
    rank: int
    status: dict[str, Any]
    seconds: float
    waits: bool
    name: str
    set_id: int
    others: list[int]
    answers: dict[int, dict[str, Any]]
    unanswered: dict[int, str]
    in_round: bool = False
    behind: Collection[int] = ()
    idle: float = 0.0
    moving: bool = False
    pauses: Mapping[int, str] = field(default_factory=dict)
    stacks: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        answered = [rank for rank in self.others if rank in self.answers]
        has = {rank: self.name in pending_names(self.answers[rank], self.set_id) for rank in answered}
        self.missing = [rank for rank in answered if not has[rank]]
        # These ranks have submitted without waking the engine, so they enter no round until a thread waits.
        self.unstarted = [
            rank for rank in answered if has[rank] and self.set_id not in self.answers[rank]["due"]
        ]
        self.unknown = [rank for rank in self.others if rank not in self.answers]

    @property
    def culprits(self) -> list[int]:
        """Ranks that the others wait for: late ranks, or ``rank`` if no other rank submitted the request."""
        if len(self.missing) == len(self.others) > 1:
            names = [set(pending_names(self.answers[rank], self.set_id)) for rank in self.missing]
            if set.intersection(*names):
                return [self.rank]
        return self.missing or self.unstarted or self.unknown or list(self.behind)

    def as_json(self) -> dict[str, Any]:
        """Return the contents of the JSON file about the stall."""
        statuses = {self.rank: self.status, **self.answers}
        return {
            "name": self.name, "process_set": self.set_id, "seconds": round(self.seconds, 3),
            "culprits": self.culprits, "missing": self.missing, "not_waited_for": self.unstarted,
            "ranks": [
                {"rank": who.rank, "host": who.host, "pid": who.pid, "paused": self.pauses.get(who.rank)}
                | {key: statuses[who.rank].get(key) for key in _IN_FILE if who.rank in statuses}
                | ({"no_answer": self.unanswered[who.rank]} if who.rank in self.unanswered else {})
                for who in self.identities if who.rank in {self.rank, *self.others}
            ],
        }  # fmt: skip

    def under_way(self, timeout: float) -> bool:
        """Return True if the exchange seems to be making progress.

        This is the case if data are moving, or if all members have submitted the request and ``idle`` is less
        than ``timeout``.
        """
        if self.missing or self.unstarted:
            return False
        return self.moving or (not self.unknown and self.idle < timeout)


def pending_names(status: dict[str, Any], set_id: int) -> list[str]:
    """Return the names of a rank's pending requests in a process set."""
    return [name for number, name in status["pending"] if number == set_id]


def stall_message(stall: Stall) -> str:
    """Return the warning about a stall."""
    who, own = stall.identities, _frames(stall.status)
    parts = []
    if stall.missing:
        late = [f"{who[rank]}: {_late(stall, rank, own)}" for rank in stall.missing]
        what = "waited for" if stall.name.startswith("message of") else "submitted"
        parts.append(f"Not {what} by {'; by '.join(late)}.")
    if stall.unstarted:
        late = [f"{who[rank]}: {_locations(stall.answers[rank], own)}" for rank in stall.unstarted]
        parts.append(f"Submitted but not yet waited for by {'; by '.join(late)}.")
    if stall.unknown:
        descriptions = [f"{who[rank]}: {stall.unanswered[rank]}" for rank in stall.unknown]
        parts.append(f"No answer from {'; from '.join(descriptions)}.")
    if stall.missing:
        if stall.culprits == [stall.rank]:
            parts.append(f"Only rank {stall.rank} has submitted {quoted(stall.name)}.")
        advice = _divide_advice(stall, own)
        calls = "All ranks must make the same calls."
        pair = "Each message needs a send and a receive with the same size and tag."
        parts.append(advice or (calls if what == "submitted" else pair))
        # Suggest join() only for reductions over all ranks, and only if a late rank is waiting: a late rank
        # that is not waiting may be computing, sleeping or loading rather than out of batches.
        status = {stall.rank: stall.status, **stall.answers}
        behind = [rank for rank in stall.missing if status[rank]["waiting"] and not status[rank]["joined"]]
        if not advice and stall.set_id == 0 and "allreduce." in stall.name and behind:
            made = [f"rank {rank} has made {status[rank]['after']}" for rank in (stall.rank, *behind)]
            parts.append(f"So far {', '.join(made)}. {UNEVEN_STEPS}")
    elif stall.unstarted:
        parts.append("A rank joins the exchange when one of its threads waits for the result.")
    elif stall.moving or not stall.unknown:
        parts = [_exchange(stall, own)]
    return " ".join([_head(stall), *parts])


def _head(stall: Stall) -> str:
    kind = f"has waited {stall.seconds:.0f} s for" if stall.waits else f"submitted {stall.seconds:.0f} s ago"
    where = f" in process set {stall.set_id}" if stall.set_id else ""
    late = [*stall.missing, *stall.unstarted, *stall.behind]
    others = _frames(stall.answers[late[0]]) if late and late[0] in stall.answers else set()
    location = _locations(stall.status, others, only_pending=True)
    return f"{stall.identities[stall.rank]} {kind} {quoted(stall.name)}{where} ({location})."


def _late(stall: Stall, rank: int, own: set[str]) -> str:
    """Describe what a rank that has not submitted the request is doing."""
    status = stall.answers[rank]
    names = pending_names(status, stall.set_id)
    if status["joined"]:
        doing = f"it has joined after {status['after']}"
    elif names:
        more = "" if len(names) <= _MOST_NAMES else f" and {len(names) - _MOST_NAMES} more"
        doing = "it is waiting for " if status["waiting"] else "it has submitted "
        doing += ", ".join(map(quoted, names[:_MOST_NAMES])) + more
        others = [stall.status, *(other for other in stall.answers.values() if other is not status)]
        if len(others) > 1 and not any(set(names) & set(pending_names(one, stall.set_id)) for one in others):
            doing += ", which no other rank has submitted"
    else:
        doing = (
            "it is waiting in another process set" if status["waiting"] else "it is not waiting for anything"
        )
    if what := stall.pauses.get(rank):
        doing = f"it is in a block marked '{what}'; {doing}"
    return f"{doing}; {_locations(status, own)}"


def _divide_advice(stall: Stall, own: set[str]) -> str:
    """Return advice about work that one rank does while the others wait, or "" if there is none."""
    rank, *more = stall.missing
    status = stall.answers[rank]
    if more or stall.culprits != [rank] or status["joined"] or status["pending"] or status["waiting"]:
        return ""
    thread = status["threads"][0]
    functions = [frame.rpartition(" in ")[2] for frame in thread["frames"] if frame not in own]
    for text in (*functions, thread.get("doing", "")):
        if _ONE_RANK_WORK.search(text):
            return (
                f"The other ranks are waiting while only rank {rank} does this ({text}). Divide it among all "
                "ranks, or do it in the background, as hvd.Checkpoints does when it writes files. If the "
                f"other ranks are meant to wait, use `with hvd.pause_stall_check('{text}'):`."
            )
    return ""


def _exchange(stall: Stall, own: set[str]) -> str:
    """Describe the progress of an exchange that all members have submitted."""
    if stall.moving:
        return "All members have submitted it, and its exchange is in progress."
    if not stall.in_round:
        return f"All members have submitted it, but no exchange has started for {stall.idle:.0f} s."
    text = f"All members have submitted it, but its exchange has made no progress for {stall.idle:.0f} s"
    behind = [
        f"{stall.identities[rank]}: {_locations(stall.answers[rank], own)}"
        for rank in stall.behind
        if rank in stall.answers
    ]
    return f"{text}: it is waiting for {'; for '.join(behind)}." if behind else f"{text}."


def _frames(status: dict[str, Any]) -> set[str]:
    return {frame for thread in status["threads"] for frame in thread["frames"]}


def _locations(status: dict[str, Any], others: Collection[str], only_pending: bool = False) -> str:
    """Describe where a rank's threads are: their lines, and their callers' lines.

    If a helper function makes the call on both ranks, show the first caller that is not in ``others``.
    """
    shown = []
    for thread in status["threads"][:_MOST_THREADS]:
        if only_pending and not thread["pending"] and thread["name"] != "main thread":
            continue
        doing = f"{thread['doing']}," if thread.get("doing") else "is"
        shown.append(f"its {thread['name']} {doing} at {place_of(thread['frames'], others)}")
    return "; ".join(shown)
