"""Runs collective calls on tensors, at once or as operations of a graph; and their gradients (contract 3.6).

Eager calls go straight to the engine, on views of the tensors' memory. In a graph they become the
operations of ``kernels``. Both are recorded for gradient tapes in the same way, by the type of operation.
All ranks of the process set have to run the backward pass. A call's gradient is named ``<name>.grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.eager import backprop as _backprop  # noqa: F401  # makes execute record gradients
from tensorflow.python.eager import execute
from tensorflow.python.framework import op_def_library
from tensorflow.python.ops import control_flow_util

from ringdance import session
from ringdance.core.request import Collective, ReduceOp
from ringdance.errors import ArgumentError
from ringdance.tensorflow import kernels
from ringdance.tensorflow.errors import as_tensorflow
from ringdance.tensorflow.memory import tensor_of, view_of
from ringdance.training.collectives import Call
from ringdance.training.sparse import submit

__all__ = ["number", "perform", "perform_all", "plain"]

Tensor = Any

Function = TypeVar("Function", bound=Callable[..., Any])

_register = cache(kernels.register_all)


def plain(function: Function) -> Function:
    """Return a function that AutoGraph leaves as it is written, where a ``tf.function`` calls it."""
    left: Function = tf.autograph.experimental.do_not_convert(function)
    return left


def _gradient_of(kind: str) -> Callable[[Function], Function]:
    """Register a function as the gradient of a kind of operation."""
    register: Callable[[Function], Function] = tf.RegisterGradient(kind)
    return register


def perform(call: Call, tensors: Sequence[Tensor], name: str | None = None) -> list[Tensor]:
    """Return the results of a call, one for each tensor; of an alltoall also the received splits.

    Args:
        call: what to do.
        tensors: the members of a group or one tensor; of an alltoall with splits also these.
        name: of the operation in a graph.

    Raises:
        RingdanceError: eager only, and also one of ``tf.errors``; running a graph raises the latter alone.
    """
    if tf.executing_eagerly():
        with as_tensorflow():
            results = _at_once(call, tensors)
    elif not tf.compat.v1.get_default_graph().building_function:
        return _in_session(call, tensors)
    else:
        types = _types(call, tensors)
        _, results = _operation(
            "RingdanceCall", name, tensors=tensors, Tout=types, call=call.text(),
            memory=kernels.memory_text(tensors),
        )
        for result, tensor in zip(results, tensors, strict=False):
            _set_shape(call, result, tensor)
    _record("RingdanceCall", tensors, ("call", call.text()), results)
    return results


def _record(kind: str, inputs: Sequence[Tensor], attribute: tuple[str, str], outputs: list[Tensor]) -> None:
    """Tell gradient tapes what was done, as an operation of this kind, whose gradient is registered below."""
    if execute.must_record_gradient():
        _register()
        execute.record_gradient(kind, list(inputs), (attribute[0], attribute[1].encode()), outputs)


def _at_once(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    engine = session.engine()
    if call.kind is Collective.ALLTOALL:
        splits = None if call.equal_splits else view_of(tensors[1])
        work = call.submit(engine, (view_of(tensors[0]),), splits=(splits,))
        result = tensor_of(work.wait()[0])
        assert work.received_splits is not None
        return [result, tf.constant(work.received_splits[0], tf.int32)]
    views = tuple([view_of(tensor) for tensor in tensors])
    return [tensor_of(array) for array in submit(call, engine, views).wait()]


def _in_session(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Add a call to a graph of ``tf.compat.v1``, where nothing orders it and it must not block a thread.

    A session has few threads, and ranks may run the calls of one graph in different orders. tf.data runs the
    function of a data set of one element on a thread that is made for it.
    """

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def function(*given: Tensor) -> tuple[Tensor, ...]:
        return tuple(perform(call, given))

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(*given: Tensor) -> Any:
        concrete = function.get_concrete_function(*[tf.TensorSpec(one.shape, one.dtype) for one in given])
        concrete.add_to_graph(tf.compat.v1.get_default_graph())
        types = [one.dtype for one in concrete.outputs]
        shapes = [one.shape for one in concrete.outputs]
        elements = tf.raw_ops.TensorDataset(components=given, output_shapes=[one.shape for one in given])
        mapped = tf.raw_ops.MapDataset(
            input_dataset=elements, other_arguments=[], f=concrete, output_types=types, output_shapes=shapes,
            use_inter_op_parallelism=False,
        )
        results = tf.raw_ops.DatasetToSingleElement(
            dataset=mapped, output_types=types, output_shapes=shapes
        )
        done = SimpleNamespace(inputs=given, outputs=results)

        def gradient(*gradients: Tensor) -> list[Tensor]:
            back = _of_gradient(call)
            if back.name is not None:  # asked for twice, both may be in one run
                back = back.but(name=tf.compat.v1.get_default_graph().unique_name(back.name))
            return _GRADIENTS[call.kind](back, done, list(gradients))

        return tuple(results), gradient

    return list(differentiable(*tensors))


def _types(call: Call, tensors: Sequence[Tensor]) -> list[Any]:
    if call.kind is Collective.ALLTOALL:
        return [tensors[0].dtype, tf.int32]
    return [tensor.dtype for tensor in tensors]


def _set_shape(call: Call, result: Tensor, tensor: Tensor) -> None:
    if call.keeps_shapes:
        result.set_shape(tensor.shape)
    elif tensor.shape.rank:
        result.set_shape([None, *tensor.shape[1:]])


def _operation(kind: str, name: str | None, **arguments: Any) -> tuple[Any, list[Tensor]]:
    """Add an operation to the graph; return it, and its results.

    Raises:
        ArgumentError: in a function that XLA compiles.
    """
    _register()
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ArgumentError(
            f"{name or kind}: a function with jit_compile=True cannot hold communication between ranks, "
            "which XLA would have to compile. Say jit_compile=False for the function (for Keras: "
            "model.compile(..., jit_compile=False)), or compile only what computes the gradients "
            "and reduce them in a function around it."
        )
    operation, results = op_def_library._apply_op_helper(kind, name=name, **arguments)[2:4]
    return operation, list(results) if isinstance(results, (list, tuple)) else [results]


def perform_all(calls: Sequence[tuple[Call, Sequence[Tensor]]]) -> list[list[Tensor]]:
    """Return the results of several reductions that are under way together.

    In a graph each is submitted when its tensors are there, and one operation waits for all.
    """
    if len(calls) == 1:
        return [perform(*calls[0])]
    if tf.executing_eagerly():
        return _together(calls)
    if not tf.compat.v1.get_default_graph().building_function:
        return [perform(*one) for one in calls]
    listed = [call for call, _ in calls]
    started = [
        _start(call, tensors, [] if index else listed[1:]) for index, (call, tensors) in enumerate(calls)
    ]
    # It has no results: the operation itself is what the others have to wait for.
    wait, _ = _operation("RingdanceWait", None, numbers=[number for _, number in started])
    with tf.control_dependencies([wait]):
        # One operation of TensorFlow's own for all: nothing else may see the results before they are there.
        results = iter(tf.raw_ops.IdentityN(input=[one for group, _ in started for one in group]))
    return [[next(results) for _ in tensors] for _, tensors in calls]


def _together(calls: Sequence[tuple[Call, Sequence[Tensor]]]) -> list[list[Tensor]]:
    with as_tensorflow():
        engine = session.engine()
        works = [
            call.submit(engine, tuple([view_of(tensor) for tensor in tensors])) for call, tensors in calls
        ]
        done = [[tensor_of(array) for array in work.wait()] for work in works]
    for (call, tensors), results in zip(calls, done, strict=True):
        _record("RingdanceCall", tensors, ("call", call.text()), results)
    return done


def _start(call: Call, tensors: Sequence[Tensor], others: list[Call]) -> tuple[list[Tensor], Tensor]:
    """Add a start to the graph; return where the results will be, and its number.

    ``others``: for the first of a group the others, which are refused if a run fails before they start.
    """
    _, (*results, number) = _operation(
        "RingdanceStart", None, tensors=tensors, call=call.text(), memory=kernels.memory_text(tensors),
        others=kernels.calls_text(others),
    )
    for result, tensor in zip(results, tensors, strict=True):
        result.set_shape(tensor.shape)
    _record("RingdanceStart", tensors, ("call", call.text()), [*results, number])
    return results, number


def number(what: str, set_id: int = 0, name: str | None = None) -> Tensor:
    """Return one of ``kernels.NUMBERS`` as an int32 tensor, in a graph as it is when the graph runs."""
    if tf.executing_eagerly():
        with as_tensorflow():
            return tf.constant(kernels.NUMBERS[what](set_id), tf.int32)
    _, (result,) = _operation("RingdanceNumber", name, what=f"{what}:{set_id}")
    result.set_shape([])
    return result


tf.no_gradient("RingdanceNumber")


@_gradient_of("RingdanceStart")
def _start_gradient(op: Any, *gradients: Tensor) -> list[Tensor]:
    call = _call_of(op)
    return perform(call, gradients[:-1], _graph_name(call))


@_gradient_of("RingdanceCall")
def _call_gradient(op: Any, *gradients: Tensor) -> list[Tensor]:
    call = _call_of(op)
    return _GRADIENTS[call.kind](call, op, list(gradients))


def _call_of(op: Any) -> Call:
    text = op.get_attr("call")
    return _of_gradient(Call.from_text(text.decode() if isinstance(text, bytes) else text))


def _of_gradient(call: Call) -> Call:
    return call if call.name is None else call.but(name=f"{call.name}.grad")


def _graph_name(call: Call) -> str | None:
    return None if tf.executing_eagerly() else f"{call.kind.name.title()}Gradient"


def _of_allreduce(call: Call, op: Any, gradients: list[Tensor]) -> list[Tensor]:
    return perform(call, gradients, _graph_name(call))


def _averaged(call: Call, gradients: list[Tensor]) -> list[Tensor]:
    mean = Call(Collective.ALLREDUCE, call.name, ReduceOp.AVERAGE, set_id=call.set_id, grouped=call.grouped)
    return perform(mean, gradients, _graph_name(call))


def _told(what: str, set_id: int = 0) -> Any:
    """Return one of ``kernels.NUMBERS``; in a graph of a job that may change its size as a tensor."""
    if tf.executing_eagerly() or not session.engine().settings.elastic:
        return kernels.NUMBERS[what](set_id)
    return number(what, set_id)


def _of_allgather(call: Call, op: Any, gradients: list[Tensor]) -> list[Tensor]:
    """The average, of which this rank's rows are its part."""
    averaged = _averaged(call, gradients)
    rows = tf.stack([tf.shape(tensor, tf.int64)[0] for tensor in op.inputs])
    name = None if call.name is None else f"{call.name}.rows"
    counts = Call(Collective.ALLGATHER, name, set_id=call.set_id)
    gathered = perform(counts, [rows[None]], _graph_name(call))[0]
    before = tf.reduce_sum(gathered[: _told("place", call.set_id)], 0)
    return [
        one[before[index] : before[index] + rows[index]] for index, one in enumerate(averaged)
    ]


def _of_broadcast(call: Call, op: Any, gradients: list[Tensor]) -> list[Tensor]:
    averaged, here = _averaged(call, gradients), _told("rank") == call.root
    return [tf.where(here, one, tf.zeros_like(one)) for one in averaged]


def _of_alltoall(call: Call, op: Any, gradients: list[Tensor]) -> list[Tensor]:
    """Rows go back the way they came; those that were not sent get zeros."""
    back = call.but(equal_splits=False)
    returned = perform(back, [gradients[0], op.outputs[1]], _graph_name(call))[0]
    given = op.inputs[0]
    rest = tf.shape(given)[0] - tf.shape(returned)[0]
    padding = tf.concat([[[0, rest]], tf.zeros((tf.rank(given) - 1, 2), tf.int32)], 0)
    result = tf.pad(returned, padding)
    result.set_shape(given.shape)
    return [result] + [None] * (len(op.inputs) - 1)


def _of_reducescatter(call: Call, op: Any, gradients: list[Tensor]) -> list[Tensor]:
    members = _told("size", call.set_id) if call.operation is ReduceOp.SUM else 1
    scale = call.prescale * call.postscale
    gather = Call(Collective.ALLGATHER, call.name, set_id=call.set_id, grouped=call.grouped)
    scaled = [one * tf.cast(scale, one.dtype) * tf.cast(members, one.dtype) for one in gradients]
    return perform(gather, scaled, _graph_name(call))


_GRADIENTS = {
    Collective.ALLREDUCE: _of_allreduce, Collective.ALLGATHER: _of_allgather,
    Collective.BROADCAST: _of_broadcast, Collective.ALLTOALL: _of_alltoall,
    Collective.REDUCESCATTER: _of_reducescatter,
}  # fmt: skip
