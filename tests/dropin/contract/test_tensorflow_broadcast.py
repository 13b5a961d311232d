"""Contract, TensorFlow: broadcast of tensors, variables and objects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_inputs import (
    MOVED,
    ODD,
    RANK,
    SIZE,
    WITH_GRADIENT,
    check_gradients,
    dims_of,
    draw,
    every,
    refused,
    same,
    several,
    value,
)

import horovod.tensorflow as hvd

v1 = tf.compat.v1


def of_rank(rank: int) -> list[Any]:
    return every(MOVED, seed=300 + rank)


def test_every_root(way: Any) -> None:
    for root in range(SIZE):
        inputs = of_rank(RANK)
        got = way(lambda x, root=root: [hvd.broadcast(tensor, root) for tensor in x], inputs)
        for result, tensor, mine, kept in zip(got, of_rank(root), inputs, of_rank(RANK), strict=True):
            same(result, tensor)
            same(mine, kept)


def made(way: Any, rank: int) -> list[Any]:
    with tf.device(way.device):
        return [tf.Variable(tensor) for tensor in of_rank(rank)]


def test_one_variable_in_place(way: Any) -> None:
    for root in range(SIZE):
        for variable, wanted in zip(made(way, RANK)[::4], of_rank(root)[::4], strict=True):
            way(lambda root=root, variable=variable: hvd.broadcast_([variable], root) and None)
            same(variable.read_value(), wanted)


def test_several_variables_in_place(way: Any) -> None:
    for root in range(SIZE):
        variables = made(way, RANK)
        way(lambda root=root, variables=variables: hvd.broadcast_(variables, root) and None)
        for variable, wanted in zip(variables, of_rank(root), strict=True):
            same(variable.read_value(), wanted)


@pytest.mark.parametrize("inplace", [False, True])
def test_broadcast_variables(way: Any, inplace: bool) -> None:
    variables = made(way, RANK)
    way(lambda: hvd.broadcast_variables(variables, SIZE - 1, inplace=inplace))
    for variable, wanted in zip(variables, of_rank(SIZE - 1), strict=True):
        same(variable.read_value(), wanted)


@several
def test_shape_mismatch(way: Any) -> None:
    refused(way, lambda: hvd.broadcast(tf.ones((17, 17 + RANK)), 0, name="cast"), "shape")


@several
def test_type_mismatch(way: Any) -> None:
    dtype = tf.int32 if ODD else tf.float32
    refused(way, lambda: hvd.broadcast(tf.ones(17, dtype), 0, name="cast"), "type")


@several
def test_root_mismatch(way: Any) -> None:
    refused(way, lambda: hvd.broadcast(tf.ones(17), RANK, name="cast"), "root")


def test_gradient(way: Any) -> None:
    """The root gets the mean of all ranks' incoming gradients, and the other ranks get zeros."""
    for root in range(SIZE):
        inputs = [draw(dtype, dims) for dtype in WITH_GRADIENT for dims in dims_of(dtype)]
        want = (SIZE + 1) / 2 if root == RANK else 0.0
        check_gradients(
            way, lambda x, root=root: [hvd.broadcast(item, root) for item in x], inputs, [want] * len(inputs)
        )


def test_global_variables_need_a_graph() -> None:
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)


def test_global_variables_of_a_graph() -> None:
    mine, wanted = [list(map(value, of_rank(rank))) for rank in (RANK, SIZE - 1)]
    with tf.Graph().as_default(), v1.Session() as session:
        variables = [v1.get_variable(f"own.{i}", initializer=entry) for i, entry in enumerate(mine)]
        operation = hvd.broadcast_global_variables(SIZE - 1)
        session.run(v1.global_variables_initializer())
        session.run(operation)
        for got, want in zip(session.run(variables), wanted, strict=True):
            np.testing.assert_array_equal(got, want)


OBJECT: dict[Any, Any] = {"hello": 123, 0: [1, 2], "nested": {"a": (1.5, None)}}


def test_objects() -> None:
    for root in range(SIZE):
        assert hvd.broadcast_object({**OBJECT, "rank": RANK}, root) == {**OBJECT, "rank": root}
    assert hvd.allgather_object({**OBJECT, "rank": RANK}) == [{**OBJECT, "rank": r} for r in range(SIZE)]


def test_object_function() -> None:
    send = hvd.broadcast_object_fn(root_rank=SIZE - 1)
    for step in range(3):
        assert send({**OBJECT, "step": step if RANK == SIZE - 1 else -1}) == {**OBJECT, "step": step}


def test_objects_beside_a_session() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        assert hvd.broadcast_object([RANK], 0, session=session) == [0]
        assert hvd.broadcast_object_fn(0, session=session)([RANK]) == [0]
        assert hvd.allgather_object(RANK, session=session) == list(range(SIZE))
