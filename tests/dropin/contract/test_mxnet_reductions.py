"""Contract, MXNet: allreduce, grouped_allreduce, reducescatter and grouped_reducescatter."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet_inputs import (
    MOVED,
    ODD,
    OWN_TYPE,
    RANK,
    REDUCED,
    SIZE,
    draw,
    every,
    members,
    near,
    refused,
    same,
    scaled,
    several,
    total,
    value,
)

import horovod.mxnet as hvd
from ringdance.mxnet.exchange import run_in_place
from ringdance.training.collectives import allreduce_call


def test_sum() -> None:
    for tensor in every(MOVED):
        result = hvd.allreduce(tensor, average=False)
        same(result, total(tensor))
        assert type(result) is type(tensor)


def test_average() -> None:
    for tensor in every(REDUCED):
        same(hvd.allreduce(tensor, average=True), value(tensor))
        same(hvd.allreduce(tensor, op=hvd.Average), value(tensor))
        same(hvd.allreduce(tensor), value(tensor))


def test_sum_in_place() -> None:
    """Earlier operations on the array affect the sum, and later operations see the result."""
    for number, tensor in enumerate(every(REDUCED)):
        tensor += 1
        before = tensor + 0
        assert hvd.allreduce_(tensor, average=False, name=f"in.place.{number}") is tensor
        after = tensor * 2
        same(tensor, total(before))
        same(after, total(tensor, 2))


@pytest.mark.parametrize("op", ["Min", "Max", "Product"])
def test_min_max_product(op: str) -> None:
    for dtype in REDUCED:
        tensors = [value(draw(dtype, 2, seed=rank, rows=5)) % 4 for rank in range(SIZE)]
        reduce = {"Min": np.minimum, "Max": np.maximum, "Product": np.multiply}[op].reduce
        result = hvd.allreduce(mx.nd.array(tensors[RANK], dtype=dtype), op=getattr(hvd, op))
        same(result, reduce(tensors).astype(dtype))


def test_prescale() -> None:
    for tensor in every(REDUCED):
        result = hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=0.3141)
        near(result, scaled(value(tensor), 0.3141) * np.asarray(SIZE, tensor.dtype))


def test_postscale() -> None:
    for tensor in every(REDUCED):
        near(hvd.allreduce(tensor, op=hvd.Sum, postscale_factor=0.3141), scaled(total(tensor), 0.3141))


@several
def test_shape_mismatch() -> None:
    refused(lambda: hvd.allreduce(mx.nd.ones((17, 17 + RANK)), name="shapes"), "shape")
    refused(lambda: hvd.allreduce(mx.nd.ones((17, 18) if ODD else 306), name="shapes"), "shape")


@several
def test_type_mismatch() -> None:
    refused(lambda: hvd.allreduce(mx.nd.ones(17, dtype=OWN_TYPE), name="types"), "type")


def test_process_sets(halves: tuple[Any, Any]) -> None:
    mine, other = halves
    count = len(members(mine))
    for tensor in every(REDUCED):
        same(hvd.allreduce(tensor, average=False, process_set=mine), total(tensor, count))
    with pytest.raises(ValueError, match="not a member") as caught:
        hvd.allreduce(mx.nd.ones(2), process_set=other)
    assert isinstance(caught.value, mx.MXNetError)


def test_arrays_may_be_dropped() -> None:
    """Neither inputs nor results must be kept alive until they are used."""
    for number in range(40):
        hvd.allreduce(mx.nd.full((1000,), number), name=f"dropped.{number}")
        hvd.allreduce_(mx.nd.full((1000,), number), name=f"dropped.in.place.{number}")
        gc.collect(0)
    results = [hvd.allreduce(mx.nd.full((100,), number), op=hvd.Sum) for number in range(40)]
    assert [value(result).tolist() for result in results] == [[number * SIZE] * 100 for number in range(40)]


def test_both_of_average_and_op() -> None:
    with pytest.raises(ValueError, match="average"):
        hvd.allreduce(mx.nd.ones(2), average=True, op=hvd.Sum)


def test_what_cannot_be_exchanged() -> None:
    refused(lambda: hvd.allreduce(mx.nd.ones(2).tostype("row_sparse"), name="sparse"), "tostype")
    refused(lambda: hvd.allreduce([1.0], name="list"), "NDArray")


def test_errors_are_mxnet_s_also_of_options_and_after_pickling() -> None:
    wrong: list[Callable[[], Any]] = [
        lambda: hvd.allreduce([1.0], name="list"), lambda: hvd.allreduce(mx.nd.ones(2), op=99, name="option"),
        lambda: hvd.broadcast(mx.nd.ones(2), 0, process_set=None), lambda: hvd.barrier(process_set=None),
    ]  # fmt: skip
    for call in wrong:
        with pytest.raises(mx.MXNetError) as caught:
            call()
        again = pickle.loads(pickle.dumps(caught.value))
        assert type(again) is type(caught.value)
        assert str(again) == str(caught.value)
        assert isinstance(again, ValueError)


def test_arrays_without_dimension_that_are_not_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, results are copied."""
    for module in ("memory", "exchange"):
        monkeypatch.setattr(f"ringdance.mxnet.{module}.on_host", lambda one: False)
    for tensor in (mx.np.array(1.0), mx.np.ones((2, 1)), mx.nd.ones(2)):
        same(hvd.allreduce(tensor, op=hvd.Sum), total(tensor))
        want = total(tensor)
        same(hvd.allreduce_(tensor, op=hvd.Sum), want)


@several
def test_calls_beside_one_that_fails_are_over() -> None:
    def calls(bad: bool) -> list[Any]:
        made = []
        for name in "ABC":
            array = mx.nd.ones(4)
            if bad and name == "B" and RANK == 0:
                array = array.tostype("row_sparse")
            call = allreduce_call(name, None, hvd.Sum, 1.0, 1.0, hvd.global_process_set, True)
            made.append((call, [array]))
        return made

    for bad in (True, False):
        several_calls = calls(bad)
        if bad:
            with pytest.raises(ValueError if RANK == 0 else mx.MXNetError, match="tostype"):
                run_in_place(several_calls)
            del several_calls[1]
        else:
            run_in_place(several_calls)
        for _, (array,) in several_calls:
            assert value(array).tolist() == [SIZE] * 4


def test_a_failed_computation_fails_the_exchange() -> None:
    """MXNet computes in the background, so it reports the failure late."""
    refused(lambda: hvd.allreduce(mx.nd.random.normal(0, -1, shape=(2, 2)), name="failed"))


# Groups.


def test_grouped_sum() -> None:
    for flavor in (mx.nd, mx.np):
        tensors = [draw(dtype, dims, flavor=flavor) for dtype in REDUCED for dims in (1, 2)]
        for result, tensor in zip(hvd.grouped_allreduce(tensors, average=False), tensors, strict=True):
            same(result, total(tensor))


def test_grouped_average() -> None:
    tensors = every(REDUCED)
    for result, tensor in zip(hvd.grouped_allreduce(tensors, op=hvd.Average), tensors, strict=True):
        same(result, value(tensor))


def test_grouped_in_place() -> None:
    tensors = every(REDUCED)
    wanted = [total(array) for array in tensors]
    hvd.grouped_allreduce_(tensors, average=False, name="group")
    for tensor, want in zip(tensors, wanted, strict=True):
        same(tensor, want)


def test_grouped_process_sets(halves: tuple[Any, Any]) -> None:
    tensors, count = every(REDUCED), len(members(halves[0]))
    for result, tensor in zip(
        hvd.grouped_allreduce(tensors, average=False, process_set=halves[0]), tensors, strict=True
    ):
        same(result, total(tensor, count))


def test_an_empty_group() -> None:
    assert hvd.grouped_allreduce([]) == hvd.grouped_allgather([]) == hvd.grouped_reducescatter([]) == []


# Reduce and scatter.


def own(array: Any, count: int = SIZE, place: int = RANK) -> Any:
    """Return a rank's rows. If they do not divide evenly, the first ranks get one more."""
    return np.array_split(np.asarray(array), count)[place]


def test_scattered_sum() -> None:
    for rows in (4 * SIZE, 17, 1):
        for tensor in every(REDUCED, rows=rows):
            same(hvd.reducescatter(tensor, op=hvd.Sum), own(total(tensor)))


def test_scattered_average() -> None:
    for tensor in every(REDUCED, rows=4 * SIZE):
        same(hvd.reducescatter(tensor), own(value(tensor)))


def test_scattered_scales() -> None:
    for tensor in every(REDUCED, rows=4 * SIZE):
        result = hvd.reducescatter(tensor, op=hvd.Sum, prescale_factor=0.3141)
        near(result, own(scaled(value(tensor), 0.3141) * np.asarray(SIZE, tensor.dtype)))
        result = hvd.reducescatter(tensor, op=hvd.Sum, postscale_factor=0.3141)
        near(result, own(scaled(total(tensor), 0.3141)))


def test_scattered_without_dimension() -> None:
    for make in (lambda: mx.nd.array(1.0).reshape(()), lambda: mx.np.array(1.0)):
        with mx.util.np_shape(True):
            refused(lambda make=make: hvd.reducescatter(make(), name="scalar"), "dimension", kind=ValueError)


@several
def test_scattered_mismatch() -> None:
    refused(lambda: hvd.reducescatter(mx.nd.ones((17 + RANK, 17)), name="cut"), "shape")
    refused(lambda: hvd.reducescatter(mx.nd.ones(17, dtype=OWN_TYPE), name="cut"), "type")


def test_scattered_adasum() -> None:
    refused(lambda: hvd.reducescatter(mx.nd.ones(SIZE), op=hvd.Adasum, name="cut"), "Sum and Average")


def test_scattered_process_sets(halves: tuple[Any, Any]) -> None:
    mine = members(halves[0])
    for tensor in every(REDUCED, rows=4 * SIZE):
        result = hvd.reducescatter(tensor, op=hvd.Sum, process_set=halves[0])
        same(result, own(total(tensor, len(mine)), len(mine), mine.index(RANK)))


def test_scattered_groups() -> None:
    tensors = every(REDUCED, rows=4 * SIZE)
    for result, tensor in zip(hvd.grouped_reducescatter(tensors, op=hvd.Sum), tensors, strict=True):
        same(result, own(total(tensor)))
    for result, tensor in zip(hvd.grouped_reducescatter(tensors), tensors, strict=True):
        same(result, own(value(tensor)))
    for result, tensor in zip(
        hvd.grouped_reducescatter(tensors, op=hvd.Sum, postscale_factor=0.3141), tensors, strict=True
    ):
        near(result, own(scaled(total(tensor), 0.3141)))


def test_scattered_groups_without_dimension() -> None:
    tensors = [mx.np.ones(SIZE), mx.np.array(1.0)]
    refused(lambda: hvd.grouped_reducescatter(tensors, name="scalars"), "dimension", kind=ValueError)


def test_scattered_groups_in_process_sets(halves: tuple[Any, Any]) -> None:
    tensors, mine = every(REDUCED, rows=4 * SIZE), members(halves[0])
    results = hvd.grouped_reducescatter(tensors, op=hvd.Sum, process_set=halves[0])
    for result, tensor in zip(results, tensors, strict=True):
        same(result, own(total(tensor, len(mine)), len(mine), mine.index(RANK)))
