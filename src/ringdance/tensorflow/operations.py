"""The collectives on TensorFlow's tensors, under Horovod's names.

They work eagerly, in a ``tf.function`` and in graphs of ``tf.compat.v1``, and are differentiable. Beyond
Horovod: bfloat16, bool, complex numbers and all integers everywhere.

Arguments of ``allreduce`` mean the same for all: ``name`` is the key that matches the ranks' calls. Without
one eager calls match by order, and those in a graph by the name of their operation, made from the
tensor's name and the name scopes (``ignore_name_scope``: without these). ``process_set`` are the
ranks that take part. Errors are of ``tf.errors``, in eager calls Ringdance's as well.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ringdance.core.request import Collective, ReduceOp
from ringdance.errors import ArgumentError
from ringdance.tensorflow.compression import Compression
from ringdance.tensorflow.exchange import number, perform, plain, reduce_rows
from ringdance.training.collectives import Call, allreduce_call, movement, reducescatter_call
from ringdance.training.exports import Average
from ringdance.training.process_sets import ProcessSet, global_process_set

__all__ = [
    "allgather", "allreduce", "alltoall", "broadcast", "broadcast_", "grouped_allgather", "grouped_allreduce",
    "grouped_reducescatter", "join", "local_rank_op", "local_size_op", "process_set_included_op", "rank_op",
    "reducescatter", "size_op",
]

Tensor = Any


def _run(call: Call, tensors: Sequence[Tensor], ignore_name_scope: bool = False) -> list[Tensor]:
    """Run a call; one without a name gets that of its operation in a graph."""
    if tf.executing_eagerly():
        return perform(call, tensors)
    kind = ("Grouped" if call.grouped else "") + call.kind.name.title()
    name = call.name or f"Horovod{kind}_{_label(tensors[0])}"
    graph = tf.compat.v1.get_default_graph()
    key = name if ignore_name_scope else graph.unique_name(name, mark_as_used=False)
    return perform(call.but(name=key), tensors, name)


def _reduce(
    call: Call, tensors: Sequence[Any], device: str, compression: Any, ignore_name_scope: bool
) -> list[Tensor]:
    """Run a reduction on compressed tensors."""
    with tf.device(device):
        pairs = [compression.compress(_tensor(tensor)) for tensor in tensors]
        results = _run(call, [small for small, _ in pairs], ignore_name_scope)
        return [compression.decompress(one, pair[1]) for one, pair in zip(results, pairs, strict=True)]


def _label(tensor: Tensor) -> str:
    """Return what a graph calls a tensor, as part of a name."""
    # An eager tensor from outside has a number for a name, which counts what this process alone has made.
    return "captured" if tensor.op.name.isdigit() else re.sub("[^a-zA-Z0-9]", "_", tensor.name)


def _group(tensors: Sequence[Tensor]) -> list[Tensor]:
    group = [_tensor(tensor) for tensor in tensors]
    if not group:
        raise ArgumentError("A group needs at least one tensor.")
    return group


def _tensor(value: Any) -> Tensor:
    if isinstance(value, tf.IndexedSlices) or (isinstance(value, tf.Tensor) and tf.executing_eagerly()):
        return value
    return tf.convert_to_tensor(value)  # in a graph this also captures tensors from outside


@plain
def allreduce(
    tensor: Tensor, average: bool | None = None, device_dense: str = "", device_sparse: str = "",
    compression: Any = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, name: str | None = None, process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Tensor:
    """Return the reduction of ``tensor`` over all ranks: same shape and type.

    Args:
        tensor: equal shape and type on all ranks; or ``tf.IndexedSlices``: the rows that any rank
            has are summed, each once.
        average: deprecated form of ``op``: True is Average, False is Sum.
        device_dense: device on which a dense tensor enters the exchange.
        device_sparse: the same for IndexedSlices.
        compression: ``Compression.none``, ``.fp16``, ``.bf16`` or an object with compress and decompress.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        prescale_factor: multiplies the input of each rank.
        postscale_factor: multiplies the result.
        name: key that matches the ranks' calls.
        process_set: the ranks that take part.
        ignore_name_scope: in a graph, whether the key is without the name scopes.

    Raises:
        ValueError: both ``average`` and ``op`` are given, or ``op`` is unknown.
        NotImplementedError: IndexedSlices with another operation than Average and Sum, or with factors.
        tf.errors.OpError: FailedPreconditionError where ranks called it with different things, raised on
            all; InvalidArgumentError for what only this rank can see.
    """
    call = allreduce_call(name, average, op, prescale_factor, postscale_factor, process_set)
    if isinstance(tensor, tf.IndexedSlices):
        return _reduce_rows(call, tensor, process_set, device_sparse, ignore_name_scope)
    return _reduce(call, [tensor], device_dense, compression, ignore_name_scope)[0]


def _reduce_rows(
    call: Call, slices: Any, process_set: ProcessSet, device: str, ignore_name_scope: bool
) -> Any:
    """Run a reduction of IndexedSlices."""
    if call.operation not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise NotImplementedError(
            f"IndexedSlices can be reduced by Average or Sum, not by {call.operation.name.title()}: make "
            "them dense first (tf.convert_to_tensor, or sparse_as_dense=True of the optimizer or tape)."
        )
    if (call.prescale, call.postscale) != (1.0, 1.0):
        raise NotImplementedError("prescale_factor and postscale_factor are not for IndexedSlices.")
    # Integers are divided as TensorFlow does it, into fractions.
    fractions = call.operation is ReduceOp.AVERAGE and slices.dtype.is_integer
    if fractions:
        call = call.but(operation=ReduceOp.SUM)
    with tf.device(device):
        label = call.name or ("IndexedSlices" if tf.executing_eagerly() else slices.values.op.name)
        (result,) = reduce_rows(
            call, [slices], [label], lambda call, tensors: _run(call, tensors, ignore_name_scope)
        )
        if fractions:
            divided = result.values / tf.cast(process_set.size(), result.dtype)
            result = tf.IndexedSlices(divided, result.indices, result.dense_shape)
        return result


@plain
def grouped_allreduce(
    tensors: Sequence[Tensor], average: bool | None = None, device_dense: str = "", device_sparse: str = "",
    compression: Any = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False, name: str | None = None,
) -> list[Tensor]:
    """Return the reductions of several tensors: the dense ones together, IndexedSlices one by one."""
    group = _group(tensors)
    call = allreduce_call(name, average, op, prescale_factor, postscale_factor, process_set, True)
    dense = [one for one in group if not isinstance(one, tf.IndexedSlices)]
    reduced = iter(_reduce(call, dense, device_dense, compression, ignore_name_scope) if dense else ())
    return [
        _reduce_rows(
            call.but(name=name and f"{name}.{index}", grouped=False), one, process_set, device_sparse,
            ignore_name_scope,
        ) if isinstance(one, tf.IndexedSlices) else next(reduced)
        for index, one in enumerate(group)
    ]  # fmt: skip


@plain
def allgather(
    tensor: Tensor, name: str | None = None, ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the ranks' tensors joined along dimension 0, which may differ between ranks."""
    call = movement(Collective.ALLGATHER, name, process_set)
    return _run(call, [_tensor(tensor)], ignore_name_scope)[0]


@plain
def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Gather several tensors together; as ``allgather``."""
    call = movement(Collective.ALLGATHER, name, process_set, grouped=True)
    return _run(call, _group(tensors), ignore_name_scope)


@plain
def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the tensor of global rank ``root_rank``; shapes and types are equal on all ranks."""
    call = movement(Collective.BROADCAST, name, process_set, root=root_rank)
    return _run(call, [_tensor(tensor)], ignore_name_scope)[0]


@plain
def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Assign the values of global rank ``root_rank`` to variables.

    Returns:
        The variables, in a list; in a graph of ``tf.compat.v1`` the operations that assign to them.
    """
    listed = list(variables)
    call = movement(Collective.BROADCAST, name, process_set, grouped=True, root=root_rank)
    if not listed:
        return []
    received = _run(call, [tf.convert_to_tensor(one) for one in listed])
    assigned = [variable.assign(value) for variable, value in zip(listed, received, strict=True)]
    in_v1 = not tf.compat.v1.executing_eagerly_outside_functions()
    return assigned if in_v1 else listed


@plain
def alltoall(
    tensor: Tensor, splits: Any = None, name: str | None = None, ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send ``splits[j]`` rows to rank j of the set and receive theirs, in rank order.

    Args:
        tensor: at least one dimension; all but the first equal on all ranks.
        splits: int32, one for each rank; their sum may be less than the rows. Without: equal shares.
        name: key that matches the ranks' calls.
        ignore_name_scope: in a graph, whether the key is without the name scopes.
        process_set: the ranks that take part.

    Returns:
        The received rows; with ``splits`` also how many came from each rank (int32).
    """
    call = movement(Collective.ALLTOALL, name, process_set, equal_splits=splits is None)
    given = [_tensor(tensor)] if splits is None else [_tensor(tensor), tf.convert_to_tensor(splits, tf.int32)]
    output, received = _run(call, given, ignore_name_scope)
    return output if splits is None else (output, received)


@plain
def reducescatter(
    tensor: Tensor, device_dense: str = "", compression: Any = Compression.none, op: int = Average,
    name: str | None = None, process_set: ProcessSet = global_process_set, ignore_name_scope: bool = False,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce (Average or Sum) and return this rank's rows.

    Of d rows each of n ranks gets d // n, the first d % n ranks one more.
    """
    call = reducescatter_call(name, None, op, prescale_factor, postscale_factor, process_set)
    return _reduce(call, [tensor], device_dense, compression, ignore_name_scope)[0]


@plain
def grouped_reducescatter(
    tensors: Sequence[Tensor], device_dense: str = "", compression: Any = Compression.none, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce and scatter several tensors together; as ``reducescatter``."""
    call = reducescatter_call(None, None, op, prescale_factor, postscale_factor, process_set, True)
    return _reduce(call, _group(tensors), device_dense, compression, False)


@plain
def join() -> Tensor:
    """Take part with zeros until all ranks have joined; return the last of them."""
    return number("join")


@plain
def size_op(process_set_id: int = 0, name: str | None = None) -> Tensor:
    """Return the number of ranks in a set as an int32 scalar; in graphs read at run time."""
    return number("size", process_set_id, name)


@plain
def local_size_op(name: str | None = None) -> Tensor:
    """Return the number of ranks on this host; as ``size_op``."""
    return number("local_size", 0, name)


@plain
def rank_op(name: str | None = None) -> Tensor:
    """Return this process's rank; as ``size_op``."""
    return number("rank", 0, name)


@plain
def local_rank_op(name: str | None = None) -> Tensor:
    """Return this process's rank on its host; as ``size_op``."""
    return number("local_rank", 0, name)


@plain
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Tensor:
    """Return 1 if this process is in the set, else 0; as ``size_op``."""
    return number("included", process_set_id, name)
