"""What Horovod's Keras tests check, on any backend, and the module's own names on TensorFlow."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from nets import ROWS, alone, by_rank_zero, data, far, fit, model, number, same_on_all_ranks

BACKEND = keras.backend.backend()
hvd = importlib.import_module("horovod.tensorflow.keras" if BACKEND == "tensorflow" else "ringdance.keras")

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
ALL = list(range(SIZE))


def sgd(**options: Any) -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9, **options)


class Trace(keras.callbacks.Callback):
    """Records the learning rate and one velocity at the start of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, Any]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        made = getattr(optimizer, "momentums", None)  # TensorFlow and PyTorch create them in the first step
        velocity = np.array(keras.ops.convert_to_numpy(made[0].value)) if made else np.zeros(1)
        self.seen.append((number(optimizer.learning_rate), velocity))


@pytest.mark.every_backend
def test_schedule_over_batches() -> None:
    """When the learning rate changes, the velocity is multiplied by new / old, also in a compiled step."""
    before, after, net = Trace(), Trace(), model()
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.05, lambda epoch: 0.5**epoch, start_epoch=1)
    net.compile(hvd.DistributedOptimizer(sgd()), "mse")
    callbacks = [before, schedule, after]
    history = net.fit(*data([RANK], 3), batch_size=ROWS, epochs=4, verbose=0, callbacks=callbacks)
    rates = [rate for rate, _ in after.seen]
    assert rates == pytest.approx([0.05] * 3 + [0.025] * 3 + [0.0125] * 3 + [0.00625] * 3)
    factors = [1.0] * 3 + [0.5, 1.0, 1.0] * 3
    for step, factor in enumerate(factors):
        np.testing.assert_allclose(after.seen[step][1], factor * before.seen[step][1], rtol=1e-6)
    assert np.abs(before.seen[3][1]).max() > 0
    assert history.history["lr"] == pytest.approx([0.05, 0.025, 0.0125, 0.00625])


def embedding_model() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([
        keras.Input((3,), dtype="int32"), keras.layers.Embedding(50, 4), keras.layers.Flatten(),
        keras.layers.Dense(1),
    ])


def words(ranks: list[int], steps: int = 8) -> tuple[Any, Any]:
    """Return words: all ranks touch some rows, one rank touches others (some twice), most are unused."""
    everything = [
        np.random.default_rng([step, rank]).integers(rank, rank + 6, (ROWS, 3))
        for step in range(steps) for rank in ranks
    ]
    x = np.concatenate(everything).astype("int32")
    return x, x.sum(axis=1, keepdims=True).astype("float32") / 10


def embedded(optimizer: Any, ranks: list[int]) -> Any:
    net = embedding_model()
    net.compile(optimizer, "mse")
    net.fit(*words(ranks), batch_size=ROWS * len(ranks), shuffle=False, verbose=0)
    return net.get_weights()


@pytest.mark.parametrize(("as_dense", "passes"), [
    (True, 1), (True, 2), pytest.param(False, 1, marks=pytest.mark.every_backend), (False, 2),
])
def test_sparse_gradients(as_dense: bool, passes: int) -> None:
    if BACKEND == "tensorflow":
        import tensorflow as tf

        net = embedding_model()
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(net(words([RANK], 1)[0]))
        assert isinstance(tape.gradient(loss, net.trainable_variables)[0], tf.IndexedSlices)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.05), sparse_as_dense=as_dense, backward_passes_per_step=passes,
        average_aggregated_gradients=True,
    )
    result = embedded(optimizer, [RANK])
    assert same_on_all_ranks(result)
    steps = passes if passes > 1 else None
    plain = keras.optimizers.SGD(0.05, gradient_accumulation_steps=steps)
    expected = by_rank_zero(lambda: embedded(plain, ALL))
    assert far(expected[:1], embedding_model().get_weights()[:1]) > 1e-3
    assert far(result, expected) < 1e-6


def variables(count: int = 2) -> list[Any]:
    return [keras.Variable(np.zeros(3, "float32")) for _ in range(count)]


def filled(*values: float) -> list[Any]:
    return [keras.ops.full((3,), value, "float32") for value in values]


def test_aggregation_of_infinite_gradients() -> None:
    """The sums over the passes are reset after each update: an infinity does not persist."""
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), backward_passes_per_step=2, average_aggregated_gradients=True
    )
    first, other = variables()
    infinite = np.inf if RANK == SIZE - 1 else 1.0
    for gradients in ((infinite, 1.0), (1.0, np.nan)):
        optimizer.apply(filled(*gradients), [first, other])
    assert not np.isfinite(number(first.value[0]))
    assert not np.isfinite(number(other.value[0]))
    for variable in (first, other):
        variable.assign(np.zeros(3))
    for _ in range(2):
        optimizer.apply(filled(1.0 + RANK, 3.0), [first, other])
    assert [number(first.value[0]), number(other.value[0])] == [-(SIZE + 1) / 2, -3.0]
    assert number(optimizer.iterations) == 2, "Keras 3 counts updates, not passes"


@pytest.mark.parametrize(("average", "local"), [
    (False, "none"), pytest.param(False, "scaled", marks=pytest.mark.every_backend), (False, "unscaled"),
    (True, "none"), (True, "scaled"), (True, "unscaled"),
])
def test_aggregation(average: bool, local: str) -> None:
    """Variables have the right values after each pass, with and without variables that stay local."""
    passes, variable, own = 3, *variables()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), backward_passes_per_step=passes, average_aggregated_gradients=average,
        scale_local_gradients=local != "unscaled",
    )
    if local != "none":
        optimizer.register_local_var(own)
    expected, expected_own = 0.0, 0.0
    for step in range(2):
        for number_of_pass in range(passes):
            assert number(variable.value[0]) == pytest.approx(expected)
            assert number(own.value[0]) == pytest.approx(expected_own)
            gradient = (RANK + 1.0) * (step + 1) * (number_of_pass + 1)
            optimizer.apply(filled(gradient, gradient), [variable, own])
        total = (step + 1) * 6 / (passes if average else 1)
        mean, alone_here = total * (SIZE + 1) / 2, total * (RANK + 1)
        expected -= mean
        expected_own -= {"none": mean, "scaled": alone_here / SIZE, "unscaled": alone_here}[local]
    assert number(variable.value[0]) == pytest.approx(expected)
    assert number(own.value[0]) == pytest.approx(expected_own)
    assert number(optimizer.iterations) == 2


def test_from_config() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.02, beta_1=0.8, amsgrad=True))
    again = type(optimizer).from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()
    assert type(again).__name__ == "Adam"
    variable = variables(1)
    again.apply(filled(RANK * 1.0), variable)
    assert same_on_all_ranks([keras.ops.convert_to_numpy(variable[0].value)])
    assert list(optimizer.variables) == list(optimizer.variables())


def test_state_is_committed_restored_and_synchronized() -> None:
    net = model(RANK)
    net.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    state = hvd.elastic.KerasState(net, batch=20 + RANK, epoch=10 + RANK)
    state.sync()
    assert same_on_all_ranks(net.get_weights())
    assert far(net.get_weights(), model(0).get_weights()) == 0
    assert (state.batch, state.epoch) == (20, 10)

    def everything() -> list[Any]:
        results = [*net.variables, *net.optimizer.variables]
        return [keras.ops.convert_to_numpy(array.value) for array in results]

    def spoil() -> None:
        for variable in [*net.variables, *net.optimizer.variables]:
            variable.assign(variable.value + 1)
        state.batch, state.epoch = 21 + RANK, 11 + RANK

    before = everything()
    spoil()
    state.restore()
    assert far(everything(), before) == 0
    assert (state.batch, state.epoch) == (20, 10)
    spoil()
    state.commit()
    after = everything()
    assert far(after, before) == 1
    spoil()
    state.restore()
    assert far(everything(), after) == 0
    assert (state.batch, state.epoch) == (21 + RANK, 11 + RANK)


def test_a_set_of_ranks_averages_for_itself() -> None:
    even = hvd.add_process_set(range(0, SIZE, 2))
    odd = hvd.add_process_set(range(1, SIZE, 2))
    try:
        mine = even if even.included() else odd
        result = fit(hvd.DistributedOptimizer(sgd(), process_set=mine), [RANK]).get_weights()
        assert far(result, fit(sgd(), list(mine.ranks)).get_weights()) < 1e-6
        assert (far(result, hvd.broadcast_object(result)) == 0) == even.included()
    finally:
        hvd.remove_process_set(odd)
        hvd.remove_process_set(even)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return one directory for all ranks."""
    return Path(by_rank_zero(lambda: str(tmp_path)))


def test_load_a_model_with_objects_of_ones_own(directory: Path) -> None:
    def closeness(expected: Any, predicted: Any) -> Any:
        return keras.ops.mean((expected - predicted) ** 2)

    net = model()
    net.compile(hvd.DistributedOptimizer(sgd()), closeness)
    net.fit(*data([RANK], 2), batch_size=ROWS, verbose=0)
    if RANK == 0:
        net.save(directory / "model.keras")
    hvd.broadcast_object(None)
    loaded = hvd.load_model(directory / "model.keras", custom_objects={"closeness": closeness})
    x, y = data([RANK], 4)
    assert loaded.evaluate(x, y, verbose=0) == pytest.approx(net.evaluate(x, y, verbose=0))
    loaded.fit(x, y, batch_size=ROWS, verbose=0)
    assert same_on_all_ranks(loaded.get_weights())


def test_rank_zero_loads_and_the_others_are_given_it(directory: Path) -> None:
    """If only rank 0 sees a checkpoint, its weights, slots and iterations reach the other ranks."""
    before = fit(hvd.DistributedOptimizer(sgd()), [RANK])
    if RANK == 0:
        before.save(directory / "model.keras")
        net = hvd.load_model(directory / "model.keras")
    else:
        net = model(RANK)
        net.compile(hvd.DistributedOptimizer(sgd()), "mse")
    x, y = data([RANK], 4)
    more = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    net.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0, callbacks=more)
    before.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    assert same_on_all_ranks(net.get_weights())
    assert far(net.get_weights(), before.get_weights()) < 1e-6
    assert number(net.optimizer.iterations) == number(before.optimizer.iterations)


def test_an_optimizer_that_one_rank_has_more(directory: Path) -> None:
    """Names are assigned on first use, so a model that only rank 0 loads does not disturb the others."""
    if RANK == 0:
        net = model()
        net.compile(sgd(), "mse")
        net.save(directory / "model.keras")
        hvd.load_model(directory / "model.keras")
    assert far(fit(hvd.DistributedOptimizer(sgd()), [RANK]).get_weights(), alone(sgd(), ALL)) < 1e-6


def test_keras_of_tensorflow_2_is_told_apart() -> None:
    class Adam:
        """As in tf_keras: not an optimizer of Keras 3."""

        __module__ = "tf_keras.src.optimizers.adam"

    with pytest.raises(ValueError, match=r"optimizer of Keras 3, keras.optimizers.*Adam. Set TF_USE_LEGACY"):
        hvd.DistributedOptimizer(Adam())
