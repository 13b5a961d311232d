"""Compare the ranks' parameters while they train: without a broadcast each trains a model of its own.

Nothing else would tell, since the gradients are averaged all the same. A binding asks ``due`` at each
exchange of gradients; then it takes a sample of its parameters, at most ``PLACES`` elements of each, and
gives it to ``compare``. Compiled programs hold the ``call_of`` a comparison, carried out when they run.

The first exchange is not looked at: scripts written for Horovod's TensorFlow broadcast after it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ringdance import session
from ringdance.core.request import Collective, ReduceOp
from ringdance.errors import MismatchError
from ringdance.training.collectives import Call

if TYPE_CHECKING:
    from ringdance.core.engine import Engine

Array = np.ndarray[Any, Any]

_log = logging.getLogger("ringdance")

PLACES = 64
_TOLERANCE = 1e-3  # of a parameter's largest element: processors of different kinds round differently


class _Seen:
    """What a job has seen: exchanges of gradients by their name, and broadcasts of weights."""

    def __init__(self) -> None:
        self.broadcasts = 0
        self.exchanges: dict[str, int] = {}
        self.compared_at: dict[str, int] = {}  # value of broadcasts


_seen: weakref.WeakKeyDictionary[Engine, _Seen] = weakref.WeakKeyDictionary()


def changed() -> None:
    """Note that all ranks of the job have broadcast weights: they are to be compared again."""
    engine = session.engine()
    _seen.setdefault(engine, _Seen()).broadcasts += 1


def due(engine: Engine, name: str) -> bool:
    """Count an exchange of gradients by its name; return whether to compare weights, alike on all ranks."""
    if engine.size == 1 or engine.settings.check_weights == "off":
        return False
    seen = _seen.setdefault(engine, _Seen())
    number = seen.exchanges[name] = seen.exchanges.get(name, 0) + 1
    if number == 1 or seen.compared_at.get(name) == seen.broadcasts:
        return False
    seen.compared_at[name] = seen.broadcasts
    return True


def compare_if_due(engine: Engine, call: Call, sample: Array) -> None:
    """Count an exchange in a compiled program, and compare if that is due; see ``compare``."""
    if due(engine, call.name or "") and sample.ndim == 1:  # not a batch of jax.vmap
        compare(engine, call, sample)


def step_of(elements: int) -> int:
    """Return the step of a slice of so many elements that has at most ``PLACES``."""
    return max(1, -(-elements // PLACES))


def call_of(name: str, parameters: Sequence[str], elements: Sequence[int], advice: str, set_id: int) -> Call:
    """Return the call that compares a sample.

    Args:
        name: of the exchange of gradients.
        parameters: their names.
        elements: how many each has.
        advice: the line that a script lacks if they differ.
        set_id: process set.
    """
    counts = [len(range(0, count, step_of(count))) for count in elements]
    described = [f"{count} {one}" for count, one in zip(counts, parameters, strict=True)]
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
    # The last element's maximum is 0 where a rank that has joined takes part.
    both = np.concatenate([sample, -sample, np.array([-1], np.float32)])
    plain = call.but(weights=())
    most = plain.submit(engine, (both,)).wait()[0]
    if most[-1] == 0:
        return
    high, low = most[: sample.size], -most[sample.size : -1]
    start = 0
    for described in call.weights[1:]:
        count, _, parameter = described.partition(" ")
        part = slice(start, start := start + int(count))
        limit = _TOLERANCE * max(np.abs(high[part]).max(initial=0), np.abs(low[part]).max(initial=0))
        wrong = np.flatnonzero(high[part] - low[part] > limit)
        if wrong.size:
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
        f"and {where[1]}. Give all ranks the weights of one before they train: {advice}"
    )
    if engine.settings.check_weights == "error":
        raise MismatchError(text)
    if engine.rank == members[0]:
        _log.warning("ringdance: %s (RINGDANCE_CHECK_WEIGHTS=error stops then, =off does not look.)", text)
