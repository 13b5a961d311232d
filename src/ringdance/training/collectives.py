"""Collective calls on NumPy views: the path from every binding to the engine.

A binding creates a ``Call`` (``reduction`` and ``movement`` check the user's arguments), converts its tensors
to NumPy views, submits the call and converts the results back to tensors. A call contains no tensors, so
frameworks that compile programs can store it in a graph as text.

Note [Refused calls]
An argument error that only this rank can detect is raised here immediately. The other ranks are still waiting
for this rank's call, so ``Call.refuse`` makes their calls fail with the same message.
"""

from __future__ import annotations

import ctypes
import enum
import json
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ringdance.core.engine import Engine
from ringdance.core.exchange import nccl
from ringdance.core.recorder import StepMark
from ringdance.core.request import Collective, Description, ReduceOp, Request, Work
from ringdance.errors import ArgumentError
from ringdance.training import checks, session
from ringdance.training.process_sets import ProcessSet, members_of, set_id

Array = np.ndarray[Any, Any]
Arrays = tuple[Array, ...]


def array_at(address: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: Any = None) -> Any:
    """Return a writable array that uses a framework's memory and keeps ``owner`` alive."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    memory.owner = owner
    return np.ndarray(shape, dtype, memory)


@dataclass(frozen=True, slots=True)
class Call:
    """One collective call, without its tensors.

    Args:
        kind: The collective.
        name: Key that matches this call with the other ranks' calls. If ``None``, calls match by order.
        operation: Reductions only: the operation.
        prescale, postscale: Reductions only: factors applied before and after the reduction.
        set_id: Id of the process set.
        root: Broadcasts only: global rank of the root.
        grouped: True if the call takes a list of tensors, which are exchanged together.
        equal_splits: True for an alltoall without splits.
        tables: Names of the tables whose rows are reduced. See ``gradients.sparse.submit``.
        step_mark: Kind of caller that marks the step, in the last exchange of a step; otherwise 0. See
            ``completed``.
        pattern: Gradient reductions only: the text from ``gradients.lists.pattern_of``.
        weights: Weight comparisons only: the texts from ``gradients.weights.call_of``.
    """

    kind: Collective
    name: str | None = None
    operation: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    set_id: int = 0
    root: int = -1
    grouped: bool = False
    equal_splits: bool = False
    tables: tuple[str, ...] = ()
    step_mark: int = 0  # A StepMark, stored as an integer because hashing Enum members is slow.
    pattern: str = ""
    weights: tuple[str, ...] = ()
    # Cached dtypes and shapes of the last submission, with its description. Comparing is faster than hashing.
    _described: list[Any] = field(default_factory=lambda: [None], init=False, repr=False, compare=False)

    @property
    def keeps_shapes(self) -> bool:
        """True if each result has the shape of its input, so that the caller can allocate the results."""
        kept = self.kind is Collective.ALLREDUCE or self.kind is Collective.BROADCAST
        return kept and not self.tables and not self.weights

    @property
    def full_name(self) -> str | None:
        """The name that the engine uses for this call, or ``None`` if the call is unnamed."""
        if self.name is None:
            return None
        return f"{'grouped_' if self.grouped else ''}{self.kind.name.lower()}.{self.name}"

    def but(self, **changes: Any) -> Call:
        """Return a copy of the call with some fields changed."""
        return replace(self, **changes)

    def text(self) -> str:
        """Return the call as text. Equal calls have equal texts."""
        return json.dumps({name: getattr(self, name) for name in _FIELDS})

    @staticmethod
    @lru_cache(maxsize=4096)
    def from_text(text: str) -> Call:
        """Return the call that ``text()`` serialized."""
        values = json.loads(text)
        values["kind"] = Collective(values["kind"])
        values["operation"] = ReduceOp(values["operation"])
        values["tables"], values["weights"] = tuple(values["tables"]), tuple(values["weights"])
        return Call(**values)

    def submit(
        self, engine: Engine, inputs: Arrays, outputs: Arrays | None = None,
        splits: Sequence[Array | None] | None = None, wake: bool = False, device: str = "", ready: Any = None,
    ) -> Work:
        """Submit the call.

        Args:
            engine: Engine of this rank.
            inputs: Contiguous views, whose contents must not change until the call is complete.
            outputs: Arrays that receive the results. Only allowed if ``keeps_shapes`` is True. Pass the
                inputs to work in place, or ``None`` to let the engine allocate the results.
            splits: Alltoall only: for each tensor, the number of rows to send to each member, or ``None``.
            wake: If True, wake the engine thread to start the call. Callers that wait right away pass False.
            device: Device type, if the inputs are the framework's own tensors.
            ready: Passed on to ``Request``.

        Returns:
            A ``Work`` whose result is a list of arrays, one for each input.

        Raises:
            ArgumentError: A dtype, operation, root or split is invalid, this process is not a member, or
                another call with this name is in flight. Peers get the same message. See Note [Refused
                calls].
        """
        kind, number = self.kind, self.set_id
        try:
            if len(inputs) == 1:
                key: Any = (inputs[0].dtype, inputs[0].shape)
            else:
                key = (tuple([view.dtype for view in inputs]), tuple([view.shape for view in inputs]))
            if device:
                key = (device, key)
            described = self._described[0]
            if described is None or described[0] != key:
                described = self._described[0] = (key, *self._describe(inputs, device))
            _, description, name = described
            rows = None
            if number or kind is not Collective.ALLREDUCE or self.operation is ReduceOp.ADASUM:
                members = members_of(engine, number)
                if kind is Collective.BROADCAST:
                    checks.check_root(self.root, members, self.name, number)
                elif kind is Collective.ALLTOALL:
                    rows = tuple([
                        checks.split_rows(view, rows_to_send, len(members), name or "alltoall", engine)
                        for view, rows_to_send in zip(inputs, splits or [None] * len(inputs), strict=True)
                    ])
                checks.check_size(self.operation, len(members))
        except ArgumentError as error:
            self.refuse(engine, error)
            raise
        return engine.submit(Request(description, inputs, outputs, name, number, rows, ready), wake=wake)

    def _describe(self, inputs: Arrays, device: str) -> tuple[Description, str | None]:
        if self.kind in (Collective.ALLREDUCE, Collective.REDUCESCATTER):
            session.watch_training(None)
        dtypes, shapes = tuple([view.dtype for view in inputs]), tuple([tuple(view.shape) for view in inputs])
        scales, name = (self.prescale, self.postscale), self.full_name
        try:
            (name or "").encode()
        except UnicodeEncodeError:
            raise ArgumentError(
                    f"name={name!r} cannot be encoded, because it contains a surrogate."
                ) from None
        described = checks.describe(self.kind, dtypes, shapes, self.operation, *scales, self.root)
        if device == nccl.DEVICE:  # Its results have a fixed shape, so no dimension may differ between ranks.
            described = replace(described, shapes=shapes)
        return replace(described, pattern=self.pattern, device=device), name

    def refuse(self, engine: Engine, error: Exception | str) -> None:
        """Make the call fail on the peers, unless they already have this error. See Note [Refused calls]."""
        if isinstance(error, str) or not getattr(error, "sent_to_peers", False):
            if isinstance(error, Exception):
                error.sent_to_peers = True  # type: ignore[attr-defined]
            request = Request(Description(self.kind), name=self.full_name, set_id=self.set_id)
            engine.refuse(request, str(error))

    def completed(self) -> None:
        """Mark the end of a step if this call ends it. Called when the call's results are available."""
        if self.step_mark:
            session.mark_step(StepMark(self.step_mark))

    def backward(self, engine: Engine) -> Backward:
        """Return the collective that computes the gradient of this call.

        Raises:
            UnsupportedOperationError: The operation is Min, Max, Product or Adasum, which have no gradient,
                and the process set has several ranks.
            NotImplementedError: This kind of collective has no gradient.
        """
        size = len(engine.members(self.set_id))
        checks.check_gradient(self.operation, size, f"{self.full_name or 'allreduce'} on rank {engine.rank}")
        name = None if self.name is None else f"{self.name}.grad"
        same: dict[str, Any] = {"name": name, "set_id": self.set_id, "grouped": self.grouped}
        if self.kind is Collective.ALLREDUCE:
            return Backward(self.but(name=name, step_mark=0))
        if self.kind is Collective.ALLTOALL:
            return Backward(self.but(name=name, equal_splits=False), Keep.PADDED)
        if self.kind is Collective.REDUCESCATTER:
            scale = self.prescale * self.postscale * (size if self.operation is ReduceOp.SUM else 1)
            return Backward(Call(Collective.ALLGATHER, **same), Keep.ALL, scale)
        average = Call(Collective.ALLREDUCE, operation=ReduceOp.AVERAGE, **same)
        if self.kind is Collective.ALLGATHER:
            return Backward(average, Keep.OWN_ROWS)
        if self.kind is Collective.BROADCAST:
            return Backward(average, Keep.ROOT)
        raise NotImplementedError(f"Call.backward() does not define a gradient for {self.kind.name}.")


_FIELDS = [field.name for field in fields(Call) if field.init]


class Keep(enum.Enum):
    """The part of a backward call's results that is this rank's gradient."""

    ALL = enum.auto()
    OWN_ROWS = enum.auto()  # The rows of each result that correspond to this rank's input to the allgather.
    ROOT = enum.auto()  # All rows on the root, and zeros on the other ranks.
    PADDED = enum.auto()  # All rows, followed by zeros for the rows that the forward call did not send.


@dataclass(frozen=True)
class Backward:
    """How to compute a collective's gradient: a collective on the results' gradients, then a local step.

    All ranks of the set must run the backward pass. The gradient of a named call has the name
    ``<name>.grad``. The gradients of unnamed calls have no names, so, like the calls themselves, they must
    run in the same order on all ranks.

    Args:
        call: Call that exchanges the gradients of the results. For an alltoall, the splits are the
            numbers of rows that the forward call received.
        keep: The part of the call's results that is the gradient.
        scale: Factor applied to the gradients before the call.
    """

    call: Call
    keep: Keep = Keep.ALL
    scale: float = 1.0


# Returns a call with the given fields. Equal fields give the same object, so its description is built only
# once. Do not use this if the shapes of the tensors change from call to call.
prepared = lru_cache(maxsize=4096)(Call)


@lru_cache(maxsize=4096)
def _reduction(
    kind: Collective, name: str | None, op: int | None, prescale: float, postscale: float, number: int,
    grouped: bool, step_mark: int, pattern: str,
) -> Call:
    scales = prescale, postscale
    operation = checks.pick_operation(None, op)
    return Call(kind, name, operation, *scales, number, -1, grouped, False, (), step_mark, pattern)


def reduction(
    kind: Collective, name: str | None, average: bool | None, op: int | None, prescale: float,
    postscale: float, process_set: ProcessSet, grouped: bool = False, step_mark: int = 0, pattern: str = "",
) -> Call:
    """Build the call for an allreduce or reducescatter from the user's arguments.

    Raises:
        ArgumentError: ``op`` or ``process_set`` is invalid. Peers get the same message.
    """
    number = set_id(process_set)
    try:
        if average is None and type(prescale) is type(postscale) is float and (op is None or type(op) is int):
            return _reduction(kind, name, op, prescale, postscale, number, grouped, step_mark, pattern)
        operation = checks.pick_operation(average, op)
        scales = float(prescale), float(postscale)
        return prepared(kind, name, operation, *scales, number, -1, grouped, False, (), step_mark, pattern)
    except (ArgumentError, TypeError, ValueError) as error:
        _refuse_early(Call(kind, name, set_id=number, grouped=grouped), error)
        raise


allreduce_call = partial(reduction, Collective.ALLREDUCE)
reducescatter_call = partial(reduction, Collective.REDUCESCATTER)


def movement(
    kind: Collective, name: str | None, process_set: ProcessSet, grouped: bool = False, root: int = -1,
    equal_splits: bool = False,
) -> Call:
    """Build the call for a collective that moves data without reducing it, from the user's arguments.

    Raises:
        ArgumentError: ``process_set`` is invalid.
        TypeError: ``root`` is not a number. Peers get the same message.
    """
    number = set_id(process_set)
    try:
        return prepared(kind, name, ReduceOp.SUM, 1.0, 1.0, number, int(root), grouped, equal_splits)
    except (TypeError, ValueError) as error:
        _refuse_early(Call(kind, name, set_id=number, grouped=grouped), error)
        raise


def _refuse_early(call: Call, error: Exception) -> None:
    if session.is_initialized():
        call.refuse(session.engine(), error)


_BARRIER = Description(Collective.BARRIER)
# Methods to call after all ranks have joined. The references are weak, to keep no object alive.
_listeners: weakref.WeakKeyDictionary[Engine, list[weakref.WeakMethod[Callable[[], None]]]] = (
    weakref.WeakKeyDictionary()
)


def on_join(engine: Engine, method: Callable[[], None]) -> None:
    """Call a bound method each time ``join`` returns on this rank, for as long as its object is alive."""
    known = [reference for reference in _listeners.get(engine, []) if reference() is not None]
    _listeners[engine] = [*known, weakref.WeakMethod(method)]


def barrier(engine: Engine, set_id: int = 0) -> None:
    """Block until all members have called this function."""
    members_of(engine, set_id)
    engine.submit(Request(_BARRIER, set_id=set_id), wake=False).wait()


def join(engine: Engine) -> int:
    """Contribute zeros to other ranks' calls until all ranks have joined. Return the last rank to join."""
    last: int = engine.submit(Request(Description(Collective.JOIN)), wake=False).wait()
    engine.joins += 1
    for listener in [reference() for reference in _listeners.get(engine, [])]:
        if listener is not None:
            listener()
    return last
