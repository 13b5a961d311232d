"""What the members of a process set do once they have agreed: batches carried out, mismatches told.

All of it follows from agreed facts, so that every member does the same; ``process_set`` decides
when, and ``execute`` knows how.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ringdance.core.agreement import RUN, Entry, VectorLayout, set_bits
from ringdance.core.batch import plan_batches
from ringdance.core.encoding import decode_call, encode_call
from ringdance.core.exchange import Exchange, Progress, Steps
from ringdance.core.exchange.arithmetic import Reduction, reduction
from ringdance.core.execute import AgreedRequest, allreduce_flat, execute
from ringdance.core.pending import PendingRequests
from ringdance.core.reports.mismatch import mismatch_message
from ringdance.core.reports.recorder import Recorder
from ringdance.core.request import Collective, ReduceOp
from ringdance.errors import MismatchError
from ringdance.transport.base import Transport

__all__ = ["AgreedRequests"]

_MOST_PLANS = 256
Plan = list[tuple[list[Entry], tuple[str, ...], Reduction]]


class AgreedRequests(PendingRequests):
    """The requests of one process set, and how they are carried out when all members are ready.

    Args:
        set_id: number of the set, 0 for all ranks.
        transport: the members' communicator.
        exchange: how they move data.
        capacity: entries of the table of known tensors.
        threshold: most bytes of a batch.
        lock: guards what submitting threads touch.
        progress: told of what is achieved.
        recorder: told of batches.
        change_set: carries out an agreed ADD_SET or REMOVE_SET; a state machine of the engine.

    Attributes:
        members: the global ranks.
        joined: bits: places of the members that have joined, as all know.
        rounds: how many there have been.
    """

    def __init__(
        self,
        set_id: int,
        transport: Transport,
        exchange: Exchange,
        *,
        capacity: int,
        threshold: int,
        lock: threading.Lock,
        progress: Progress,
        recorder: Recorder,
        change_set: Callable[[AgreedRequest], Steps] | None = None,
    ) -> None:
        super().__init__(capacity)
        self.set_id = set_id
        self.transport = transport
        self.exchange = exchange
        self.members = transport.members
        self.joined = 0
        self.rounds = 0
        self._layout = VectorLayout(transport.size)
        self._plans: dict[int, Plan | None] = {}
        self._threshold = threshold
        self._lock = lock
        self._progress = progress
        self._recorder = recorder
        self._change_set = change_set

    def _run_ready(self, ready: int) -> Steps:
        """Execute what is ready everywhere; the plan of a set of all-reduces is remembered."""
        if self.joined:
            yield from self._run_slots(set_bits(ready))
            return
        if ready in self._plans:
            plan = self._plans[ready]
        else:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[ready] = self._plan(set_bits(ready))
        if plan is None:
            yield from self._run_slots(set_bits(ready))
            return
        pending = self.pending
        with self._lock:
            self._ready &= ~ready
        for entries, names, how in plan:
            began = time.monotonic()
            works = [pending[name] for name in names]
            for entry in entries:
                entry.used = self.rounds
            outputs = yield from allreduce_flat(self.exchange, [work.request for work in works], how)
            self._recorder.add(
                "batch", (self.set_id, self.rounds, "ALLREDUCE", names, time.monotonic() - began)
            )
            with self._lock:
                for name in names:
                    del pending[name]
            for work, output in zip(works, outputs, strict=True):
                work.finish(output)

    def _plan(self, slots: list[int]) -> Plan | None:
        """Return the batches of these entries if all are plain all-reduces of one dtype each, else None."""
        entries = [entry for entry in (self._table.entries[slot] for slot in slots) if entry is not None]
        for entry in entries:
            d = entry.description
            plain = d.kind == Collective.ALLREDUCE and d.operation != ReduceOp.ADASUM and not d.detail
            if not plain or entry.disputed:
                return None
            if len(set(d.dtypes)) != 1:
                return None
        plan = []
        for positions in plan_batches([entry.description for entry in entries], self._threshold):
            batch = [entries[i] for i in positions]
            d = batch[0].description
            how = reduction(d.dtypes[0], d.operation, d.prescale, d.postscale, self.transport.size)
            plan.append((batch, tuple(entry.name for entry in batch), how))
        return plan

    def _run_unnamed(self, agreed: int) -> Steps:
        number, first, run = self._layout.read_unnamed(agreed)
        if not number:
            return False
        with self._lock:
            works = [self.unnamed.popleft() for _ in range(RUN if first and run else 1)]
            self.running = works
        items = [AgreedRequest(work.name, work.request.description, work) for work in works]
        if first:
            yield from self._run(items)
        else:
            yield from self._dispute(items[0])
        self.running = []
        return True

    def _run_slots(self, slots: list[int]) -> Steps:
        """Execute table entries that are ready on all members."""
        items: list[AgreedRequest] = []
        disputes: list[tuple[int, AgreedRequest]] = []
        with self._lock:
            for slot in slots:
                entry = self._table.entries[slot]
                if entry is None:
                    continue  # everybody who is left has joined
                entry.used = self.rounds
                self._ready &= ~(1 << slot)
                work = None if self._joined_here else self.pending[entry.name]
                item = AgreedRequest(entry.name, entry.description, work)
                if entry.disputed:
                    disputes.append((slot, item))
                else:
                    items.append(item)
        yield from self._run(items)
        for slot, item in disputes:
            yield from self._dispute(item)
            self._table.remove(slot)
            self._plans.clear()

    def _run(self, items: list[AgreedRequest]) -> Steps:
        alone = len(items) == 1
        for positions in [[0]] if alone else plan_batches([w.description for w in items], self._threshold):
            batch = [items[i] for i in positions]
            began = time.perf_counter()
            kind = batch[0].description.kind
            results: list[Any]
            if batch[0].work is not None and batch[0].work.refusal is not None:
                results = [[] for _ in batch]  # all ranks made the same mistake, and have raised
            elif error := self._forbidden(batch[0]):
                results = [error for _ in batch]
            elif kind in (Collective.ADD_SET, Collective.REMOVE_SET) and self._change_set is not None:
                results = yield from self._change_set(batch[0])
            else:
                results = yield from execute(self.exchange, self.members, batch)
            self._recorder.add(
                "batch",
                (self.set_id, self.rounds, kind.name, [w.name for w in batch], time.perf_counter() - began),
            )
            self._finish(batch, results)

    def _forbidden(self, item: AgreedRequest) -> MismatchError | None:
        """Return why an agreed request cannot be executed, the same on all members."""
        d = item.description
        if self.joined and d.kind not in (Collective.ALLREDUCE, Collective.BARRIER):
            who = ", ".join(str(self.transport.identities[i]) for i in set_bits(self.joined))
            return MismatchError(
                f"'{item.name}': {d.kind.name.lower()} is not possible while some ranks have joined ({who}); "
                "only allreduce is. Call join() after the last such operation."
            )
        size = self.transport.size
        if d.operation == ReduceOp.ADASUM and size & (size - 1):
            return MismatchError(
                f"'{item.name}': Adasum needs a power of two of ranks, and there are {size}."
            )
        return None

    def _finish(self, batch: list[AgreedRequest], results: list[Any]) -> None:
        with self._lock:
            for item in batch:
                if item.work is not None and self.pending.get(item.name) is item.work:
                    del self.pending[item.name]
        for item, result in zip(batch, results, strict=True):
            if item.work is None:
                continue
            if isinstance(result, Exception):
                item.work.finish(error=result)
            else:
                item.work.finish(result)

    def _dispute(self, item: AgreedRequest) -> Steps:
        """All members have submitted the name, but not the same: tell each the same."""
        own = None if item.work is None else (item.work.request.description, item.work.refusal)
        everybody = yield from self.exchange.gather_bytes(encode_call(item.name, own))
        told = [decode_call(payload) for payload in everybody]
        # The name of an unnamed request contains the collective, which may differ: use the first member's.
        submitted = [entry for _, entry in told]
        error = MismatchError(mismatch_message(told[0][0], self.transport.identities, submitted))
        self._recorder.add("mismatch", str(error))
        self._finish([item], [error])
