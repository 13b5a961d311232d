"""Distributed tapes, batch norm, variables and objects, process sets: values on all ranks."""

from __future__ import annotations

import threading
import time
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from by_numpy import values
from other_settings import other_settings
from steps import counting_steps
from warned import warned

import ringdance.tensorflow as hvd
from ringdance.errors import MismatchError

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
several = pytest.mark.ranks(2, 3, 4)
both = pytest.mark.parametrize("way", [lambda function: function, tf.function], ids=["eager", "graph"])
MEAN = (SIZE + 1) / 2


def model() -> tuple[list[Any], Any]:
    """Return variables and a function of a tape's options that returns their gradients, times rank + 1."""
    table = tf.Variable(values(0, "float64", (6, 3), 1))
    weight = tf.Variable(values(0, "float64", (3, 2), 2))
    unused = tf.Variable(1.0)

    def gradients(**how: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.matmul(tf.gather(table, [RANK, 5]), weight)) * (RANK + 1)
        tape = hvd.DistributedGradientTape(tape, **how)
        return tape.gradient(loss, [table, weight, unused])

    return [table, weight, unused], gradients


@several
@both
@pytest.mark.parametrize(("differ", "broadcast"), [(False, False), (True, False), (True, True)])
def test_weights_that_differ_are_noticed(way: Any, differ: bool, broadcast: bool) -> None:
    """The first steps are not compared, because scripts for Horovod broadcast after the first step."""
    weight = tf.Variable(values(RANK * differ, "float32", (3, 2), 2), name="mine")

    @way
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight**2)
        weight.assign_sub(0.01 * hvd.DistributedGradientTape(tape).gradient(loss, [weight])[0])

    with warned() as texts:
        for number in range(12):
            step()
            if broadcast and number == 0:
                hvd.broadcast_variables([weight], root_rank=0)
    assert len(texts) == (RANK == 0 and differ and not broadcast)
    assert all("an element of 'mine" in text for text in texts)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("way", [lambda step: step, tf.function])
@pytest.mark.parametrize("differ", [False, True])
def test_weights_are_compared_once_where_ranks_join_early(way: Any, differ: bool) -> None:
    """Variables without a gradient may differ."""
    weight = tf.Variable([1.0, np.nan if differ and RANK == 1 else 0.0], name="mine")
    own = tf.Variable(float(RANK), name="own")

    @way
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight)
        hvd.DistributedGradientTape(tape).gradient(loss, [own, weight])

    with warned() as texts:
        for _ in range(6):
            for _ in range(2):
                step()
            hvd.join()
    assert len(texts) == (RANK == 0 and differ)
    assert all("an element of 'mine" in text and "nan on rank 1" in text for text in texts)


def expected(table: Any, weight: Any, average: bool = True) -> tuple[Any, Any]:
    of_table, of_weight = np.zeros((6, 3)), np.zeros((3, 2))
    for rank in range(SIZE):
        for row in (rank, 5):
            of_table[row] += (rank + 1) * weight.sum(1)
            of_weight += (rank + 1) * table[row][:, None]
    divisor = SIZE if average else 1
    return of_table / divisor, of_weight / divisor


@both
@pytest.mark.parametrize(
    "how",
    [
        {}, {"op": hvd.Sum}, {"sparse_as_dense": True},
        {"gradient_predivide_factor": 4.0, "sparse_as_dense": True}, {"groups": 1},
        {"groups": 2, "sparse_as_dense": True}, {"compression": hvd.Compression.fp16},
    ],
    ids=str,
)
def test_gradients_are_reduced(way: Any, how: dict[str, Any]) -> None:
    (table, weight, _), gradients = model()
    with counting_steps() as steps:
        of_table, of_weight, of_unused = way(lambda: gradients(**how))()
        assert steps() == 1
    wanted = expected(table.numpy(), weight.numpy(), how.get("op") != hvd.Sum)
    sparse = SIZE > 1 and not how.get("sparse_as_dense")
    assert isinstance(of_table, tf.IndexedSlices) or not sparse
    near = {"rtol": 2e-3, "atol": 8e-3} if "compression" in how else {"rtol": 1e-7, "atol": 1e-9}
    np.testing.assert_allclose(tf.convert_to_tensor(of_table).numpy(), wanted[0], **near)
    np.testing.assert_allclose(of_weight.numpy(), wanted[1], **near)
    assert of_unused is None


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_large_gradients_go_in_parts(overlap: str) -> None:
    """Exchanges with several starts and waits work, twice in one function, with a single thread."""
    with other_settings({"RINGDANCE_OVERLAP": overlap}):
        variables = [tf.Variable(tf.fill((300_000 + i,), 1.0 + i)) for i in range(8)]

        @tf.function
        def step() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(variable * variable) for variable in variables]) * (RANK + 1.0)
            gradients = hvd.DistributedGradientTape(tape).gradient(loss, variables)
            with tf.GradientTape() as again:
                second = tf.reduce_sum(variables[0] * (RANK + 1.0))
            return gradients, hvd.DistributedGradientTape(again).gradient(second, variables[:1])

        for _ in range(3):
            with counting_steps() as steps:
                gradients, again = step()
                assert steps() == 2
            for i, value in enumerate(gradients):
                assert np.ptp(value.numpy()) == 0
                assert float(value[0]) == pytest.approx(2 * (1 + i) * MEAN)
            assert float(again[0][7]) == pytest.approx(MEAN)
        kinds = [operation.type for operation in step.get_concrete_function().graph.get_operations()]
        assert kinds.count("RingdanceWait") == (SIZE > 1)
        assert kinds.count("RingdanceStart") > 3 * (SIZE > 1) - 1


@both
def test_the_same_variables_twice(way: Any) -> None:
    """Two exchanges with the same name in one function run one after the other."""
    variables = [tf.Variable(tf.ones((300_000,))) for _ in range(4)]

    def step() -> Any:
        taken = []
        for factor in (1.0, 2.0, 3.0):
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(v * v) for v in variables]) * (RANK + 1) * factor
            taken.append(hvd.DistributedGradientTape(tape).gradient(loss, variables)[-1])
        return taken

    for _ in range(3):
        for number, value in enumerate(way(step)(), 1):
            assert np.ptp(value.numpy()) == 0
            assert float(value[0]) == pytest.approx(2 * number * MEAN)


@several
@both
@pytest.mark.parametrize("others", ["none", "another", "dense"])
def test_other_gradients_on_rank_0(way: Any, others: str) -> None:
    """All ranks raise one error. Gradients of two variables are never averaged, and no rank waits."""
    first, second = tf.Variable(tf.ones((9, 2))), tf.Variable(tf.ones((9, 2)))

    def step(alike: bool) -> Any:
        with tf.GradientTape() as tape:
            if alike or RANK == 0:
                loss = tf.reduce_sum(tf.gather(first, [1, 2]) if others == "dense" else first)
            else:
                loss = tf.reduce_sum({"none": tf.ones(3), "another": second, "dense": first}[others])
        return hvd.DistributedGradientTape(tape).gradient(loss, [first, second])

    function = way(step)
    with pytest.raises((MismatchError, tf.errors.FailedPreconditionError), match="Mismatched gradients"):
        function(False)
    got, nothing = function(True)
    assert tf.reduce_sum(got).numpy() == (4 if others == "dense" else 18)
    assert nothing is None


@several
@both
def test_shapes_that_differ_by_mistake(way: Any) -> None:
    """All ranks raise one error with the shapes, for dense gradients and for rows."""

    def step(variable: Any, rows: bool) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(variable, [1, 2]) if rows else variable)
        return hvd.DistributedGradientTape(tape).gradient(loss, [variable])

    for rows in (False, True):
        wrong = tf.Variable(tf.ones((9, 2 + RANK)), name="mine")
        begin = r"gradients for .*mine:0.*: rows .* of shape" if rows else "shapes for 'mine:0':"
        shown = rf"Mismatched {begin} \(9, 2\) on rank 0 .* \(9, 3\) on rank 1"
        with pytest.raises(tf.errors.FailedPreconditionError, match=shown):
            way(step)(wrong, rows)
        (got,) = way(step)(tf.Variable(tf.ones((9, 2))), rows)
        assert tf.reduce_sum(got).numpy() == (4 if rows else 18)


def test_two_tapes_of_one_recording() -> None:
    weight = tf.Variable([1.0])
    with tf.GradientTape(persistent=True) as recording:
        loss = weight * (RANK + 1.0)
    summed = hvd.DistributedGradientTape(recording, op=hvd.Sum)
    mean = hvd.DistributedGradientTape(recording)
    assert summed.gradient(loss, weight).numpy() == [MEAN * SIZE]
    assert mean.gradient(loss, weight).numpy() == [MEAN]


@several
@pytest.mark.parametrize("apart", ["", "names", "shapes"])
def test_models_in_two_threads(apart: str) -> None:
    """Rank 0's threads run in another order: each model gets its own mean. Unnamed equal models raise."""
    models = [tf.Variable([1.0]), tf.Variable([1.0] * (1 + (apart == "shapes")))]
    turns, stop = [threading.Event(), threading.Event()], threading.Event()
    found: dict[int, Any] = {}

    def train(number: int, **how: Any) -> None:
        turns[number].wait(30)
        try:
            with tf.GradientTape() as tape:
                loss = models[number] * (10.0 * number + RANK)
            found[number] = hvd.DistributedGradientTape(tape, **how).gradient(loss, models[number])[0].numpy()
        except ValueError as error:
            found[number] = str(error)
        turns[1 - number].set()
        stop.wait(30)

    names = [{"name": f"model.{number}"} if apart == "names" else {} for number in range(2)]
    threads = [threading.Thread(target=train, args=(i,), kwargs=names[i]) for i in range(2)]
    for thread in threads:
        thread.start()
    for number in range(2) if apart else [RANK == 0]:
        turns[number].set()
    for event in turns:
        event.wait(30)
    while len(found) < 2:
        time.sleep(0.01)
    stop.set()
    for thread in threads:
        thread.join()
    if apart:
        assert found == {0: MEAN - 1, 1: MEAN + 9}
    else:
        assert "Pass a unique name=" in str(found[int(RANK != 0)])


@several
def test_adasum_of_gradients() -> None:
    if SIZE == 3:
        pytest.skip("Adasum needs 2, 4, 8 ranks")
    weight = tf.Variable(np.zeros(SIZE))
    with tf.GradientTape() as tape:
        loss = weight[RANK] * 3.0
    got = hvd.DistributedGradientTape(tape, op=hvd.Adasum).gradient(loss, [weight])[0]
    np.testing.assert_allclose(tf.convert_to_tensor(got).numpy(), np.full(SIZE, 3.0))


def test_the_tape_is_of_its_kind() -> None:
    weight = tf.Variable([1.0, 2.0])
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        loss = tf.reduce_sum(weight) * (RANK + 1)
        other = weight[0] * 2.0
    assert isinstance(tape, tf.GradientTape)
    assert type(tape).__name__ == "GradientTape"
    assert tape.gradient(loss, [weight])[0].numpy().tolist() == [MEAN] * 2
    assert tape.gradient(loss, weight).numpy().tolist() == [MEAN] * 2
    nested = tape.gradient(loss, {"b": (weight,), "a": weight}, use_generic_names=True)
    assert nested["b"][0].numpy().tolist() == nested["a"].numpy().tolist() == [MEAN] * 2
    assert tf.convert_to_tensor(tape.gradient(other, [weight])[0]).numpy().tolist() == [2.0, 0.0]
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedGradientTape(tape)
    wrong_groups = [{"groups": item} for item in (-2, "x", 1.5, [1, 2], [[1]])]
    for wrong in (*wrong_groups, {"op": hvd.Sum, "gradient_predivide_factor": 2.0}, {"op": 9}):
        with pytest.raises(ValueError):
            hvd.DistributedGradientTape(tf.GradientTape(), **wrong)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        hvd.DistributedGradientTape(tf.GradientTape(), num_groups=1)


@both
@pytest.mark.parametrize("scale", [True, False])
def test_local_sources(way: Any, scale: bool) -> None:
    weight, own = tf.Variable([1.0]), tf.Variable(tf.ones(RANK + 1))

    def compute() -> Any:
        with tf.GradientTape(persistent=True) as tape:
            loss = (tf.reduce_sum(weight) + tf.reduce_sum(own)) * (RANK + 1.0)
        tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scale)
        tape.register_local_source(own)
        local, reduced = tape.get_local_and_global_gradients(loss, [own, weight])
        assert [source is own for source, _ in local] == [True]
        assert [source is weight for source, _ in reduced] == [True]
        return local[0][1], reduced[0][1]

    local, reduced = way(compute)()
    np.testing.assert_allclose(local.numpy(), np.full(RANK + 1, (RANK + 1) / (SIZE if scale else 1)))
    assert reduced.numpy().tolist() == [MEAN]


@both
def test_optimizer_of_keras_in_a_loop(way: Any) -> None:
    """This module's DistributedOptimizer also accepts Keras optimizers. Steps use the mean gradient."""
    weight = tf.Variable([1.0, 2.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
    optimizer.build([weight])

    def step() -> None:
        optimizer.apply_gradients([(tf.constant([1.0, 3.0]) * (RANK + 1), weight)])

    function = way(step)
    for count in range(1, 4):
        function()
        np.testing.assert_allclose(weight.numpy(), [1 - 0.5 * MEAN * count, 2 - 1.5 * MEAN * count])


def test_partial_tape_leaves_layers_local() -> None:
    """In a model-parallel model, layers of different width stay local, and the shared one is reduced."""
    own, shared = keras.layers.Dense(RANK + 2), keras.layers.Dense(3, kernel_initializer="ones")
    inputs = tf.ones((4, 3)) * (RANK + 1.0)
    own.build((None, 3))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(own(shared(inputs)))
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=own, scale_local_gradients=False)
    weights = [*own.trainable_weights, *shared.trainable_weights]
    gradients = tape.gradient(loss, weights)
    assert len(gradients) == 4
    assert [tuple(gradient.shape) for gradient in gradients] == [(3, RANK + 2), (RANK + 2,), (3, 3), (3,)]
    np.testing.assert_allclose(gradients[1].numpy(), 4.0)
    everywhere = hvd.allgather_object(gradients[2].numpy().tolist())
    assert all(tensor == everywhere[0] for tensor in everywhere)
    for wrong in ("dense", [own, 3]):
        with pytest.raises(ValueError, match="Keras layers"):
            hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=wrong)


# Variables and objects.


@pytest.mark.parametrize("inplace", [False, True])
def test_broadcast_variables(inplace: bool) -> None:
    own = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.BatchNormalization()])
    for weight in own.variables:
        weight.assign(tf.cast(tf.fill(weight.shape, RANK + 1), weight.dtype))
    plain = [tf.Variable(RANK, dtype=tf.int64), tf.Variable([RANK == 1, True])]
    assert hvd.broadcast_variables([*own.variables, *plain], SIZE - 1, inplace=inplace) is None
    for weight in own.weights:
        assert np.unique(np.asarray(weight)).tolist() == [SIZE]
    assert plain[0].numpy() == SIZE - 1
    assert plain[1].numpy().tolist() == [SIZE == 2, True]
    assert hvd.broadcast_variables([], 0) is None


def test_objects() -> None:
    inputs = {"rank": RANK, "list": [1, 2.5, "three"]}
    for root in range(SIZE):
        assert hvd.broadcast_object(inputs, root, name=f"object.{root}") == {**inputs, "rank": root}
        assert hvd.broadcast_object_fn(root)(inputs) == {**inputs, "rank": root}
    assert hvd.allgather_object("x" * RANK) == ["x" * r for r in range(SIZE)]


# Batch norm.


@both
@pytest.mark.parametrize("lengths", [[2, 2, 2, 2], [2, 1, 3, 2]], ids=["equal", "unequal"])
def test_sync_batch_norm(way: Any, lengths: list[int]) -> None:
    """Outputs, statistics and gradients equal those of one layer with all ranks' samples."""
    parts = [values(r, "float32", (lengths[r], 3, 4)) for r in range(SIZE)]
    weights = [values(r, "float32", (lengths[r], 3, 4), 1) for r in range(SIZE)]

    def train(layer: Any, inputs: Any, factors: Any) -> Any:
        inputs = tf.constant(inputs)

        def compute(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                outputs = layer(x, training=True)
                loss = tf.reduce_sum(outputs**2 * factors)
            return outputs, tape.gradient(loss, x)

        return [tensor.numpy() for tensor in way(compute)(inputs)]

    synced, plain = hvd.SyncBatchNormalization(), keras.layers.BatchNormalization()
    synced.build((None, 3, 4))
    plain.build((None, 3, 4))
    got = train(synced, parts[RANK], weights[RANK])
    outputs, of_inputs = train(plain, np.concatenate(parts), np.concatenate(weights))
    start = sum(lengths[:RANK])
    rows = slice(start, start + lengths[RANK])
    np.testing.assert_allclose(got[0], outputs[rows], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got[1], of_inputs[rows], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(synced.moving_mean, plain.moving_mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(synced.moving_variance, plain.moving_variance, rtol=1e-4)
    assert hvd.SyncBatchNormalization.from_config(synced.get_config()).epsilon == synced.epsilon
    for fused in (True, None):
        with pytest.raises(ValueError, match="fused"):
            hvd.SyncBatchNormalization(fused=fused)


# Process sets.


@several
@both
def test_process_sets(way: Any) -> None:
    even = hvd.add_process_set(range(0, SIZE, 2))
    odd = hvd.add_process_set(range(1, SIZE, 2))
    own, foreign = (even, odd) if even.included() else (odd, even)
    ranks = own.ranks or []
    try:
        x = tf.constant([RANK + 1.0])
        assert int(hvd.size_op(own.process_set_id)) == len(ranks)
        assert int(hvd.process_set_included_op(own.process_set_id)) == 1
        assert int(way(lambda: hvd.process_set_included_op(foreign.process_set_id))()) == 0
        calls = {
            "allreduce": lambda: hvd.allreduce(x, op=hvd.Sum, process_set=own),
            "allgather": lambda: hvd.allgather(x, process_set=own),
            "broadcast": lambda: hvd.broadcast(x, ranks[-1], process_set=own),
            "alltoall": lambda: hvd.alltoall(tf.repeat(x, len(ranks)), process_set=own),
            "reducescatter": lambda: hvd.reducescatter(tf.repeat(x, len(ranks)), process_set=own),
        }
        got = {name: way(call)().numpy().tolist() for name, call in calls.items()}
        every = [rank + 1.0 for rank in ranks]
        assert got == {
            "allreduce": [sum(every)], "allgather": every, "broadcast": every[-1:], "alltoall": every,
            "reducescatter": [pytest.approx(sum(every) / len(every))],
        }
        weight = tf.Variable([1.0])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight) * (RANK + 1)
        gradient = hvd.DistributedGradientTape(tape, process_set=even).gradient(loss, [weight])[0]
        wanted = np.mean(every) if even.included() else RANK + 1
        assert gradient.numpy().tolist() == [pytest.approx(wanted)]
        with pytest.raises(tf.errors.InvalidArgumentError, match="not a member"):
            way(lambda: hvd.allreduce(x, process_set=foreign))()
    finally:
        hvd.allreduce(tf.ones(1))
        hvd.remove_process_set(odd)
        hvd.remove_process_set(even)
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(tf.ones(1), process_set=even)


def test_a_wrong_static_shape() -> None:
    """A graph's static shape is not trusted: the tensor itself determines the memory."""

    @tf.function(input_signature=[tf.TensorSpec([None])])  # type: ignore[untyped-decorator]
    def told(given: Any) -> Any:
        scaled = given * (RANK + 1.0)
        scaled.set_shape([3])
        return hvd.allreduce(scaled)

    for length in (5, 2, 3, 0):
        np.testing.assert_array_equal(told(tf.ones(length)).numpy(), np.full(length, MEAN, np.float32))


@pytest.mark.ranks(2, 3)
def test_later_calls_come_after_those_within_a_condition() -> None:
    """Weights are compared in this order too. Otherwise, with one thread, ranks wait for different calls."""
    weight = tf.Variable([1.0])

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * 2.0)
        hvd.DistributedGradientTape(tape).gradient(loss, [weight])
        return hvd.allreduce(tf.ones(2), name="later")

    every = step.get_concrete_function().graph.get_operations()
    before, left = set(), [[tensor for tensor in every if tensor.type.startswith("Ringdance")][-1]]
    while left:
        first = left.pop()
        if first.name not in before:
            before.add(first.name)
            left += [*first.control_inputs, *(tensor.op for tensor in first.inputs)]
    conditions = {tensor.name for tensor in every if tensor.type in ("If", "StatelessIf")}
    assert conditions
    assert conditions <= before
