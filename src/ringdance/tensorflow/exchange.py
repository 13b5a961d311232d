"""Run collective calls on tensors and IndexedSlices, eagerly or in graphs, and define their gradients.

Eager calls go directly to the engine, which uses the tensors' memory. In a graph, calls become operations
defined in ``graph.kernels``. Gradient tapes record eager calls and operations in the same way, by operation
type. All ranks of the process set must run the backward pass. The gradient of the call ``<name>`` is named
``<name>.grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import tensorflow as tf

from ringdance.core.exchange import aligned_empty
from ringdance.core.recorder import Profiler
from ringdance.core.request import Collective
from ringdance.errors import ArgumentError
from ringdance.tensorflow import _private
from ringdance.tensorflow.errors import as_tensorflow
from ringdance.tensorflow.graph import kernels
from ringdance.training import session
from ringdance.training.collectives import Call, Keep

Array = np.ndarray[Any, Any]
Tensor = Any

Function = TypeVar("Function", bound=Callable[..., Any])

session.add_profiler(Profiler(_private.profiler_running, tf.profiler.experimental.Trace))

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def plain(function: Function) -> Function:
    """Return a function that AutoGraph does not convert when a ``tf.function`` calls it."""
    return tf.autograph.experimental.do_not_convert(function)


def in_session() -> bool:
    """Return True if operations added now, even in ``tf.cond``, will run in a session in arbitrary order."""
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "is_control_flow_graph", False):  # Branches of tf.cond are not ordered either.
        graph = graph.outer_graph
    return not graph.building_function


def unique_in_session(name: str) -> str:
    """Return a name that is unique in the session's graph, even while a function is being traced."""
    with tf.init_scope():
        return str(tf.compat.v1.get_default_graph().unique_name(name))


def perform(call: Call, tensors: Sequence[Tensor], name: str | None = None) -> list[Tensor]:
    """Run a call and return its results. For an alltoall, the last result contains the received splits.

    Args:
        call: The collective and its options.
        tensors: One tensor or the tensors of a group. For an alltoall with splits, the tensor and the splits.
        name: Name of the operation if the call is added to a graph.

    Raises:
        RingdanceError: An eager call failed. The error is also an instance of a ``tf.errors`` class. When a
            graph runs, errors are only instances of ``tf.errors`` classes.
    """
    if in_session() or not _private.RECORDS:
        run = _from_data_set if in_session() else _run
        return _with_gradient(call, tensors, lambda inputs: run(call, inputs, name))
    results = _run(call, tensors, name)
    _private.record("RingdanceCall", tensors, partial(kernels.text_of, call), results)
    return results


def _run(call: Call, tensors: Sequence[Tensor], name: str | None) -> list[Tensor]:
    """Run a call now, or add it to the function that is being traced."""
    if tf.executing_eagerly():
        with as_tensorflow():
            return [_tensor_of(out) for out in kernels.run(call, [_view_of(tensor) for tensor in tensors])]
    types = [tensor.dtype for tensor in tensors]
    if call.kind is Collective.ALLTOALL:
        types = [types[0], tf.int32]
    results = _operation(
        "RingdanceCall", name, tensors, types, Tin=[tensor.dtype for tensor in tensors], Tout=types,
        text=kernels.text_of(call, tensors),
    ).outputs
    for result, tensor in zip(results, tensors, strict=False):
        if call.keeps_shapes:
            result.set_shape(tensor.shape)
        elif tensor.shape.rank:
            result.set_shape([None, *tensor.shape[1:]])
    return list(results)


def _view_of(tensor: Any) -> Array:
    """Return a contiguous view of an eager tensor, or a copy if it is on a GPU."""
    return np.asarray(_private.numpy_of(tensor))


def _tensor_of(array: Array) -> Any:
    """Return an eager tensor that shares an array's memory.

    The array must not change afterwards. TensorFlow requires memory with 64-byte alignment, which the
    engine's memory has. Unaligned arrays are copied.
    """
    if array.ctypes.data % 64 and array.size:
        aligned = aligned_empty(array.shape, array.dtype)
        aligned[...] = array
        array = aligned
    if array.dtype == _BFLOAT16:  # NumPy cannot export bfloat16 through DLPack, so export uint16.
        return tf.bitcast(tf.experimental.dlpack.from_dlpack(array.view(np.uint16).__dlpack__()), tf.bfloat16)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _with_gradient(
    call: Call, tensors: Sequence[Tensor], run: Callable[[Sequence[Tensor]], list[Tensor]]
) -> list[Tensor]:
    """Run a call and define its gradient for tapes and ``tf.gradients``, using only the public API."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(*given: Tensor) -> Any:
        results = run(given)
        operation = SimpleNamespace(inputs=given, outputs=results)

        def gradient(*gradients: Tensor) -> list[Tensor]:
            return _backward(call, operation, list(gradients))

        return tuple(results), gradient

    return list(differentiable(*tensors))


def _from_data_set(call: Call, tensors: Sequence[Tensor], name: str | None) -> list[Tensor]:
    """Add a call to a ``tf.compat.v1`` graph, wrapped in a tf.data pipeline.

    The operations of such a graph have no order, so the ranks may run them in different orders. In addition,
    a session has few threads, which must not block. For a dataset with a single element, tf.data runs the
    function on a new thread.
    """

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def function(*given: Tensor) -> tuple[Tensor, ...]:
        return tuple(_run(call, given, name))

    concrete = function.get_concrete_function(*[tf.TensorSpec(item.shape, item.dtype) for item in tensors])
    concrete.add_to_graph(tf.compat.v1.get_default_graph())
    types = [output.dtype for output in concrete.outputs]
    shapes = [output.shape for output in concrete.outputs]
    elements = tf.raw_ops.TensorDataset(components=tensors, output_shapes=[item.shape for item in tensors])
    mapped = tf.raw_ops.MapDataset(
        input_dataset=elements, other_arguments=[], f=concrete, output_types=types, output_shapes=shapes,
        use_inter_op_parallelism=False,
    )
    return list(tf.raw_ops.DatasetToSingleElement(dataset=mapped, output_types=types, output_shapes=shapes))


def _operation(
    kind: str, name: str | None, inputs: Sequence[Tensor], outputs: Sequence[Any], **attributes: Any
) -> Any:
    """Add an operation to the graph and return it.

    Args:
        kind: Operation type.
        name: Name of the operation. The default is ``kind``.
        inputs: Input tensors.
        outputs: Dtypes of the results.
        attributes: Strings, numbers and lists of dtypes.

    Raises:
        ArgumentError: The operation would be part of a function that XLA compiles.
    """
    graph = tf.compat.v1.get_default_graph()
    if _private.in_xla_context(graph):
        raise ArgumentError(
            f"{name or kind}: a function with jit_compile=True cannot contain communication between ranks, "
            "because XLA cannot compile it. Use jit_compile=False for the function (for Keras: "
            "model.compile(..., jit_compile=False)), or compile only the gradient computation "
            "and reduce the gradients in a function around it."
        )
    attrs = {key: _attribute(value) for key, value in attributes.items()}
    return graph.create_op(kind, list(inputs), list(outputs), name=name or kind, attrs=attrs)


def _attribute(value: Any) -> Any:
    if isinstance(value, str):
        return tf.compat.v1.AttrValue(s=value.encode())
    if isinstance(value, int):
        return tf.compat.v1.AttrValue(i=value)
    types = [dtype.as_datatype_enum for dtype in value]
    return tf.compat.v1.AttrValue(list=tf.compat.v1.AttrValue.ListValue(type=types))


def perform_all(calls: Sequence[tuple[Call, Sequence[Tensor]]]) -> list[list[Tensor]]:
    """Run several reductions concurrently, and return their results.

    In a ``tf.function``, each reduction is submitted when its tensors are ready, and one operation waits for
    all reductions. In a session, the other reductions start after the first one has completed. If a rank
    refuses the first reduction, it fails on all ranks, and no rank waits for the other reductions.
    """
    if len(calls) == 1 or in_session() or not _private.RECORDS:
        first = perform(*calls[0])
        with tf.control_dependencies(first if in_session() else []):
            return [first, *[perform(*pair) for pair in calls[1:]]]
    if tf.executing_eagerly():
        return _together(calls)
    listed = [call for call, _ in calls]
    started = [
        _start(call, tensors, [] if index else listed[1:]) for index, (call, tensors) in enumerate(calls)
    ]
    # The operation has no results, so later operations must depend on the operation itself.
    wait = _operation("RingdanceWait", None, [number for _, number in started], [], N=len(started), text="")
    with tf.control_dependencies([wait]):
        # All results pass through one built-in operation, so that they are not read before they are complete.
        results = iter(tf.raw_ops.IdentityN(input=[tensor for group, _ in started for tensor in group]))
    return [[next(results) for _ in tensors] for _, tensors in calls]


def _together(calls: Sequence[tuple[Call, Sequence[Tensor]]]) -> list[list[Tensor]]:
    with as_tensorflow():
        engine = session.engine()
        works = [
            call.submit(engine, tuple([_view_of(tensor) for tensor in tensors])) for call, tensors in calls
        ]
        all_results = [[_tensor_of(array) for array in work.wait()] for work in works]
        for call, _ in calls:
            call.completed()
    for (call, tensors), results in zip(calls, all_results, strict=True):
        _private.record("RingdanceCall", tensors, partial(kernels.text_of, call), results)
    return all_results


def _start(call: Call, tensors: Sequence[Tensor], others: list[Call]) -> tuple[list[Tensor], Tensor]:
    """Add a RingdanceStart operation to the graph. Return the tensors for the results, and the call's number.

    For the first call of a group, ``others`` contains the other calls. They are refused if the run fails
    before they start.
    """
    types = [tensor.dtype for tensor in tensors]
    *results, number = _operation(
        "RingdanceStart", None, tensors, [*types, tf.int64], T=types,
        text=kernels.text_of(call, tensors, others),
    ).outputs
    for result, tensor in zip(results, tensors, strict=True):
        result.set_shape(tensor.shape)
    _private.record("RingdanceStart", tensors, partial(kernels.text_of, call), [*results, number])
    return results, number


def number(what: str, about: int | str = 0, name: str | None = None) -> Tensor:
    """Return an entry of ``kernels.NUMBERS`` as an int32 scalar. In a graph, it is computed at run time."""
    if tf.executing_eagerly():
        with as_tensorflow():
            return tf.constant(kernels.NUMBERS[what](str(about)), tf.int32)
    (result,) = _operation("RingdanceNumber", name, [], [tf.int32], text=f"{what}:{about}").outputs
    result.set_shape([])
    return result


def order_after(results: Sequence[Tensor]) -> None:
    """Make later calls in a ``tf.function`` run after a ``tf.cond`` that returned ``results``.

    TensorFlow runs the stateful operations of a function in program order, but later operations may run
    before operations inside ``tf.cond``. Ranks that have only one thread for operations could then wait
    forever for different calls.
    """
    if not tf.executing_eagerly() and not in_session():
        with tf.control_dependencies(results):
            number("rank")


kernels.register_all()
tf.no_gradient("RingdanceNumber")


@tf.RegisterGradient("RingdanceStart")  # type: ignore[untyped-decorator]
def _start_gradient(op: Any, *gradients: Tensor) -> list[Tensor]:
    return _backward(_call_of(op), op, list(gradients[:-1]))


@tf.RegisterGradient("RingdanceCall")  # type: ignore[untyped-decorator]
def _call_gradient(op: Any, *gradients: Tensor) -> list[Tensor]:
    return _backward(_call_of(op), op, list(gradients))


def _call_of(op: Any) -> Call:
    return kernels.call_of(op.get_attr("text").decode())


def _backward(call: Call, op: Any, gradients: list[Tensor]) -> list[Tensor]:
    """Return the gradients with respect to an operation's inputs. See ``Backward``.

    Args:
        call: The call that the operation runs.
        op: The operation, or an object with the same ``inputs`` and ``outputs``.
        gradients: Gradients of the outputs.
    """
    engine = session.engine()
    rule = call.backward(engine)
    back, keep = rule.call, rule.keep
    name = None if tf.executing_eagerly() else f"{call.kind.name.title()}Gradient"
    if in_session() and back.name is not None:  # One run may compute this gradient twice.
        back = back.but(name=unique_in_session(back.name))
    if call.tables:
        return _rows_gradient(back, op, gradients)
    if keep is Keep.PADDED:
        return _padded(perform(back, [gradients[0], op.outputs[1]], name)[0], op.inputs)
    if rule.scale != 1.0:
        gradients = [gradient * tf.cast(rule.scale, gradient.dtype) for gradient in gradients]
    results = perform(back, gradients, name)
    if keep is Keep.ROOT:  # Depend on the result on every rank, so that every session runs it.
        return [tf.where(engine.rank == call.root, result, tf.zeros_like(result)) for result in results]
    if keep is Keep.OWN_ROWS:
        rows = tf.stack([tf.shape(tensor, tf.int64)[0] for tensor in op.inputs])
        key = None if back.name is None else f"{back.name}.rows"
        gathered = perform(Call(Collective.ALLGATHER, key, set_id=call.set_id), [rows[None]], name)[0]
        first = tf.reduce_sum(gathered[: engine.members(call.set_id).index(engine.rank)], 0)
        return [result[first[index] : first[index] + rows[index]] for index, result in enumerate(results)]
    return results


def _padded(returned: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradient of an alltoall: the returned rows, then zeros for rows that were not sent."""
    tensor = inputs[0]
    rest = tf.shape(tensor)[0] - tf.shape(returned)[0]
    padding = tf.concat([[[0, rest]], tf.zeros((tf.rank(tensor) - 1, 2), tf.int32)], 0)
    result = tf.pad(returned, padding)
    result.set_shape(tensor.shape)
    return [result] + [None] * (len(inputs) - 1)


def reduce_rows(
    call: Call, slices: Sequence[Any], names: Sequence[str],
    run: Callable[[Call, Sequence[Tensor]], list[Tensor]], tables: Sequence[int | None] = (),
) -> list[Any]:
    """Reduce IndexedSlices over the ranks. The results have unique, ascending indices. Differentiable.

    Args:
        call: An allreduce (Average or Sum) with its name and process set.
        slices: This rank's IndexedSlices for each table.
        names: Names of the tables, for messages.
        run: Function that runs the call.
        tables: Number of rows in each table. ``None`` means that the slices determine it.
    """
    call = call.but(tables=tuple(names))
    inputs: list[Tensor] = []
    for index, rows in enumerate(slices):
        inputs += [rows.values, rows.indices, _rows_of_table(rows, tables[index] if tables else None)]

    results = run(call, inputs)
    return [
        tf.IndexedSlices(results[3 * index], results[3 * index + 1], rows.dense_shape)
        for index, rows in enumerate(slices)
    ]


def _rows_of_table(one: Any, known: int | None) -> Tensor:
    if known is not None:
        return tf.constant(known, tf.int64)
    return tf.constant(-1, tf.int64) if one.dense_shape is None else tf.cast(one.dense_shape[0], tf.int64)


def _rows_gradient(back: Call, op: Any, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Reduce the gradients of the result rows, and return the gradient of each input row's result row."""
    arrived = [tf.convert_to_tensor(gradient) for gradient in gradients[::3]]
    results: list[Tensor] = []
    for index, reduced in enumerate(perform(back.but(tables=(), grouped=True), arrived)):
        rows = tf.searchsorted(op.outputs[3 * index + 1], op.inputs[3 * index + 1])
        results += [tf.gather(reduced, rows), None, None]
    return results
