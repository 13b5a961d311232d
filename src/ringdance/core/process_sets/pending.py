"""This rank's in-flight requests in one process set, divided into response cache hits and misses.

Threads: submitting threads add requests, and the rounds of ``state`` take them out. Lock: callers hold the
engine's lock.
"""

from __future__ import annotations

import math
from collections import deque

from ringdance.core.process_sets.agreement import ResponseCache
from ringdance.core.request import TUNE_NAME, Collective, Description, Work
from ringdance.errors import DuplicateNameError, ProcessSetRemovedError


class PendingRequests:
    """Requests in flight: by name, by order, and by whether they are in the response cache.

    Attributes:
        named: All named requests in flight. A name is removed when its operation is complete.
        misses: Named requests that are not in the response cache.
        ready: Bits of the cache entries that are pending here.
        unnamed: Requests without a name, in order of submission.
        running: Unnamed requests that are being executed. They also fail if the engine fails.
        join: The pending join request, or None.
        joined: Bits of the members that have joined, as agreed in the last round.
        held: By name: requests, in order of submission, that are held until a refused request with the same
            name has been reported to the peers.
        joined_here: True if this rank contributes neutral elements until all ranks have joined.
        eager_since: Submission time of the oldest request that the engine thread must start.
        eager_last: Submission time of the latest such request.
        not_before: Earliest start of the next round (monotonic), delayed if the last rounds achieved nothing.
        backoff: Seconds by which rounds are delayed.
        submitted: Number of unnamed requests that this rank has submitted.
        limit: Unnamed requests from this number on are refused, because a member will never submit them.
        removal: Reason for the refusal.
    """

    def __init__(self, capacity: int) -> None:
        self.named: dict[str, Work] = {}
        self.misses: dict[str, Work] = {}
        self.ready = 0
        self.unnamed: deque[Work] = deque()
        self.running: list[Work] = []
        self.join: Work | None = None
        self.joined = 0
        self.joined_here = False
        self.eager_since: float | None = None
        self.eager_last = 0.0
        self.not_before = 0.0
        self.backoff = 0.0
        self.cache = ResponseCache(capacity)
        self.held: dict[str, list[Work]] = {}
        self.limit: float = math.inf
        self.removal = ""
        self.submitted = 0

    def add(self, work: Work, name: str | None, eager: bool) -> None:
        """Add a request. Raises DuplicateNameError or ProcessSetRemovedError."""
        if work.request.description.kind == Collective.JOIN:
            if self.join is not None:
                raise DuplicateNameError(
                    "join() is already pending on this rank. Wait for it before you call join() again."
                )
            self.join = work
        elif name is None:
            if self.submitted >= self.limit:
                raise ProcessSetRemovedError(self.removal)
            self._number(work)
            self.unnamed.append(work)
        else:
            last = self.held[name][-1] if name in self.held else self.named.get(name)
            if last is None:
                self._add_named(name, work)
            elif last.refusal is not None:
                self.held.setdefault(name, []).append(work)
            else:
                raise DuplicateNameError(
                    f"'{name}' is already in flight on this rank. Wait for it (synchronize) before you "
                    "submit it again, or use another name."
                )
        if eager:
            self.eager_last = work.submitted
            if self.eager_since is None:
                self.eager_since = work.submitted
        self.backoff = 0.0
        self.not_before = 0.0

    def _number(self, work: Work) -> None:
        work.order = self.submitted
        self.submitted += 1  # increment before any call, because a signal handler may submit during a call
        work.name = f"{work.request.description.kind.name.lower()}.noname.{work.order}"

    def _add_named(self, name: str, work: Work) -> None:
        self.named[name] = work
        slot = self.cache.find(name, work.request.description)
        if slot is None:
            self.misses[name] = work
        else:
            self.ready |= 1 << slot

    def _remove_named(self, name: str) -> Work:
        """Remove and return a named request that has not been executed."""
        if self.misses.pop(name, None) is None:
            self.ready &= ~(1 << self.cache.slots[name])
        return self.named.pop(name)

    def end_at(self, number: int, removal: str) -> list[Work]:
        """Refuse unnamed requests from ``number`` on. Remove and return those that are pending.

        A vector that this rank has already sent may contain them. The member that never submits them has not
        sent any in their place, so they are not executed (see Note [Complements]).
        """
        if number >= self.limit:
            return []
        self.limit, self.removal = number, removal
        late = [work for work in self.unnamed if work.order >= number]
        for _ in late:
            self.unnamed.pop()
        return late

    def release_held(self) -> None:
        """Add the next held request under each name whose refused request has been reported to the peers."""
        for name in [name for name in self.held if name not in self.named]:
            self._add_named(name, self.held[name].pop(0))
            if not self.held[name]:
                del self.held[name]

    def in_flight(self) -> list[Work]:
        """Return all pending requests except the tuning request. Other threads may submit more at any time.

        Note [Copies of dictionaries]
            In Python 3.11, allocating a container may trigger a garbage collection, during which another
            thread may run. Therefore ``tuple(mapping.values())`` and ``list(mapping.items())`` can fail with
            "dictionary changed size during iteration". ``list(mapping.values())`` and ``mapping.copy()``
            cannot.
        """
        held = [work for queue in list(self.held.values()) for work in queue]
        running = [work for work in list(self.running) if not work.done()]
        join = [self.join] if self.join is not None else []
        named = [work for name, work in self.named.copy().items() if name != TUNE_NAME]
        return [*named, *running, *self.unnamed, *held, *join]

    def drop_all(self) -> list[Work]:
        """Remove and return all pending requests."""
        self.withdraw_tuning()
        dropped = self.in_flight()
        for collection in (self.named, self.unnamed, self.running, self.held):
            collection.clear()
        self.join = None
        return dropped

    def has_work(self) -> bool:
        """Return True if any request other than the tuning request is pending."""
        return bool(len(self.named) > (TUNE_NAME in self.named) or self.unnamed or self.join is not None)

    def withdraw_tuning(self) -> None:
        """Remove the tuning request, because this rank is joining or stopping."""
        if TUNE_NAME in self.named:
            self._remove_named(TUNE_NAME).finish([])

    def name_unnamed(self) -> None:
        """Turn unnamed requests into named ones, because joined members have none to match by order."""
        while self.unnamed:
            work = self.unnamed.popleft()
            self._add_named(work.name, work)

    def all_joined(self) -> Work | None:
        """Reset the join state after all members have joined. Returns this rank's join request."""
        work, self.join = self.join, None
        self.joined, self.joined_here = 0, False
        again = sorted((w for w in self.named.values() if w.order >= 0), key=lambda w: w.order)
        for unnamed in again:
            self._remove_named(unnamed.name)
        self.unnamed.extendleft(reversed(again))
        self.submitted = 0  # members that joined early have submitted fewer requests
        for unnamed in self.unnamed:
            self._number(unnamed)
        return work

    def answer(self, items: list[tuple[str, Description]]) -> int:
        """Return two bits for each of the leader's cache misses: "no mismatch" and "submitted here"."""
        answer = 0
        for number, (name, description) in enumerate(items):
            work = self.named.get(name)
            if self.joined_here or (work is not None and work.request.description == description):
                bits = 3
            else:
                bits = 1 if work is None else 2
            answer |= bits << 2 * number
        return answer

    def look_up_all(self) -> None:
        """Look up all named requests again, because the cache has changed."""
        self.ready = 0
        self.misses = {}
        for name, work in self.named.copy().items():
            self._add_named(name, work)
