"""Contract, TensorFlow: this process's place, and the parts of a training."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_inputs import ODD, RANK, REDUCED, SIZE, every, near, same, several, total, value

import horovod.tensorflow as hvd

keras = tf.keras  # 2 or 3, as in the user's environment

v1 = tf.compat.v1
MEAN = (SIZE + 1) / 2

LAUNCHER = {
    "rank": ("OMPI_COMM_WORLD_RANK", "PMI_RANK"), "size": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "local_rank": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "local_size": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}  # fmt: skip


@pytest.mark.parametrize("what", LAUNCHER)
def test_the_place_is_the_launchers(what: str) -> None:
    inputs = [os.environ[name] for name in LAUNCHER[what] if name in os.environ]
    if not inputs:
        pytest.skip("this launcher does not set it")
    assert getattr(hvd, what)() == int(inputs[0])


@pytest.mark.parametrize("what", LAUNCHER)
def test_the_place_as_an_operation(way: Any, what: str) -> None:
    number = way(lambda: getattr(hvd, f"{what}_op")(name="told"))
    assert number.dtype == tf.int32
    assert int(number) == getattr(hvd, what)()


def test_an_operation_tells_what_holds_when_it_runs() -> None:
    """After shutdown() the same graph raises, and after init() it works again."""
    told = tf.function(lambda: (hvd.size_op(), hvd.process_set_included_op()))
    assert [int(item) for item in told()] == [SIZE, 1]
    hvd.shutdown()
    with pytest.raises(tf.errors.FailedPreconditionError, match="init"):
        told()
    hvd.init()
    assert [int(item) for item in told()] == [SIZE, 1]


def test_compression_fp16(way: Any) -> None:
    inputs = every([dtype for dtype in REDUCED if dtype.is_floating], most=50)
    got = way(
        lambda x: [hvd.allreduce(item, op=hvd.Sum, compression=hvd.Compression.fp16) for item in x], inputs
    )
    for result, tensor in zip(got, inputs, strict=True):
        same(result, total(tensor))
    for tensor in every(REDUCED):
        small, context = hvd.Compression.fp16.compress(tensor)
        assert small.dtype == (tf.float16 if tensor.dtype.is_floating else tensor.dtype)
        same(hvd.Compression.fp16.decompress(small, context), tensor)
        unchanged, context = hvd.Compression.none.compress(tensor)
        assert unchanged is tensor
        assert hvd.Compression.none.decompress(unchanged, context) is tensor


@several
def test_join_with_each_rank_first() -> None:
    """The other ranks get averages over all ranks, all learn the same last rank, and can join again."""
    for first in range(SIZE):
        if first != RANK:
            for _ in range(2):
                near(hvd.allreduce(tf.ones(4), name="joined"), np.full(4, (SIZE - 1) / SIZE, np.float32))
        elif SIZE == 2:
            assert hvd.join() != first
        if first != RANK or SIZE > 2:
            last = int(hvd.join())
            assert SIZE > 2 or last == 1 - first
        everywhere = value(hvd.allgather(tf.constant([RANK])))
        assert everywhere.tolist() == list(range(SIZE))


@several
def test_while_a_rank_has_joined() -> None:
    calls = {
        "allgather": lambda: hvd.allgather(tf.ones(2), name="late"),
        "broadcast": lambda: hvd.broadcast(tf.ones(2), SIZE - 1, name="late"),
        "alltoall": lambda: hvd.alltoall(tf.ones(SIZE), name="late"),
        "reducescatter": lambda: hvd.reducescatter(tf.ones(SIZE), name="late"),
    }
    if RANK > 0:
        for call in calls.values():
            with pytest.raises(tf.errors.FailedPreconditionError, match="joined"):
                call()
    hvd.join()


def test_elastic_state() -> None:
    """Changes after a commit are undone by restore, and sync gives all ranks rank 0's values."""
    variables = [tf.Variable([RANK + 1.0] * 3), tf.Variable(RANK)]
    state = hvd.elastic.TensorFlowState(variables, batch=20 + RANK, epoch=5)
    state.sync()
    assert [value(variable).tolist() for variable in variables] == [[1.0] * 3, 0]
    assert (state.batch, state.epoch) == (20, 5)
    variables[0].assign([7.0] * 3)
    state.batch = 21
    state.commit()
    variables[0].assign([9.0] * 3)
    state.batch = 22
    state.restore()
    assert value(variables[0]).tolist() == [7.0] * 3
    assert state.batch == 21


@pytest.mark.parametrize("lengths", ["equal", "uneven"])
def test_sync_batch_norm(way: Any, lengths: str) -> None:
    """Outputs, moving statistics and gradients equal those of a plain layer with all ranks' inputs."""
    rows = [3 if lengths == "equal" else rank + 2 for rank in range(SIZE)]
    random = np.random.default_rng(5)
    inputs = random.normal(2.0, 3.0, (sum(rows), 6, 4)).astype(np.float32)
    incoming = random.normal(size=inputs.shape).astype(np.float32)
    own = slice(sum(rows[:RANK]), sum(rows[: RANK + 1]))

    def train(layer: Any, given: Any, gradients: Any) -> Any:
        layer.build((None, 6, 4))

        def compute(x: Any, dy: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                outputs = layer(x, training=True)
            return outputs, *tape.gradient(outputs, [x, *layer.trainable_weights], output_gradients=dy)

        return [value(tensor) for tensor in way(compute, tf.constant(given), tf.constant(gradients))]

    sync, plain = hvd.SyncBatchNormalization(axis=-1), keras.layers.BatchNormalization(axis=-1)
    output, of_inputs, *of_weights = train(sync, inputs[own], incoming[own])
    whole, of_whole, *of_plain = train(plain, inputs, incoming)
    np.testing.assert_allclose(output, whole[own], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(of_inputs, of_whole[own], rtol=1e-3, atol=1e-4)
    for got, want in zip(of_weights, of_plain, strict=True):
        everywhere = hvd.allreduce(tf.constant(got), op=hvd.Sum)
        np.testing.assert_allclose(value(everywhere), want, rtol=1e-3, atol=1e-3)
    for got, want in ((sync.moving_mean, plain.moving_mean), (sync.moving_variance, plain.moving_variance)):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("average", [False, True], ids=["sum", "average"])
def test_local_aggregation(sparse: bool, average: bool) -> None:
    """Two passes are summed locally, exchanged in the second one, and applied only then."""
    with tf.Graph().as_default(), v1.Session() as session:
        weight = v1.get_variable("w", initializer=np.ones((6, 2)))
        chosen = tf.gather(weight, [RANK, 5]) if sparse else weight
        loss = tf.reduce_sum(chosen) * (RANK + 1)
        optimizer = hvd.DistributedOptimizer(
            v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2, sparse_as_dense=sparse,
            average_aggregated_gradients=average,
        )
        step = v1.train.get_or_create_global_step()
        train = optimizer.minimize(loss, global_step=step)
        session.run(v1.global_variables_initializer())
        gradient = np.zeros((6, 2))
        for rank in range(SIZE):
            rows = [rank, 5] if sparse else slice(None)
            gradient[rows] += (rank + 1) / SIZE * (1 if average else 2)
        for count in range(1, 5):
            session.run(train)
            np.testing.assert_allclose(session.run(weight), 1 - (count // 2) * gradient, rtol=1e-12)
            assert session.run(step) == count


@pytest.mark.parametrize("scale", [True, False], ids=["scaled", "unscaled"])
def test_partial_tape(way: Any, scale: bool) -> None:
    """Gradients of local layers stay local, divided by the number of ranks. Others are averaged."""
    layers = [keras.layers.Dense(2, kernel_initializer="ones") for _ in range(3)]
    for layer in layers:
        layer.build((None, 2))
    weights = [weight for layer in layers for weight in layer.trainable_weights]

    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layers[2](layers[1](layers[0](x))))
        tape = hvd.PartialDistributedGradientTape(
            tape, local_layers=[layers[0], layers[2]], scale_local_gradients=scale
        )
        return tape.gradient(loss, weights)

    got = [value(tensor) for tensor in way(compute, tf.fill([1, 2], RANK + 1.0))]
    assert len(got) == 6
    divisor = SIZE if scale else 1
    # Values of x are r = rank + 1. After one layer they are 2r, then 4r.
    want = [4 * (RANK + 1) / divisor, 4 / divisor, 2 * 2 * MEAN, 2, 4 * (RANK + 1) / divisor, 1 / divisor]
    for actual, wanted in zip(got, want, strict=True):
        np.testing.assert_allclose(actual, np.full(actual.shape, wanted), rtol=1e-6)
    for wrong in (3, "dense", [layers[0], weights[0]]):
        with pytest.raises(ValueError, match="Keras layers"):
            hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=wrong)


def test_a_model_with_a_layer_of_its_own_on_each_rank(way: Any) -> None:
    """The local layer's shape differs between ranks, while the shared weights stay equal."""
    keras.utils.set_random_seed(3)
    shared = keras.layers.Dense(4)
    shared.build((None, 3))
    own = keras.layers.Dense(3 if ODD else 5)
    own.build((None, 4))
    before = [value(weight) for weight in own.trainable_weights]
    weights = [*shared.trainable_weights, *own.trainable_weights]
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(weights)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(own(shared(x)) ** 2)
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=own)
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    data = tf.constant(np.random.default_rng(RANK).normal(size=(8, 3)), tf.float32)
    losses = [float(way(step, data)) for _ in range(3)]
    assert losses[-1] < losses[0]
    everywhere = hvd.allgather_object([value(weight).tolist() for weight in shared.trainable_weights])
    assert all(tensor == everywhere[0] for tensor in everywhere)
    assert not np.array_equal(before[0], value(own.trainable_weights[0]))


@pytest.mark.skipif(SIZE & (SIZE - 1) != 0, reason="Adasum needs 2, 4, 8, ... ranks")
def test_adasum(way: Any) -> None:
    """Each tensor is reduced separately: orthogonal ones add up, parallel ones average, others in between."""
    orthogonal = [tf.one_hot(RANK, SIZE, dtype=dtype) * 3 for dtype in (tf.float32, tf.float64)]
    parallel = [tf.ones(5, dtype) * 2 for dtype in (tf.float32, tf.float64)]
    random = [tf.constant(np.random.default_rng([RANK, i]).normal(size=7)) for i in range(4)]
    got = way(lambda x: [hvd.allreduce(item, op=hvd.Adasum) for item in x], [*orthogonal, *parallel, *random])
    for tensor in got[:2]:
        near(tensor, np.full(SIZE, 3, tensor.dtype.as_numpy_dtype))
    for tensor in got[2:4]:
        near(tensor, np.full(5, 2, tensor.dtype.as_numpy_dtype))
    for i, tensor in enumerate(got[4:]):
        level = [np.random.default_rng([rank, i]).normal(size=7) for rank in range(SIZE)]
        while len(level) > 1:
            level = [combined(*level[place : place + 2]) for place in range(0, len(level), 2)]
        np.testing.assert_allclose(value(tensor), level[0], rtol=1e-6)


def combined(a: Any, b: Any) -> Any:
    dot = a @ b
    return (1 - dot / (2 * (a @ a))) * a + (1 - dot / (2 * (b @ b))) * b


def test_functions_compiled_by_xla() -> None:
    """Tracing raises an error that says what to do. A function may contain parts compiled by XLA."""
    with pytest.raises(ValueError, match="jit_compile=False"):
        tf.function(lambda x: hvd.allreduce(x), jit_compile=True)(tf.ones(2))
    inner = tf.function(lambda x: 2 * x, jit_compile=True)
    around = tf.function(lambda x: hvd.allreduce(inner(x), op=hvd.Sum))
    assert value(around(tf.ones(2))).tolist() == [2 * SIZE] * 2
