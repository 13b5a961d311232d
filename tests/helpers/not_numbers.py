"""Inputs with NaN and infinities for the tests of reductions, and the expected results."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from by_numpy import FLOATS, OPERATIONS, Array, dtype_of, reduced

OPS = {name: OPERATIONS[name] for name in ("max", "min", "sum")}


def special(rank: int, size: int, dtype: str, length: int, culprit: int) -> Array:
    """Return small integers, exact in every sum, with NaN and infinities on `culprit` and its neighbor."""
    made = (np.arange(length) % 5 + rank % 3).astype(dtype_of(dtype))
    if rank == culprit:
        made[[0, length // 2, length - 1]] = np.nan
        made[1 : length - 1 : 7] = np.inf
        made[2 : length - 1 : 7] = -np.inf
    elif rank == (culprit + 1) % size:
        made[1 : length - 1 : 14] = -np.inf  # meets +inf, so the sum is NaN
    return made


def cases(size: int, lengths: tuple[int, ...]) -> Iterator[tuple[str, str, int, list[Array]]]:
    """Yield (dtype, operation, rank with the NaN, all ranks' inputs)."""
    for dtype in FLOATS:
        for length in lengths:
            for culprit in range(size) if length < 5000 else (size - 1,):
                inputs = [special(rank, size, dtype, length, culprit) for rank in range(size)]
                for operation in OPS:
                    yield dtype, operation, culprit, inputs


def check(got: Array, inputs: list[Array], operation: str, case: str) -> None:
    with np.errstate(invalid="ignore"):
        want = reduced(inputs, operation)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64), err_msg=case)
