"""Collectives on TensorFlow tensors, with Horovod's names.

The collectives are differentiable. They work eagerly, in a ``tf.function`` and in ``tf.compat.v1`` graphs.
Unlike in Horovod, all collectives support bfloat16, bool, complex numbers and all integer dtypes.

The arguments documented for ``allreduce`` have the same meaning in all functions. ``name`` is the key by
which calls are matched across ranks. Unnamed eager calls match by order. Unnamed calls in a graph match by
the name of their operation, which consists of the tensor's name and, unless ``ignore_name_scope`` is set, the
name scopes. ``process_set`` contains the participating ranks. Errors are instances of ``tf.errors`` classes.
Errors of eager calls are also instances of Ringdance's classes.
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
    """Run a call. In a graph, an unnamed call gets the name of its operation."""
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
        return [compression.decompress(result, pair[1]) for result, pair in zip(results, pairs, strict=True)]


def _label(tensor: Tensor) -> str:
    """Return a tensor's name in the graph, with special characters replaced so that names can contain it."""
    # The name of an eager tensor from outside the graph is a number, which may differ between ranks.
    return "captured" if tensor.op.name.isdigit() else re.sub("[^a-zA-Z0-9]", "_", tensor.name)


def _group(tensors: Sequence[Tensor]) -> list[Tensor]:
    group = [_tensor(tensor) for tensor in tensors]
    if not group:
        raise ArgumentError("A group needs at least one tensor.")
    return group


def _tensor(value: Any) -> Tensor:
    if isinstance(value, tf.IndexedSlices) or (isinstance(value, tf.Tensor) and tf.executing_eagerly()):
        return value
    return tf.convert_to_tensor(value)  # In a graph, this also captures tensors from outside it.


@plain
def allreduce(
    tensor: Tensor, average: bool | None = None, device_dense: str = "", device_sparse: str = "",
    compression: Any = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, name: str | None = None, process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Tensor:
    """Return the reduction of ``tensor`` over all ranks, with the same shape and dtype.

    Args:
        tensor: A tensor with the same shape and dtype on all ranks, or ``tf.IndexedSlices``. For
            IndexedSlices, the result contains the reduction of each row that any rank has.
        average: Deprecated: use ``op``. True means Average, False means Sum.
        device_dense: Device on which a dense tensor enters the exchange.
        device_sparse: Device on which IndexedSlices enter the exchange.
        compression: ``Compression.none``, ``.fp16``, ``.bf16`` or an object with the methods
            ``compress`` and ``decompress``.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        prescale_factor: Factor applied to each rank's input.
        postscale_factor: Factor applied to the result.
        name: Key by which calls are matched across ranks.
        process_set: The participating ranks.
        ignore_name_scope: If True, name scopes of a graph are not part of the key.

    Raises:
        ValueError: Both ``average`` and ``op`` are passed, or ``op`` is unknown.
        NotImplementedError: IndexedSlices are passed with scale factors, or ``op`` is not Average or Sum for
            IndexedSlices.
        tf.errors.OpError: FailedPreconditionError on all ranks if their calls do not match.
            InvalidArgumentError for an error that only this rank can detect.
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
            f"IndexedSlices can be reduced by Average or Sum, not by {call.operation.name.title()}. Convert "
            "them with tf.convert_to_tensor, or set sparse_as_dense=True in the optimizer or tape."
        )
    if (call.prescale, call.postscale) != (1.0, 1.0):
        raise NotImplementedError(
            "prescale_factor and postscale_factor are not supported for IndexedSlices. Convert them with "
            "tf.convert_to_tensor first."
        )
    # As in TensorFlow, the average of integers may be a fraction.
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
    """Reduce several tensors. Dense tensors are reduced together, and IndexedSlices one at a time."""
    group = _group(tensors)
    call = allreduce_call(name, average, op, prescale_factor, postscale_factor, process_set, True)
    dense = [tensor for tensor in group if not isinstance(tensor, tf.IndexedSlices)]
    reduced = iter(_reduce(call, dense, device_dense, compression, ignore_name_scope) if dense else ())
    return [
        _reduce_rows(
            call.but(name=name and f"{name}.{index}", grouped=False), tensor, process_set, device_sparse,
            ignore_name_scope,
        ) if isinstance(tensor, tf.IndexedSlices) else next(reduced)
        for index, tensor in enumerate(group)
    ]  # fmt: skip


@plain
def allgather(
    tensor: Tensor, name: str | None = None, ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the ranks' tensors concatenated along dimension 0, whose length may differ between ranks."""
    call = movement(Collective.ALLGATHER, name, process_set)
    return _run(call, [_tensor(tensor)], ignore_name_scope)[0]


@plain
def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Gather several tensors together. See ``allgather``."""
    call = movement(Collective.ALLGATHER, name, process_set, grouped=True)
    return _run(call, _group(tensors), ignore_name_scope)


@plain
def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the tensor of global rank ``root_rank``. Shapes and dtypes must match on all ranks."""
    call = movement(Collective.BROADCAST, name, process_set, root=root_rank)
    return _run(call, [_tensor(tensor)], ignore_name_scope)[0]


@plain
def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Assign the values of global rank ``root_rank`` to variables.

    Returns:
        The variables, in a list. In a ``tf.compat.v1`` graph, the operations that assign to them.
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
    """Send ``splits[j]`` rows to rank j of the process set, and return the received rows in rank order.

    Args:
        tensor: Tensor with at least one dimension. All dimensions except the first must match across ranks.
        splits: Number of rows to send to each rank (int32). The sum may be less than the number of rows in
            ``tensor``. By default, the rows are split equally.
        name: Key by which calls are matched across ranks.
        ignore_name_scope: If True, name scopes of a graph are not part of the key.
        process_set: The participating ranks.

    Returns:
        The received rows. If ``splits`` is given, also the number of rows received from each rank (int32).
    """
    call = movement(Collective.ALLTOALL, name, process_set, equal_splits=splits is None)
    args = [_tensor(tensor)] if splits is None else [_tensor(tensor), tf.convert_to_tensor(splits, tf.int32)]
    output, received = _run(call, args, ignore_name_scope)
    return output if splits is None else (output, received)


@plain
def reducescatter(
    tensor: Tensor, device_dense: str = "", compression: Any = Compression.none, op: int = Average,
    name: str | None = None, process_set: ProcessSet = global_process_set, ignore_name_scope: bool = False,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce ``tensor`` over all ranks (Average or Sum), and return this rank's share of the rows.

    For d rows and n ranks, each rank gets d // n rows, and the first d % n ranks get one more row each.
    """
    call = reducescatter_call(name, None, op, prescale_factor, postscale_factor, process_set)
    return _reduce(call, [tensor], device_dense, compression, ignore_name_scope)[0]


@plain
def grouped_reducescatter(
    tensors: Sequence[Tensor], device_dense: str = "", compression: Any = Compression.none, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce and scatter several tensors together. See ``reducescatter``."""
    call = reducescatter_call(None, None, op, prescale_factor, postscale_factor, process_set, True)
    return _reduce(call, _group(tensors), device_dense, compression, False)


@plain
def join() -> Tensor:
    """Contribute zeros to other ranks' calls until all ranks have joined. Return the last rank to join."""
    return number("join")


@plain
def size_op(process_set_id: int = 0, name: str | None = None) -> Tensor:
    """Return the size of a process set as an int32 scalar. In a graph, it is determined at run time."""
    return number("size", process_set_id, name)


@plain
def local_size_op(name: str | None = None) -> Tensor:
    """Return the number of ranks on this host. See ``size_op``."""
    return number("local_size", 0, name)


@plain
def rank_op(name: str | None = None) -> Tensor:
    """Return this process's rank. See ``size_op``."""
    return number("rank", 0, name)


@plain
def local_rank_op(name: str | None = None) -> Tensor:
    """Return this process's rank on its host. See ``size_op``."""
    return number("local_rank", 0, name)


@plain
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Tensor:
    """Return 1 if this process is a member of the process set, otherwise 0. See ``size_op``."""
    return number("included", process_set_id, name)
