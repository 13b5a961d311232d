"""Compare the ranks' parameters while they train: without a broadcast each trains a model of its own.

Nothing else would tell, since the gradients are averaged all the same. A binding asks ``due`` at each
exchange of gradients; then it takes a sample of its parameters, at most ``PLACES`` elements of each, and
gives it to ``compare``. Compiled programs hold the ``call_of`` a comparison, carried out when they run.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ringdance.core import labels
from ringdance.core.request import Collective, ReduceOp
from ringdance.errors import MismatchError
from ringdance.training.collectives import Call, on_join

if TYPE_CHECKING:
    from ringdance.core.engine import Engine

Array = np.ndarray[Any, Any]

_log = logging.getLogger("ringdance")

PLACES = 64
_LATER = 10  # exchanges: scripts for TensorFlow and Keras may broadcast after the first step, of several
_TOLERANCE = 1e-3  # of a parameter's largest element: processors of different kinds round differently


class _Exchanges(Counter[tuple[tuple[int, ...], str]]):
    """How many exchanges of gradients there were, by members of the process set and name.

    Attributes:
        told: those whose weights were found to differ, on all ranks alike: once is enough.
    """

    def __init__(self) -> None:
        super().__init__()
        self.told: set[tuple[tuple[int, ...], str]] = set()

    def forget(self) -> None:
        """Count anew: all ranks have joined, after different numbers of exchanges."""
        self.clear()


_counts: weakref.WeakKeyDictionary[Engine, _Exchanges] = weakref.WeakKeyDictionary()


def due(engine: Engine, set_id: int, name: str, at: int = _LATER, anew: bool = False) -> bool:
    """Count an exchange of gradients; return whether to compare weights, alike on all ranks.

    All ranks that take part have counted the same: since the job began, or since all had joined. After the
    first time weights are compared in exchange 10, 100, 1000 and so on, for what changes them later.

    Args:
        engine: of this rank.
        set_id: process set.
        name: of the exchange, or of the call that compares.
        at: which exchange is the first.
        anew: count from this exchange on; alike on all ranks.
    """
    if engine.size == 1 or engine.settings.check_weights == "off":
        return False
    if (counts := _counts.get(engine)) is None:
        counts = _counts[engine] = _Exchanges()
        on_join(engine, counts.forget)
    key = _key(engine, set_id, name)  # the number of a set that was removed is another one's later
    number = counts[key] = 1 if anew else counts[key] + 1
    return (number == at or (number % 10 == 0 and str(number).strip("0") == "1")) and key not in counts.told


def _key(engine: Engine, set_id: int, name: str) -> tuple[tuple[int, ...], str]:
    return engine.members(set_id), name.removesuffix(".weights")


def step_of(elements: int) -> int:
    """Return the step of a slice of so many elements that has at most ``PLACES``."""
    return max(1, -(-elements // PLACES))


def call_of(name: str, parameters: Sequence[str], elements: Sequence[int], advice: str, set_id: int) -> Call:
    """Return the call that compares a sample.

    Args:
        name: of the exchange of gradients.
        parameters: their names.
        elements: how many each has.
        advice: the lines that a script lacks if they differ.
        set_id: process set.
    """
    counts = [len(range(0, count, step_of(count))) for count in elements]
    described = [f"{count} {one}" for count, one in zip(counts, parameters, strict=True)]
    labels.note(f"allreduce.{name}.weights", name, "weights", parameters)
    name, kind = f"{name}.weights", Collective.ALLREDUCE
    return Call(kind, name, ReduceOp.MAX, set_id=set_id, weights=(advice, *described))


def compare(engine: Engine, call: Call, sample: Array) -> None:
    """Compare a sample with those of the other ranks; say which parameter differs.

    Args:
        engine: of this rank.
        call: see ``call_of``.
        sample: of all parameters, one after the other, float32.

    Raises:
        MismatchError: one differs, and the setting ``check_weights`` is "error"; on all ranks.
    """
    sample = np.nan_to_num(np.asarray(sample, np.float32))
    plain = call.but(weights=())
    here = plain.but(operation=ReduceOp.SUM).submit(engine, (np.ones(1, np.float32),)).wait()[0]
    if int(here[0]) < len(engine.members(call.set_id)):  # others have joined, and have no weights to show
        return
    most = plain.submit(engine, (np.concatenate([sample, -sample]),)).wait()[0]
    high, low = most[: sample.size], -most[sample.size :]
    start = 0
    for described in call.weights[1:]:
        count, _, parameter = described.partition(" ")
        part = slice(start, start := start + int(count))
        limit = _TOLERANCE * max(np.abs(high[part]).max(initial=0), np.abs(low[part]).max(initial=0))
        wrong = np.flatnonzero(high[part] - low[part] > limit)
        if wrong.size:
            if (counts := _counts.get(engine)) is not None:
                counts.told.add(_key(engine, call.set_id, call.name or ""))
            _report(engine, plain, parameter, sample[part][wrong[:1]], call.weights[0])
            return


def _report(engine: Engine, call: Call, parameter: str, value: Array, advice: str) -> None:
    gathered = Call(Collective.ALLGATHER, call.name, set_id=call.set_id).submit(engine, (value,)).wait()[0]
    members = engine.members(call.set_id)
    first, other = int(np.argmin(gathered)), int(np.argmax(gathered))
    first, other = min(first, other), max(first, other)
    where = [
        f"{gathered[one]:.4g} on rank {members[one]} ({engine.hosts[members[one]]})" for one in (first, other)
    ]
    text = (
        f"The ranks' models differ, so each trains one of its own: an element of {parameter!r} is {where[0]} "
        f"and {where[1]}. Give all ranks the weights and the optimizer's state of one, before they train and "
        f"wherever one sets them later (from a checkpoint, in a new layer): {advice}. Learning rate and "
        "other options of the optimizer must be the same on all ranks, too."
    )
    if engine.settings.check_weights == "error":
        raise MismatchError(text)
    if engine.rank == members[0]:
        _log.warning("ringdance: %s (RINGDANCE_CHECK_WEIGHTS=error stops then, =off does not look.)", text)
