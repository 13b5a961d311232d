"""Compare parameters between ranks during training, to detect a missing broadcast.

Without a broadcast, each rank trains its own model. Nothing else would reveal this, because the gradients are
averaged anyway. A binding calls ``due`` in each gradient exchange. If a comparison is due, the binding
samples its parameters (at most ``PLACES`` elements of each), and passes the sample to ``compare``. Compiled
programs contain the call for the comparison (``call_of``), and make it when they run.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ringdance.core import labels
from ringdance.core.engine import Engine
from ringdance.core.request import Collective, ReduceOp
from ringdance.errors import MismatchError
from ringdance.training import session
from ringdance.training.collectives import Array, Call, on_join

_Key = tuple[tuple[int, ...], str]

_log = logging.getLogger("ringdance")

PLACES = 64
ROW = 1 + PLACES
_INFINITE = np.float32(1e38)  # Stands for infinity. Twice this value is still finite in float32.
# TensorFlow and Keras scripts may broadcast after the first step, which may contain several exchanges.
_LATER = 10
_TOLERANCE = 1e-3  # Relative to a parameter's largest element, because CPUs round differently.


class _Exchanges(Counter[_Key]):
    """Counts gradient exchanges since the last join. Keys: process set members and exchange name.

    Attributes:
        left: Number of exchanges left before the first comparison. Joins do not change it, so it may differ
            between ranks.
        done: Keys whose weights have been compared, equal on all ranks.
        reported: Keys whose weights differed, equal on all ranks. Each is reported once.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.left: dict[_Key, int] = {}
        self.done: set[_Key] = set()
        self.reported: set[_Key] = set()
        on_join(engine, self.forget)

    def forget(self) -> None:
        """Restart the counts, because ranks may have joined after different numbers of exchanges."""
        self.clear()


_counts: weakref.WeakKeyDictionary[Engine, _Exchanges] = weakref.WeakKeyDictionary()


def _counts_of(engine: Engine) -> _Exchanges:
    if (counts := _counts.get(engine)) is None:
        counts = _counts[engine] = _Exchanges(engine)
    return counts


def due(engine: Engine, set_id: int, name: str, at: int = _LATER, anew: bool = False) -> bool:
    """Count an exchange of gradients. Return True on all ranks if they must compare weights.

    All ranks in an exchange have counted the same number of exchanges since the last join. After the first
    comparison, weights are compared in exchanges 10, 100, 1000 and so on. Before it, the ranks also check
    after each join whether all are ready. See ``compare``.

    Args:
        engine: Engine of this rank.
        set_id: Id of the process set.
        name: Name of the exchange, or of the call that compares.
        at: Number of the exchange in which to compare first.
        anew: If True, restart the count with this exchange. Must be the same on all ranks.
    """
    if engine.size == 1 or engine.settings.check_weights == "off":
        return False
    counts = _counts_of(engine)
    key = _key(engine, set_id, name)  # Omits the set's id, because ids of removed sets are reused.
    number = counts[key] = 1 if anew else counts[key] + 1
    counts.left[key] = counts.left.get(key, at) - 1
    asked = number == 1 and engine.joins > 0 and key not in counts.done
    later = number % 10 == 0 and str(number).strip("0") == "1"
    return (number == at or later or asked) and key not in counts.reported


def _key(engine: Engine, set_id: int, name: str) -> _Key:
    return engine.members(set_id), name.removesuffix(".weights")


def step_of(elements: int) -> int:
    """Return the slice step with which at most ``PLACES`` of ``elements`` elements are selected."""
    return max(1, -(-elements // PLACES))


def call_of(name: str, parameters: Sequence[str], advice: str, set_id: int) -> Call:
    """Return the call that compares a sample of the parameters.

    Args:
        name: Name of the gradient exchange.
        parameters: Names of the parameters.
        advice: Code that the script needs to add if parameters differ.
        set_id: Id of the process set.
    """
    labels.note(f"allreduce.{name}.weights", name, "weights", parameters)
    name, kind = f"{name}.weights", Collective.ALLREDUCE
    return Call(kind, name, ReduceOp.MAX, set_id=set_id, weights=(advice, *parameters))


def rows_of(parameters: Iterable[Any], take: Callable[[Any], tuple[int, Any]]) -> Iterator[Any]:
    """Yield ``ROW`` numbers for each parameter: its number of elements, a sample of them, and padding.

    Args:
        parameters: Parameters of any type.
        take: Function that returns a parameter's number of elements, and every ``step_of``-th of them as
            float32. If it fails (for other types or unreadable values), the parameter is not compared.
    """
    for parameter in parameters:
        try:
            size, values = take(parameter)
            parts = [np.array([size], np.float32), values, np.zeros(PLACES - values.shape[0], np.float32)]
        except Exception:  # Training must not fail because of the comparison.
            parts = [np.zeros(ROW, np.float32)]
        yield from parts


def compare_if_due(
    exchange: str, names: Sequence[str], advice: str, set_id: int, sample: Callable[[], Array]
) -> None:
    """Count an exchange of gradients, and compare parameters if due. See ``due`` and ``call_of``.

    Args:
        exchange: Name of the gradient exchange.
        names: Names of the parameters.
        advice: Code that the script needs to add if parameters differ.
        set_id: Id of the process set.
        sample: Function that returns the sample for ``compare``.
    """
    engine = session.engine()
    if due(engine, set_id, exchange):
        compare(engine, call_of(exchange, names, advice, set_id), sample())


def compare(engine: Engine, call: Call, sample: Array) -> None:
    """Compare a sample with the samples of the other ranks. Report a parameter that differs.

    Nothing is compared while a rank has joined, or before each rank has made its first exchanges. A parameter
    is skipped if its number of elements differs between ranks, or if a rank could not read it.

    Args:
        engine: Engine of this rank.
        call: Call from ``call_of``.
        sample: Output of ``rows_of``, as one array.

    Raises:
        MismatchError: A parameter differs, and the setting ``check_weights`` is "error". Raised on all ranks.
    """
    rows, plain, counts = sample.reshape(-1, ROW), call.but(weights=()), _counts_of(engine)
    key, members = _key(engine, call.set_id, call.name or ""), len(engine.members(call.set_id))
    about = np.array([1, counts.left.get(key, 0) <= 0, len(rows), len(rows) ** 2], np.int64)
    sums = plain.but(operation=ReduceOp.SUM).submit(engine, (about,)).wait()[0]
    ranks, ready, total, squares = sums.tolist()
    if ranks < members or ready < members:
        return
    counts.done.add(key)
    if not total or total * total != members * squares:  # The ranks have different numbers of parameters.
        return
    ordered = _ordered(rows)
    most = plain.submit(engine, (np.stack([ordered, -ordered]),)).wait()[0]
    high, low = most[0], -most[1]
    bounds = np.maximum(np.abs(high), np.abs(low))
    limits = _TOLERANCE * bounds[:, 1:].max(axis=1, keepdims=True, initial=0, where=bounds[:, 1:] < _INFINITE)
    wrong = (high - low > limits) & (high[:, :1] == low[:, :1])
    if wrong.any():
        row, place = np.argwhere(wrong)[0]
        counts.reported.add(key)
        _report(engine, plain, call.weights[1 + row], rows[row, place : place + 1], call.weights[0])


def _ordered(values: Array) -> Array:
    """Map values to finite numbers without changing their order. NaN becomes the largest number."""
    return np.nan_to_num(np.clip(values, -_INFINITE, _INFINITE), nan=float(1.5 * _INFINITE))


def _report(engine: Engine, call: Call, parameter: str, value: Array, advice: str) -> None:
    gathered = Call(Collective.ALLGATHER, call.name, set_id=call.set_id).submit(engine, (value,)).wait()[0]
    members = engine.members(call.set_id)
    ordered = _ordered(gathered)
    first, other = sorted([int(ordered.argmin()), int(ordered.argmax())])
    where = [
        f"{gathered[at]:.4g} on rank {members[at]} ({engine.hosts[members[at]]})" for at in (first, other)
    ]
    text = (
        f"The ranks' models differ, so each rank trains its own: an element of {parameter!r} is {where[0]} "
        f"and {where[1]}. Copy the weights and the optimizer's state from one rank to all others before "
        "training, and whenever a rank sets them later (from a checkpoint or in a new layer): "
        f"{advice}. The learning rate and other optimizer options must also be equal on all ranks."
    )
    if engine.settings.check_weights == "error":
        raise MismatchError(text)
    if engine.rank == members[0]:
        _log.warning(
            "ringdance: %s Set RINGDANCE_CHECK_WEIGHTS=error to stop the job in this case, or =off to skip "
            "this check.",
            text,
        )
