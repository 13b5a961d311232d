"""Graphs and sessions of tf.compat.v1: collectives, gradients, optimizers, the hook."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from by_numpy import all_values, reduced, values
from steps import counting_steps

import ringdance.tensorflow as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
several = pytest.mark.ranks(2, 3, 4)
v1 = tf.compat.v1
Run = Callable[[Any], Any]


@pytest.fixture(params=[1, 4])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Return a function that runs tensors of a new graph with the parameter's number of operation threads."""
    config = v1.ConfigProto(inter_op_parallelism_threads=request.param, use_per_session_threads=True)
    with tf.Graph().as_default(), v1.Session(config=config) as session:
        yield session.run


@pytest.mark.parametrize("branch", [False, True])
def test_many_calls_in_one_run(run: Run, branch: bool) -> None:
    """More calls than threads complete, in a different order on each rank, also in branches of tf.cond."""
    yes = v1.placeholder_with_default(True, ())
    shapes = [(i % 5, 3) for i in range(30)]
    made: dict[int, Any] = {}
    for i in np.random.default_rng(RANK).permutation(len(shapes)).tolist():
        tensor = tf.constant(values(RANK, "float32", shapes[i], seed=i))
        call = partial(hvd.allreduce, tensor, op=hvd.Sum, name=f"many.{i}")
        made[i] = tf.cond(yes, call, partial(tf.identity, tensor)) if branch else call()
    for i, result in zip(made, run(list(made.values())), strict=True):
        wanted = reduced(all_values(SIZE, "float32", shapes[i], seed=i), "sum")
        assert result.tobytes() == wanted.tobytes()


def test_every_verb(run: Run) -> None:
    x = tf.constant(values(RANK, "float32", (SIZE, 2)))
    rows, received = hvd.alltoall(x, [1] * SIZE)
    results = run([
        hvd.allgather(x), hvd.broadcast(x, SIZE - 1), rows, received, hvd.reducescatter(x, op=hvd.Sum),
        hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum), hvd.size_op(), hvd.rank_op(),
    ])  # fmt: skip
    every = all_values(SIZE, "float32", (SIZE, 2))
    total = reduced(every, "sum")
    wanted = [
        np.concatenate(every), every[-1], np.stack([tensor[RANK] for tensor in every]), [1] * SIZE,
        total[RANK : RANK + 1], [total, 2 * total], SIZE, RANK,
    ]  # fmt: skip
    for result, tensor in zip(results, wanted, strict=True):
        np.testing.assert_allclose(result, tensor, rtol=1e-6)


def test_gradients(run: Run) -> None:
    x = tf.constant(values(RANK, "float64", (SIZE, 2)))
    weights = tf.constant(values(RANK, "float64", (SIZE, 2), seed=1))
    every = all_values(SIZE, "float64", (SIZE, 2), seed=1)
    summed = v1.gradients(tf.reduce_sum(hvd.allreduce(x, op=hvd.Sum) * weights), x)[0]
    sent = v1.gradients(tf.reduce_sum(hvd.alltoall(x) * weights), x)[0]
    gathered = v1.gradients(tf.reduce_sum(hvd.allgather(x) * tf.tile(weights, [SIZE, 1])), x)[0]
    first, second, third = run([summed, sent, gathered])
    np.testing.assert_allclose(first, sum(every))
    np.testing.assert_allclose(second, np.stack([tensor[RANK] for tensor in every]))
    np.testing.assert_allclose(third, sum(every) / SIZE)


def test_gradients_of_one_call_twice_in_one_run(run: Run) -> None:
    x = tf.constant([1.0, 2.0])
    reduced_ = hvd.allreduce(x, op=hvd.Sum, name="once")
    both = [v1.gradients(reduced_ * factor, x)[0] for factor in (1.0, 3.0)]
    first, other = run(both)
    assert first.tolist() == [SIZE] * 2
    assert other.tolist() == [3 * SIZE] * 2


@several
def test_a_mismatch(run: Run) -> None:
    bad = hvd.allreduce(tf.zeros(RANK + 1), name="bad")
    for _ in range(2):
        with pytest.raises(tf.errors.FailedPreconditionError, match=r"on rank 0 on host"):
            run(bad)
    assert run(hvd.allreduce(tf.ones(1), op=hvd.Sum, name="good")).tolist() == [SIZE]


def network(optimizer: Any, passes: int = 1) -> tuple[Any, Any, Any]:
    """Build a linear model with an embedding. Returns (loss, training operation, variables)."""
    table = v1.get_variable("table", initializer=np.arange(12.0).reshape(6, 2))
    weight = v1.get_variable("weight", initializer=np.array([[1.0], [-2.0]]))
    chosen = tf.gather(table, [RANK, 5])
    loss = tf.reduce_sum(tf.matmul(chosen, weight) ** 2)
    step = v1.train.get_or_create_global_step()
    return loss, optimizer.minimize(loss, global_step=step), [table, weight]


def by_hand(steps: int, rate: float) -> tuple[Any, Any]:
    """Return the result of gradient descent on the mean of all ranks' losses."""
    table, weight = np.arange(12.0).reshape(6, 2), np.array([[1.0], [-2.0]])
    for _ in range(steps):
        of_table, of_weight = np.zeros_like(table), np.zeros_like(weight)
        for rank in range(SIZE):
            for row in (rank, 5):
                product = 2 * (table[row] @ weight)
                of_table[row] += product * weight[:, 0] / SIZE
                of_weight += (product * table[row])[:, None] / SIZE
        table, weight = table - rate * of_table, weight - rate * of_weight
    return table, weight


@pytest.mark.parametrize("dense", [False, True])
def test_optimizer(run: Run, dense: bool) -> None:
    plain = v1.train.GradientDescentOptimizer(0.001)
    optimizer = hvd.DistributedOptimizer(plain, sparse_as_dense=dense)
    assert optimizer.get_name() == "DistributedGradientDescentOptimizer"
    _, train, variables = network(optimizer)
    run(v1.global_variables_initializer())
    for _ in range(3):
        run(train)
    for result, wanted in zip(run(variables), by_hand(3, 0.001), strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-6, atol=1e-8)


def test_two_optimizers_in_one_run(run: Run) -> None:
    """As for generator and discriminator, one run trains both variables, which stay equal on all ranks."""
    weights = [v1.get_variable(f"w{i}", initializer=np.full(3, 1.0)) for i in range(2)]
    trains = []
    for i, weight in enumerate(weights):
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5))
        trains.append(optimizer.minimize(tf.reduce_sum(weight) * (RANK + 1) * (i + 1), var_list=[weight]))
    run(v1.global_variables_initializer())
    for _ in range(3):
        run(trains)
    for i, weight in enumerate(run(weights)):
        np.testing.assert_allclose(weight, np.full(3, 1.0 - 3 * 0.5 * (i + 1) * (SIZE + 1) / 2))


@pytest.mark.parametrize("average", [False, True])
def test_several_passes(run: Run, average: bool) -> None:
    passes = 2
    optimizer = hvd.DistributedOptimizer(
        v1.train.GradientDescentOptimizer(0.001), backward_passes_per_step=passes, sparse_as_dense=True,
        average_aggregated_gradients=average,
    )
    _, train, variables = network(optimizer)
    run(v1.global_variables_initializer())
    for count in range(1, 5):
        with counting_steps() as steps:
            run(train)
            assert steps() == (SIZE > 1 and count % passes == 0)
        # Both passes use the same loss, so their sum is twice the gradient.
        rate = 0.001 if average else passes * 0.001
        for result, wanted in zip(run(variables), by_hand(count // passes, rate), strict=True):
            np.testing.assert_allclose(result, wanted, rtol=1e-6, atol=1e-8)
        assert run(v1.train.get_global_step()) == count


def test_passes_that_cannot_be(run: Run) -> None:
    optimizer = hvd.DistributedOptimizer(
        v1.train.GradientDescentOptimizer(0.001), backward_passes_per_step=2
    )
    with pytest.raises(ValueError, match="sparse_as_dense"):
        network(optimizer)


@pytest.mark.ranks(1, 2, 4)
def test_adasum_combines_the_steps(run: Run) -> None:
    """Orthogonal weight changes add up, and equal ones are averaged."""
    optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5), op=hvd.Adasum)
    assert optimizer.get_name() == "DistributedDeltaGradientDescentOptimizer"
    weights = v1.get_variable("w", initializer=np.zeros(SIZE))
    own = tf.one_hot(RANK, SIZE, dtype=tf.float64)
    train = optimizer.minimize(-tf.reduce_sum(weights * own))
    run(v1.global_variables_initializer())
    run(train)
    np.testing.assert_allclose(run(weights), np.full(SIZE, 0.5))
    shared = v1.get_variable("s", initializer=np.zeros(3))
    train = optimizer.minimize(-tf.reduce_sum(shared), var_list=[shared])
    run(shared.initializer)
    run(train)
    np.testing.assert_allclose(run(shared), np.full(3, 0.5))


def test_broadcast_of_global_variables(run: Run) -> None:
    variables = [v1.get_variable(f"v{i}", initializer=np.full(3, 10.0 * RANK + i)) for i in range(3)]
    count = v1.get_variable("count", initializer=RANK, use_resource=False)
    operation = hvd.broadcast_global_variables(SIZE - 1)
    run(v1.global_variables_initializer())
    run(operation)
    assert [item[0] for item in run(variables)] == [10.0 * (SIZE - 1) + i for i in range(3)]
    assert run(count) == SIZE - 1
    received = hvd.broadcast_(variables, 0)
    run(received)


def test_hook() -> None:
    hook = hvd.BroadcastGlobalVariablesHook(0)
    for _ in range(2):  # the second time with another graph
        with tf.Graph().as_default():
            weight = v1.get_variable("w", initializer=float(RANK + 1))
            optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5))
            train = optimizer.minimize((weight - RANK) ** 2, global_step=v1.train.get_or_create_global_step())
            hooks = [hook, v1.train.StopAtStepHook(last_step=3)]
            with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
                assert session.run(weight) == 1.0
                while not session.should_stop():
                    last = session.run([weight, train])[0]
            mean = (SIZE - 1) / 2
            assert last == pytest.approx(mean, abs=1e-6)


def test_eager_has_no_global_variables() -> None:
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)
    with pytest.raises(ValueError, match="needs a graph"):
        hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1), backward_passes_per_step=2)


def test_optimizer_in_eager_execution() -> None:
    weight = tf.Variable(1.0)
    optimizer = hvd.DistributedOptimizer(v1.train.MomentumOptimizer(0.5, 0.9))
    with counting_steps() as steps:
        optimizer.minimize(lambda: weight * (RANK + 1))
        assert steps() == 1
    assert weight.numpy() == pytest.approx(1.0 - 0.5 * (SIZE + 1) / 2)
    assert optimizer.get_slot_names() == ["momentum"]
    assert optimizer.get_slot(weight, "momentum").numpy() == pytest.approx((SIZE + 1) / 2)
    assert len(optimizer.variables()) == 1


@several
def test_local_variables() -> None:
    weight, own = tf.Variable(1.0), tf.Variable(1.0)
    optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
    optimizer.register_local_var(own)
    optimizer.minimize(lambda: (weight + own) * (RANK + 1))
    assert weight.numpy() == pytest.approx(1.0 - (SIZE + 1) / 2)
    assert own.numpy() == pytest.approx(1.0 - (RANK + 1) / SIZE)


def test_arguments_that_do_not_go_together() -> None:
    plain = v1.train.GradientDescentOptimizer(0.1)
    for wrong in (
        {"op": hvd.Sum, "gradient_predivide_factor": 2.0}, {"groups": -1}, {"backward_passes_per_step": 0},
        {"op": hvd.Adasum, "average_aggregated_gradients": True},
    ):
        with pytest.raises(ValueError):
            hvd.DistributedOptimizer(plain, **wrong)
    with pytest.raises(NotImplementedError):
        hvd.DistributedOptimizer(plain, op=hvd.Adasum, process_set=hvd.ProcessSet([0]))


def test_scripts_written_for_horovod_ask_whether_operations_run_at_once() -> None:
    horovod = importlib.import_module("horovod.tensorflow")
    for ask in (horovod._executing_eagerly, horovod.util._executing_eagerly):
        assert ask() is True
        with tf.Graph().as_default():
            assert ask() is False
