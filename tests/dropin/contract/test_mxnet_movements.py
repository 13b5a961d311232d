"""Contract, MXNet: broadcast, allgather, alltoall, and one rank's parameters and objects for all ranks."""

from __future__ import annotations

import copy
import functools
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn
from mxnet_inputs import (
    DIMS,
    MOVED,
    OWN_TYPE,
    RANK,
    SIZE,
    draw,
    every,
    members,
    refused,
    same,
    several,
    value,
)

import horovod.mxnet as hvd


def of_rank(rank: int) -> list[Any]:
    return every(MOVED, seed=300 + rank)


def test_every_root() -> None:
    for root in range(SIZE):
        inputs = of_rank(RANK)
        for number, (tensor, wanted) in enumerate(zip(inputs, of_rank(root), strict=True)):
            same(hvd.broadcast(tensor, root, name=f"{root}.{number}"), value(wanted))
        for tensor, kept in zip(inputs, of_rank(RANK), strict=True):
            same(tensor, value(kept))


def test_broadcast_in_place() -> None:
    for root in range(SIZE):
        for tensor, wanted in zip(of_rank(RANK), of_rank(root), strict=True):
            assert hvd.broadcast_(tensor, root) is tensor
            same(tensor, value(wanted))


@several
def test_broadcast_mismatch() -> None:
    refused(lambda: hvd.broadcast(mx.nd.ones((17, 17 + RANK)), 0, name="cast"), "shape")
    refused(lambda: hvd.broadcast(mx.nd.ones(17, dtype=OWN_TYPE), 0, name="cast"), "type")


@several
def test_root_mismatch() -> None:
    refused(lambda: hvd.broadcast(mx.nd.ones(17), RANK, name="cast"), "root")


def test_broadcast_process_sets(halves: tuple[Any, Any]) -> None:
    mine, other = halves
    for root in members(mine):
        same(hvd.broadcast(of_rank(RANK)[0], root, process_set=mine), value(of_rank(root)[0]))
    outside = members(other)[0]
    refused(lambda: hvd.broadcast(mx.nd.ones(2), outside, process_set=mine), "root", kind=ValueError)


def test_parameters_in_a_dictionary() -> None:
    """A root of -1 is refused if there are several ranks."""
    inputs = {f"key.{number}": entry for number, entry in enumerate(of_rank(RANK))}
    hvd.broadcast_parameters(inputs, root_rank=SIZE - 1, prefix="dictionary.")
    for tensor, wanted in zip(inputs.values(), of_rank(SIZE - 1), strict=True):
        same(tensor, value(wanted))


def test_other_than_a_dictionary() -> None:
    for wrong in ([mx.nd.ones(2)], mx.nd.ones(2), None):
        with pytest.raises(ValueError, match="dictionary"):
            hvd.broadcast_parameters(wrong)


def all_equal(net: Any) -> None:
    for name, parameter in sorted(net.collect_params().items()):
        gathered = value(hvd.allgather(parameter.data().expand_dims(0), name=f"equal.{name}"))
        assert (gathered == gathered[0]).all()


@pytest.mark.parametrize("hybrid", [False, True])
def test_parameters_whose_shape_is_not_known_yet(hybrid: bool) -> None:
    """They are broadcast when the first forward pass creates them. Known parameters are broadcast at once."""
    mx.random.seed(RANK)
    net = nn.HybridSequential(prefix=f"later{hybrid}_")
    with net.name_scope():
        net.add(nn.Dense(8, in_units=5), nn.BatchNorm(), nn.Dense(3))
    net.initialize(mx.init.Uniform(0.5))
    if hybrid:
        net.hybridize()
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    net(mx.nd.ones((4, 5))).wait_to_read()
    all_equal(net)


def test_a_copy_of_parameters_whose_shape_is_not_known_yet() -> None:
    """It gets the root's values like the original. Later, a single rank may set new values."""
    mx.random.seed(RANK)
    net = nn.Dense(3, prefix="copied_")
    net.initialize(mx.init.Uniform(0.5))
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    copied = copy.deepcopy(net)
    for network in (copied, net):
        network(mx.nd.ones((4, 5))).wait_to_read()
        all_equal(network)
    if RANK == 0:
        for network in (copied, net):
            network.initialize(mx.init.Uniform(0.5), force_reinit=True)
            network(mx.nd.ones((4, 5))).wait_to_read()
    hvd.barrier()


def test_a_root_that_has_its_parameters_already() -> None:
    """Rank 0 has loaded its parameters. The other ranks create theirs in their first pass."""
    mx.random.seed(RANK)
    net = nn.Dense(3, prefix="loaded_")
    net.initialize(mx.init.Uniform(0.5))
    if RANK == 0:
        net(mx.nd.ones((4, 5)))
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    net(mx.nd.ones((4, 5))).wait_to_read()
    all_equal(net)


OBJECT: dict[Any, Any] = {"hello": 123, 0: [1, 2], "nested": {"a": (1.5, None)}}


def test_objects() -> None:
    for root in range(SIZE):
        assert hvd.broadcast_object({**OBJECT, "rank": RANK}, root) == {**OBJECT, "rank": root}
    assert hvd.allgather_object({**OBJECT, "rank": RANK}) == [{**OBJECT, "rank": r} for r in range(SIZE)]


# Gather.

ROWS = (17, 32, 81)


def gathered(dtype: str, dims: int, rows: tuple[int, ...], ranks: list[int]) -> Any:
    return np.concatenate([value(draw(dtype, dims, seed=r, rows=rows[r % len(rows)])) for r in ranks])


@pytest.mark.parametrize("rows", [(17,), ROWS], ids=["equal", "uneven"])
def test_rows_of_all_ranks_in_order(rows: tuple[int, ...]) -> None:
    for dtype in MOVED:
        for dims in DIMS:
            mine = draw(dtype, dims, seed=RANK, rows=rows[RANK % len(rows)])
            same(hvd.allgather(mine), gathered(dtype, dims, rows, members()))


def test_a_rank_without_rows() -> None:
    with mx.util.np_shape(True):
        mine = mx.np.ones((RANK, 3))
    same(hvd.allgather(mine), np.ones((SIZE * (SIZE - 1) // 2, 3), "float32"))


@several
def test_gather_mismatch() -> None:
    refused(lambda: hvd.allgather(mx.nd.ones((17, 17 + RANK)), name="gather"), "shape")
    refused(lambda: hvd.allgather(mx.nd.ones(17, dtype=OWN_TYPE), name="gather"), "type")


def test_gather_process_sets(halves: tuple[Any, Any]) -> None:
    mine = draw("float32", 2, seed=RANK, rows=ROWS[RANK % 3])
    same(hvd.allgather(mine, process_set=halves[0]), gathered("float32", 2, ROWS, members(halves[0])))


@pytest.mark.parametrize("rows", [(17,), ROWS], ids=["equal", "uneven"])
def test_gathered_groups(rows: tuple[int, ...]) -> None:
    kinds = [(dtype, dims) for dtype in MOVED for dims in DIMS]
    mine = [draw(*kind, seed=RANK, rows=rows[RANK % len(rows)]) for kind in kinds]
    for result, kind in zip(hvd.grouped_allgather(mine), kinds, strict=True):
        same(result, gathered(*kind, rows, members()))


def test_gathered_groups_in_process_sets(halves: tuple[Any, Any]) -> None:
    mine = [draw("float32", dims, seed=RANK, rows=ROWS[RANK % 3]) for dims in DIMS]
    for result, dims in zip(hvd.grouped_allgather(mine, process_set=halves[0]), DIMS, strict=True):
        same(result, gathered("float32", dims, ROWS, members(halves[0])))


# All to all.


def check(splits: Any, dtypes: Any = MOVED, process_set: Any = hvd.global_process_set) -> None:
    """Check ``splits(sender, receiver)``, the number of rows sent. Each row contains its sender's number."""
    ranks = members(process_set)
    mine = [splits(RANK, other) for other in ranks]
    arriving = [splits(other, RANK) for other in ranks]
    senders = np.repeat(ranks, arriving)
    for dtype in dtypes:
        for dims in DIMS:
            rest = (17,) * (dims - 1)
            array = mx.np.array(np.full((sum(mine), *rest), RANK), dtype=dtype)
            cut = mx.np.array(mine, dtype="int32")
            result, received = hvd.alltoall(array, cut, process_set=process_set)
            assert received.dtype == np.int32
            assert value(received).tolist() == arriving
            column = senders.reshape(-1, *[1] * len(rest))
            same(result, np.broadcast_to(column, (len(senders), *rest)).astype(dtype))


def test_splits() -> None:
    check(lambda sender, receiver: sender + 1)
    check(lambda sender, receiver: receiver + 1, ["int32", "float32"])


def test_splits_of_process_sets(halves: tuple[Any, Any]) -> None:
    check(lambda sender, receiver: sender + 1, ["int32", "float32"], halves[0])


def test_equal_split() -> None:
    for dtype in MOVED:
        array = mx.nd.array(np.repeat(np.arange(SIZE), 2), dtype=dtype)
        same(hvd.alltoall(array), np.full(2 * SIZE, RANK, dtype))


def test_one_rank_sends_nothing() -> None:
    check(lambda sender, receiver: 0 if sender == 0 else 2, ["int32", "float64"])


def test_one_rank_receives_nothing() -> None:
    check(lambda sender, receiver: 0 if receiver == 0 else 2, ["int32", "float64"])


def test_splits_of_nothing_but_zeros() -> None:
    result, received = hvd.alltoall(mx.nd.ones((3, 4)), mx.nd.zeros(SIZE, dtype="int32"))
    assert tuple(result.shape) == (0, 4)
    assert value(received).tolist() == [0] * SIZE


@several
def test_alltoall_mismatch() -> None:
    refused(lambda: hvd.alltoall(mx.nd.ones(SIZE, dtype=OWN_TYPE), name="sent"), "type")
    refused(lambda: hvd.alltoall(mx.nd.ones((SIZE, 17 + RANK)), name="sent"), "shape")


@several
def test_rows_that_do_not_divide() -> None:
    refused(lambda: hvd.alltoall(mx.nd.ones(SIZE + 1), name="sent"), "splits", kind=ValueError)


def test_splits_that_cannot_be() -> None:
    """Splits are refused if they are for too many rows or too many ranks, or are not integers."""
    for splits, dtype in (([2] * SIZE, "int32"), ([1] * (SIZE + 1), "int32"), ([1] * SIZE, "float32")):
        wrong = mx.nd.array(splits, dtype=dtype)
        call = functools.partial(hvd.alltoall, mx.nd.ones(SIZE), wrong, name="sent")
        refused(call, "splits", kind=ValueError)
