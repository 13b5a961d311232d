"""Every collective on TensorFlow tensors, eagerly and in functions: values by NumPy, gradients, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from by_numpy import OPERATIONS, all_values, dtype_of, reduced, rows_of, same, values
from other_settings import other_settings

import ringdance.tensorflow as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
several = pytest.mark.ranks(2, 3, 4)

DTYPES = [
    "uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
]  # fmt: skip
SHAPES = [(), (0,), (5,), (3, 4, 2)]
ROWS = [17, 32, 81, 12]


def in_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function as a tf.function."""
    return tf.function(function, autograph=True)


def at_once(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


both = pytest.mark.parametrize("way", [at_once, in_graph])


def array(tensor: Any) -> Any:
    return np.asarray(tensor.numpy())


def mine(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Any:
    return tf.constant(values(RANK, dtype, shape, seed))


def test_place_and_the_operations_that_tell_it() -> None:
    wanted = [SIZE, hvd.local_size(), RANK, hvd.local_rank(), 1]

    def told() -> list[Any]:
        return [
            hvd.size_op(), hvd.local_size_op(), hvd.rank_op(), hvd.local_rank_op(name="x"),
            hvd.process_set_included_op(),
        ]

    for way in (at_once, in_graph):
        numbers = way(told)()
        assert [int(number) for number in numbers] == wanted
        assert all(number.dtype == tf.int32 for number in numbers)


@both
@pytest.mark.parametrize("dtype", DTYPES)
def test_allreduce(way: Any, dtype: str) -> None:
    for shape in SHAPES:
        for name, op in OPERATIONS.items():
            tensor = mine(dtype, shape)
            result = way(lambda x, op=op: hvd.allreduce(x, op=op))(tensor)
            assert result.dtype == tensor.dtype
            same(array(result), reduced(all_values(SIZE, dtype, shape), name))
            same(array(tensor), values(RANK, dtype, shape))


@both
def test_allreduce_of_booleans(way: Any) -> None:
    tensor = tf.constant([RANK == 0, True, False])
    assert way(lambda x: hvd.allreduce(x, op=hvd.Max))(tensor).numpy().tolist() == [True, True, False]
    assert way(lambda x: hvd.allreduce(x, op=hvd.Min))(tensor).numpy().tolist() == [SIZE == 1, True, False]


@both
def test_allreduce_of_what_is_no_tensor_yet(way: Any) -> None:
    assert way(lambda: hvd.allreduce([1.0, 2.0], op=hvd.Sum))().numpy().tolist() == [SIZE, 2 * SIZE]
    variable = tf.Variable([1.0, 2.0])
    assert way(lambda: hvd.allreduce(variable))().numpy().tolist() == [1.0, 2.0]
    assert variable.numpy().tolist() == [1.0, 2.0]


def test_average_and_op_arguments() -> None:
    ones = tf.ones(2)
    with pytest.warns(DeprecationWarning, match="average= is deprecated"):
        assert hvd.allreduce(ones, average=False).numpy().tolist() == [SIZE, SIZE]
    with pytest.warns(DeprecationWarning, match="average= is deprecated"):
        assert hvd.allreduce(ones, average=True).numpy().tolist() == [1, 1]
    for kind in (hvd.allreduce, lambda x, **how: hvd.grouped_allreduce([x], **how)):
        with pytest.raises(ValueError, match="not both"):
            kind(ones, average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match="is not one of"):
        hvd.allreduce(ones, op=17)


@both
@pytest.mark.parametrize("dtype", ["int32", "float16", "float32", "float64"])
def test_prescale_and_postscale(way: Any, dtype: str) -> None:
    for op in ("sum", "average"):
        result = way(
            lambda x, op=op: hvd.allreduce(x, op=OPERATIONS[op], prescale_factor=2.5, postscale_factor=0.5)
        )(mine(dtype, (6,)))
        wanted = reduced(all_values(SIZE, dtype, (6,)), op, 2.5, 0.5)
        np.testing.assert_allclose(array(result), wanted, rtol=1e-3 if dtype == "float16" else 1e-6)


@both
def test_many_in_one_function(way: Any) -> None:
    def many(tensors: list[Any]) -> list[Any]:
        return [hvd.allreduce(tensor, op=hvd.Sum) for tensor in tensors]

    inputs = [mine("float32", (i, 3), seed=i) for i in range(20)]
    for i, result in enumerate(way(many)(inputs)):
        same(array(result), reduced(all_values(SIZE, "float32", (i, 3), seed=i), "sum"))


@both
@pytest.mark.parametrize("compression", [hvd.Compression.fp16, hvd.Compression.bf16])
def test_compression(way: Any, compression: Any) -> None:
    inputs = tf.constant([1.5, -2.0]) * (RANK + 1)
    whole = tf.constant([RANK + 1])
    floats, integers = way(
        lambda x, y: (hvd.allreduce(x, op=hvd.Sum, compression=compression),
                      hvd.allreduce(y, op=hvd.Sum, compression=compression))
    )(inputs, whole)
    total = SIZE * (SIZE + 1) // 2
    assert floats.dtype == tf.float32
    assert floats.numpy().tolist() == [1.5 * total, -2.0 * total]
    assert integers.numpy().tolist() == [total]


@both
def test_indexed_slices(way: Any) -> None:
    def call(values_: Any, indices: Any, op: int) -> Any:
        tensor = tf.IndexedSlices(values_, indices, dense_shape=tf.constant([9, 2]))
        result = hvd.allreduce(tensor, op=op)
        assert isinstance(result, tf.IndexedSlices)
        return result.values, result.indices, result.dense_shape

    rows = RANK + 1
    for op, divisor in ((hvd.Sum, 1), (hvd.Average, SIZE)):
        got = way(lambda v, i, op=op: call(v, i, op))(
            tf.ones((rows, 2)) * rows, tf.range(rows, dtype=tf.int64)
        )
        wanted = [[sum(range(row + 1, SIZE + 1)) / divisor] * 2 for row in range(SIZE)]
        np.testing.assert_allclose(got[0].numpy(), wanted, rtol=1e-6)
        assert got[1].numpy().tolist() == list(range(SIZE))
        assert got[2].numpy().tolist() == [9, 2]


def test_indexed_slices_refuse() -> None:
    tensor = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]), dense_shape=tf.constant([9, 2]))
    for op in (hvd.Adasum, hvd.Min, hvd.Max, hvd.Product):
        with pytest.raises(NotImplementedError):
            hvd.allreduce(tensor, op=op)
        with pytest.raises(NotImplementedError):
            hvd.grouped_allreduce([tf.ones(2), tensor], op=op)
    for scale in ({"prescale_factor": 2.0}, {"postscale_factor": 2.0}):
        with pytest.raises(NotImplementedError):
            hvd.allreduce(tensor, op=hvd.Sum, **scale)


@both
def test_grouped_allreduce(way: Any) -> None:
    def call(dense: list[Any], rows: Any) -> Any:
        sparse = tf.IndexedSlices(rows, tf.constant([RANK]), dense_shape=tf.constant([SIZE, 2]))
        first, gathered, *others = hvd.grouped_allreduce([dense[0], sparse, *dense[1:]], op=hvd.Sum)
        return [first, *others], tf.convert_to_tensor(gathered)

    kinds = [("float32", (4,)), ("int64", (2, 2)), ("float64", ())]
    dense, sparse = way(call)([mine(*kind) for kind in kinds], tf.fill((1, 2), RANK + 1.0))
    for result, (dtype, shape) in zip(dense, kinds, strict=True):
        same(array(result), reduced(all_values(SIZE, dtype, shape), "sum"))
    assert sparse.numpy().tolist() == [[n + 1.0] * 2 for n in range(SIZE)]
    with pytest.raises(ValueError, match="at least one"):
        hvd.grouped_allreduce([])


@both
@pytest.mark.parametrize("dtype", [*DTYPES, "bool"])
def test_allgather(way: Any, dtype: str) -> None:
    for rows in ([3] * SIZE, ROWS[:SIZE], [0] * SIZE, [2 * (r % 2) for r in range(SIZE)]):
        tensor = mine(dtype, (rows[RANK], 3))
        result = way(lambda x: hvd.allgather(x))(tensor)
        same(array(result), np.concatenate([values(r, dtype, (rows[r], 3)) for r in range(SIZE)]))
    first, two = way(lambda x, y: hvd.grouped_allgather([x, y]))(
        mine(dtype, (ROWS[RANK], 2)), mine("int32", (RANK,))
    )
    same(array(first), np.concatenate([values(r, dtype, (ROWS[r], 2)) for r in range(SIZE)]))
    same(array(two), np.concatenate([values(r, "int32", (r,)) for r in range(SIZE)]))


@both
@pytest.mark.parametrize("dtype", [*DTYPES, "bool"])
def test_broadcast(way: Any, dtype: str) -> None:
    for root in range(SIZE):
        for shape in SHAPES:
            result = way(lambda x, root=root: hvd.broadcast(x, root))(mine(dtype, shape))
            same(array(result), values(root, dtype, shape))


@both
@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "bfloat16"])
def test_broadcast_in_place(way: Any, dtype: str) -> None:
    variable = tf.Variable(mine(dtype, (3, 2)))
    two = tf.Variable(mine("int32", ()))
    for root in range(SIZE):
        variable.assign(mine(dtype, (3, 2)))
        two.assign(mine("int32", ()))
        way(lambda root=root: hvd.broadcast_([variable, two], root) and 0)()
        same(array(variable), values(root, dtype, (3, 2)))
        same(array(two), values(root, "int32", ()))


@both
@pytest.mark.parametrize("dtype", [*DTYPES, "bool"])
def test_alltoall(way: Any, dtype: str) -> None:
    def given(rank: int) -> Any:
        return np.concatenate([values(rank, dtype, (rank + 1, 2), seed=to) for to in range(SIZE)])

    wanted = np.concatenate([values(r, dtype, (r + 1, 2), seed=RANK) for r in range(SIZE)])
    for splits in ([RANK + 1] * SIZE, tf.constant([RANK + 1] * SIZE, tf.int32)):
        result, received = way(lambda x, splits=splits: hvd.alltoall(x, splits))(tf.constant(given(RANK)))
        same(array(result), wanted)
        assert received.dtype == tf.int32
        assert received.numpy().tolist() == [r + 1 for r in range(SIZE)]
    equal = way(lambda x: hvd.alltoall(x))(tf.constant(np.full((2 * SIZE, 2), RANK).astype(dtype_of(dtype))))
    same(array(equal), np.repeat(np.arange(SIZE), 2)[:, None].repeat(2, 1).astype(dtype_of(dtype)))


@both
def test_alltoall_of_little_or_nothing(way: Any) -> None:
    def exchange(x: Any, splits: Any) -> Any:
        return hvd.alltoall(x, splits)

    call = way(exchange)
    result, received = call(tf.zeros((0, 3)), tf.zeros(SIZE, tf.int32))
    assert (result.shape, received.numpy().tolist()) == ((0, 3), [0] * SIZE)
    # Rank 0 sends nothing, then receives nothing. Rows that are not in the splits stay.
    sent = 0 if RANK == 0 else 1
    result, received = call(tf.ones((sent * SIZE + 1, 3)), tf.fill([SIZE], sent))
    assert received.numpy().tolist() == [0] + [1] * (SIZE - 1)
    assert result.shape == (SIZE - 1, 3)
    splits = tf.constant([0] + [1] * (SIZE - 1), tf.int32)
    result, received = call(tf.ones((SIZE, 3)), splits)
    assert received.numpy().tolist() == ([0] * SIZE if RANK == 0 else [1] * SIZE)


@both
@pytest.mark.parametrize("dtype", ["int32", "int64", "float16", "bfloat16", "float32", "float64"])
def test_reducescatter(way: Any, dtype: str) -> None:
    for rows in (SIZE, 2 * SIZE + 1, 1):
        shape = (rows, 2)
        for op in ("sum", "average"):
            result = way(lambda x, op=op: hvd.reducescatter(x, op=OPERATIONS[op]))(mine(dtype, shape))
            whole = reduced(all_values(SIZE, dtype, shape), op)
            same(array(result), whole[rows_of(RANK, rows, SIZE)])
            first, two = way(lambda x, op=op: hvd.grouped_reducescatter([x, x], op=OPERATIONS[op]))(
                mine(dtype, shape)
            )
            same(array(first), array(result))
            same(array(two), array(result))
    scaled = way(lambda x: hvd.reducescatter(x, op=hvd.Sum, prescale_factor=3.0, postscale_factor=2.0))(
        tf.ones((SIZE, 2), dtype)
    )
    assert array(scaled).astype(float).tolist() == [[6.0 * SIZE] * 2]


@both
def test_names(way: Any) -> None:
    """An explicit name works, and name scopes may differ between ranks if they are ignored."""

    def call(x: Any) -> Any:
        with tf.name_scope(f"scope{RANK}"):
            tensor = hvd.allreduce(x, op=hvd.Sum, name="named.here", ignore_name_scope=True)
            two = hvd.broadcast(x, 0, name="again", ignore_name_scope=True)
            three = hvd.allgather(x, name="rows", ignore_name_scope=True)
            four, _ = hvd.alltoall(x, [1] * SIZE, name="rows", ignore_name_scope=True)
        return tensor, two, three, four

    for _ in range(2):
        first, two, three, four = way(call)(tf.fill((SIZE,), RANK + 1.0))
        assert first.numpy().tolist() == [SIZE * (SIZE + 1) / 2] * SIZE
        assert two.numpy().tolist() == [1.0] * SIZE
        assert three.shape == (SIZE * SIZE,)
        assert four.numpy().tolist() == [r + 1.0 for r in range(SIZE)]


def test_results_do_not_share_the_inputs_memory() -> None:
    tensor = tf.ones(4)
    for result in (
        hvd.allreduce(tensor), hvd.allgather(tensor), hvd.broadcast(tensor, 0), hvd.reducescatter(tensor),
        hvd.alltoall(tf.repeat(tensor, SIZE)),
    ):
        result._numpy()[...] = 7.0
        assert tensor.numpy().tolist() == [1.0] * 4


@several
def test_join() -> None:
    """The rank that joins first contributes zeros, and averages divide by all ranks."""
    for first in range(SIZE):
        if first != RANK:
            for _ in range(3):
                assert hvd.allreduce(tf.ones(3), name="joined").numpy()[0] == pytest.approx((SIZE - 1) / SIZE)
            if first < RANK:
                total = hvd.allreduce(tf.ones(2), op=hvd.Sum, name=f"joined.{first}") if SIZE == 2 else None
                assert total is None or total.numpy().tolist() == [1.0, 1.0]
            elif SIZE == 2:
                hvd.allreduce(tf.ones(2), op=hvd.Sum, name=f"joined.{first}")
        last = hvd.join()
        assert last.dtype == tf.int32
        gathered = hvd.allgather(tf.reshape(last, [1])).numpy().tolist()
        assert len(set(gathered)) == 1
        assert gathered[0] != first


@several
def test_tensors_from_outside_of_a_graph_match_whatever_else_a_rank_has_made() -> None:
    for _ in range(RANK):
        tf.constant(0.0) + 1
    first, two = tf.constant([1.0]), tf.constant([2.0])
    both = tf.function(lambda: (hvd.allreduce(first, op=hvd.Sum), hvd.allreduce(two, op=hvd.Sum)))
    assert [total.numpy().tolist() for total in both()] == [[SIZE], [2 * SIZE]]


@several
@both
def test_complex_numbers(way: Callable[..., Any]) -> None:
    for dtype in ("complex64", "complex128")[: 1 + (way is at_once)]:
        x, every = mine(dtype, (5, 2)), all_values(SIZE, dtype, (5, 2))
        total, own = sum(every), rows_of(RANK, 5, SIZE)

        def near(function: Callable[[], Any], want: Any) -> None:
            np.testing.assert_allclose(array(way(function)()), want, rtol=1e-5)

        near(lambda x=x: hvd.allreduce(x, name="reduced"), total / SIZE)
        near(lambda x=x: hvd.grouped_allreduce([x, tf.ones(3)], op=hvd.Sum, name="group")[0], total)
        near(lambda x=x: hvd.allgather(x, name="gathered"), np.concatenate(every))
        near(lambda x=x: hvd.broadcast(x, 1, name="broadcast"), every[1])
        near(lambda x=x: hvd.reducescatter(x, op=hvd.Sum, name="scattered"), total[own])
        parts = np.concatenate([value[RANK : RANK + 1] for value in every])
        near(lambda x=x: hvd.alltoall(x, [1] * SIZE, name="exchanged")[0], parts)
        for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
            with pytest.raises((NotImplementedError, tf.errors.OpError), match="by Sum and Average, not by"):
                way(lambda x=x, op=op: hvd.allreduce(x, op=op, name="refused"))()
        weight = tf.Variable(values(RANK, dtype, (5, 2), 7))
        hvd.broadcast_variables([weight], 0)
        same(array(weight), values(0, dtype, (5, 2), 7))

        def gradient(x: Any = x, weight: Any = weight) -> Any:
            with hvd.DistributedGradientTape(tf.GradientTape(), compression=hvd.Compression.fp16) as tape:
                loss = tf.reduce_sum(tf.math.real(tf.math.conj(weight) * x))
            return tape.gradient(loss, weight)

        def rows(weight: Any = weight) -> Any:
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = tf.reduce_sum(tf.math.real(tf.gather(weight, [RANK, 4])))
            return tf.convert_to_tensor(tape.gradient(loss, weight))

        def through(x: Any = x) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(tf.abs(hvd.allreduce(x, op=hvd.Sum, name="through")) ** 2)
            return tape.gradient(loss, x)

        near(gradient, total / SIZE)
        near(rows, np.bincount([*range(SIZE), *[4] * SIZE], minlength=5)[:, None] * np.ones((1, 2)) / SIZE)
        near(through, 2 * SIZE * total)


@several
def test_complex_weights_that_differ_are_seen() -> None:
    with other_settings({"RINGDANCE_CHECK_WEIGHTS": "error"}):
        weight = tf.Variable(tf.complex(1.0, float(RANK)))  # only the imaginary parts differ

        def train() -> None:
            for _ in range(12):
                with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                    loss = tf.abs(weight)
                tape.gradient(loss, weight)

        with pytest.raises(tf.errors.OpError, match="models differ"):
            train()
