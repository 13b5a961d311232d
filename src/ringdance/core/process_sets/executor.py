"""Execute the requests that all members of a process set have agreed on, and report mismatches.

What is executed depends only on agreed facts, so it is the same on all members.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from ringdance.core.collectives import AgreedRequest, allreduce_flat, execute
from ringdance.core.exchange import Exchange, Steps
from ringdance.core.exchange.arithmetic import Reduction, reduction
from ringdance.core.labels import label_of
from ringdance.core.process_sets.agreement import CacheEntry, set_bits
from ringdance.core.process_sets.batch import description_bytes, is_plain, plan_batches
from ringdance.core.process_sets.encoding import decode_call, encode_call
from ringdance.core.process_sets.pending import PendingRequests
from ringdance.core.recorder import BatchRecord, Recorder
from ringdance.core.reports.mismatch import mismatch_message
from ringdance.core.request import Collective, ReduceOp
from ringdance.core.transport.base import Transport
from ringdance.errors import MismatchError, StallError

_MAX_PLANS = 256
_CHANGES = (Collective.ADD_SET, Collective.REMOVE_SET, Collective.TUNE)


@dataclass(slots=True)
class Batch:
    """Cache entries whose all-reduces are executed together.

    Attributes:
        bits: Ready bits of the entries.
        entries: The entries.
        names: Names of the entries.
        reduction: How their data are reduced.
        record: Record of the batch.
    """

    bits: int
    entries: list[CacheEntry]
    names: tuple[str, ...]
    reduction: Reduction
    record: BatchRecord


@dataclass(kw_only=True)
class Executor:
    """Executes the agreed requests of one process set.

    Attributes:
        set_id: Number of the set, or 0 for all ranks.
        transport: The members' communicator.
        exchange: Moves the members' data.
        pending: The requests in flight.
        threshold: Maximum number of bytes per batch.
        lock: Guards ``pending``.
        recorder: Receives a record of each batch.
        change: Executes an agreed ADD_SET, REMOVE_SET or TUNE. None unless this is the set of all ranks.
        plans: Batches for each combination of ready bits. None for a combination that contains anything other
            than plain all-reduces. Must be cleared whenever the response cache changes.
        largest: Maximum numbers of requests per round, bytes per round, and bytes per batch, over all planned
            rounds of all-reduces. Equal on all members.
    """

    set_id: int
    transport: Transport
    exchange: Exchange
    pending: PendingRequests
    threshold: int
    lock: AbstractContextManager[Any]
    recorder: Recorder
    change: Callable[[AgreedRequest], Steps] | None = None
    plans: dict[int, list[Batch] | None] = field(default_factory=dict)
    largest: tuple[int, int, int] = (0, 0, 0)

    def run_ready(self, ready: int, round_number: int) -> Steps:
        """Execute the cache entries whose bits are set in ``ready``.

        Plans that contain only all-reduces are cached.
        """
        pending = self.pending
        plan = None
        if not pending.joined:
            if ready not in self.plans:
                if len(self.plans) >= _MAX_PLANS:
                    self.plans.clear()
                self.plans[ready] = self._plan(set_bits(ready))
            plan = self.plans[ready]
        if plan is None:
            yield from self.run_slots(set_bits(ready), round_number)
            return
        named = pending.named
        for batch in plan:
            began = time.monotonic_ns()
            works = [named[name] for name in batch.names]
            for entry in batch.entries:
                entry.used = round_number
            requests = [work.request for work in works]
            outputs = yield from allreduce_flat(self.exchange, requests, batch.reduction)
            self.recorder.batch(batch.record, round_number, began, len(works))
            with self.lock:
                pending.ready &= ~batch.bits
                for name in batch.names:
                    del named[name]
            for work, output in zip(works, outputs, strict=True):
                work.finish(output)

    def _plan(self, slots: list[int]) -> list[Batch] | None:
        """Group the entries in these slots into batches. Returns None unless all are plain all-reduces."""
        cached = self.pending.cache.entries
        entries = [entry for slot in slots if (entry := cached[slot]) is not None]
        if any(entry.mismatched or not is_plain(entry.description) for entry in entries):
            return None
        groups = plan_batches([entry.description for entry in entries], self.threshold)
        plan = [self.batch_of([entries[i] for i in positions]) for positions in groups]
        sizes = [batch.record.nbytes for batch in plan]
        requests, in_round, in_batch = self.largest
        self.largest = max(requests, len(entries)), max(in_round, sum(sizes)), max(in_batch, *sizes, 0)
        return plan

    def batch_of(self, entries: list[CacheEntry]) -> Batch:
        """Return the batch of these cached all-reduces, which have the same dtype and operation."""
        d = entries[0].description
        how = reduction(d.dtypes[0], d.operation, d.prescale, d.postscale, self.transport.size)
        names = tuple(entry.name for entry in entries)
        nbytes = sum(description_bytes(entry.description) for entry in entries)
        labels = tuple(map(label_of, names))
        label = self.recorder.ring.label(labels if len(labels) > 1 else labels[0])
        record = BatchRecord(self.set_id, Collective.ALLREDUCE, label, nbytes)
        bits = sum(1 << self.pending.cache.slots[name] for name in names)
        return Batch(bits, entries, names, how, record)

    def run_unnamed(self, count: int, round_number: int) -> Steps:
        """Execute the first ``count`` unnamed requests. If ``count`` is 0, the first one is a mismatch."""
        pending = self.pending
        with self.lock:
            if len(pending.unnamed) < max(1, count):  # a request was given up after the vector had been sent
                raise StallError(pending.removal)
            works = pending.running = [pending.unnamed.popleft() for _ in range(max(1, count))]
        items = [AgreedRequest(work.name, work.request.description, work) for work in works]
        if count:
            yield from self._run(items, round_number)
        else:
            yield from self._report_mismatch(items[0])
        pending.running = []

    def run_slots(self, slots: list[int], round_number: int) -> Steps:
        """Execute the cache entries in these slots, which are ready on all members."""
        pending, items, mismatched = self.pending, [], []
        with self.lock:
            for slot in slots:
                entry = pending.cache.entries[slot]
                if entry is None:
                    continue  # all remaining members have joined
                entry.used = round_number
                pending.ready &= ~(1 << slot)
                work = None if pending.joined_here else pending.named[entry.name]
                item = AgreedRequest(entry.name, entry.description, work)
                if entry.mismatched:
                    mismatched.append((slot, item))
                else:
                    items.append(item)
        # Tune first, so that the new values apply to the other requests.
        items.sort(key=lambda item: item.description.kind != Collective.TUNE)
        yield from self._run(items, round_number)
        for slot, item in mismatched:
            yield from self._report_mismatch(item)
            pending.cache.remove(slot)
            self.plans.clear()

    def _run(self, items: list[AgreedRequest], round_number: int) -> Steps:
        lone = len(items) == 1
        plan = [[0]] if lone else plan_batches([item.description for item in items], self.threshold)
        for positions in plan:
            batch = [items[i] for i in positions]
            began = time.monotonic_ns()
            first, kind = batch[0], batch[0].description.kind
            results: list[Any]
            if first.work is not None and first.work.refusal is not None:
                results = [[] for _ in batch]  # the same invalid call raised an error on all members
            elif error := self._forbidden(first):
                results = [error for _ in batch]
            elif kind in _CHANGES and self.change is not None:
                results = yield from self.change(first)
            else:
                results = yield from execute(self.exchange, self.transport.members, batch)
            works = [item.work for item in batch if item.work is not None]
            nbytes = sum([view.nbytes for work in works for view in work.request.inputs])
            label = self.recorder.ring.label(tuple([label_of(item.name) for item in batch]))
            record = BatchRecord(self.set_id, kind, label, nbytes)
            self.recorder.batch(record, round_number, began, len(batch))
            self._finish(batch, results)

    def _forbidden(self, item: AgreedRequest) -> MismatchError | None:
        """Return an error if an agreed request cannot be executed, else None. All members agree on it."""
        d, joined, size = item.description, self.pending.joined, self.transport.size
        if joined and d.kind not in (Collective.ALLREDUCE, Collective.BARRIER, Collective.TUNE):
            who = ", ".join(str(self.transport.identities[i]) for i in set_bits(joined))
            return MismatchError(
                f"'{item.name}': {d.kind.name.lower()} is not possible while some ranks have joined ({who}). "
                f"Only allreduce and barrier are. Call join() after the last {d.kind.name.lower()}."
            )
        if joined and d.prescale != 1.0 and d.operation in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT):
            return MismatchError(
                f"'{item.name}': {d.operation.name.title()} with prescale_factor={d.prescale:g} is not "
                "possible while some ranks have joined. Scale the tensors themselves before the call."
            )
        if d.operation == ReduceOp.ADASUM and size & (size - 1):
            return MismatchError(
                f"'{item.name}': for Adasum, the number of ranks must be a power of two, but it is {size}."
            )
        return None

    def _finish(self, batch: list[AgreedRequest], results: list[Any]) -> None:
        named = self.pending.named
        with self.lock:
            for item in batch:
                if item.work is not None and named.get(item.name) is item.work:
                    del named[item.name]
        for item, result in zip(batch, results, strict=True):
            if item.work is not None:
                error = result if isinstance(result, Exception) else None
                item.work.finish(None if error else result, error)

    def _report_mismatch(self, item: AgreedRequest) -> Steps:
        """Fail a request that differs between members, with the same message on all of them."""
        own = None if item.work is None else (item.work.request.description, item.work.refusal)
        payloads = yield from self.exchange.gather_bytes(encode_call(item.name, own))
        calls = [decode_call(payload) for payload in payloads]
        # The generated name contains the collective, which may differ, so use the first member's name.
        submitted = [call for _, call in calls]
        error = MismatchError(mismatch_message(calls[0][0], self.transport.identities, submitted))
        self.recorder.text(str(error))
        self._finish([item], [error])
