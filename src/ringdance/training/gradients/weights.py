"""Compare the ranks' parameters while they train: without a broadcast each trains a model of its own.

Nothing else would tell, since the gradients are averaged all the same. A binding asks ``due`` at each
exchange of gradients; then it takes a sample of its parameters, at most ``PLACES`` elements of each, and
gives it to ``compare``. Compiled programs hold the ``call_of`` a comparison, carried out when they run.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ringdance.core import labels
from ringdance.core.request import Collective, ReduceOp
from ringdance.errors import MismatchError
from ringdance.training import session
from ringdance.training.collectives import Call, on_join

if TYPE_CHECKING:
    from ringdance.core.engine import Engine

Array = np.ndarray[Any, Any]
_Key = tuple[tuple[int, ...], str]

_log = logging.getLogger("ringdance")

PLACES = 64
ROW = 1 + PLACES
_INFINITE = np.float32(1e38)  # differences of twice as much are finite in float32
_LATER = 10  # exchanges: scripts for TensorFlow and Keras may broadcast after the first step, of several
_TOLERANCE = 1e-3  # of a parameter's largest element: processors of different kinds round differently


class _Exchanges(Counter[_Key]):
    """How many exchanges of gradients there were since all joined, by members of the process set and name.

    Attributes:
        left: how many are to come before the first comparison; joins do not change it, so ranks differ.
        done: those that were compared, on all ranks alike.
        reported: those whose weights were found to differ, on all ranks alike: once is enough.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.left: dict[_Key, int] = {}
        self.done: set[_Key] = set()
        self.reported: set[_Key] = set()
        on_join(engine, self.forget)

    def forget(self) -> None:
        """Count anew: all ranks have joined, after different numbers of exchanges."""
        self.clear()


_counts: weakref.WeakKeyDictionary[Engine, _Exchanges] = weakref.WeakKeyDictionary()


def _counts_of(engine: Engine) -> _Exchanges:
    if (counts := _counts.get(engine)) is None:
        counts = _counts[engine] = _Exchanges(engine)
    return counts


def due(engine: Engine, set_id: int, name: str, at: int = _LATER, anew: bool = False) -> bool:
    """Count an exchange of gradients; return whether to compare weights, alike on all ranks.

    All that take part have counted the same since they joined. After the first time weights are compared in
    exchange 10, 100, 1000 and so on; before, the ranks also ask each other after each join: see ``compare``.

    Args:
        engine: of this rank.
        set_id: process set.
        name: of the exchange, or of the call that compares.
        at: which exchange is the first.
        anew: count from this exchange on; alike on all ranks.
    """
    if engine.size == 1 or engine.settings.check_weights == "off":
        return False
    counts = _counts_of(engine)
    key = _key(engine, set_id, name)  # the number of a set that was removed is another one's later
    number = counts[key] = 1 if anew else counts[key] + 1
    counts.left[key] = counts.left.get(key, at) - 1
    asked = number == 1 and engine.joins > 0 and key not in counts.done
    later = number % 10 == 0 and str(number).strip("0") == "1"
    return (number == at or later or asked) and key not in counts.reported


def _key(engine: Engine, set_id: int, name: str) -> _Key:
    return engine.members(set_id), name.removesuffix(".weights")


def step_of(elements: int) -> int:
    """Return the step of a slice of so many elements that has at most ``PLACES``."""
    return max(1, -(-elements // PLACES))


def call_of(name: str, parameters: Sequence[str], advice: str, set_id: int) -> Call:
    """Return the call that compares a sample.

    Args:
        name: of the exchange of gradients.
        parameters: their names.
        advice: the lines that a script lacks if they differ.
        set_id: process set.
    """
    labels.note(f"allreduce.{name}.weights", name, "weights", parameters)
    name, kind = f"{name}.weights", Collective.ALLREDUCE
    return Call(kind, name, ReduceOp.MAX, set_id=set_id, weights=(advice, *parameters))


def rows_of(parameters: Iterable[Any], take: Callable[[Any], tuple[int, Any]]) -> Iterator[Any]:
    """Yield in turn how many elements a parameter has, some of them, and zeros: ``ROW`` numbers together.

    Args:
        parameters: of any kind.
        take: returns how many elements a parameter has, and each ``step_of``-th of them, float32. If it
            fails, as for other types and for what cannot be read, that parameter is not compared.
    """
    for one in parameters:
        try:
            size, values = take(one)
            parts = [np.array([size], np.float32), values, np.zeros(PLACES - values.shape[0], np.float32)]
        except Exception:  # the training goes well without
            parts = [np.zeros(ROW, np.float32)]
        yield from parts


def compare_if_due(
    exchange: str, names: Sequence[str], advice: str, set_id: int, sample: Callable[[], Array]
) -> None:
    """Count an exchange of gradients, and compare parameters if that is due: see ``due`` and ``call_of``.

    Args:
        exchange: name of the exchange of gradients.
        names: of the parameters.
        advice: the lines that a script lacks if they differ.
        set_id: process set.
        sample: makes what ``compare`` needs.
    """
    engine = session.engine()
    if due(engine, set_id, exchange):
        compare(engine, call_of(exchange, names, advice, set_id), sample())


def compare(engine: Engine, call: Call, sample: Array) -> None:
    """Compare a sample with those of the other ranks; say which parameter differs.

    Nothing is compared while a rank has joined or has not had its first exchanges; nor a parameter of which
    a rank has another number of elements, or could read none.

    Args:
        engine: of this rank.
        call: see ``call_of``.
        sample: what ``rows_of`` gives, as one array.

    Raises:
        MismatchError: one differs, and the setting ``check_weights`` is "error"; on all ranks.
    """
    rows, plain, counts = sample.reshape(-1, ROW), call.but(weights=()), _counts_of(engine)
    key, members = _key(engine, call.set_id, call.name or ""), len(engine.members(call.set_id))
    about = np.array([1, counts.left.get(key, 0) <= 0, len(rows), len(rows) ** 2], np.int64)
    sums = plain.but(operation=ReduceOp.SUM).submit(engine, (about,)).wait()[0]
    ranks, ready, total, squares = sums.tolist()
    if ranks < members or ready < members:
        return
    counts.done.add(key)
    if not total or total * total != members * squares:  # they have different numbers of parameters
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
    """Return finite numbers: infinities are the ends, and NaN is above them."""
    return np.nan_to_num(np.clip(values, -_INFINITE, _INFINITE), nan=float(1.5 * _INFINITE))


def _report(engine: Engine, call: Call, parameter: str, value: Array, advice: str) -> None:
    gathered = Call(Collective.ALLGATHER, call.name, set_id=call.set_id).submit(engine, (value,)).wait()[0]
    members = engine.members(call.set_id)
    ordered = _ordered(gathered)
    first, other = sorted([int(ordered.argmin()), int(ordered.argmax())])
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
