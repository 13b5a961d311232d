"""allreduce compared with NumPy: every dtype, operation and size, in every way that bytes can move."""

from __future__ import annotations

import not_numbers
import numpy as np
import pytest
from by_numpy import (
    DTYPES,
    FLOATS,
    HALVES,
    INTEGERS,
    OPERATIONS,
    Array,
    adasum,
    all_values,
    allowed,
    dtype_of,
    reduced,
    same,
    values,
)
from sampled import sampled

import ringdance.numpy as hvd
from ringdance.errors import ArgumentError, CollectiveError

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()

EVERY_DAY = ("int64", "bfloat16", "float32")  # each has its own arithmetic; other types change daily
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (3, 5, 7), (1000,), (2, 0, 3), (257, 33)]


def around_the_limits(dtype: str, way: str) -> list[tuple[int, ...]]:
    """Return shapes just below, at and above the small path's limit, and several chunks with a remainder."""
    small, large = (64, 40_000) if "tiny" in way else (16 << 10, 2 << 20)
    at = small // dtype_of(dtype).itemsize
    return [(at - 1,), (at,), (at + 1,), (large // dtype_of(dtype).itemsize + 13,)]


def check(got: Array, want: Array, way: str, operation: str) -> None:
    """Compare bit by bit, except that MPI may add three or more floats in any order."""
    if "messages" in way and SIZE > 2 and want.dtype in (np.float32, np.float64, np.complex64):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-13 if want.dtype == np.float64 else 1e-5, atol=1e-6)
    else:
        same(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_operation_and_shape(way: str, dtype: str) -> None:
    for operation in allowed(dtype):
        for seed, shape in enumerate(SHAPES):
            inputs = all_values(SIZE, dtype, shape, seed)
            before = inputs[RANK].copy()
            got = hvd.allreduce(inputs[RANK], op=OPERATIONS[operation])
            check(got, reduced(inputs, operation), way, operation)
            same(inputs[RANK], before)


def test_complex_numbers_are_pairs_of_floats(way: str) -> None:
    """An infinite part leaves the other part unchanged at any scale. A joined rank adds zeros."""
    array = np.array([complex(np.inf, 1), complex(2, -np.inf), 3 - 4j])
    factors = {"prescale_factor": 0.5, "postscale_factor": 3.0}
    for _ in range(4):  # from the second call on, the request is cached
        same(hvd.allreduce(array, name="complex"), array)
        same(hvd.allreduce(array, name="scaled", **factors), (1.5 * array.view(float)).view(complex))
    inputs = [all_values(SIZE, dtype, (5,), 1) for dtype in ("complex128", "float64", "complex64")]
    for got, row in zip(hvd.allreduce([row[RANK] for row in inputs], **factors), inputs, strict=True):
        np.testing.assert_allclose(got, reduced(row, "average", 0.5, 3.0), rtol=1e-6)
    if RANK:
        same(hvd.allreduce(array, op=hvd.Sum), sum([array] * (SIZE - 1)))
    hvd.join()


@pytest.mark.parametrize("dtype", sampled("limits", DTYPES, 2, EVERY_DAY))
def test_around_the_limits_of_the_small_path_and_of_pieces(way: str, dtype: str) -> None:
    for operation in ("sum", "max") if dtype == "bool" else ("sum", "average"):
        for shape in around_the_limits(dtype, way):
            inputs = all_values(SIZE, dtype, shape)
            check(
                hvd.allreduce(inputs[RANK], op=OPERATIONS[operation]),
                reduced(inputs, operation),
                way,
                operation,
            )


@pytest.mark.parametrize("dtype", sampled("in place", DTYPES, 2, EVERY_DAY))
def test_in_place(way: str, dtype: str) -> None:
    operation = "max" if dtype == "bool" else "average"
    for shape in [(), (0,), (11,), *around_the_limits(dtype, way)]:
        inputs = all_values(SIZE, dtype, shape)
        array = inputs[RANK].copy()
        assert hvd.allreduce(array, op=OPERATIONS[operation], out=array) is array
        check(array, reduced(inputs, operation), way, operation)


def test_asynchronous_in_any_order(way: str) -> None:
    """Each rank submits 40 named tensors in its own order and waits for them in yet another order."""
    names = [f"tensor {i}" for i in range(40)]
    made = np.random.default_rng(RANK)
    handles = {
        name: hvd.allreduce(values(RANK, "float32", (i * 37,), i), name=name, op=hvd.Sum, wait=False)
        for i, name in made.permutation(list(enumerate(names))).tolist()
        for i in [int(i)]
    }
    for name in made.permutation(names).tolist():
        i = names.index(name)
        got = hvd.synchronize(handles[name])
        check(got, reduced(all_values(SIZE, "float32", (i * 37,), i), "sum"), way, "sum")


def test_many_unnamed(way: str) -> None:
    """More unnamed requests than fit in one run, of different shapes, are in flight at once."""
    inputs = [all_values(SIZE, "float64", (i % 5,), i) for i in range(50)]
    handles = [hvd.allreduce(row[RANK], op=hvd.Max, wait=False) for row in inputs]
    for row, handle in zip(inputs, handles, strict=True):
        same(hvd.synchronize(handle), reduced(row, "max"))


def test_asynchronous_in_place(way: str) -> None:
    for shape in ((5,), (300_000,)):
        inputs = all_values(SIZE, "float32", shape)
        array = inputs[RANK].copy()
        handle = hvd.allreduce(array, name="in place", out=array, wait=False)
        result = hvd.synchronize(handle)
        assert result is array
        check(array, reduced(inputs, "average"), way, "average")


def test_group_of_many(way: str) -> None:
    shapes = [(i % 13, 1 + i % 7) for i in range(150)] + [(), (300_000,), (0,)]
    inputs = [all_values(SIZE, "float32", shape, i) for i, shape in enumerate(shapes)]
    for name in (None, "group", "group"):
        results = hvd.allreduce([row[RANK] for row in inputs], name=name, op=hvd.Sum)
        for got, row in zip(results, inputs, strict=True):
            check(got, reduced(row, "sum"), way, "sum")


def test_group_of_mixed_types_in_place_and_asynchronous(way: str) -> None:
    kinds = [dtype for dtype in DTYPES if dtype != "bool"] * 2
    inputs = [all_values(SIZE, dtype, (17 + i, 3), i) for i, dtype in enumerate(kinds)]
    mine = [row[RANK].copy() for row in inputs]
    later = hvd.allreduce([row[RANK] for row in inputs], name="mixed", wait=False)
    hvd.allreduce(mine, out=mine)
    for array, result, row in zip(mine, hvd.synchronize(later), inputs, strict=True):
        check(array, reduced(row, "average"), way, "average")
        same(result, array)


@pytest.mark.parametrize("dtype", sampled("scales", [*INTEGERS, *FLOATS], 2, EVERY_DAY))
def test_scales(way: str, dtype: str) -> None:
    """Powers of two are exact in every float type. Integers are scaled in double precision and truncated."""
    for operation in ("sum", "average", "max"):
        for pre, post in ((2.0, 1.0), (1.0, 0.5), (0.5, 4.0)):
            for shape in ((9,), (5001,)):
                inputs = all_values(SIZE, dtype, shape)
                if dtype in INTEGERS:
                    inputs = [abs(part) for part in inputs]
                got = hvd.allreduce(
                    inputs[RANK], op=OPERATIONS[operation], prescale_factor=pre, postscale_factor=post
                )
                check(got, reduced(inputs, operation, pre, post), way, operation)


@pytest.mark.parametrize("dtype", ["float32", "float64", *HALVES])
def test_scales_that_round(way: str, dtype: str) -> None:
    inputs = all_values(SIZE, dtype, (1000,))
    got = hvd.allreduce(inputs[RANK], op=hvd.Sum, prescale_factor=0.1, postscale_factor=3.3)
    want = sum(part.astype(np.float64) for part in inputs) * 0.33
    digits = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5, "float64": 1e-13}[dtype]
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=digits, atol=digits)


@pytest.mark.parametrize("dtype", HALVES)
def test_scaled_halves_are_rounded_once(way: str, dtype: str) -> None:
    """Scaled halves are rounded once, alone and grouped, whether sent with the vector, small or in chunks."""
    for operation in ("sum", "average", "max"):
        for shape in ((), (9,), (1000,), (50_001,)):
            inputs = all_values(SIZE, dtype, shape)
            want = reduced(inputs, operation, 0.3, 1 / 7)
            scales = {"op": OPERATIONS[operation], "prescale_factor": 0.3, "postscale_factor": 1 / 7}
            for _ in range(2):
                same(hvd.allreduce(inputs[RANK], name=f"{dtype} {operation} {shape}", **scales), want)
            for got in hvd.allreduce([inputs[RANK]] * 2, **scales):
                same(got, want)


def test_integers_wrap_as_in_numpy(way: str) -> None:
    for dtype in INTEGERS:
        top = np.full(5, np.iinfo(dtype).max, dtype)
        same(hvd.allreduce(top, op=hvd.Sum), reduced([top] * SIZE, "sum"))


def test_halves_are_rounded_once(way: str) -> None:
    """Adding two tiny parts to 1 loses neither of them, unlike a sum in 16 bits."""
    for dtype, tiny in (("float16", 2.0**-11), ("bfloat16", 2.0**-8)):
        tensor = np.full(3, 1.0 if RANK == 0 else tiny, dtype_of(dtype))
        got = hvd.allreduce(tensor, op=hvd.Sum)
        same(got, np.full(3, np.float32(1.0 + (SIZE - 1) * tiny)).astype(dtype_of(dtype)))


def test_all_ranks_have_the_same_bits(way: str) -> None:
    for dtype in FLOATS:
        got = hvd.allreduce(values(RANK, dtype, (70_001,)), op=hvd.Average)
        everyone = hvd.allgather_object(got.tobytes())
        assert len(set(everyone)) == 1


@pytest.mark.ranks(1)
def test_one_rank_is_the_identity(way: str) -> None:
    for dtype in DTYPES:
        for operation in allowed(dtype):
            array = values(0, dtype, (7, 3))
            same(hvd.allreduce(array, op=OPERATIONS[operation]), array)
    for dtype in FLOATS:
        same(hvd.allreduce(values(0, dtype, (5,)), op=hvd.Adasum), values(0, dtype, (5,)))


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", FLOATS)
def test_adasum(way: str, dtype: str) -> None:
    for shape in ((), (1,), (40,), (0,), (70_000,)):
        inputs = all_values(SIZE, dtype, shape)
        got = hvd.allreduce(inputs[RANK], op=hvd.Adasum)
        digits = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-4, "float64": 1e-10}[dtype]
        assert got.dtype == dtype_of(dtype)
        np.testing.assert_allclose(got.astype(np.float64), adasum(inputs), rtol=digits, atol=digits)


@pytest.mark.ranks(2, 4)
def test_adasum_takes_each_tensor_of_a_group_by_itself(way: str) -> None:
    inputs = [all_values(SIZE, "float64", (6,), seed) for seed in range(3)]
    results = hvd.allreduce([row[RANK] for row in inputs], op=hvd.Adasum, postscale_factor=2.0)
    for got, row in zip(results, inputs, strict=True):
        np.testing.assert_allclose(got, 2 * adasum(row), rtol=1e-12)


@pytest.mark.ranks(2, 4)
def test_adasum_of_orthogonal_is_the_sum_and_of_equal_the_average(way: str) -> None:
    axis = np.zeros(SIZE)
    axis[RANK] = RANK + 1.0
    same(hvd.allreduce(axis, op=hvd.Adasum), np.arange(1.0, SIZE + 1))
    np.testing.assert_allclose(hvd.allreduce(np.full(5, 3.0), op=hvd.Adasum), np.full(5, 3.0))


@pytest.mark.ranks(3)
def test_adasum_needs_a_power_of_two(way: str) -> None:
    with pytest.raises(ArgumentError, match="power of two"):
        hvd.allreduce(np.ones(3), op=hvd.Adasum)
    same(hvd.allreduce(np.ones(3), op=hvd.Sum), np.full(3, float(SIZE)))


def test_types_and_operations_that_do_not_go(way: str) -> None:
    with pytest.raises(CollectiveError, match="cannot be averaged"):
        hvd.allreduce(np.ones(2, bool))
    with pytest.raises(CollectiveError, match="floating"):
        hvd.allreduce(np.ones(2, np.int32), op=hvd.Adasum)
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        with pytest.raises(CollectiveError, match=r"Complex tensors .* Sum and Average, not by"):
            hvd.allreduce([np.ones(2), np.ones(2, complex)], op=op)
    with pytest.raises(ArgumentError, match="complex256"):
        hvd.allgather(np.ones(2, np.clongdouble))
    with pytest.raises(ArgumentError, match="op=17"):
        hvd.allreduce(np.ones(2), op=17)
    with pytest.raises(ArgumentError, match="contiguous"):
        hvd.allreduce(np.ones((4, 4))[:, ::2], out=np.ones((4, 4))[:, ::2])


def test_arrays_that_are_not_contiguous_are_copied(way: str) -> None:
    inputs = all_values(SIZE, "int32", (6, 8))
    same(hvd.allreduce(inputs[RANK][:, ::2], op=hvd.Sum), reduced(inputs, "sum")[:, ::2])
    same(hvd.allreduce(inputs[RANK].T, op=hvd.Sum), reduced(inputs, "sum").T)


def test_not_a_number_and_infinities(way: str) -> None:
    for dtype, operation, culprit, inputs in not_numbers.cases(SIZE, (1, 1000, 5000, 300_000)):
        got = hvd.allreduce(inputs[RANK], op=OPERATIONS[operation])
        case = f"{operation} of {inputs[0].size} {dtype}, NaN on rank {culprit}"
        not_numbers.check(got, inputs, operation, case)
