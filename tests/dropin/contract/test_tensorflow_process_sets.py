"""Contract, TensorFlow: every call in process sets of the even and the odd ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_inputs import (
    MOVED,
    ODD,
    RANK,
    REDUCED,
    ROWS,
    SCATTERED,
    SIZE,
    all_same,
    check_gradients,
    draw,
    every,
    same,
    several,
    total,
    value,
)

import horovod.tensorflow as hvd

pytestmark = several
v1 = tf.compat.v1


def mean(mine: Any) -> float:
    return float(np.mean([rank + 1.0 for rank in mine.ranks]))


def of(dtypes: list[Any], rank: int = RANK, **others: Any) -> list[Any]:
    """Return tensors that are equal within a set but differ between the two sets."""
    return every(dtypes, seed=40 + rank % 2, **others)


def test_sets_come_and_go() -> None:
    # Must run before `halves`, which creates the same sets on 2 ranks.
    first = hvd.add_process_set([0])
    assert first.process_set_id is not None
    for twice in ([0], range(SIZE), hvd.ProcessSet([0])):
        with pytest.raises(ValueError, match="exists"):
            hvd.add_process_set(twice)
    last = hvd.add_process_set(hvd.ProcessSet([SIZE - 1]))
    own = first if RANK == 0 else last
    if own.included():
        same(hvd.allreduce(tf.ones(3), op=hvd.Sum, process_set=own), np.ones(3, np.float32))
    hvd.allreduce(tf.ones(1), name="before they go")
    assert hvd.remove_process_set(first)
    assert first.process_set_id is None
    assert not hvd.remove_process_set(first)
    assert not hvd.remove_process_set(hvd.global_process_set)
    again = hvd.add_process_set(first)
    assert again is first
    assert hvd.remove_process_set(first)
    assert hvd.remove_process_set(last)


def test_numbers(way: Any, halves: Any) -> None:
    mine, other = halves
    assert int(way(lambda: hvd.size_op(process_set_id=mine.process_set_id))) == len(mine.ranks)
    assert int(way(lambda: hvd.process_set_included_op(process_set_id=mine.process_set_id))) == 1
    assert int(way(lambda: hvd.process_set_included_op(process_set_id=other.process_set_id))) == 0


def test_allreduce(way: Any, halves: Any) -> None:
    mine, _ = halves
    inputs = of(REDUCED)
    got = way(lambda x: [hvd.allreduce(tensor, op=hvd.Sum, process_set=mine) for tensor in x], inputs)
    all_same(got, [total(tensor, mine) for tensor in inputs])
    all_same(way(lambda x: [hvd.allreduce(tensor, process_set=mine) for tensor in x], inputs), inputs)


def test_a_set_that_this_process_is_not_in(way: Any, halves: Any) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="not a member"):
        way(lambda: hvd.allreduce(tf.ones(3), process_set=halves[1]))


def test_a_set_that_nobody_knows(way: Any) -> None:
    fake = hvd.ProcessSet([0])
    with pytest.raises(ValueError, match="not registered"):
        way(lambda: hvd.allreduce(tf.ones(3), process_set=fake))
    fake.process_set_id = 10
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        way(lambda: hvd.allreduce(tf.ones(3), process_set=fake))


def test_grouped_allreduce(way: Any, halves: Any) -> None:
    mine, _ = halves
    inputs = of(REDUCED)
    got = way(lambda x: hvd.grouped_allreduce(x, op=hvd.Sum, process_set=mine), inputs)
    all_same(got, [total(tensor, mine) for tensor in inputs])


def test_allgather(way: Any, halves: Any) -> None:
    mine, _ = halves
    inputs = [draw(dtype, 2, seed=RANK, rows=ROWS[RANK]) for dtype in MOVED]
    want = [
        np.concatenate([value(draw(dtype, 2, seed=rank, rows=ROWS[rank])) for rank in mine.ranks])
        for dtype in MOVED
    ]
    all_same(way(lambda x: [hvd.allgather(tensor, process_set=mine) for tensor in x], inputs), want)
    all_same(way(lambda x: hvd.grouped_allgather(x, process_set=mine), inputs), want)


def test_objects(halves: Any) -> None:
    mine, _ = halves
    assert hvd.allgather_object({"rank": RANK}, process_set=mine) == [{"rank": rank} for rank in mine.ranks]
    last = mine.ranks[-1]
    assert hvd.broadcast_object({"rank": RANK}, last, process_set=mine) == {"rank": last}


def test_broadcast(way: Any, halves: Any) -> None:
    mine, _ = halves
    for root in mine.ranks:
        inputs = every(MOVED, seed=RANK)
        got = way(
            lambda x, root=root: [hvd.broadcast(tensor, root, process_set=mine) for tensor in x], inputs
        )
        all_same(got, every(MOVED, seed=root))


def test_broadcast_of_variables(way: Any, halves: Any) -> None:
    mine, _ = halves
    for root in mine.ranks:
        variables = [tf.Variable(tensor) for tensor in every(MOVED, seed=RANK)]
        way(lambda root=root, given=variables: hvd.broadcast_(given, root, process_set=mine) and None)
        all_same([variable.read_value() for variable in variables], every(MOVED, seed=root))
        variables = [tf.Variable(tensor) for tensor in every(MOVED, seed=RANK)]
        way(lambda root=root, given=variables: hvd.broadcast_variables(given, root, process_set=mine))
        all_same([variable.read_value() for variable in variables], every(MOVED, seed=root))


def test_a_root_that_is_not_in_the_set(way: Any, halves: Any) -> None:
    mine, other = halves
    with pytest.raises(tf.errors.InvalidArgumentError, match="root"):
        way(lambda: hvd.broadcast(tf.ones(3), other.ranks[0], process_set=mine))


def test_alltoall(way: Any, halves: Any) -> None:
    mine, _ = halves
    members = len(mine.ranks)
    tensor = tf.repeat(tf.constant([[RANK, 7]]), members * (RANK + 1), axis=0)
    rows, received = way(
        lambda x: hvd.alltoall(x, tf.constant([RANK + 1] * members), process_set=mine), tensor
    )
    assert value(received).tolist() == [rank + 1 for rank in mine.ranks]
    assert value(rows)[:, 0].tolist() == [rank for rank in mine.ranks for _ in range(rank + 1)]


def test_reducescatter(way: Any, halves: Any) -> None:
    mine, _ = halves
    inputs = of(SCATTERED, rows=2 * SIZE + 1)
    want = [np.array_split(total(tensor, mine), len(mine.ranks))[mine.rank()] for tensor in inputs]
    all_same(way(lambda x: [hvd.reducescatter(one, op=hvd.Sum, process_set=mine) for one in x], inputs), want)
    all_same(way(lambda x: hvd.grouped_reducescatter(x, op=hvd.Sum, process_set=mine), inputs), want)


def test_gradients(way: Any, halves: Any) -> None:
    mine, _ = halves
    members = len(mine.ranks)
    inputs = [draw(tf.float64, 2, rows=2 * members) for _ in range(2)]
    root = mine.ranks[0]
    parts = 2 * members // members
    gathered = np.repeat([rank + 1.0 for rank in mine.ranks], parts)[:, None] * np.ones(17)
    checks = {
        hvd.allreduce: ({"op": hvd.Sum}, mean(mine) * members), hvd.allgather: ({}, mean(mine)),
        hvd.broadcast: ({"root_rank": root}, mean(mine) if root == RANK else 0.0),
        hvd.alltoall: ({}, gathered), hvd.reducescatter: ({"op": hvd.Average}, gathered),
    }  # fmt: skip
    for kind, (options, want) in checks.items():
        check_gradients(
            way, lambda x, kind=kind, how=options: [kind(one, process_set=mine, **how) for one in x], inputs,
            [want] * 2,
        )
    groups = {
        hvd.grouped_allreduce: ({"op": hvd.Average}, mean(mine)), hvd.grouped_allgather: ({}, mean(mine)),
        hvd.grouped_reducescatter: ({"op": hvd.Sum}, members * gathered),
    }  # fmt: skip
    for kind, (options, want) in groups.items():
        check_gradients(
            way, lambda x, kind=kind, how=options: kind(x, process_set=mine, **how), inputs, [want] * 2
        )


def test_tape(way: Any, halves: Any) -> None:
    """Each set gets its own mean, and a rank outside the set keeps its own gradient."""
    weight = tf.Variable([1.0, 2.0])
    even = halves[1] if ODD else halves[0]

    def compute(process_set: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight) * (RANK + 1)
        return hvd.DistributedGradientTape(tape, process_set=process_set).gradient(loss, [weight])[0]

    assert value(way(lambda: compute(halves[0]))).tolist() == [pytest.approx(mean(halves[0]))] * 2
    want = RANK + 1 if ODD else mean(even)
    assert value(way(lambda: compute(even))).tolist() == [pytest.approx(want)] * 2


def test_optimizer(halves: Any) -> None:
    even = halves[1] if ODD else halves[0]
    for chosen, want in ((halves[0], mean(halves[0])), (even, RANK + 1 if ODD else mean(even))):
        with tf.Graph().as_default(), v1.Session() as session:
            weight = v1.get_variable("w", initializer=1.0)
            plain = v1.train.GradientDescentOptimizer(0.5)
            train = hvd.DistributedOptimizer(plain, process_set=chosen).minimize(weight * (RANK + 1))
            session.run(v1.global_variables_initializer())
            for _ in range(2):
                session.run(train)
            assert session.run(weight) == pytest.approx(1 - want)
