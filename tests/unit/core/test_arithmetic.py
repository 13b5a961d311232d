"""Rounding rules, each compared with exact arithmetic."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from by_numpy import (
    FLOATS,
    HALVES,
    INTEGERS,
    OPERATIONS,
    all_values,
    any_integers,
    dtype_of,
    integer_average,
    reduced,
    same,
)
from sampled import sampled

from ringdance.core.exchange.arithmetic import dtype_named, reduction
from ringdance.core.request import ReduceOp


def run(parts: list[np.ndarray], operation: ReduceOp, pre: float = 1.0, post: float = 1.0) -> np.ndarray:
    """Reduce as an exchange does: each rank prepares its part, one combines, and all deliver."""
    how = reduction(str(parts[0].dtype.name), operation, pre, post, len(parts))
    prepared = []
    for part in parts:
        scaled = np.empty_like(part)
        how.prepare(part, scaled)
        prepared.append(scaled)
    total, out = np.empty_like(parts[0]), np.empty_like(parts[0])
    how.combine(prepared, total)
    how.deliver(total, out)
    return out


def test_names_of_types() -> None:
    assert dtype_named("bfloat16") == dtype_of("bfloat16")
    assert dtype_named("float32") == np.float32


@pytest.mark.parametrize("size", [1, 2, 3, 7, 49, 98, 103, 107, 161, 187, 197])
@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "int16"])
def test_averages_of_integers_are_exact(size: int, dtype: str) -> None:
    """Averages truncate toward zero. Multiplying by 1/49, for example, makes some results too small."""
    limit = np.iinfo(dtype)
    wanted = np.arange(-40 if limit.min else 0, 41)
    sums = [int(n) * size + extra for n in wanted for extra in (0, 1, size - 1)]
    sums = [n for n in sums if limit.min <= n <= limit.max]
    parts = [np.array(sums, dtype)] + [np.zeros(len(sums), dtype)] * (size - 1)
    want = [int(Fraction(n, size)) for n in sums]  # int() truncates toward zero
    assert run(parts, ReduceOp.AVERAGE).tolist() == want


SUMS = list(product(INTEGERS, [2, 3, 5, 8, 100, 127, 128, 129, 1000]))


@pytest.mark.parametrize("case", sampled("sums that do not fit", SUMS, 24), ids=str)
def test_averages_whose_sums_do_not_fit(case: tuple[str, int]) -> None:
    dtype, size = case
    parts = [any_integers(rank, dtype, (200,)) for rank in range(size)]
    same(run(parts, ReduceOp.AVERAGE), integer_average(parts))
    for end in (np.iinfo(dtype).min, np.iinfo(dtype).max):
        ends = [np.full((), end, dtype)] * size
        same(run(ends, ReduceOp.AVERAGE), ends[0])
        if dtype not in ("int64", "uint64"):  # computed in double precision
            same(run(ends, ReduceOp.AVERAGE, post=0.5), np.trunc(ends[0] * 0.5).astype(dtype))


def test_averages_of_large_integers_do_not_pass_through_double() -> None:
    big = (1 << 62) + 3
    assert run([np.array([big])] + [np.array([0])] * 2, ReduceOp.AVERAGE).tolist() == [big // 3]
    assert run([np.array([-big])] + [np.array([0])] * 2, ReduceOp.AVERAGE).tolist() == [-(big // 3)]


def test_other_scales_of_integers_are_cut_off() -> None:
    parts = [np.array([7, -7, 3, 0], np.int32)] * 2
    assert run(parts, ReduceOp.SUM, post=0.25).tolist() == [3, -3, 1, 0]
    assert run(parts, ReduceOp.SUM, pre=0.5).tolist() == [6, -6, 2, 0]
    assert run(parts, ReduceOp.AVERAGE, post=0.5).tolist() == [3, -3, 1, 0]


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_like_numpy_in_rank_order(dtype: str, size: int) -> None:
    parts = all_values(size, dtype, (1000,))
    for name, number in OPERATIONS.items():
        if dtype in INTEGERS and name == "product" and size == 8:
            continue  # the product wraps around, and NumPy uses 64 bits for some types
        same(run(parts, ReduceOp(number)), reduced(parts, name))
        if dtype in FLOATS:
            same(run(parts, ReduceOp(number), 2.0, 0.25), reduced(parts, name, 2.0, 0.25))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_summed_in_float32(dtype: str) -> None:
    """Sums in 16 bits would stop growing at 2048 ones (float16) or much earlier (bfloat16)."""
    ones = [np.ones(3, dtype_of(dtype))] * 3000
    assert (
        run(ones, ReduceOp.SUM).astype(np.float64).tolist()
        == [float(np.float32(3000).astype(dtype_of(dtype)))] * 3
    )
    assert run(ones, ReduceOp.AVERAGE).astype(np.float64).tolist() == [1.0] * 3
    largest = [np.full(2, np.finfo(np.float16).max if dtype == "float16" else 3e38, dtype_of(dtype))] * 2
    if dtype == "float16":  # the sum overflows 16 bits, but half of it does not
        same(run(largest, ReduceOp.AVERAGE), largest[0])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_halves_are_rounded_once_whatever_the_prescale(dtype: str, size: int) -> None:
    parts = all_values(size, dtype, (4000,))
    for name, number in OPERATIONS.items():
        for pre, post in ((1 / 3, 1.0), (0.1, 3.3), (7.0, 1 / 7)):
            same(run(parts, ReduceOp(number), pre, post), reduced(parts, name, pre, post))
            how, alone = reduction(dtype, ReduceOp(number), pre, post, 1), np.empty_like(parts[0])
            how.alone(parts[0], alone)
            same(alone, reduced(parts[:1], name, pre, post))


@pytest.mark.parametrize("size", [2, 3, 5, 6, 7, 64])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_averages_of_floats_are_the_sum_divided(size: int, dtype: str) -> None:
    parts = all_values(size, dtype, (4000,))
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    same(run(parts, ReduceOp.AVERAGE), total / total.dtype.type(size))


def test_booleans() -> None:
    parts = [np.array([False, True, False]), np.array([False, False, True])]
    assert run(parts, ReduceOp.SUM).tolist() == [False, True, True]
    assert run(parts, ReduceOp.MIN).tolist() == [False, False, False]


def test_not_numbers_and_infinities_pass() -> None:
    for dtype in FLOATS:
        parts = [
            np.array([np.nan, np.inf, 1.0], dtype_of(dtype)),
            np.array([1.0, 1.0, -np.inf], dtype_of(dtype)),
        ]
        for operation in (ReduceOp.SUM, ReduceOp.AVERAGE):
            got = run(parts, operation).astype(np.float64)
            assert np.isnan(got[0])
            assert got[1:].tolist() == [np.inf, -np.inf]


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS])
def test_of_one_rank(dtype: str) -> None:
    (values,) = all_values(1, dtype, (5, 3))
    for operation in ReduceOp:
        how = reduction(dtype, operation, 1.0, 1.0, 1)
        out = np.empty_like(values)
        how.alone(values, out)
        same(out, values)
    how = reduction(dtype, ReduceOp.AVERAGE, 2.0, 3.0, 1)
    array = values.copy()
    how.alone(array, array)
    same(array, reduced([values], "average", 2.0, 3.0))


def test_infinities_are_results_and_no_warnings() -> None:
    """Infinities must not warn, because a program may turn warnings into errors and break the engine."""
    program = (
        "import numpy as np\n"
        "from ringdance.core.exchange.arithmetic import reduction\n"
        "from ringdance.core.request import ReduceOp\n"
        "for dtype in ('float16', 'float32'):\n"
        "    parts = [np.array([6e4, sign * np.inf, np.nan, 1], dtype) for sign in (1, -1)]\n"
        "    out = np.empty_like(parts[0])\n"
        "    reduction(dtype, ReduceOp.SUM, 1.0, 1.0, 2).combine(parts, out)\n"
        "    print(out.tolist())\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[inf, nan, nan, 2.0]", "[120000.0, nan, nan, 2.0]"], done.stderr
