"""Run collective calls on tensors, eagerly or in graphs, and their gradients; reduce ``tf.IndexedSlices``.

Eager calls go straight to the engine, on views of the tensors' memory. In a graph they become the
operations of ``graph.kernels``. Both are recorded for gradient tapes in the same way, by the type of
operation. All ranks of the process set have to run the backward pass. A call's gradient is named
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
    """Return a function that AutoGraph does not convert where a ``tf.function`` calls it."""
    return tf.autograph.experimental.do_not_convert(function)


def in_session() -> bool:
    """Return whether a session will run what is added now, in an order of its own: also in ``tf.cond``."""
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "is_control_flow_graph", False):  # of a branch, without an order either
        graph = graph.outer_graph
    return not graph.building_function


def unique_in_session(name: str) -> str:
    """Return a name that is the only one in the graph of a session, whatever function is traced now."""
    with tf.init_scope():
        return str(tf.compat.v1.get_default_graph().unique_name(name))


def perform(call: Call, tensors: Sequence[Tensor], name: str | None = None) -> list[Tensor]:
    """Return the results of a call; of an alltoall also the received splits.

    Args:
        call: the collective and its options.
        tensors: the members of a group or one tensor; of an alltoall with splits also these.
        name: of the operation in a graph.

    Raises:
        RingdanceError: eager only, and also one of ``tf.errors``; running a graph raises the latter alone.
    """
    if in_session() or not _private.RECORDS:
        run = _from_data_set if in_session() else _run
        return _with_gradient(call, tensors, lambda given: run(call, given, name))
    results = _run(call, tensors, name)
    _private.record("RingdanceCall", tensors, partial(kernels.text_of, call), results)
    return results


def _run(call: Call, tensors: Sequence[Tensor], name: str | None) -> list[Tensor]:
    """Run a call at once, or add it to the function that is being traced."""
    if tf.executing_eagerly():
        with as_tensorflow():
            return [_tensor_of(one) for one in kernels.run(call, [_view_of(tensor) for tensor in tensors])]
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
    """Return a contiguous view of an eager tensor; a copy if it is on a GPU."""
    return np.asarray(_private.numpy_of(tensor))


def _tensor_of(array: Array) -> Any:
    """Return an eager tensor that shares the memory of an array.

    The array must not change any more. TensorFlow needs memory aligned to 64 bytes, as the engine's own is;
    other memory is copied.
    """
    if array.ctypes.data % 64 and array.size:
        aligned = aligned_empty(array.shape, array.dtype)
        aligned[...] = array
        array = aligned
    if array.dtype == _BFLOAT16:  # which NumPy cannot export by DLPack: the same bits under another name
        return tf.bitcast(tf.experimental.dlpack.from_dlpack(array.view(np.uint16).__dlpack__()), tf.bfloat16)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _with_gradient(
    call: Call, tensors: Sequence[Tensor], run: Callable[[Sequence[Tensor]], list[Tensor]]
) -> list[Tensor]:
    """Run a call so that tapes and ``tf.gradients`` know its gradient, without TensorFlow's private names."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(*given: Tensor) -> Any:
        results = run(given)
        done = SimpleNamespace(inputs=given, outputs=results)

        def gradient(*gradients: Tensor) -> list[Tensor]:
            return _backward(call, done, list(gradients))

        return tuple(results), gradient

    return list(differentiable(*tensors))


def _from_data_set(call: Call, tensors: Sequence[Tensor], name: str | None) -> list[Tensor]:
    """Add a call to a graph of ``tf.compat.v1``, by tf.data.

    There nothing orders operations, so that ranks may run them in different orders, and a session has few
    threads, which must not block. tf.data runs the function of a data set of one element on a new thread.
    """

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def function(*given: Tensor) -> tuple[Tensor, ...]:
        return tuple(_run(call, given, name))

    concrete = function.get_concrete_function(*[tf.TensorSpec(one.shape, one.dtype) for one in tensors])
    concrete.add_to_graph(tf.compat.v1.get_default_graph())
    types = [one.dtype for one in concrete.outputs]
    shapes = [one.shape for one in concrete.outputs]
    elements = tf.raw_ops.TensorDataset(components=tensors, output_shapes=[one.shape for one in tensors])
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
        kind: the type of operation.
        name: of the operation; by default the kind.
        inputs: tensors.
        outputs: types of the results.
        attributes: texts, numbers, and lists of types.

    Raises:
        ArgumentError: in a function that XLA compiles.
    """
    graph = tf.compat.v1.get_default_graph()
    if _private.in_xla_context(graph):
        raise ArgumentError(
            f"{name or kind}: a function with jit_compile=True cannot hold communication between ranks, "
            "which XLA would have to compile. Use jit_compile=False for the function (for Keras: "
            "model.compile(..., jit_compile=False)), or compile only what computes the gradients "
            "and reduce them in a function around it."
        )
    attrs = {key: _attribute(value) for key, value in attributes.items()}
    return graph.create_op(kind, list(inputs), list(outputs), name=name or kind, attrs=attrs)


def _attribute(value: Any) -> Any:
    if isinstance(value, str):
        return tf.compat.v1.AttrValue(s=value.encode())
    if isinstance(value, int):
        return tf.compat.v1.AttrValue(i=value)
    types = [one.as_datatype_enum for one in value]
    return tf.compat.v1.AttrValue(list=tf.compat.v1.AttrValue.ListValue(type=types))


def perform_all(calls: Sequence[tuple[Call, Sequence[Tensor]]]) -> list[list[Tensor]]:
    """Return the results of several reductions that are under way together.

    In a function each is submitted when its tensors are there, and one operation waits for all; in a session
    after the first, so that nothing waits for ranks to which that was refused.
    """
    if len(calls) == 1 or in_session() or not _private.RECORDS:
        first = perform(*calls[0])
        with tf.control_dependencies(first if in_session() else []):
            return [first, *[perform(*one) for one in calls[1:]]]
    if tf.executing_eagerly():
        return _together(calls)
    listed = [call for call, _ in calls]
    started = [
        _start(call, tensors, [] if index else listed[1:]) for index, (call, tensors) in enumerate(calls)
    ]
    # It has no results: the operation itself is what the others have to wait for.
    wait = _operation("RingdanceWait", None, [number for _, number in started], [], N=len(started), text="")
    with tf.control_dependencies([wait]):
        # One operation of TensorFlow's own for all: nothing else may see the results before they are there.
        results = iter(tf.raw_ops.IdentityN(input=[one for group, _ in started for one in group]))
    return [[next(results) for _ in tensors] for _, tensors in calls]


def _together(calls: Sequence[tuple[Call, Sequence[Tensor]]]) -> list[list[Tensor]]:
    with as_tensorflow():
        engine = session.engine()
        works = [
            call.submit(engine, tuple([_view_of(tensor) for tensor in tensors])) for call, tensors in calls
        ]
        done = [[_tensor_of(array) for array in work.wait()] for work in works]
        for call, _ in calls:
            call.completed()
    for (call, tensors), results in zip(calls, done, strict=True):
        _private.record("RingdanceCall", tensors, partial(kernels.text_of, call), results)
    return done


def _start(call: Call, tensors: Sequence[Tensor], others: list[Call]) -> tuple[list[Tensor], Tensor]:
    """Add a start to the graph; return its future results, and its number.

    ``others``: for the first of a group the others, which are refused if a run fails before they start.
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
    """Return one of ``kernels.NUMBERS`` as an int32 tensor; in graphs read at run time."""
    if tf.executing_eagerly():
        with as_tensorflow():
            return tf.constant(kernels.NUMBERS[what](str(about)), tf.int32)
    (result,) = _operation("RingdanceNumber", name, [], [tf.int32], text=f"{what}:{about}").outputs
    result.set_shape([])
    return result


def order_after(results: Sequence[Tensor]) -> None:
    """Run the calls that a function makes from here on after these results of ``tf.cond``.

    TensorFlow runs the stateful operations of a function in their order, but orders nothing after those
    within ``tf.cond``. Ranks with one thread for operations would wait for different calls, forever.
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
    text = op.get_attr("text")
    return kernels.call_of(text.decode() if isinstance(text, bytes) else text)


def _backward(call: Call, op: Any, gradients: list[Tensor]) -> list[Tensor]:
    """Return the gradients of an operation's inputs: see ``Backward``.

    Args:
        call: the operation's call.
        op: has its ``inputs`` and ``outputs``.
        gradients: of the outputs.
    """
    engine = session.engine()
    rule = call.backward(engine)
    back, keep = rule.call, rule.keep
    name = None if tf.executing_eagerly() else f"{call.kind.name.title()}Gradient"
    if in_session() and back.name is not None:  # asked for twice, both may be in one run
        back = back.but(name=unique_in_session(back.name))
    if call.tables:
        return _rows_gradient(back, op, gradients)
    if keep is Keep.PADDED:
        return _padded(perform(back, [gradients[0], op.outputs[1]], name)[0], op.inputs)
    if rule.scale != 1.0:
        gradients = [one * tf.cast(rule.scale, one.dtype) for one in gradients]
    results = perform(back, gradients, name)
    if keep is Keep.ROOT:  # a session runs only what results depend on, so all ranks' depend on the call
        return [tf.where(engine.rank == call.root, one, tf.zeros_like(one)) for one in results]
    if keep is Keep.OWN_ROWS:
        rows = tf.stack([tf.shape(tensor, tf.int64)[0] for tensor in op.inputs])
        key = None if back.name is None else f"{back.name}.rows"
        gathered = perform(Call(Collective.ALLGATHER, key, set_id=call.set_id), [rows[None]], name)[0]
        first = tf.reduce_sum(gathered[: engine.members(call.set_id).index(engine.rank)], 0)
        return [one[first[index] : first[index] + rows[index]] for index, one in enumerate(results)]
    return results


def _padded(returned: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return an alltoall's gradient: the returned rows, and zeros for those that were not sent."""
    given = inputs[0]
    rest = tf.shape(given)[0] - tf.shape(returned)[0]
    padding = tf.concat([[[0, rest]], tf.zeros((tf.rank(given) - 1, 2), tf.int32)], 0)
    result = tf.pad(returned, padding)
    result.set_shape(given.shape)
    return [result] + [None] * (len(inputs) - 1)


def reduce_rows(
    call: Call, slices: Sequence[Any], names: Sequence[str],
    run: Callable[[Call, Sequence[Tensor]], list[Tensor]], tables: Sequence[int | None] = (),
) -> list[Any]:
    """Return the rows of all ranks as IndexedSlices: ascending indices, each once. Differentiable.

    Args:
        call: an all-reduce: Average or Sum, its name and process set.
        slices: this rank's rows of each table.
        names: of the tables, for messages.
        run: runs the call.
        tables: how many rows each table has, ``None`` where that is not known; without, as the slices say.
    """
    call = call.but(tables=tuple(names))
    given: list[Tensor] = []
    for index, one in enumerate(slices):
        given += [one.values, one.indices, _rows_of_table(one, tables[index] if tables else None)]

    results = run(call, given)
    return [
        tf.IndexedSlices(results[3 * index], results[3 * index + 1], one.dense_shape)
        for index, one in enumerate(slices)
    ]


def _rows_of_table(one: Any, known: int | None) -> Tensor:
    if known is not None:
        return tf.constant(known, tf.int64)
    return tf.constant(-1, tf.int64) if one.dense_shape is None else tf.cast(one.dense_shape[0], tf.int64)


def _rows_gradient(back: Call, op: Any, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Reduce the gradients of the resulting rows; return for each input row that of its row."""
    arrived = [tf.convert_to_tensor(one) for one in gradients[::3]]
    results: list[Tensor] = []
    for index, one in enumerate(perform(back.but(tables=(), grouped=True), arrived)):
        rows = tf.searchsorted(op.outputs[3 * index + 1], op.inputs[3 * index + 1])
        results += [tf.gather(one, rows), None, None]
    return results
