"""Exchange the gradients of one optimizer between ranks, as the framework computes them.

A binding calls ``GradientExchange`` for each gradient (``on_gradient``) and at the end of each backward
pass (``on_backward_end``). It gives access to the gradients as NumPy views (``GradientSource``).

Note [Exchange of gradients]
When: at the end of every ``passes``-th backward pass, before it returns. Clipping, unscaling and norms then
see reduced gradients on all ranks. A rank without such a pass in a step exchanges in ``finish_exchange()``,
which the optimizer's step calls.

What: each rank sends a mask of the gradients it computed. A gradient that any rank has is reduced on all
ranks, with zeros where it is missing. One that no rank has is left alone, so the optimizer skips it as it
does in one process.

Early buckets: a rank with exactly the *expected* gradients (the last outcome) sends them with the mask to
save a round trip. This is safe. If a rank sent a bucket, the union of the masks contains it, so every rank
sends it. If the union does not contain it, no rank sent it. If all ranks compute the same gradients each
time, they stop sending masks: see ``fast_path``.

Checks: in a step, all ranks end the same number of passes that touch this optimizer's parameters, or none.
The mask carries the step number and a digest of the parameter names. If either differs, all ranks raise the
same error.

Recomputed gradients: a gradient may be computed again after it was reduced (two losses, one optimizer).
Average stays right (the mean of (reduced + new) is reduced + mean of new); other operations raise.

Gradients set by hand (``torch.autograd.grad``, master weights): a gradient that no backward pass computed
still counts as computed, unless it is the tensor that an earlier exchange left there. It is reduced with
the gradients of the pass, or before it is used. All ranks set such gradients between the same two exchanges.
Values changed in place cannot be told from clipping, unless the step had no backward pass. With Average, all
gradients count in an exchange before they are used: averaging equal gradients changes nothing, and the ranks
stay on their fast path.

Overlap: if all ranks have spare cores (agreed through the mask), buckets are exchanged during backward.
Otherwise everything is sent in one request at the end of the pass. Parameter order decides on the buckets
and their order, never timing.

Note [Direct buckets]
Gradients that are exchanged on their device (``core.exchange.device``) take another fast path. After
several steps in which all ranks computed the same gradients, each bucket is exchanged as soon as it is
complete, without a round: in a fixed order, through a dedicated communicator, and as a copy. The mask at
the end of the pass shows whether all ranks had the expected gradients. If so, the copies become the
gradients. Otherwise all ranks drop them and exchange the gradients by rounds.

So that the calls of all ranks match, each rank launches all buckets in each pass, with zeros for the
gradients it lacks. Two kinds of ranks launch none: a rank that has joined, and a rank whose launch has
failed. The mask shows both to the others, which then abort the communicator and continue by rounds.
On a GPU, the calls of this communicator are not ordered relative to the calls of rounds, because each
communicator has its own stream.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ringdance.core import labels
from ringdance.core.request import Collective, ReduceOp, Work
from ringdance.errors import MismatchError
from ringdance.training import session
from ringdance.training.collectives import Call, on_join, prepared
from ringdance.training.gradients import weights
from ringdance.training.gradients.fast_path import DifferentStepsError, FastPath
from ringdance.training.gradients.options import check_passes, parts_of, scales_of
from ringdance.training.gradients.source import AS_DENSE, DENSE, Bucket, GradientSource, State
from ringdance.training.gradients.sparse import SparseExchange
from ringdance.training.process_sets import ProcessSet, bind, global_process_set, set_id
from ringdance.training.tuning.tunables import Tunable, tunables

if TYPE_CHECKING:
    from ringdance.core.engine import Engine

Array = np.ndarray[Any, Any]

# Step numbers travel as two bytes of the mask, s + 1 and STEPS - s. Both differ from the zeros that a joined
# rank contributes, and their maxima show whether all ranks are in the same step. STEPS is a multiple of
# the fast path's number of tags, so that neighboring steps also have different tags when the count wraps.
STEPS = 248
# Number of exchanges with the same parameter names and ranks. Makes the names of exchanges unique.
_seen: weakref.WeakKeyDictionary[Any, Counter[tuple[str, tuple[int, ...]]]] = weakref.WeakKeyDictionary()


_exchanges: weakref.WeakSet[GradientExchange] = weakref.WeakSet()


def _of_all_ranks() -> list[GradientExchange]:
    engine = session.engine()
    return [exchange for exchange in list(_exchanges) if exchange.engine is engine and exchange.set_id == 0]


def forget_all() -> None:
    """Make all exchanges of this rank forget a failed step, whose gradients are dropped."""
    engine = session.engine() if session.is_initialized() else None
    for exchange in list(_exchanges):
        if exchange.engine is engine and (exchange.state.passes or 1 in exchange.state.computed):
            exchange.abandon()


def _overlaps() -> int | None:
    """Return 1 if this rank's exchanges in the global set are to overlap, 0 if not, None if fixed."""
    exchanges = _of_all_ranks()
    free = all(item.early and item.passes == 1 and not item.source.on_device for item in exchanges)
    if not exchanges or not free or exchanges[0].engine.settings.overlap != "auto":
        return None
    return int(any(exchange.wants_overlap for exchange in exchanges))


def _set_overlap(value: int) -> None:
    for exchange in _of_all_ranks():
        if exchange.early and not exchange.source.on_device:
            exchange.choose_overlap(bool(value))


tunables["overlap"] = Tunable(_overlaps, _set_overlap, lambda: 1)


def _digest_of(names: Sequence[str], size: int) -> bytes:
    return hashlib.blake2b("\0".join(names).encode(), digest_size=size).digest()


class GradientExchange:
    """Reduces one optimizer's gradients. All members of the set create theirs in the same order.

    Threads: during backward, autograd calls ``on_gradient`` and ``on_backward_end``. Between passes, the
    optimizer's thread may call any method. Calls must not overlap: there is no lock.

    Args:
        source: Access to the gradients.
        names: Parameter names, in the same order on all ranks.
        operation: Average, Sum, Min, Max or Product.
        passes: Backward passes per exchange. The framework sums their gradients.
        predivide: Divisor before the sum, undone after it (Average only).
        groups: Parameter indices to reduce together.
        process_set: Ranks that exchange. After ``shutdown()`` and ``init()``, the new set with these ranks.
        early: Exchange at the end of backward. If False, only in ``finish_exchange()``.
        overlap: True if this rank can exchange during backward. Used if all ranks can.
    """

    def __init__(
        self, source: GradientSource, names: Sequence[str], *, operation: ReduceOp = ReduceOp.AVERAGE,
        passes: int = 1, predivide: float = 1.0, groups: Sequence[tuple[int, ...]] = (),
        process_set: ProcessSet = global_process_set, early: bool = True, overlap: bool = False,
    ) -> None:
        check_passes(passes)
        self.source = source
        self.names = list(names)
        self.operation = operation
        self.prescale, self.postscale = scales_of(operation, predivide)
        self.passes = passes
        self.process_set = process_set
        self.early = early
        self.wants_overlap, self._chosen = overlap and early, False
        self.groups = [tuple(group) for group in groups]
        self.state = State(computed=bytearray(len(names)), reduced=bytearray(len(names)))
        self.direct = self._spoiled = self._broken = False
        self.idle = True  # No step has begun, and no other exchange has taken the gradients.
        _exchanges.add(self)
        self._digest = _digest_of(names, 4).hex()  # Does not change when names are added: see extend.
        self._join(session.engine())

    def _join(self, engine: Engine) -> None:
        """Join a job and forget what was agreed on in earlier steps."""
        self.engine = engine
        bind([self.process_set])
        self.set_id = set_id(self.process_set)
        counter = _seen.setdefault(engine, Counter())
        key = self._digest, engine.members(self.set_id)
        self.name = f"gradients.{self._digest}.{counter[key]}"
        counter[key] += 1
        self._forget()
        on_join(engine, self.start_again)

    def _forget(self) -> None:
        digest = _digest_of(self.names, 2)
        self._names_digest = digest + bytes(255 - byte for byte in digest)
        self.step = 0
        self._trained: set[int] = set()  # Parameters reduced so far, equal on all ranks.
        self.overlap = False  # Set once all ranks have agreed, at the earliest with the first mask.
        self.buckets: list[Bucket] = []
        self.source.close_direct()
        self._bucket_of: list[Bucket] = []
        self._expected: set[int] = set()  # The expected gradients of all buckets.
        self._leave_direct()
        self._fast_path = FastPath(
            self.engine, self.set_id, self.source, self.name, (self.prescale, self.postscale)
        )
        self._plan()

    def _rejoin(self) -> bool:
        """Join the new job after ``shutdown()`` and ``init()``. Returns True if there is one."""
        if not self.engine.closed or self.engine is session.engine():
            return False
        self._join(session.engine())
        return True

    def _plan(self) -> None:
        """Divide the parameters into buckets: the groups, then the rest, in several parts for overlap."""
        grouped = {index for group in self.groups for index in group}
        rest = [index for index in range(len(self.names)) if index not in grouped]
        parts: list[list[int]] = [list(group) for group in self.groups]
        if self.overlap:
            parts += parts_of(rest, self.source.nbytes, self.source.on_device)
        elif rest:
            parts.append(rest)
        first, expected = not self.buckets, self._expected
        self.buckets = [
            Bucket(
                f"{self.name}.{number}", tuple(part),
                tuple(index for index in part if first or index in expected),
            )
            for number, part in enumerate(parts)
        ]
        self._note(f"{self.name}.expected", range(len(self.names)))
        for bucket in self.buckets:
            self._note(bucket.name, bucket.members)
        labels.note(f"allreduce.{self.name}.mask", self.name, "list of the gradients", self.names)
        by_index = {index: bucket for bucket in self.buckets for index in bucket.members}
        self._bucket_of = [by_index[index] for index in range(len(self.names))]
        self._expected = {index for bucket in self.buckets for index in bucket.expected}

    def _note(self, name: str, indices: Sequence[int]) -> None:
        if not labels.known(f"grouped_allreduce.{name}", len(indices)):
            chosen = [self.names[index] for index in indices]
            labels.note(f"grouped_allreduce.{name}", self.name, "gradients", chosen)

    def start_again(self) -> None:
        """Forget agreements after ``join()``: a joined rank has missed agreements of the other ranks."""
        self._forget()
        self.reset()

    def extend(self, names: Sequence[str]) -> None:
        """Add the gradients that the source has gained. All ranks call this between the same two steps.

        The exchange keeps its name, so that the next one fails on all ranks if a rank has not called this.

        Args:
            names: Names of the added parameters, as in ``__init__``.
        """
        if any(bucket.work is not None for bucket in self.buckets):
            self.abandon()
        self._fast_path.leave()
        self.names += names
        self.state.computed += bytes(len(names))
        self.state.reduced += bytes(len(names))
        self._forget()

    def choose_overlap(self, overlap: bool) -> None:
        """Ask to overlap exchanges with backward, or to stop.

        All ranks switch after the same mask: on once all ask for it, off once one does not.
        Ranks may call this between different steps.
        """
        if overlap != self.wants_overlap:
            self.wants_overlap, self._chosen = overlap, True

    def reset(self) -> None:
        """Forget what was computed and reduced. Called by ``zero_grad`` and after an error."""
        state = self.state
        if not state.passes and state.exchanged_at < 0 and 1 not in state.computed:
            return
        count = len(self.names)
        self.state = State(computed=bytearray(count), reduced=bytearray(count))
        self._spoiled = self._launched > 0  # The launched buckets hold gradients of another pass.
        for bucket in self.buckets:
            if bucket.work is not None and not bucket.work.done() and not self.direct:
                bucket.work.wait()  # Its memory is still being read.
            bucket.work = None
            bucket.missing, bucket.unexpected = len(bucket.expected), 0

    def on_gradient(self, index: int) -> None:
        """Note a computed gradient. With overlap, send its bucket once the bucket is complete.

        Raises:
            AssertionError: The gradient was already reduced in this step and the operation is not Average,
                or it was computed twice in one pass while it was being reduced.
        """
        state = self.state
        if state.reduced[index] and self.operation is not ReduceOp.AVERAGE:
            raise AssertionError(
                f"The gradient of {self.names[index]} was computed again, or replaced, after it had been "
                "reduced. Only op=Average allows that. Call optimizer.step() or optimizer.zero_grad() after "
                f"each {self.passes} backward passes, or set backward_passes_per_step to the number you "
                "make. Change reduced gradients in place, or call step() within skip_synchronize(). To "
                "replace local gradients, set reduce_in_backward=False."
            )
        if not state.computed[index]:
            state.computed[index] = 1
            if self.overlap:
                self._count(index)
        elif self.overlap and self._bucket_of[index].work is not None:
            raise AssertionError(
                f"The gradient of {self.names[index]} was computed twice in one backward pass, the second "
                "time while it was being reduced. Set RINGDANCE_OVERLAP=off, or use checkpointing with "
                "use_reentrant=False."
            )

    def _count(self, index: int) -> None:
        bucket = self._bucket_of[index]
        if index in self._expected:
            bucket.missing -= 1
        else:
            bucket.unexpected += 1
        if self.passes > 1:  # Later passes add to gradients that have been complete since the first.
            return
        if self.direct:
            self._launch()
        elif bucket.missing == 0 and bucket.unexpected == 0 and bucket.work is None:
            if self._rejoin():
                return
            kinds = self.source.kinds(self.state.computed, bucket.expected)
            if min(kinds, default=DENSE) >= AS_DENSE:
                bucket.kinds = bytes(kinds)
                bucket.work = self._send(bucket, bucket.expected, wake=True)

    def _launch(self, rest: bool = False) -> None:
        """Launch the next complete buckets in order, or all remaining ones if ``rest``.

        See Note [Direct buckets].
        """
        if self._rejoin():
            return
        if self.engine.closed:
            raise self.engine.end.error()
        while self._launched < len(self.buckets):
            bucket = self.buckets[self._launched]
            if not rest and (bucket.missing or bucket.unexpected):
                return
            self._launched += 1
            if bucket.expected and not self._broken:
                self._broken = True  # If launch() raises, this rank is one call behind the others.
                bucket.work = self.source.launch(self._call(bucket.name), bucket.expected)
                self._broken = bucket.work is None

    def _leave_direct(self, abort: bool = False) -> None:
        """Continue by rounds. Use ``abort`` if a rank has not launched the same buckets as this one."""
        for bucket in self.buckets:
            bucket.work = None
        self._launched = 0
        self.direct = self._spoiled = self._broken = False
        if abort:
            self.source.close_direct()

    def on_backward_end(self, began_in: int | None = None) -> None:
        """Count a backward pass that computed some of the gradients. Exchange after every ``passes``-th.

        Args:
            began_in: The step in which the pass began, if it can be an earlier one (``step()`` was called in
                a hook). Gradients computed since are exchanged, but the pass does not count in this step.
        """
        own = began_in is None or began_in == self.step
        self.state.passes += own
        if self.early and (not own or self.state.passes % self.passes == 0):
            self._exchange()

    def finish_exchange(self) -> None:
        """Exchange before the gradients are used, unless done already: see Note [Exchange of gradients]."""
        computed = self.state.computed
        if not self.finished or 1 in computed or self.source.unreduced(computed):
            if self.operation is ReduceOp.AVERAGE:
                self.source.forget()
            elif not self.finished and not self.state.passes:
                self.source.forget_changed()
            self._exchange()

    def on_step_end(self) -> None:
        """Start the next step."""
        self.step = (self.step + 1) % STEPS
        self.begin()

    def begin(self) -> None:
        """Forget what was computed and reduced. Later changes to gradients count for the next exchange."""
        if self.operation is not ReduceOp.AVERAGE:
            self.source.settle()
        self.reset()

    @property
    def finished(self) -> bool:
        """True if all gradients computed so far are reduced."""
        return self.state.exchanged_at == self.state.passes

    def _exchange(self) -> None:
        self._rejoin()
        for index in self.source.unreduced(self.state.computed):
            self.on_gradient(index)
        known = len(self._trained)
        try:
            path = self._fast_path
            if self._chosen:
                path.pause()
                self._chosen = False
            if path.open and not self.direct and path.exchange(self.state.computed, self.step):
                self._exchanged(path.expected_kinds)
            else:
                self._exchange_by_mask()
        except DifferentStepsError as error:
            self.abandon()
            raise self._different_steps(str(error)) from None
        except BaseException:
            self.abandon()
            raise
        # Parameters that are never reduced, such as frozen ones, may differ between ranks.
        if weights.due(self.engine, self.set_id, self.name, 2, anew=len(self._trained) > known):
            chosen = sorted(self._trained)
            names, sample = self.source.sample(chosen, [self.names[index] for index in chosen])
            call = weights.call_of(self.name, names, self.source.advice, self.set_id)
            weights.compare(self.engine, call, sample)

    def _exchange_by_mask(self) -> None:
        state, count = self.state, len(self.names)
        if self.direct:
            self._launch(rest=True)
        kinds = self.source.kinds(state.computed)
        for bucket in self.buckets:
            if bucket.work is not None and not self.direct:
                for index, kind in zip(bucket.expected, bucket.kinds, strict=True):
                    kinds[index] = kind
        as_expected = kinds == self._fast_path.expected_kinds and not self._spoiled
        # A joined rank contributes zeros to all of these bytes.
        members = self.engine.members(self.set_id) if self.source.on_device else ()
        deviates = 2 if self._broken else 0 if as_expected else 1
        memory = kinds + bytes(
            (self.step + 1, STEPS - self.step, 0 if self.wants_overlap else 1, deviates)
        ) + bytes(rank == self.engine.rank for rank in members) + self._names_digest
        mask = np.frombuffer(memory, np.uint8)
        call = prepared(Collective.ALLREDUCE, f"{self.name}.mask", ReduceOp.MAX, set_id=self.set_id)
        sent = call.submit(self.engine, (mask,), (mask,))
        # Unless the operation is Average, a gradient left from an earlier exchange must not count again.
        zeros = b""
        if self.operation is not ReduceOp.AVERAGE:
            zeros = bytes(0 if kind else 1 for kind in kinds)
        for bucket in () if self.direct else self.buckets:
            if bucket.work is None and bucket.expected and self._complete(bucket, kinds):
                bucket.work = self._send(bucket, bucket.expected, zeros)
        self._wait_for_mask(sent, memory)
        latest, earliest = memory[count] - 1, STEPS - memory[count + 1]
        if latest != earliest:
            raise self._different_steps(f"the ranks are in {earliest} to {latest} (modulo {STEPS})")
        union = bytes(memory[:count])
        joined = 0 in memory[count + 4 : count + 4 + len(members)]
        if self.direct and (joined or memory[count + 3]):
            self._leave_direct(abort=joined or memory[count + 3] == 2)
            self._fast_path.close()
        self._trained.update([index for index, kind in enumerate(union) if kind])
        self._reduce(union, zeros)
        self._exchanged(union)
        overlap = not memory[count + 2]
        if overlap != self.overlap:
            self.overlap = overlap
            self._plan()
            self._fast_path.restart()
        self._fast_path.update(
            union if all(not kind or kind >= AS_DENSE for kind in union) else b"",
            alike=not memory[count + 3] and not joined,
            possible=self.operation is ReduceOp.AVERAGE
            and (self.overlap if self.source.on_device else len(self.buckets) == 1 and not self.overlap),
        )
        if self._fast_path.open and self.source.on_device and not self.direct:
            self.direct = self.source.open_direct(self.engine, self.set_id, self.name)
            if not self.direct:
                self._fast_path.close()

    def _exchanged(self, union: bytes) -> None:
        state = self.state
        if self.operation is not ReduceOp.AVERAGE:
            both = zip(union, state.reduced, strict=True)
            state.reduced = bytearray(1 if now or before else 0 for now, before in both)
        state.computed = bytearray(len(union))
        state.exchanged_at = state.passes
        self._launched, self._spoiled = 0, False
        for bucket in self.buckets:
            bucket.work = None
            bucket.missing, bucket.unexpected = len(bucket.expected), 0

    @staticmethod
    def _complete(bucket: Bucket, kinds: bytearray) -> bool:
        """Return True if this rank has exactly the bucket's expected gradients, all of them dense."""
        computed = [index for index in bucket.members if kinds[index]]
        return tuple(computed) == bucket.expected and min([kinds[index] for index in computed]) >= AS_DENSE

    def _reduce(self, union: bytes, zeros: bytes) -> None:
        """Send the rest of the union, wait for all requests, and write the results back."""
        works: list[tuple[Work, tuple[int, ...]]] = []
        for bucket in self.buckets:
            dense = tuple(index for index in bucket.members if union[index] >= AS_DENSE)
            expected = bucket.expected
            extra = dense
            if expected and (dense == expected or set(expected).issubset(dense)):
                if bucket.work is None:
                    bucket.work = self._send(bucket, expected, zeros)
                works.append((bucket.work, expected))
                extra = tuple(sorted(set(dense).difference(expected)))
            if extra:
                works.append((self._send(bucket, extra, zeros), extra))
            bucket.expected = dense
        self._expected = {index for index, kind in enumerate(union) if kind >= AS_DENSE}
        sparse = [index for index, kind in enumerate(union) if 0 < kind < AS_DENSE]
        rows = self._send_sparse(sparse, union) if sparse else None
        for work, indices in works:
            work.wait()
            self.source.write_back(indices, union)
        if rows is not None:
            for index, summed in zip(sparse, rows.wait(), strict=True):
                self.source.write_back_sparse(index, union[index], summed)

    def _send(
        self, bucket: Bucket, indices: tuple[int, ...], zeros: bytes = b"", wake: bool = False
    ) -> Work:
        name = bucket.name
        if len(indices) != len(bucket.members):
            chosen = hashlib.blake2b(repr(indices).encode(), digest_size=4).hexdigest()
            name = f"{name}.{chosen}"
            self._note(name, indices)
        return self.source.send(self._call(name), self.engine, indices, zeros, wake)

    def _call(self, name: str) -> Call:
        scales = self.prescale, self.postscale
        return prepared(Collective.ALLREDUCE, name, self.operation, *scales, self.set_id, grouped=True)

    def _send_sparse(self, sparse: list[int], union: bytes) -> SparseExchange:
        parts = [self.source.sparse_rows(index, union[index]) for index in sparse]
        chosen = hashlib.blake2b(repr(sparse).encode(), digest_size=4).hexdigest()
        return SparseExchange(
            self.engine, parts, [self.names[index] for index in sparse],
            name=f"{self.name}.sparse.{chosen}", average=self.operation is ReduceOp.AVERAGE,
            set_id=self.set_id,
        )

    def close(self) -> None:
        """Free the device's resources: the optimizer is gone, or another has taken its parameters."""
        _exchanges.discard(self)
        self.source.close_direct()

    def abandon(self) -> None:
        """After an error, wait for requests in flight, which use the gradients' memory. Then reset."""
        if self.direct:
            self._leave_direct(abort=True)
            self._fast_path.close()
        for bucket in self.buckets:
            work, bucket.work = bucket.work, None
            if work is not None:
                try:
                    work.wait(1.0)
                except Exception:
                    pass  # The first error is the one to raise.
        self.reset()

    def _wait_for_mask(self, sent: Work, memory: bytearray) -> None:
        """Wait for the mask. Raises MismatchError if the ranks have different parameters."""
        error: MismatchError | None = None
        try:
            sent.wait()
        except MismatchError as mismatch:
            error = mismatch
        # If digests differ, the maximum of the digests or of their complements differs from this rank's.
        if error is not None or not memory.endswith(self._names_digest):
            raise MismatchError(
                f"The ranks' optimizers have different parameters: rank {self.engine.rank} "
                f"({self.engine.hosts[self.engine.rank]}) has {len(self.names)}, and the last is "
                f"{self.names[-1]!r}. Call add_param_group() on all ranks of the process set, with the same "
                f"parameters, between the same two steps. {error or ''}".rstrip()
            ) from error

    def _different_steps(self, others: str) -> MismatchError:
        return MismatchError(
            f"Gradients of different steps were exchanged together: rank {self.engine.rank} is in step "
            f"{self.step}, {others}. Some made more backward passes than others before optimizer.step(). "
            "Make the same number on all ranks (a pass may skip parameters), replace gradients after a "
            "pass on all ranks or none, or set reduce_in_backward=False, which exchanges once, in step()."
        )
