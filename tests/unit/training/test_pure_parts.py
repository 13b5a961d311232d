"""Parts that need no ranks: groups, scales, handles and descriptions."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ringdance.core.request import Collective, ReduceOp
from ringdance.errors import ArgumentError
from ringdance.host.limits import usable_cores
from ringdance.training import checks, handles
from ringdance.training.gradients.options import check_groups, scales_of, share_of_cores


def test_groups_by_number_are_nearly_equal_and_in_order() -> None:
    assert check_groups(2, [0, 1, 3, 4, 5], lambda one: None) == [(0, 1, 3), (4, 5)]
    assert check_groups(9, [0, 1], lambda one: None) == [(0,), (1,)]
    assert check_groups(None, [0], lambda one: None) == []


def test_groups_by_lists() -> None:
    places = {"a": 0, "b": 1, "c": 2}
    assert check_groups([["c", "x", "a"], []], [0, 1, 2], places.get) == [(2, 0)]
    for wrong in ([["a", "a"]], [["a"], ["a"]], "ab", -1, 1.5):
        with pytest.raises(ArgumentError):
            check_groups(wrong, [0, 1, 2], places.get)


def test_predivide_cancels_out() -> None:
    assert scales_of(ReduceOp.AVERAGE, 4.0) == (0.25, 4.0)
    assert scales_of(ReduceOp.SUM, 1.0) == (1.0, 1.0)
    with pytest.raises(ArgumentError, match="Average"):
        scales_of(ReduceOp.SUM, 2.0)


def test_the_users_number_of_threads_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5,2")
    assert share_of_cores() == 5
    for value in ("", "none", "0"):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert share_of_cores() == usable_cores()


def test_descriptions_are_made_once_and_leave_out_what_may_differ() -> None:
    dtypes = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
    made = checks.describe(Collective.ALLGATHER, dtypes, ((2, 3), (4,)))
    assert made is checks.describe(Collective.ALLGATHER, dtypes, ((2, 3), (4,)))
    assert made.dtypes == ("float32", "bfloat16")
    assert made.shapes == ((3,), ())
    assert checks.describe(Collective.ALLREDUCE, dtypes, ((2, 3), (4,))).shapes == ((2, 3), (4,))
    assert checks.describe(Collective.ALLTOALL, dtypes[:1], ((),)).detail == (-1,)
    numbers = (np.dtype(np.complex64),)
    assert checks.describe(Collective.ALLREDUCE, numbers, ((2,),)).dtypes == ("complex64",)
    for op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT, ReduceOp.ADASUM):
        with pytest.raises(checks.UnsupportedOperationError, match=f"not by {op.name.title()}"):
            checks.describe(Collective.ALLREDUCE, numbers, ((2,),), op)


def test_unknown_handles() -> None:
    for wrong in (10**9, None, "0", []):
        for function in (handles.synchronize, handles.poll):
            with pytest.raises(ArgumentError, match="not a handle"):
                function(wrong)
