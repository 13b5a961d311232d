"""Exchange the gradients of one optimizer between ranks, as the framework computes them.

A binding calls ``GradientExchange`` for each gradient (``on_gradient``) and at the end of each backward
pass (``on_backward_end``). The binding provides the gradients as NumPy views (``GradientSource``).

Note [Exchange of gradients]
When: at the end of every ``passes``-th backward pass, before backward returns, so that code that clips or
unscales gradients or computes norms sees reduced gradients on all ranks. If a rank does not run such a pass
in a step, it exchanges in ``finish_exchange()``, which the optimizer's step calls.

What: each rank sends a mask of the gradients that it has computed. A gradient that any rank has computed is
reduced on all ranks, with zeros where it is missing. A gradient that no rank has computed is left
unchanged, and the optimizer skips it.

How: in buckets (Note [Buckets]). If all ranks repeatedly compute the same gradients, they stop sending masks.
See ``Mode`` and ``fast_path``.

Checks: in a step, each rank must complete either the same number of passes that involve the optimizer's
parameters as the others, or none. The mask contains the step number and a digest of the parameter names
(Note [Mask]). If either differs, all ranks raise the same error.

Recomputed gradients: a gradient may be computed again after it was reduced (two losses, one optimizer).
With Average, the result is still correct, because the mean of (reduced + new) is reduced + mean of new. With
other operations, an error is raised.

Gradients set by hand (``torch.autograd.grad``, master weights): a gradient that was not computed in a
backward pass still counts as computed, unless it is the tensor in which an earlier exchange stored its
result. It is reduced together with the gradients of the next pass, or before it is used. All ranks must set
such gradients between the same two exchanges. Values changed in place cannot be distinguished from clipping,
unless the step had no backward pass. If the operation is Average, an exchange before use counts all gradients
as computed. Averaging equal gradients changes nothing, and the ranks stay on their fast path.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

from ringdance.core import labels
from ringdance.core.request import Collective, ReduceOp
from ringdance.errors import MismatchError
from ringdance.training import session
from ringdance.training.collectives import Call, on_join
from ringdance.training.gradients import weights
from ringdance.training.gradients.buckets import Buckets
from ringdance.training.gradients.direct import DirectBuckets
from ringdance.training.gradients.fast_path import FastPath
from ringdance.training.gradients.mask import STEPS, Deviation, DifferentStepsError, StepMask, digest_of
from ringdance.training.gradients.options import check_passes, scales_of
from ringdance.training.gradients.source import GradientSource
from ringdance.training.process_sets import ProcessSet, bind, global_process_set, set_id

# Number of exchanges with the same parameter names and ranks, to give each exchange a unique name.
_seen: weakref.WeakKeyDictionary[Any, Counter[tuple[str, tuple[int, ...]]]] = weakref.WeakKeyDictionary()
exchanges: weakref.WeakSet[GradientExchange] = weakref.WeakSet()
"""All exchanges in this process, including those for other loopback ranks."""


def forget_all() -> None:
    """Discard the failed step, and its gradients, in all exchanges on this rank."""
    engine = session.engine() if session.is_initialized() else None
    for exchange in list(exchanges):
        if exchange.engine is engine and (exchange.state.passes or 1 in exchange.state.computed):
            exchange.abandon()


class Mode(Enum):
    """How the ranks exchange the gradients of a step. All ranks change their mode after the same exchange."""

    # Changes to FAST (or DIRECT on a device) after all ranks have computed the same gradients several times.
    MASKED = auto()
    FAST = auto()  # Changes to MASKED if a rank refuses. See ``fast_path``.
    # Changes to MASKED if a rank joins, deviates or fails to launch. See Note [Direct buckets].
    DIRECT = auto()


class State:
    """Progress since the last step or ``zero_grad``, for ``count`` gradients."""

    def __init__(self, count: int) -> None:
        self.passes = 0
        self.exchanged_at = -1  # Value of ``passes`` at the last exchange, or -1 before the first.
        self.computed = bytearray(count)  # Gradients computed since the last exchange.
        self.reduced = bytearray(count)  # Gradients reduced in this step.


class GradientExchange:
    """Reduces one optimizer's gradients. All members of the set must create exchanges in the same order.

    Threads: *autograd* runs the hooks of a backward pass. *script* uses the optimizer between passes.
    *exchanging* is the one of these that runs the exchange. Private methods are called on this thread unless
    their docstrings say otherwise. Calls must not overlap, because nothing is locked.

    Args:
        source: Access to the gradients.
        names: Parameter names, in the same order on all ranks.
        operation: Average, Sum, Min, Max or Product.
        passes: Number of backward passes per exchange. The framework sums their gradients.
        predivide: Average only: factor by which gradients are divided before the sum and multiplied after it.
        groups: Groups of parameters, by index, whose gradients are reduced together.
        process_set: The participating ranks. After ``shutdown()`` and ``init()``, the new set with the same
            ranks is used.
        early: If True, exchange at the end of backward. If False, exchange only in ``finish_exchange()``.
        overlap: True if this rank can exchange during backward. Exchanges overlap only if all ranks can.

    Attributes:
        mode: Mode of the next exchange. The same on all ranks.
        overlap: True if all ranks have agreed to exchange during backward.
        idle: True if no step has begun and no other exchange has taken over the gradients.
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
        self.passes = passes
        self.process_set = process_set
        self.early = early
        self.wants_overlap = overlap and early
        self.idle = True
        self.state = State(len(names))
        self._scales = scales_of(operation, predivide)
        self._groups = groups
        self._overlap_changed = False
        exchanges.add(self)
        self._digest = digest_of("\0".join(names)).hex()  # Stays the same when names are added. See extend.
        self._join()

    def _join(self) -> None:
        """Join the running job, and discard the agreements from earlier steps. Thread: any."""
        engine = self.engine = session.engine()
        bind([self.process_set])
        self.set_id = set_id(self.process_set)
        counter = _seen.setdefault(engine, Counter())
        key = self._digest, engine.members(self.set_id)
        self.name = f"gradients.{self._digest}.{counter[key]}"
        counter[key] += 1
        self._forget()
        on_join(engine, self.start_again)

    def _forget(self) -> None:
        """Discard the agreements from earlier steps. Thread: any."""
        self.source.close_direct()
        self.step = 0
        self.mode = Mode.MASKED
        self.overlap = False  # True once all ranks have agreed, which takes at least one mask.
        self._trained: set[int] = set()  # Parameters reduced so far, the same on all ranks.
        operation, scales = self.operation, self._scales
        call = Call(Collective.ALLREDUCE, self.name, operation, *scales, self.set_id, grouped=True)
        labels.note(f"grouped_allreduce.{self.name}.expected", self.name, "gradients", self.names)
        self._fast_path = FastPath(self.engine, self.source, call)
        self.buckets = Buckets(self.engine, self.source, call, self.names, self._groups)
        self._mask = StepMask(self.engine, call, self.names)
        self._direct = DirectBuckets(self.source, self.buckets)

    def _rejoin(self) -> bool:
        """Join the new job after ``shutdown()`` and ``init()``. Return True if there is one. Thread: any."""
        if not self.engine.closed or self.engine is session.engine():
            return False
        self._join()
        return True

    def start_again(self) -> None:
        """Discard agreements after ``join()``, because a joined rank has missed some. Thread: script."""
        self._forget()
        self.reset()

    def extend(self, names: Sequence[str]) -> None:
        """Add the gradients that are new in the source. All ranks must call this between the same two steps.

        The name of the exchange does not change, so the next exchange fails on all ranks if a rank has not
        called this. Thread: script.
        """
        if any(bucket.work is not None for bucket in self.buckets.all):
            self.abandon()
        if self.mode is Mode.FAST:
            self._fast_path.refuse()
        self.names += names
        self.state.computed += bytes(len(names))
        self.state.reduced += bytes(len(names))
        self._forget()

    def choose_overlap(self, overlap: bool) -> None:
        """Request that exchanges overlap with the backward pass, or withdraw this request.

        All ranks switch after the same mask: on once all ranks have requested overlap, off once any rank has
        withdrawn its request. Ranks may call this between different steps. Thread: script.
        """
        if overlap != self.wants_overlap:
            self.wants_overlap = overlap
            self._overlap_changed = True

    def reset(self) -> None:
        """Discard the progress in this step. Called by ``zero_grad`` and after an error. Thread: any."""
        state = self.state
        if not state.passes and state.exchanged_at < 0 and 1 not in state.computed:
            return
        self.state = State(len(self.names))
        self._direct.spoil()
        self.buckets.restart(wait=self.mode is not Mode.DIRECT)

    def on_gradient(self, index: int) -> None:
        """Record a computed gradient. With overlap, send its bucket once it is complete. Thread: autograd.

        Raises:
            AssertionError: The gradient was already reduced in this step and the operation is not Average,
                or it was computed a second time in a pass while it was being reduced.
        """
        state = self.state
        if state.reduced[index] and self.operation is not ReduceOp.AVERAGE:
            raise AssertionError(
                f"The gradient of {self.names[index]} was computed again, or replaced, after it had been "
                "reduced. Only op=Average allows that. If a pass computed it again, call optimizer.step() or "
                f"zero_grad() after each exchange, or set backward_passes_per_step (now {self.passes}) to "
                "the number of passes per step. If the script replaced it, change it in place, call step() "
                "in skip_synchronize(), or set reduce_in_backward=False to replace local gradients."
            )
        if not state.computed[index]:
            state.computed[index] = 1
            if self.overlap:
                self._count(index)
        elif self.overlap and self.buckets.of[index].work is not None:
            raise AssertionError(
                f"The gradient of {self.names[index]} was computed twice in one backward pass, the second "
                "time while it was being reduced. Set RINGDANCE_OVERLAP=off, or use checkpointing with "
                "use_reentrant=False."
            )

    def _count(self, index: int) -> None:
        """Count a computed gradient, and send its bucket once complete. Thread: as for ``on_gradient``."""
        buckets = self.buckets
        bucket = buckets.of[index]
        bucket.lacking += -1 if index in buckets.expected else 1
        # With several passes per exchange, later passes add to the gradients from the first.
        if bucket.lacking or self.passes > 1 or self._rejoin():
            return
        if self.mode is Mode.DIRECT:
            self._direct.launch()
        elif bucket.work is None:
            buckets.send_early(bucket, self.state.computed)

    def on_backward_end(self, began_in: int | None = None) -> None:
        """Count a backward pass that computed any of the gradients. Exchange after every ``passes``-th pass.

        Thread: autograd, which exchanges.

        Args:
            began_in: The step in which the pass began: an earlier one if a hook called ``step()``. In
                that case, gradients computed since then are exchanged, but the pass does not count in the
                current step.
        """
        own = began_in is None or began_in == self.step
        self.state.passes += own
        if self.early and (not own or self.state.passes % self.passes == 0):
            self._exchange()

    def finish_exchange(self) -> None:
        """Exchange the gradients that are not reduced yet. Thread: script, which exchanges."""
        computed = self.state.computed
        if not self.finished or 1 in computed or self.source.unreduced(computed):
            if self.operation is ReduceOp.AVERAGE:
                self.source.forget()
            elif not self.finished and not self.state.passes:
                self.source.forget_changed()
            self._exchange()

    def on_step_end(self) -> None:
        """Start the next step. Thread: script."""
        self.step = (self.step + 1) % STEPS
        self.begin()

    def begin(self) -> None:
        """Begin a step, so that later changes to gradients count for the next exchange. Thread: script."""
        if self.operation is not ReduceOp.AVERAGE:
            self.source.settle()
        self.reset()

    @property
    def finished(self) -> bool:
        """True if all gradients computed so far are reduced."""
        return self.state.exchanged_at == self.state.passes

    def _exchange(self) -> None:
        """Exchange all gradients, and write the results back. Thread: exchanging."""
        self._rejoin()
        for index in self.source.unreduced(self.state.computed):
            self.on_gradient(index)
        known = len(self._trained)
        try:
            if self.mode is not Mode.FAST or not self._exchange_fast():
                self._exchange_by_mask()
        except BaseException as error:
            self.abandon()
            if not isinstance(error, DifferentStepsError):
                raise
            raise MismatchError(
                f"Gradients from different steps were exchanged together: rank {self.engine.rank} is in step "
                f"{self.step}, and {error}. Some ranks ran more backward passes than others before "
                "optimizer.step(). Run the same number on all ranks (a pass may skip parameters), replace "
                "gradients after a pass on all ranks or none, or exchange only in step(), with "
                "reduce_in_backward=False."
            ) from None
        # Parameters that are never reduced, such as frozen ones, may differ between ranks.
        if weights.due(self.engine, self.set_id, self.name, 2, anew=len(self._trained) > known):
            chosen = sorted(self._trained)
            names, sample = self.source.sample(chosen, [self.names[index] for index in chosen])
            call = weights.call_of(self.name, names, self.source.advice, self.set_id)
            weights.compare(self.engine, call, sample)

    def _exchange_fast(self) -> bool:
        """Exchange the expected gradients without a mask. Return False if a rank refuses."""
        if self._overlap_changed:
            self._fast_path.refuse()
        elif self._fast_path.exchange(self.state.computed, self.step):
            self._exchanged(self._fast_path.expected_kinds)
            return True
        self._continue_masked()
        return False

    def _exchange_by_mask(self) -> None:
        """Agree on the gradients by a mask, then reduce them. Raises the errors of ``StepMask.wait``."""
        self._overlap_changed = False
        kinds = self.source.kinds(self.state.computed)
        if self.mode is Mode.DIRECT:
            self._direct.launch(rest=True)
        else:
            self.buckets.restore_kinds(kinds)
        mask = self._mask
        deviation = Deviation.NONE if kinds == self._fast_path.expected_kinds else Deviation.OTHER
        mask.submit(
            kinds, self.step, overlap=self.wants_overlap, on_device=self.source.on_device,
            deviation=max(deviation, self._direct.deviation),
        )
        # Unless the operation is Average, a gradient left behind by an earlier exchange must not count again.
        zeros = b"" if self.operation is ReduceOp.AVERAGE else bytes(not kind for kind in kinds)
        if self.mode is not Mode.DIRECT:
            self.buckets.send_complete(kinds, zeros)
        mask.wait()
        if self.mode is Mode.DIRECT and mask.deviation:
            self._continue_masked(abort=mask.deviation is Deviation.MISSING)
        self._trained.update([index for index, kind in enumerate(mask.kinds) if kind])
        self.buckets.reduce(mask.kinds, zeros)
        self._exchanged(mask.kinds)
        if mask.all_want_overlap != self.overlap:
            self.overlap = mask.all_want_overlap
            self.buckets.divide(self.overlap)
            self._fast_path.restart()
        self._choose_mode()

    def _choose_mode(self) -> None:
        """Choose the mode of the next exchange, after an exchange by the mask."""
        mask, path, on_device = self._mask, self._fast_path, self.source.on_device
        possible = self.overlap if on_device else len(self.buckets.all) == 1 and not self.overlap
        possible = possible and self.operation is ReduceOp.AVERAGE
        if not path.update(mask.kinds, alike=not mask.deviation, possible=possible):
            self.mode = Mode.MASKED
        elif not on_device:
            self.mode = Mode.FAST
        elif self.mode is Mode.DIRECT or self.source.open_direct(self.engine, self.set_id, self.name):
            self.mode = Mode.DIRECT
        else:
            path.back_off()

    def _continue_masked(self, abort: bool = False) -> None:
        """Exchange by the mask, for more steps than last time. ``abort``: see ``DirectBuckets.leave``."""
        if self.mode is Mode.DIRECT:
            self._direct.leave(abort)
        self.mode = Mode.MASKED
        self._fast_path.back_off()

    def _exchanged(self, union: bytes) -> None:
        """Record that the gradients in ``union`` were reduced."""
        state = self.state
        if self.operation is not ReduceOp.AVERAGE:
            both = zip(union, state.reduced, strict=True)
            state.reduced = bytearray(1 if now or before else 0 for now, before in both)
        state.computed = bytearray(len(union))
        state.exchanged_at = state.passes
        if self.mode is Mode.DIRECT:
            self._direct.restart()
        self.buckets.restart()

    def close(self) -> None:
        """Free device resources after the optimizer is gone. Thread: script, or any that collects garbage."""
        exchanges.discard(self)
        self.source.close_direct()

    def abandon(self) -> None:
        """Wait for requests in flight after an error, because they use the gradients' memory. Then reset."""
        if self.mode is Mode.DIRECT:
            self._continue_masked(abort=True)
        self.buckets.abandon()
        self.reset()
