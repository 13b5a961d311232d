"""Every collective on NumPy views: checks the arguments, builds the request, submits it.

Each function takes the engine, contiguous views (a tuple; several make a group, all or nothing) and
returns a Work whose result is a list of arrays, one for each view. ``outputs=None`` lets the engine
allocate; giving the inputs again works in place. ``wake=False`` is for callers that wait at once.

Names are ``<collective>.<name>`` and ``grouped_<collective>.<name>``; ``None`` matches by order.
An argument error that only this rank can see is raised here at once, and the ranks that wait for
the same call get its message (``refuse``) instead of being left waiting.
"""

from __future__ import annotations

import inspect
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import ml_dtypes
import numpy as np

from ringdance import session
from ringdance.core.request import Collective, Description, ReduceOp, Request, Work
from ringdance.errors import ArgumentError, CollectiveError, DuplicateNameError
from ringdance.settings import level_of_caller

if TYPE_CHECKING:
    from ringdance.core.engine import Engine

__all__ = [
    "ReduceOp", "UnsupportedOperationError", "allgather", "allreduce", "alltoall", "barrier", "broadcast",
    "join", "pick_operation", "reducescatter", "refusing", "tell_of_joins",
]

P = ParamSpec("P")
T = TypeVar("T")

Array = np.ndarray[Any, Any]
Arrays = tuple[Array, ...]

# dtype.name is computed anew at each access (2 µs); a lookup takes 0.1.
DTYPE_NAMES: dict[np.dtype[Any], str] = {
    np.dtype(kind): np.dtype(kind).name
    for kind in (
        "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
        "float16", "float32", "float64", "bool", ml_dtypes.bfloat16,
    )
}
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
_OPERATIONS = {int(operation): operation for operation in ReduceOp}


class UnsupportedOperationError(ArgumentError, CollectiveError, NotImplementedError):
    """A reduction that this collective, data type or number of ranks does not allow. Raised locally, at once.

    Of all three kinds because Horovod raises one or the other, by case.
    """


def pick_operation(average: bool | None, op: int | None) -> ReduceOp:
    """Return the operation meant by Horovod's pair of arguments; Average if both are ``None``.

    Raises:
        ArgumentError: both are given, or ``op`` is not a known number.
    """
    if average is not None:
        if op is not None:
            raise ArgumentError("Give op, as in op=hvd.Average or op=hvd.Sum, or average=, not both.")
        text = "average= is old: say op=hvd.Average or op=hvd.Sum."
        warnings.warn(text, DeprecationWarning, stacklevel=level_of_caller())
        return ReduceOp.AVERAGE if average else ReduceOp.SUM
    if op is None:
        return ReduceOp.AVERAGE
    try:
        return _OPERATIONS[op]
    except (KeyError, TypeError):
        raise ArgumentError(f"op={op!r} is not one of Average, Sum, Adasum, Min, Max, Product.") from None


@lru_cache(maxsize=8192)
def _describe(
    kind: Collective, dtypes: tuple[np.dtype[Any], ...], shapes: tuple[tuple[int, ...], ...],
    operation: ReduceOp = ReduceOp.SUM, prescale: float = 1.0, postscale: float = 1.0, root: int = -1,
) -> Description:
    """Return the description of a request; checked once for each signature, then remembered."""
    for dtype in dtypes:
        if dtype not in DTYPE_NAMES:
            known = ", ".join(DTYPE_NAMES.values())
            raise ArgumentError(f"Elements of type {dtype} cannot be exchanged; known are {known}.")
    names = tuple(DTYPE_NAMES[dtype] for dtype in dtypes)
    _check_operation(kind, names, operation)
    detail: tuple[int, ...] = ()
    if kind in (Collective.ALLGATHER, Collective.ALLTOALL, Collective.REDUCESCATTER) and not all(shapes):
        detail = (-1,)  # a tensor without dimensions: the engine refuses it, on all members alike
    if kind in (Collective.ALLGATHER, Collective.ALLTOALL):
        shapes = tuple(shape[1:] for shape in shapes)
    return Description(kind, names, shapes, operation, float(prescale), float(postscale), root, detail)


def _check_operation(kind: Collective, names: tuple[str, ...], operation: ReduceOp) -> None:
    if kind is Collective.REDUCESCATTER and operation not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise UnsupportedOperationError(f"reducescatter knows Sum and Average, not {operation.name.title()}.")
    if operation is ReduceOp.ADASUM and not _FLOATS.issuperset(names):
        raise UnsupportedOperationError(f"Adasum needs floating-point tensors, got {', '.join(names)}.")
    if operation is ReduceOp.AVERAGE and "bool" in names and kind is not Collective.BROADCAST:
        raise UnsupportedOperationError("Booleans have no average: use Max (any) or Min (all).")


def _dtypes_and_shapes(views: Arrays) -> tuple[tuple[np.dtype[Any], ...], tuple[tuple[int, ...], ...]]:
    if len(views) == 1:
        view = views[0]
        return (view.dtype,), (view.shape,)
    if not views:
        raise ArgumentError("A group needs at least one tensor.")
    return tuple([view.dtype for view in views]), tuple([view.shape for view in views])


def _full_name(kind: str, name: str | None, grouped: bool) -> str | None:
    if name is None:
        return None
    return f"grouped_{kind}.{name}" if grouped else f"{kind}.{name}"


def _refuse(
    engine: Engine, kind: Collective, name: str | None, set_id: int, grouped: bool, error: Exception
) -> None:
    """Let the ranks that wait for this call fail with the message of ``error``, once for each error."""
    if not getattr(error, "told_to_peers", False):
        error.told_to_peers = True  # type: ignore[attr-defined]
        full = _full_name(kind.name.lower(), name, grouped)
        engine.refuse(Request(Description(kind), name=full, set_id=set_id), str(error))


def refusing(kind: Collective, grouped: bool = False) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a binding's function that makes a call: where it raises before submitting, the peers are told.

    The function has the arguments ``name`` and ``process_set``, and may have ``grouped``.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)

        def tell(error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            try:
                given = signature.bind(*args, **kwargs)
            except TypeError:  # it was not even called rightly: nobody knows the name that was meant
                return
            given.apply_defaults()
            which = given.arguments
            set_id = getattr(which["process_set"], "process_set_id", None)
            if isinstance(set_id, int):
                _refuse(session.engine(), kind, which["name"], set_id, which.get("grouped", grouped), error)

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            began = time.monotonic()
            try:
                return function(*args, **kwargs)
            except (ArgumentError, TypeError, ValueError, IndexError, AttributeError) as error:
                early = session.is_initialized() and not session.engine().submitted_since(began)
                if early and not isinstance(error, DuplicateNameError):
                    tell(error, args, kwargs)
                raise

        return checked

    return decorate


def _described(
    engine: Engine, kind: Collective, views: Arrays, name: str | None, set_id: int, grouped: bool,
    *others: Any,
) -> tuple[Description, str | None]:
    """Return the description of a request and its full name; others: operation, scales, root."""
    try:
        return (
            _describe(kind, *_dtypes_and_shapes(views), *others),
            _full_name(kind.name.lower(), name, grouped),
        )
    except ArgumentError as error:
        _refuse(engine, kind, name, set_id, grouped, error)
        raise


def _members(engine: Engine, set_id: int) -> tuple[int, ...]:
    """Return the ranks of the set; raise if this process is not one of them."""
    members = engine.members(set_id)
    if engine.rank not in members:
        raise ArgumentError(
            f"Rank {engine.rank} ({engine.hosts[engine.rank]}) is not a member of process set {set_id} with "
            f"the ranks {list(members)}: only members may submit to it (test with process_set.included())."
        )
    return members


def allreduce(
    engine: Engine, inputs: Arrays, outputs: Arrays | None, *, name: str | None = None,
    operation: ReduceOp = ReduceOp.AVERAGE, prescale: float = 1.0, postscale: float = 1.0, set_id: int = 0,
    grouped: bool = False, wake: bool = True,
) -> Work:
    """Reduce element by element over the members; shapes and types equal on all. Any shape, 0-dim too.

    Raises:
        ArgumentError: type or operation not possible, not a member, empty group, name in flight.
    """
    if set_id:
        _members(engine, set_id)
    full: str | None = None
    try:
        if name is None:
            kinds = _dtypes_and_shapes(inputs)
            description = _describe(Collective.ALLREDUCE, *kinds, operation, prescale, postscale)
        else:
            description, full = _describe_again(name, grouped, inputs, operation, prescale, postscale)
    except ArgumentError as error:
        _refuse(engine, Collective.ALLREDUCE, name, set_id, grouped, error)
        raise
    if operation is ReduceOp.ADASUM:
        _check_adasum(len(engine.members(set_id)))
    return engine.submit(Request(description, inputs, outputs, full, set_id), wake=wake)


# Name -> what was reduced under it last, alone or as a group: comparing is quicker than hashing, and a step's
# names come again.
_recent: tuple[dict[str, tuple[tuple[Any, ...], Description, str]], ...] = ({}, {})
_MOST_RECENT = 4096


def _describe_again(
    name: str, grouped: bool, views: Arrays, operation: ReduceOp, prescale: float, postscale: float
) -> tuple[Description, str]:
    """Return description and full name of a named allreduce."""
    recent = _recent[grouped]
    if grouped:
        key: tuple[Any, ...] = (*_dtypes_and_shapes(views), operation, prescale, postscale)
    else:
        key = (views[0].dtype, views[0].shape, operation, prescale, postscale)
    known = recent.get(name)
    if known is not None and known[0] == key:
        return known[1], known[2]
    if len(recent) >= _MOST_RECENT:
        recent.clear()
    description = _describe(Collective.ALLREDUCE, *_dtypes_and_shapes(views), operation, prescale, postscale)
    full = f"grouped_allreduce.{name}" if grouped else f"allreduce.{name}"
    recent[name] = (key, description, full)
    return description, full


def _check_adasum(size: int) -> None:
    if size & (size - 1):
        raise UnsupportedOperationError(
            f"Adasum combines ranks in pairs and needs 2, 4, 8, ... of them; there are {size}. "
            "Start another number, or use op=hvd.Average."
        )


def allgather(
    engine: Engine, inputs: Arrays, *, name: str | None = None, set_id: int = 0, grouped: bool = False,
    wake: bool = True,
) -> Work:
    """Join the members' tensors along dimension 0, which may differ; the other dimensions are equal."""
    if set_id:
        _members(engine, set_id)
    description, full = _described(engine, Collective.ALLGATHER, inputs, name, set_id, grouped)
    return engine.submit(Request(description, inputs, None, full, set_id), wake=wake)


def broadcast(
    engine: Engine, inputs: Arrays, outputs: Arrays | None, root: int, *, name: str | None = None,
    set_id: int = 0, grouped: bool = False, wake: bool = True,
) -> Work:
    """Give all members the root's values. ``root`` is a global rank, also within a process set.

    Raises:
        ArgumentError: the root is not a member; peers get the same message.
    """
    members = _members(engine, set_id)
    if not isinstance(root, int):
        root = int(root)
    scales = ReduceOp.SUM, 1.0, 1.0
    description, full = _described(engine, Collective.BROADCAST, inputs, name, set_id, grouped, *scales, root)
    if root not in members:
        error = ArgumentError(
            f"broadcast{f' {name!r}' if name else ''}: root rank {root} is not in process set {set_id} with "
            f"the ranks {list(members)}; the root is given as a global rank."
        )
        _refuse(engine, Collective.BROADCAST, name, set_id, grouped, error)
        raise error
    return engine.submit(Request(description, inputs, outputs, full, set_id), wake=wake)


def alltoall(
    engine: Engine, inputs: Arrays, splits: Sequence[Array | None], *, name: str | None = None,
    set_id: int = 0, grouped: bool = False, wake: bool = True,
) -> Work:
    """Send slice j of each tensor (``splits[j]`` rows) to member j; receive theirs, in member order.

    Args:
        engine: the engine.
        inputs: tensors of at least one dimension; the others are equal on all members.
        splits: for each tensor integers, one for each member, or ``None`` for equal slices.
        name: key that matches the ranks' requests.
        set_id: process set.
        grouped: whether this is a group of tensors.
        wake: whether the engine thread starts it.

    Raises:
        ArgumentError: splits do not fit; peers that wait for this name get the same message.
    """
    members = _members(engine, set_id)
    description, full = _described(engine, Collective.ALLTOALL, inputs, name, set_id, grouped)
    try:
        checked = tuple([
            _splits(view, rows, len(members), full or "alltoall", engine)
            for view, rows in zip(inputs, splits, strict=True)
        ])
    except ArgumentError as error:
        _refuse(engine, Collective.ALLTOALL, name, set_id, grouped, error)
        raise
    return engine.submit(Request(description, inputs, None, full, set_id, checked), wake=wake)


def _splits(view: Array, splits: Array | None, size: int, name: str, engine: Engine) -> Array:
    """Return rows for each member as int64, checked against the tensor."""
    where = f"{name} on rank {engine.rank} ({engine.hosts[engine.rank]})"
    rows = view.shape[0] if view.ndim else 0
    if splits is None:
        if rows % size:
            raise ArgumentError(f"{where}: {rows} rows cannot be cut equally for {size} ranks; give splits.")
        return np.full(size, rows // size, np.int64)
    splits = np.asarray(splits)
    if splits.ndim != 1 or (splits.dtype.kind not in "iu" and splits.size):
        raise ArgumentError(f"{where}: splits must be a list of integers, got {splits.dtype} {splits.shape}.")
    if len(splits) != size:
        raise ArgumentError(f"{where}: {len(splits)} splits for {size} ranks; give one for each.")
    if (splits < 0).any() or int(splits.sum()) > rows:
        raise ArgumentError(
            f"{where}: splits {splits.tolist()} must not be negative, and their sum {int(splits.sum())} not "
            f"more than the {rows} rows of the tensor."
        )
    return np.ascontiguousarray(splits, np.int64)


def reducescatter(
    engine: Engine, inputs: Arrays, *, name: str | None = None, operation: ReduceOp = ReduceOp.AVERAGE,
    prescale: float = 1.0, postscale: float = 1.0, set_id: int = 0, grouped: bool = False, wake: bool = True,
) -> Work:
    """Reduce (Sum or Average) and give each member its rows: d // n of them, the first d % n one more."""
    if set_id:
        _members(engine, set_id)
    scales = operation, prescale, postscale
    description, full = _described(engine, Collective.REDUCESCATTER, inputs, name, set_id, grouped, *scales)
    return engine.submit(Request(description, inputs, None, full, set_id), wake=wake)


_BARRIER = Description(Collective.BARRIER)
_JOIN = Description(Collective.JOIN)
# Called when all ranks have joined. Held weakly: the methods' objects live as long as their users want.
_listeners: weakref.WeakKeyDictionary[Engine, list[weakref.WeakMethod[Callable[[], None]]]] = (
    weakref.WeakKeyDictionary()
)


def tell_of_joins(engine: Engine, method: Callable[[], None]) -> None:
    """Call the bound method each time that ``join`` returns on this rank, as long as its object lives."""
    known = [one for one in _listeners.get(engine, []) if one() is not None]
    _listeners[engine] = [*known, weakref.WeakMethod(method)]


def barrier(engine: Engine, set_id: int = 0) -> None:
    """Return after all members have entered."""
    _members(engine, set_id)
    engine.submit(Request(_BARRIER, set_id=set_id), wake=False).wait()


def join(engine: Engine) -> int:
    """Help the other ranks with zeros until all have joined; return the rank that came last."""
    last: int = engine.submit(Request(_JOIN), wake=False).wait()
    for listener in [reference() for reference in _listeners.get(engine, [])]:
        if listener is not None:
            listener()
    return last
