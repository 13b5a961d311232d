"""What is pending on this rank in one process set, and what of it all members know.

Submitting threads add requests; the rounds of ``process_set`` take them out. The callers hold
the engine's lock.
"""

from __future__ import annotations

from collections import deque

from ringdance.core.agreement import KnownTensors
from ringdance.core.request import Collective, Description, Work
from ringdance.errors import DuplicateNameError

__all__ = ["PendingRequests"]


class PendingRequests:
    """Requests in flight: by name, by order, and by whether they are known to all.

    Attributes:
        pending: all named requests in flight; a name leaves when its operation is complete.
        news: those of them that are not in the table of known tensors.
        unnamed: requests without name, in order of submission.
        running: those of them that are being executed; should the engine fail, they fail too.
        join_work: a pending join.
        eager_since: when the oldest request was submitted that the engine thread is to start.
        eager_last: when the latest such request was submitted.
        not_before: rounds are put off until then (monotonic) after one that achieved nothing.
        in_round: a round is under way; its members rely on what this rank has told.
    """

    def __init__(self, capacity: int) -> None:
        self.pending: dict[str, Work] = {}
        self.news: dict[str, Work] = {}
        self.unnamed: deque[Work] = deque()
        self.running: list[Work] = []
        self.join_work: Work | None = None
        self.eager_since: float | None = None
        self.eager_last = 0.0
        self.not_before = 0.0
        self.in_round = False
        self._pause = 0.0
        self._joined_here = False  # sticky until all have joined; not before what was pending is done
        # Calls that wait, in order, until the peers have heard of refused ones under the same name.
        self._held: dict[str, list[Work]] = {}
        self._ready = 0  # bits: table entries that are pending here
        self._next_unnamed = 0
        self._table = KnownTensors(capacity)

    def add(self, work: Work, name: str | None, eager: bool) -> None:
        """Take a request in. Raises DuplicateNameError."""
        kind = work.request.description.kind
        if kind == Collective.JOIN:
            if self.join_work is not None:
                raise DuplicateNameError("join() is already pending on this rank.")
            self.join_work = work
        elif name is None:
            self._number(work)
            self.unnamed.append(work)
        else:
            old = self.pending.get(name)
            last = self._held[name][-1] if name in self._held else old
            if last is not None and last.refusal is None:
                raise DuplicateNameError(
                    f"'{name}' is already in flight on this rank. Wait for it (synchronize) before you "
                    "submit it again, or use another name."
                )
            if last is not None:
                self._held.setdefault(name, []).append(work)
            else:
                self._take(name, work)
        if eager:
            self.eager_last = work.submitted
            if self.eager_since is None:
                self.eager_since = work.submitted
        self._pause = 0.0
        self.not_before = 0.0

    def _number(self, work: Work) -> None:
        """Give the next number to an unnamed request."""
        work.order = self._next_unnamed
        work.name = f"{work.request.description.kind.name.lower()}.noname.{work.order}"
        self._next_unnamed += 1

    def _release(self) -> None:
        """Take in what was held back by refused calls that the peers have heard of."""
        for name in [name for name in self._held if name not in self.pending]:
            self._take(name, self._held[name].pop(0))
            if not self._held[name]:
                del self._held[name]

    def _take(self, name: str, work: Work) -> None:
        self.pending[name] = work
        self._classify(name, work)

    def _classify(self, name: str, work: Work) -> None:
        slot = self._table.find(name, work.request.description)
        if slot is None:
            self.news[name] = work
        else:
            self.news.pop(name, None)
            self._ready |= 1 << slot

    def in_flight(self) -> list[Work]:
        """Return all that is pending here."""
        own = [self.join_work] if self.join_work is not None else []
        held = [work for line in self._held.values() for work in line]
        running = [work for work in self.running if not work.done()]
        return [*self.pending.values(), *running, *self.unnamed, *held, *own]

    def drop_all(self) -> list[Work]:
        """Forget all that is pending here, and return it."""
        dropped = self.in_flight()
        self.pending.clear()
        self.unnamed.clear()
        self.running = []
        self._held.clear()
        self.join_work = None
        return dropped

    def has_work(self) -> bool:
        return bool(self.pending or self.unnamed or self.join_work is not None)

    def _name_unnamed(self) -> None:
        """Turn unnamed requests into named ones while somebody has joined, who has no such requests."""
        while self.unnamed:
            work = self.unnamed.popleft()
            self.pending[work.name] = work
            self._classify(work.name, work)

    def _answer(self, items: list[tuple[str, Description]]) -> int:
        """Return two bits for each item: no conflict here, and submitted here."""
        answer = 0
        for number, (name, description) in enumerate(items):
            work = self.pending.get(name)
            if self._joined_here or (work is not None and work.request.description == description):
                bits = 3
            else:
                bits = 1 if work is None else 2
            answer |= bits << 2 * number
        return answer

    def _reclassify(self) -> None:
        """Find out anew which pending requests are known: entries have come, changed and gone."""
        self._ready = 0
        self.news = {}
        for name, work in self.pending.items():
            self._classify(name, work)
