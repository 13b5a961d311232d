"""If ranks call differently, all learn which ranks, where, both values, the tensor and what to do."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract_inputs import RANK, SIZE, several

import horovod.torch as hvd

HOST = socket.gethostname()
LAST = SIZE - 1


def reduce(*shape: int, dtype: torch.dtype = torch.float32, **others: Any) -> Any:
    return lambda: hvd.allreduce(torch.ones(shape, dtype=dtype), name="mismatched", **others)


def cast(root: int, shape: int = 3) -> Any:
    return lambda: hvd.broadcast(torch.ones(shape), root, name="mismatched")


# The last rank's call, the other ranks' call, what is reported of each, and the suggested fix.
CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], str, str, str]] = {
    "shapes": (reduce(2, 3), reduce(3, 2), "(2, 3)", "(3, 2)", "Give the tensor the same shape"),
    "dimensions": (reduce(6), reduce(3, 2), "(6,)", "(3, 2)", "Give the tensor the same shape"),
    "dtypes": (
        reduce(4, dtype=torch.float64), reduce(4), "float64", "float32", "Cast to one dtype on all ranks",
    ),
    "roots": (cast(LAST), cast(0), str(LAST), "0", "Pass the same root_rank"),
    "reduce operations": (
        reduce(4, op=hvd.Sum), reduce(4, op=hvd.Average), "Sum", "Average", "Pass the same op on all ranks",
    ),
    "adasum": (
        reduce(4, op=hvd.Adasum), reduce(4, op=hvd.Max), "Adasum", "Max", "Pass the same op on all ranks",
    ),
    "prescales": (
        reduce(4, prescale_factor=2.0), reduce(4), "2.0", "1.0", "equal arguments on all ranks",
    ),
    "gathered shapes": (
        lambda: hvd.allgather(torch.ones(RANK, 3), name="mismatched"),
        lambda: hvd.allgather(torch.ones(RANK, 4), name="mismatched"),
        "(*, 3)", "(*, 4)", "Give the tensor the same shape",
    ),
    "operations": (
        lambda: hvd.allgather(torch.ones(2)), lambda: hvd.allreduce(torch.ones(2)), "allgather", "allreduce",
        "Call the same operation on all ranks",
    ),
}  # fmt: skip


@several
@pytest.mark.parametrize("case", CASES)
def test_mismatch(case: str) -> None:
    if case == "adasum" and SIZE & (SIZE - 1):
        pytest.skip("Adasum needs 2, 4, 8, ... ranks")
    odd, others, said_of_last, said_of_others, advice = CASES[case]
    for _ in range(2):  # the second time, the names are known
        with pytest.raises(hvd.HorovodInternalError) as caught:
            (odd if RANK == LAST else others)()
        text = str(caught.value)
        first = "rank 0" if SIZE == 2 else "ranks " + ", ".join(str(rank) for rank in range(LAST))
        assert f"{said_of_last} on rank {LAST} on host {HOST}" in text
        assert f"{said_of_others} on {first} on host {HOST}" in text
        assert "mismatched'" in text or ".noname." in text
        assert advice in text
        assert len(set(hvd.allgather_object(text))) == 1
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="mismatched").tolist() == [SIZE] * 2


@several
def test_names_that_never_match_are_not_mixed_up() -> None:
    """The same names in different orders are not a mismatch."""
    names = [f"name.{number}" for number in range(4)]
    handles = {
        name: hvd.allreduce_async(torch.full((number + 1,), 1.0), name=name, op=hvd.Sum)
        for number, name in sorted(enumerate(names), reverse=RANK % 2 == 1)
    }
    for number, name in enumerate(names):
        assert hvd.synchronize(handles[name]).tolist() == [SIZE] * (number + 1)
