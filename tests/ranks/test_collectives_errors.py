"""Wrong calls: all ranks raise, with names and values, no rank waits forever, and the name works again."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from by_numpy import same

import ringdance.numpy as hvd
from ringdance.errors import (
    ArgumentError,
    CollectiveError,
    DuplicateNameError,
    MismatchError,
    NotInitializedError,
    ShutDownError,
)
from ringdance.training import session

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
HOST = socket.gethostname()
LAST = SIZE - 1
several = pytest.mark.ranks(2, 3, 4)
ODD = RANK == LAST  # this rank calls differently


def reduce(shape: Any = 4, dtype: Any = np.float32, **others: Any) -> Any:
    return hvd.allreduce(np.ones(shape, dtype), name="mismatched", **others)


# The last rank's call, the other ranks' call, and what the message says about each.
MISMATCHES: dict[str, tuple[Callable[[], Any], Callable[[], Any], str, str]] = {
    "dtype": (lambda: reduce(dtype=np.int32), reduce, "int32", "float32"),
    "bfloat16": (lambda: reduce(dtype="float16"), lambda: reduce(dtype="bfloat16"), "float16", "bfloat16"),
    "shape": (lambda: reduce((2, 3)), lambda: reduce((3, 2)), "(2, 3)", "(3, 2)"),
    "dimensions": (lambda: reduce((4, 1)), reduce, "(4, 1)", "(4,)"),
    "prescale": (lambda: reduce(prescale_factor=2.0), reduce, "2.0", "1.0"),
    "postscale": (lambda: reduce(postscale_factor=0.5), reduce, "0.5", "1.0"),
    "operation": (lambda: reduce(op=hvd.Max), lambda: reduce(op=hvd.Min), "Max", "Min"),
    "root": (
        lambda: hvd.broadcast(np.ones(3), LAST, name="mismatched"),
        lambda: hvd.broadcast(np.ones(3), 0, name="mismatched"),
        f"{LAST}",
        "0",
    ),
    "broadcast shape": (
        lambda: hvd.broadcast(np.ones(3), 0, name="mismatched"),
        lambda: hvd.broadcast(np.ones(4), 0, name="mismatched"),
        "(3,)",
        "(4,)",
    ),
    "gathered rest": (
        lambda: hvd.allgather(np.ones((2, 3)), name="mismatched"),
        lambda: hvd.allgather(np.ones((2, 4)), name="mismatched"),
        "(*, 3)",
        "(*, 4)",
    ),
    "gathered dimensions": (
        lambda: hvd.allgather(np.ones((2, 3, 1)), name="mismatched"),
        lambda: hvd.allgather(np.ones((2, 3)), name="mismatched"),
        "(*, 3, 1)",
        "(*, 3)",
    ),
    "alltoall rest": (
        lambda: hvd.alltoall(np.ones((SIZE, 3)), name="mismatched"),
        lambda: hvd.alltoall(np.ones((SIZE, 4)), name="mismatched"),
        "(*, 3)",
        "(*, 4)",
    ),
    "reducescatter rows": (
        lambda: hvd.reducescatter(np.ones((5, 3)), name="mismatched"),
        lambda: hvd.reducescatter(np.ones((6, 3)), name="mismatched"),
        "(5, 3)",
        "(6, 3)",
    ),
    "members of a group": (
        lambda: hvd.allreduce([np.ones(2)] * 3, name="mismatched"),
        lambda: hvd.allreduce([np.ones(2)] * 2, name="mismatched"),
        "3",
        "2",
    ),
    "shape in a group": (
        lambda: hvd.allreduce([np.ones(2), np.ones(5)], name="mismatched"),
        lambda: hvd.allreduce([np.ones(2), np.ones(6)], name="mismatched"),
        "(2,), (5,)]",
        "(2,), (6,)]",
    ),
}
NORMAL: dict[str, Callable[[], Any]] = {
    "root": lambda: hvd.broadcast(np.ones(3), 0, name="mismatched"),
    "broadcast shape": lambda: hvd.broadcast(np.ones(3), 0, name="mismatched"),
    "gathered rest": lambda: hvd.allgather(np.ones((RANK, 2)), name="mismatched"),
    "gathered dimensions": lambda: hvd.allgather(np.ones((RANK, 2)), name="mismatched"),
    "alltoall rest": lambda: hvd.alltoall(np.ones((SIZE, 3)), name="mismatched"),
    "reducescatter rows": lambda: hvd.reducescatter(np.ones((6, 3)), name="mismatched"),
    "members of a group": lambda: hvd.allreduce([np.ones(2)] * 3, name="mismatched"),
    "shape in a group": lambda: hvd.allreduce([np.ones(2)] * 3, name="mismatched"),
}


@several
@pytest.mark.parametrize("what", MISMATCHES)
def test_mismatch(way: str, what: str) -> None:
    odd, others, said_odd, said_others = MISMATCHES[what]
    for _ in range(2):  # the second time, the names are known
        with pytest.raises(MismatchError) as caught:
            (odd if ODD else others)()
        message = str(caught.value)
        assert "mismatched'" in message
        assert f"{said_odd} on rank {LAST} on host {HOST}" in message
        first = "rank 0" if SIZE == 2 else f"ranks {', '.join(map(str, range(LAST)))}"
        assert f"{said_others} on {first} on host {HOST}" in message
        assert len(set(hvd.allgather_object(message))) == 1
        NORMAL.get(what, reduce)()


@several
def test_different_verbs_in_the_same_place(way: str) -> None:
    """Unnamed calls match by order, here an allgather with an allreduce."""
    with pytest.raises(MismatchError, match=r"(allgather|allreduce) on rank"):
        hvd.allgather(np.ones((2, 2))) if ODD else hvd.allreduce(np.ones((2, 2)))
    same(hvd.allreduce(np.ones(2), op=hvd.Sum), np.full(2, float(SIZE)))


@several
def test_unnamed_mismatch_amid_many_in_flight(way: str) -> None:
    """Of 40 unnamed reductions, number 23 has another shape on one rank. Only it fails, on all ranks."""
    handles = [hvd.allreduce(np.ones(5 + (ODD and i == 23)), op=hvd.Sum, wait=False) for i in range(40)]
    for i, handle in enumerate(handles):
        if i == 23:
            with pytest.raises(MismatchError, match=r"Mismatched shapes.*matched by their order"):
                hvd.synchronize(handle)
        else:
            same(hvd.synchronize(handle), np.full(5, float(SIZE)))


@several
def test_outputs_are_untouched_by_a_mismatch(way: str) -> None:
    array = np.full(4 + ODD, 3.0)
    with pytest.raises(MismatchError):
        hvd.allreduce(array, name="in place", out=array)
    same(array, np.full(4 + ODD, 3.0))


@several
def test_duplicate_name(way: str) -> None:
    """Only the rank that repeats the name gets an error, and its first request completes."""
    first = hvd.allreduce(np.full(3, 1.0), name="twice", op=hvd.Sum, wait=False) if ODD else -1
    if ODD:
        with pytest.raises(DuplicateNameError, match=r"'allreduce\.twice' is already in flight"):
            hvd.allreduce(np.ones(3), name="twice", wait=False)
        hvd.allgather_object(0)
        same(hvd.synchronize(first), np.full(3, float(SIZE)))
    else:
        hvd.allgather_object(0)
        same(hvd.allreduce(np.full(3, 1.0), name="twice", op=hvd.Sum), np.full(3, float(SIZE)))


BAD_SPLITS: dict[str, tuple[Any, str]] = {
    "too many": ([1] * (SIZE + 1), "splits, one for each rank"),
    "sum": ([2] * SIZE, "their sum"),
    "negative": ([-1] + [1] * (SIZE - 1), "must not be negative"),
    "kind": ([0.5] * SIZE, "list of integers"),
    "dimensions": ([[1] * SIZE], "list of integers"),
}


@several
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("what", BAD_SPLITS)
def test_bad_splits_on_one_rank(way: str, what: str, named: bool) -> None:
    splits, said = BAD_SPLITS[what]
    name = "split" if named else None
    if ODD:
        with pytest.raises(ArgumentError, match=said):
            hvd.alltoall(np.ones((SIZE, 2)), splits, name=name)
    else:
        with pytest.raises(
            MismatchError, match=f"because of the call on rank {LAST} on host .*: .*{said}"
        ):
            hvd.alltoall(np.ones((SIZE, 2)), [1] * SIZE, name=name)
    same(hvd.alltoall(np.ones((SIZE, 2)), name=name), np.ones((SIZE, 2)))


WRONG_ALONE: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "complex": (hvd.allreduce, lambda x, **k: hvd.allreduce(x * 1j, op=hvd.Product, **k), "not by Product"),
    "text": (hvd.allgather, lambda _, **k: hvd.allgather("abc", **k), "<U3"),
    "operation": (hvd.allreduce, lambda x, **k: hvd.allreduce(x, op="sum", **k), "op='sum' is not one of"),
    "not a number": (hvd.reducescatter, lambda x, **k: hvd.reducescatter(x, prescale_factor="a", **k), "'a'"),
    "in place": (hvd.allreduce, lambda x, **k: hvd.allreduce(x, **k, out=np.ones(8)[::2]), "contiguous"),
    "another out": (hvd.allreduce, lambda x, **k: hvd.allreduce(x, **k, out=np.ones(5)), "out has dtype"),
    "no Max": (hvd.reducescatter, lambda x, **k: hvd.reducescatter(x, op=hvd.Max, **k), "not Max"),
}


@several
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("what", WRONG_ALONE)
def test_a_wrong_argument_on_one_rank(way: str, what: str, named: bool) -> None:
    """The call raises immediately on its rank. The others, which wait for it, receive the reason."""
    right, wrong, said = WRONG_ALONE[what]
    name = "wrong alone" if named else None
    told = f"because of the call on rank {LAST} on host .*{said}"
    with pytest.raises((ArgumentError, ValueError) if ODD else MismatchError, match=said if ODD else told):
        (wrong if ODD else right)(np.ones(4), name=name)
    same(hvd.allreduce(np.ones(4), op=hvd.Sum, name=name), np.full(4, float(SIZE)))


@several
def test_a_name_that_cannot_be_encoded(way: str) -> None:
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"'allreduce\.a\\ud800' cannot be encoded"):
            hvd.allreduce(np.ones(3), name="a\ud800")
        same(hvd.allreduce(np.ones(3), op=hvd.Sum, name="b"), np.full(3, float(SIZE)))
    if ODD:
        with pytest.raises(ArgumentError, match="surrogate"):
            hvd.allreduce(np.ones(3), name="on one rank \udcff")
    same(hvd.allreduce(np.ones(3), op=hvd.Sum, name="b"), np.full(3, float(SIZE)))


@several
@pytest.mark.parametrize("named", [True, False])
def test_bad_splits_on_all_ranks(way: str, named: bool) -> None:
    for _ in range(3):
        with pytest.raises(ArgumentError, match="their sum"):
            hvd.alltoall(np.ones(SIZE), [2] * SIZE, name="all wrong" if named else None)
    same(hvd.alltoall(np.ones(SIZE), name="all wrong" if named else None), np.ones(SIZE))


@several
def test_rows_that_do_not_divide(way: str) -> None:
    with pytest.raises(ArgumentError, match="Pass splits"):
        hvd.alltoall(np.ones(SIZE + 1))
    hvd.barrier()


@several
def test_root_outside(way: str) -> None:
    for root in (SIZE, -1):
        with pytest.raises(ArgumentError, match=f"root rank {root} is not in process set 0"):
            hvd.broadcast(np.ones(3), root)
    process_set = hvd.add_process_set([LAST])
    if ODD:
        with pytest.raises(ArgumentError, match="given as a global rank"):
            hvd.broadcast(np.ones(3), 0, process_set=process_set)
    hvd.remove_process_set(process_set)


@several
def test_root_outside_on_one_rank(way: str) -> None:
    with pytest.raises(ArgumentError if ODD else MismatchError, match=f"root rank {SIZE} is not in"):
        hvd.broadcast(np.ones(3), SIZE if ODD else 0, name="root")
    same(hvd.broadcast(np.full(3, RANK), 0, name="root"), np.zeros(3, np.int64))


def test_scalars_where_rows_are_needed(way: str) -> None:
    for kind in (hvd.allgather, hvd.reducescatter):
        with pytest.raises(CollectiveError, match="at least one dimension"):
            kind(np.float32(1.0))
    if SIZE > 1:
        with pytest.raises(MismatchError):
            hvd.allgather(np.float32(1.0) if ODD else np.ones(1, np.float32), name="scalar here")
    same(hvd.allreduce(np.float32(2.0), op=hvd.Sum), np.float32(2.0 * SIZE))


def test_after_shutdown(way: str) -> None:
    hvd.shutdown()
    hvd.shutdown()
    try:
        for call in (lambda: hvd.allreduce(np.ones(2)), hvd.rank, hvd.size, hvd.join, hvd.barrier):
            with pytest.raises(NotInitializedError, match="init"):
                call()
    finally:
        hvd.init()


@several
def test_shutdown_ends_what_others_wait_for(way: str) -> None:
    """When the last rank leaves, the error of the others' pending work names it, and the next job works."""
    engine = session.engine()
    if ODD:
        time.sleep(0.05)
        hvd.shutdown()
    else:
        with pytest.raises(ShutDownError, match=rf"rank {LAST} on host .* has called shutdown\(\)"):
            hvd.allreduce(np.ones(4), name="too late")
        with pytest.raises(CollectiveError, match="No further operations can be submitted"):
            engine.submit(engine_request())
        hvd.shutdown()
    hvd.init()
    same(hvd.allreduce(np.ones(4), name="too late", op=hvd.Sum), np.full(4, float(SIZE)))


def engine_request() -> Any:
    from ringdance.core.request import Collective, Description, Request

    return Request(Description(Collective.BARRIER))


def test_handles(way: str) -> None:
    handle = hvd.allreduce(np.ones(3), op=hvd.Sum, wait=False)
    result = hvd.synchronize(handle)
    same(result, np.full(3, float(SIZE)))
    for function in (hvd.synchronize, hvd.poll):
        with pytest.raises(ArgumentError, match="not a handle"):
            function(handle)
    second = hvd.allreduce(np.ones(3), wait=False)
    while not hvd.poll(second):  # completes although no rank waits
        time.sleep(0.001)
    same(hvd.synchronize(second), np.ones(3))
    with pytest.raises(ArgumentError, match="at least one tensor"):
        hvd.allreduce([])
