"""Calls without their tensors: their text, their gradients, and what is prepared only once."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from loopback_job import job

from ringdance.core.engine import Engine
from ringdance.core.request import Collective, ReduceOp
from ringdance.errors import ArgumentError, MismatchError
from ringdance.training import exports
from ringdance.training.collectives import Call, Keep, movement, prepared, reduction
from ringdance.training.process_sets import ProcessSet, global_process_set


def ranks(size: int) -> Any:
    """Return the parts of an engine that a gradient needs, for the last of ``size`` ranks."""
    return SimpleNamespace(rank=size - 1, members=lambda _: tuple(range(size)))


def test_a_call_as_text() -> None:
    call = Call(Collective.ALLREDUCE, "x", ReduceOp.MAX, 2.0, 0.5, 3, grouped=True, tables=("a", "b"))
    assert Call.from_text(call.text()) == call
    assert Call.from_text(call.text()) is Call.from_text(call.text())
    assert call.but(name=None).full_name is None
    assert call.full_name == "grouped_allreduce.x"
    assert not call.keeps_shapes
    assert call.but(tables=()).keeps_shapes


@pytest.mark.parametrize(
    ("call", "back", "keep", "scale"),
    [
        (Call(Collective.ALLREDUCE, "x", ReduceOp.AVERAGE, 2.0, 3.0, grouped=True),
         Call(Collective.ALLREDUCE, "x.grad", ReduceOp.AVERAGE, 2.0, 3.0, grouped=True), Keep.ALL, 1.0),
        (Call(Collective.ALLGATHER, "x", set_id=2),
         Call(Collective.ALLREDUCE, "x.grad", ReduceOp.AVERAGE, set_id=2), Keep.OWN_ROWS, 1.0),
        (Call(Collective.BROADCAST, root=1), Call(Collective.ALLREDUCE, None, ReduceOp.AVERAGE),
         Keep.ROOT, 1.0),
        (Call(Collective.ALLTOALL, "x", equal_splits=True), Call(Collective.ALLTOALL, "x.grad"),
         Keep.PADDED, 1.0),
        (Call(Collective.REDUCESCATTER, "x", ReduceOp.SUM, 2.0, 3.0),
         Call(Collective.ALLGATHER, "x.grad"), Keep.ALL, 6.0 * 4),
        (Call(Collective.REDUCESCATTER, "x", ReduceOp.AVERAGE), Call(Collective.ALLGATHER, "x.grad"),
         Keep.ALL, 1.0),
    ],
)  # fmt: skip
def test_gradients(call: Call, back: Call, keep: Keep, scale: float) -> None:
    gradient = call.backward(ranks(4))
    assert gradient.call == back
    assert (gradient.keep, gradient.scale) == (keep, scale)


@pytest.mark.parametrize("name", ["MIN", "MAX", "PRODUCT", "ADASUM"])
def test_what_is_not_linear_has_no_gradient(name: str) -> None:
    call = Call(Collective.ALLREDUCE, "x", ReduceOp[name])
    assert call.backward(ranks(1)).call == call.but(name="x.grad")
    with pytest.raises(ArgumentError, match=rf"allreduce\.x on rank 3: {name.title()} has no gradient"):
        call.backward(ranks(4))


@pytest.mark.parametrize("kind", [Collective.BARRIER, Collective.TUNE])
def test_a_collective_without_a_rule_has_no_gradient(kind: Collective) -> None:
    with pytest.raises(NotImplementedError, match=f"does not define a gradient for {kind.name}"):
        Call(kind).backward(ranks(2))


def test_equal_arguments_give_one_call() -> None:
    arguments = "x", None, None, 1.0, 1.0, global_process_set
    first = reduction(Collective.ALLREDUCE, *arguments)
    assert first is reduction(Collective.ALLREDUCE, *arguments)
    assert first.operation is ReduceOp.AVERAGE
    assert reduction(Collective.ALLREDUCE, "x", None, 1, 2, 1.0, global_process_set).prescale == 2.0
    assert movement(Collective.BROADCAST, "x", global_process_set, root=3) is prepared(
        Collective.BROADCAST, "x", ReduceOp.SUM, 1.0, 1.0, 0, 3, False, False
    )
    for wrong in (7, "sum", [1]):
        with pytest.raises(ArgumentError, match="is not one of Average, Sum"):
            reduction(Collective.ALLREDUCE, "x", None, wrong, 1.0, 1.0, global_process_set)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="not registered"):
        movement(Collective.ALLGATHER, "x", ProcessSet([0]))


def test_one_call_with_changing_shapes() -> None:
    call = Call(Collective.ALLREDUCE, "x")

    def program(engine: Engine) -> list[float]:
        shapes = [(2,), (3, 1), (2,), ()]
        views = [np.full(shape, 1.0, np.float32) for shape in shapes]
        return [float(call.submit(engine, (view,)).wait()[0].sum()) for view in views]

    assert job(2, program) == [[4.0, 6.0, 4.0, 2.0]] * 2


def test_a_root_that_is_no_number_fails_on_all_ranks() -> None:
    def program(engine: Engine) -> None:
        view = np.ones(2)
        if engine.rank:
            with pytest.raises(TypeError):
                movement(Collective.BROADCAST, "x", global_process_set, root=None)  # type: ignore[arg-type]
        else:
            with pytest.raises(MismatchError, match="because of the call on rank 1"):
                Call(Collective.BROADCAST, "x", root=0).submit(engine, (view,)).wait()
        Call(Collective.BROADCAST, "x", root=0).submit(engine, (view,)).wait()

    job(2, program)


@pytest.mark.parametrize("binding", ["numpy", "torch"])
def test_bindings_export_the_common_names(binding: str) -> None:
    module = importlib.import_module(f"ringdance.{binding}")
    assert set(exports.__all__) < set(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)
