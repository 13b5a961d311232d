"""What scripts for Keras 2 do with Horovod: fit, custom loops, callbacks, files, elastic states."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if os.environ.get("TF_USE_LEGACY_KERAS") != "1":
    pytest.skip("runs with TF_USE_LEGACY_KERAS=1", allow_module_level=True)
pytest.importorskip("tf_keras")

import tensorflow as tf
from sampled import sampled, sampled_rows
from script_jobs import check_shown_script
from steps import counting_steps

import horovod.keras as hvd_keras
import horovod.tensorflow as hvd_tensorflow
import horovod.tensorflow.keras as hvd
from ringdance.keras.library import variables_of

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
ROWS = 4
keras = tf.keras
pytestmark = pytest.mark.limit(300)


def kinds(test: Any) -> Any:
    """Try both kinds of optimizers. Each test runs with one of them per day."""
    cases = sampled(test.__name__, ["new", "legacy"], 1)
    return pytest.mark.parametrize("kind", cases)(test)


def sgd(kind: str = "new", **options: Any) -> Any:
    module = keras.optimizers if kind == "new" else keras.optimizers.legacy
    return module.SGD(0.05, momentum=0.9, **options)


def model(seed: int = 0) -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential([
        keras.layers.Dense(8, activation="tanh", input_shape=(6,)), keras.layers.Dense(1),
    ])


def data(ranks: list[int], steps: int) -> tuple[Any, Any]:
    """Return the batches of these ranks, joined per step."""
    rows = [
        np.random.default_rng([step, rank]).normal(size=(ROWS, 6)) for step in range(steps) for rank in ranks
    ]
    x = np.concatenate(rows).astype("float32")
    return x, np.sin(x.sum(axis=1, keepdims=True))


def fit(net: Any, ranks: list[int], steps: int = 4, passes: int = 1, **options: Any) -> Any:
    size = ROWS * len(ranks) * passes
    return net.fit(*data(ranks, steps), batch_size=size, shuffle=False, verbose=0, **options)


def far(one: Any, other: Any) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def same_on_all_ranks(net: Any) -> bool:
    weights = b"".join(weight.tobytes() for weight in net.get_weights())
    return len(set(hvd_tensorflow.allgather_object(weights))) == 1


def shared(path: Path) -> Path:
    """Return rank 0's directory on all ranks."""
    return Path(hvd_tensorflow.broadcast_object(str(path)))


@pytest.mark.parametrize(("kind", "passes"), sampled_rows("fit", [
    ("new", 1), ("legacy", 2), ("legacy", 1), ("new", 2),
], 1))
def test_fit_is_that_of_one_process_on_all_data(kind: str, passes: int) -> None:
    net, plain = model(), model()
    optimizer = hvd.DistributedOptimizer(
        sgd(kind, clipnorm=0.1), backward_passes_per_step=passes, average_aggregated_gradients=True
    )
    net.compile(optimizer, "mse")
    with counting_steps() as steps:
        fit(net, [RANK])
        assert steps() == 4 // passes
    plain.compile(sgd(kind, clipnorm=0.1), "mse")
    fit(plain, list(range(SIZE)), passes=passes)
    assert far(plain.get_weights(), model().get_weights()) > 1e-3
    assert far(net.get_weights(), plain.get_weights()) < 1e-6
    assert same_on_all_ranks(net)
    assert int(optimizer.iterations) == 4, "each pass counts"
    assert len(optimizer.variables()) == len(optimizer.variables)


@pytest.mark.parametrize(("kind", "compiled"), sampled_rows("reduced once", [
    ("new", True), ("legacy", False), ("legacy", True), ("new", False),
], 1))
def test_gradients_are_reduced_once(kind: str, compiled: bool) -> None:
    """compute_gradients reduces if called, otherwise apply_gradients. op=Sum would reveal two reductions."""
    optimizers = keras.optimizers if kind == "new" else keras.optimizers.legacy
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(1.0), op=hvd.Sum)
    weight, own = tf.Variable([0.0]), tf.Variable([0.0])
    optimizer.register_local_var(own)
    once = tf.function if compiled else lambda function: function

    def loss() -> Any:
        return tf.reduce_sum(weight + own) * (RANK + 1.0)

    @once
    def compute_and_apply() -> Any:
        pairs = optimizer._compute_gradients(loss, [weight, own])
        optimizer.apply_gradients(pairs)
        return pairs[0][0]

    @once
    def apply(skip: bool) -> None:
        with tf.GradientTape() as tape:
            value = loss()
        pairs = zip(tape.gradient(value, [weight, own]), [weight, own], strict=True)
        optimizer.apply_gradients(pairs, experimental_aggregate_gradients=not skip)

    total = sum(range(1, SIZE + 1))
    steps = [
        (compute_and_apply, total, (RANK + 1) / SIZE),
        (lambda: apply(False), total, (RANK + 1) / SIZE),
        (lambda: optimizer.minimize(loss, [weight, own]), total, (RANK + 1) / SIZE),
        (lambda: apply(True), RANK + 1, RANK + 1),
    ]
    for step, of_weight, of_own in steps:
        weight.assign([0.0])
        own.assign([0.0])
        step()
        assert [float(-weight[0]), float(-own[0])] == pytest.approx([of_weight, of_own])
    assert float(compute_and_apply()[0]) == total
    parts = tf.function(lambda: [pair[0] for pair in optimizer.compute_gradients(loss, [weight, own])])
    weight.assign([0.0])
    optimizer.apply_gradients(zip(parts(), [weight, own], strict=True))
    assert float(-weight[0]) == total, "computed in a program, applied outside"


@kinds
def test_passes_in_a_loop(kind: str) -> None:
    """A custom optimizer, embedding rows and an infinity: each update sums its own passes only."""
    base = keras.optimizers.Optimizer if kind == "new" else keras.optimizers.legacy.Optimizer

    class Adding(base):  # type: ignore[misc,valid-type]
        def __init__(self, name: str = "adding", **options: Any) -> None:
            super().__init__(name=name, **options)
            if kind == "new":
                self._learning_rate = self._build_learning_rate(0.1)

        def update_step(self, gradient: Any, variable: Any) -> None:
            variable.assign_add(gradient)

        def _resource_apply_dense(self, gradient: Any, variable: Any, apply_state: Any = None) -> Any:
            return variable.assign_add(gradient)

        def get_config(self) -> Any:
            return super().get_config()

    optimizer = hvd.DistributedOptimizer(Adding(), backward_passes_per_step=3, sparse_as_dense=True)
    table, scale = tf.Variable([[0.0], [0.0]]), tf.Variable(1.0)

    @tf.function
    def step(factor: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [0])) * factor * (RANK + 1.0) + 0.0 * scale
        optimizer.apply_gradients(optimizer._compute_gradients(loss, [table, scale], tape=tape))

    mean = (SIZE + 1) / 2
    for number in range(1, 8):
        step(tf.constant(float("inf") if number == 2 else 1.0))
        if number == 3:
            assert np.isinf(table.numpy()[0, 0])
            table.assign([[0.0], [0.0]])
        if number > 3:
            assert table.numpy().tolist() == [[pytest.approx(3 * mean * (number // 3 - 1))], [0.0]]
        assert int(optimizer._agg_helper.counter) == number % 3
        assert int(optimizer.iterations) == number
    again = type(optimizer).from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()
    assert again._agg_helper.counter is None


@kinds
def test_all_ranks_skip_a_step_with_an_infinity(kind: str) -> None:
    """compile() under mixed_float16 wraps the optimizer. A script may do so too, before or after us."""
    wrapped = keras.mixed_precision.LossScaleOptimizer(sgd(kind), initial_scale=64)
    assert hvd.DistributedOptimizer(wrapped) is wrapped
    wrapped.register_local_var(tf.Variable(0.0))
    for optimizer in (hvd.DistributedOptimizer(sgd(kind)), wrapped):
        keras.mixed_precision.set_global_policy("mixed_float16")
        try:
            net = model()
            net.compile(optimizer, "mse", run_eagerly=optimizer is wrapped)
        finally:
            keras.mixed_precision.set_global_policy("float32")
        scale = float(net.optimizer.loss_scale)
        x, y = data([RANK], 3)
        if RANK == SIZE - 1:
            x[ROWS, 0] = np.inf
        fit(net, [RANK], 1)
        before = net.get_weights()
        net.fit(x[ROWS : 2 * ROWS], y[ROWS : 2 * ROWS], batch_size=ROWS, verbose=0)
        assert far(net.get_weights(), before) == 0
        assert float(net.optimizer.loss_scale) == scale / 2
        net.fit(x[2 * ROWS :], y[2 * ROWS :], batch_size=ROWS, verbose=0)
        assert far(net.get_weights(), before) > 0
        assert same_on_all_ranks(net)


@kinds
def test_callbacks(kind: str, tmp_path: Path) -> None:
    net = model(RANK)
    own = net.layers[0].trainable_variables
    inputs = own[0].numpy()
    optimizer = hvd_keras.PartialDistributedOptimizer(sgd(kind), local_layers=net.layers[0])
    net.compile(optimizer, "mse")
    seen: list[float] = []
    lengths: dict[str, list[float]] = {"before": [], "after": []}

    class Length(keras.callbacks.Callback):
        """Records the norm of the velocities."""

        def __init__(self, when: str) -> None:
            super().__init__()
            self.when = when

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            results = [item.numpy().ravel() for item in variables_of(optimizer) if len(item.shape)]
            lengths[self.when].append(float(np.linalg.norm(np.concatenate([*results, [0.0]]))))

    class Trace(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if not seen:
                assert far([own[0].numpy()], [inputs]) == 0
                first = hvd_tensorflow.broadcast_object(net.layers[1].get_weights())
                assert far(net.layers[1].get_weights(), first) == 0
            seen.append(float(optimizer.lr))

    best = hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath=str(tmp_path / "best.h5"))
    history = fit(net, [RANK], 2, epochs=3, callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=own),
        hvd.callbacks.MetricAverageCallback(),
        Length("before"),
        hvd.callbacks.LearningRateWarmupCallback(0.05, warmup_epochs=1, steps_per_epoch=2),
        hvd.callbacks.LearningRateScheduleCallback(0.05, 0.5, start_epoch=2), Length("after"), Trace(), best,
    ]).history
    rates = [0.05 * (1 / SIZE * ((step + 1) / 2 * (SIZE - 1) + 1)) for step in range(2)] + [0.05] * 4
    assert seen == pytest.approx(rates)
    assert history["lr"] == pytest.approx([0.05] * 3)
    assert len(set(map(tuple, hvd_tensorflow.allgather_object(history["loss"])))) == 1
    assert (tmp_path / "best.h5").exists() == (RANK == 0)
    factors = [1, rates[1] / rates[0], 1, 1, 1, 1]
    expected = [length * factor for length, factor in zip(lengths["before"], factors, strict=True)]
    assert expected[1] > 0
    assert lengths["after"] == pytest.approx(expected)


@pytest.mark.parametrize(("kind", "name"), sampled_rows("saved", [
    ("new", "model.keras"), ("legacy", "model.h5"), ("new", "model"),
], 1))
def test_a_saved_model_goes_on(kind: str, name: str, tmp_path: Path) -> None:
    """Loaded with Ringdance, it trains as if never saved. Loaded without, it has the plain optimizer."""
    path = shared(tmp_path) / name
    net = model()
    net.compile(hvd.DistributedOptimizer(sgd(kind)), "mse")
    fit(net, [RANK])
    if RANK == 0:
        net.save(path)
    hvd_tensorflow.broadcast_object(None)
    plain, loaded = keras.models.load_model(path), hvd.load_model(path, legacy_opts=kind == "legacy")
    assert type(plain.optimizer) is type(sgd(kind))
    assert isinstance(loaded.optimizer, type(sgd(kind)))
    for network in (net, loaded):
        fit(network, [RANK])
    if path.suffix:  # Keras itself does not restore the optimizer of a SavedModel
        assert int(loaded.optimizer.iterations) == 8
        assert far(loaded.get_weights(), net.get_weights()) < 1e-6
    assert same_on_all_ranks(loaded)


@kinds
def test_layers_built_in_the_first_step_are_broadcast(kind: str) -> None:
    class Lazy(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.early, self.late = keras.layers.Dense(4), keras.layers.Dense(1)

        def call(self, inputs: Any) -> Any:
            return self.late(self.early(inputs))

    keras.utils.set_random_seed(RANK)
    net = Lazy()
    net.early.build((None, 6))
    net.built = True
    net.compile(hvd.DistributedOptimizer(sgd(kind)), "mse")
    fit(net, [RANK], 3, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert len(net.get_weights()) == 4
    assert same_on_all_ranks(net)


@kinds
def test_passes_of_a_gradient_whose_rows_are_not_known_in_the_program(kind: str) -> None:
    module = keras.optimizers if kind == "new" else keras.optimizers.legacy
    optimizer = hvd.DistributedOptimizer(module.SGD(1.0), backward_passes_per_step=2)
    variable = tf.Variable(tf.zeros((4, 1)))

    @tf.function(input_signature=[tf.TensorSpec((None, 1))])
    def step(gradient: Any) -> None:
        optimizer.apply_gradients([(gradient, variable)])

    step(tf.fill((4, 1), RANK + 1.0))
    step(tf.fill((4, 1), RANK + 1.0))
    np.testing.assert_allclose(variable, np.full((4, 1), -(SIZE + 1.0)))


def test_warm_up_with_several_steps_in_an_execution() -> None:
    net = model()
    net.compile(hvd.DistributedOptimizer(sgd()), "mse", steps_per_execution=4)
    warm_up = hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2)
    fit(net, [RANK], 4, epochs=2, callbacks=[warm_up])
    assert float(net.optimizer.learning_rate) == pytest.approx(0.1)


def test_a_loaded_optimizer_reduces_as_the_saved_one(tmp_path: Path) -> None:
    net = model()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.01), op=hvd.Sum, backward_passes_per_step=2, scale_local_gradients=False,
    )
    net.compile(optimizer, "mse")
    fit(net, [RANK], 2)
    path = shared(tmp_path) / "model.keras"
    if RANK == 0:
        net.save(path)
    hvd_tensorflow.broadcast_object(None)
    loaded = hvd.load_model(path)
    loaded.set_weights(net.get_weights())
    for network in (net, loaded):
        fit(network, [RANK])
    assert far(loaded.get_weights(), net.get_weights()) < 1e-6


@kinds
def test_elastic_state(kind: str) -> None:
    net, optimizer = model(RANK), hvd.DistributedOptimizer(sgd(kind), backward_passes_per_step=2)
    net.compile(optimizer, "mse", run_eagerly=True)
    state = hvd.elastic.KerasState(net, batch=RANK, epoch=10 + RANK)
    state.sync()
    assert same_on_all_ranks(net)
    assert (state.batch, state.epoch) == (0, 10)
    before = net.get_weights()
    callbacks = [hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.UpdateEpochStateCallback(state)]
    fit(net, [RANK], 3, callbacks=callbacks)
    assert (state.batch, state.epoch, int(optimizer._agg_helper.counter)) == (0, 11, 1)
    assert far(net.get_weights(), before) > 0
    state.restore()
    assert far(net.get_weights(), before) == 0
    assert (state.epoch, int(optimizer.iterations), int(optimizer._agg_helper.counter)) == (10, 0, 0)
    fit(net, [RANK], 3, callbacks=[*callbacks, hvd.elastic.CommitStateCallback(state)])
    after = net.get_weights()
    net.set_weights(before)
    state.restore()
    assert far(net.get_weights(), after) == 0
    assert int(optimizer.iterations) == 3
    assert same_on_all_ranks(net)


def test_a_restore_clears_the_sums_of_an_optimizer_in_another() -> None:
    net, optimizer = model(), hvd.DistributedOptimizer(sgd("new"), backward_passes_per_step=2)
    net.compile(keras.mixed_precision.LossScaleOptimizer(optimizer), "mse", run_eagerly=True)
    state = hvd.elastic.KerasState(net)
    fit(net, [RANK], 1)
    assert int(optimizer._agg_helper.counter) == 1
    state.restore()
    assert int(optimizer._agg_helper.counter) == 0


@pytest.mark.ranks(2)
def test_the_page(tmp_path: Path) -> None:
    command = "TF_CPP_MIN_LOG_LEVEL=3 TF_USE_LEGACY_KERAS=1 ringdance run -np 2 python keras2.py"
    check_shown_script("docs/coming-from-horovod.md", command, tmp_path, RANK)


def test_batch_normalization_over_all_ranks() -> None:
    inputs = [np.random.default_rng(rank).normal(size=(3 + rank, 2, 2, 3)) for rank in range(SIZE)]
    synced, plain = hvd_tensorflow.SyncBatchNormalization(), keras.layers.BatchNormalization(fused=False)
    result = synced(inputs[RANK].astype("float32"), training=True)
    wanted = plain(np.concatenate(inputs).astype("float32"), training=True)
    start = sum(len(value) for value in inputs[:RANK])
    np.testing.assert_allclose(result, wanted[start : start + len(inputs[RANK])], atol=1e-5)
    np.testing.assert_allclose(synced.moving_variance, plain.moving_variance, atol=1e-6)


def test_verbs_and_what_does_not_fit() -> None:
    assert hvd_tensorflow._executing_eagerly() is True
    assert float(hvd.allreduce(RANK + 1.0, compression=hvd.Compression.fp16)) == (SIZE + 1) / 2
    assert hvd.broadcast(np.array([RANK]), 1).numpy().tolist() == [1]

    class SGD:
        """As in Keras 3: not an optimizer of Keras 2."""

        __module__ = "keras.src.optimizers.sgd"

    with pytest.raises(ValueError, match=r"optimizer of Keras 2, tf_keras.*Unset TF_USE_LEGACY_KERAS"):
        hvd.DistributedOptimizer(SGD())
