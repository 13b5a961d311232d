"""Callbacks, saving and loading, and the functions on values."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from nets import (
    FEW_STEPS,
    ROWS,
    STEPS,
    alone,
    data,
    far,
    fit,
    model,
    number,
    same_on_all_ranks,
)

import ringdance.keras as hvd
from ringdance.errors import ArgumentError, CollectiveError, MismatchError
from ringdance.keras import _private
from ringdance.keras.library import read

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
ALL = list(range(SIZE))
callbacks = hvd.callbacks


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one directory for all ranks."""
    return Path(hvd.broadcast_object(str(tmp_path_factory.mktemp("shared"))))


class Spy(keras.callbacks.Callback):
    """Records the learning rate in each batch and the logs of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []
        self.logs: list[dict[str, float]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.rates.append(number(self.model.optimizer.learning_rate))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.logs.append(dict(logs))


def sgd() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def test_ranks_that_begin_differently_train_as_rank_zero() -> None:
    result = fit(
        hvd.DistributedOptimizer(sgd()), [RANK], seed=RANK + 1,
        callbacks=[callbacks.BroadcastGlobalVariablesCallback(0)],
    ).get_weights()
    assert same_on_all_ranks(result)
    assert far(result, alone(sgd(), ALL, seed=1)) < 1e-6


class Lazy(keras.Model):
    """A model that is built although one layer has no variables before the first step."""

    def __init__(self, trainable: bool) -> None:
        super().__init__()
        self.early, self.late = keras.layers.Dense(4), keras.layers.Dense(4, trainable=trainable)
        self.out = keras.layers.Dense(1)

    def build(self, shape: Any) -> None:
        self.early.build(shape)
        self.built = True

    def call(self, inputs: Any) -> Any:
        return self.out(self.late(self.early(inputs)))


@pytest.mark.every_backend
@pytest.mark.parametrize("trainable", [True, False])
def test_layers_built_in_the_first_step_are_broadcast(trainable: bool) -> None:
    keras.utils.set_random_seed(RANK)
    net = Lazy(trainable)
    net.build((None, 8))
    net.compile(hvd.DistributedOptimizer(sgd()), "mse", **FEW_STEPS)
    net.fit(
        *data([RANK], 3), batch_size=ROWS, verbose=0,
        callbacks=[callbacks.BroadcastGlobalVariablesCallback(0)],
    )
    assert len(net.get_weights()) == 6
    assert same_on_all_ranks(net.get_weights())


class TwoOptimizers(keras.Model):
    """Like a GAN: each half has its own optimizer, held as an attribute. A step updates both halves."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = [keras.layers.Dense(4, name="first"), keras.layers.Dense(1, name="second")]
        self.optimizers = {
            name: hvd.DistributedOptimizer(keras.optimizers.Adam(0.1), name=name) for name in ("one", "two")
        }

    def call(self, inputs: Any) -> Any:
        return self.halves[1](self.halves[0](inputs))

    def train_on(self) -> None:
        for half, optimizer in zip(self.halves, self.optimizers.values(), strict=True):
            gradients = [keras.ops.ones(v.shape) * (RANK + 1.0) for v in half.trainable_variables]
            optimizer.apply(gradients, half.trainable_variables)


def test_optimizers_held_as_attributes_are_broadcast() -> None:
    """Only rank 0 has momentum, as from a file. After the first step all ranks must have it."""
    keras.utils.set_random_seed(RANK)
    net = TwoOptimizers()
    net(np.ones((1, 8), "float32"))
    if RANK == 0:
        for half, optimizer in zip(net.halves, net.optimizers.values(), strict=True):
            optimizer.build(half.trainable_variables)
            for variable in optimizer.variables[2:]:
                variable.assign(keras.ops.ones(variable.shape))
    broadcast = callbacks.BroadcastGlobalVariablesCallback(0)
    broadcast.set_model(net)
    broadcast.on_train_begin()
    assert same_on_all_ranks(net.get_weights())
    for batch in range(3):
        broadcast.on_train_batch_begin(batch)
        net.train_on()
    slots = [values for array in net.optimizers.values() for values in map(read, array.variables)]
    assert len(slots) == 2 * (2 + 2 * 2)
    assert same_on_all_ranks(slots)
    assert same_on_all_ranks(net.get_weights())
    assert hvd.elastic.KerasState(net)._read()[-1].shape == slots[-1].shape


def test_optimizers_built_after_the_state_go_back_to_their_beginning() -> None:
    net = TwoOptimizers()
    net(np.ones((1, 8), "float32"))
    state = hvd.elastic.KerasState(net, epoch=1)
    before = [read(weight) for weight in net.weights]
    net.train_on()
    state.restore()
    assert far([read(weight) for weight in net.weights], before) == 0
    slots = [read(variable) for each in net.optimizers.values() for variable in each.variables[2:]]
    assert len(slots) == 2 * 2 * 2
    assert not any(slot.any() for slot in slots)
    state.commit()
    net.train_on()
    state.restore()
    assert not read(net.optimizers["two"].variables[-1]).any()


def test_local_variables_are_not_broadcast() -> None:
    net = model(RANK + 1)
    net.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse")
    before = net.get_weights()
    broadcast = callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[net.trainable_variables[0]])
    broadcast.register_local_var(net.trainable_variables[2])
    net.fit(*data([RANK], 2), batch_size=ROWS, verbose=0, callbacks=[broadcast])
    after = net.get_weights()
    assert far(before[:1] + before[2:3], after[:1] + after[2:3]) == 0
    hvd.broadcast_variables(net.variables, root_rank=SIZE - 1)
    assert same_on_all_ranks(net.get_weights())
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)


@pytest.mark.every_backend
def test_metrics_are_averaged() -> None:
    average, spy, before = callbacks.MetricAverageCallback(), Spy(), Spy()
    net = model()
    net.compile(hvd.DistributedOptimizer(sgd()), "mse", metrics=["mae"])
    net.fit(*data([RANK]), batch_size=ROWS, verbose=0, callbacks=[before, average, spy])
    local = hvd.allgather_object(before.logs[0])
    for name in ("loss", "mae"):
        assert spy.logs[0][name] == pytest.approx(sum(entry[name] for entry in local) / SIZE)
    assert net.history.history["loss"] == [spy.logs[0]["loss"]]
    if SIZE > 1:
        with pytest.raises(MismatchError, match=r"rank 1 .* has \['a', 'b'\]"):
            average.on_epoch_end(0, {"a": 1.0} if RANK != 1 else {"a": 1.0, "b": 2.0})


def rates(
    *more: Any, epochs: int = 3, steps: int = 4, **compiled: Any
) -> tuple[list[float], list[dict[str, float]]]:
    spy, net = Spy(), model()
    net.compile(hvd.DistributedOptimizer(sgd()), "mse", **(compiled or FEW_STEPS))
    net.fit(*data([RANK], steps), batch_size=ROWS, epochs=epochs, verbose=0, callbacks=[*more, spy])
    return spy.rates, spy.logs


def test_warm_up() -> None:
    result, logs = rates(callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2))
    progress = [min((batch + 1) / 4 / 2, 1.0) for batch in range(12)]
    assert result == pytest.approx([0.1 / SIZE * (item * (SIZE - 1) + 1) for item in progress], rel=1e-5)
    assert [log["lr"] for log in logs] == pytest.approx([0.1 / SIZE * ((SIZE - 1) / 2 + 1), 0.1, 0.1])


@pytest.mark.every_backend
@pytest.mark.parametrize("together", [3, 4])
@pytest.mark.skipif(keras.backend.backend() == "torch", reason="torch makes one step per execution")
def test_warm_up_with_several_steps_in_an_execution(together: int) -> None:
    warm_up = callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2)
    result, logs = rates(warm_up, steps_per_execution=together)
    firsts = [epoch * 4 + batch for epoch in range(3) for batch in range(0, 4, together)]
    progress = [min((step + 1) / 4 / 2, 1.0) for step in firsts]
    assert result == pytest.approx([0.1 / SIZE * (item * (SIZE - 1) + 1) for item in progress], rel=1e-5)
    assert [log["lr"] for log in logs][1:] == pytest.approx([0.1, 0.1])


def test_schedules() -> None:
    make = callbacks.LearningRateScheduleCallback
    result, _ = rates(make(0.1, 0.5, start_epoch=1))
    assert result == pytest.approx([0.05] * 4 + [0.1] * 4 + [0.05] * 4)
    result, _ = rates(make(0.1, lambda epoch: epoch + 1, end_epoch=2))
    assert result == pytest.approx([0.1] * 4 + [0.2] * 8)
    result, _ = rates(make(0.1, lambda epoch: epoch, staircase=False, steps_per_epoch=4), epochs=1)
    assert result == pytest.approx([0.0, 0.025, 0.05, 0.075])
    with pytest.raises(ArgumentError, match="initial_lr"):
        make(None, 0.5)


def test_best_model_is_written_by_rank_zero(tmp_path: Path) -> None:
    best = callbacks.BestModelCheckpoint(monitor="loss", filepath=str(tmp_path / "best.keras"))
    both = [callbacks.MetricAverageCallback(), best]
    fit(hvd.DistributedOptimizer(sgd()), [RANK], callbacks=both, epochs=2)
    assert [path.name for path in tmp_path.iterdir()] == (["best.keras"] if RANK == 0 else [])
    nowhere = callbacks.BestModelCheckpoint(monitor="loss")
    with pytest.raises(ArgumentError, match="filepath"):
        nowhere.on_epoch_end(0, {"loss": 1.0})


def test_what_writes_is_for_rank_zero(shared: Path) -> None:
    """Files come from rank 0 only, while callbacks that change training act equally on all ranks."""
    log, kept = shared / "log.csv", shared / "kept.keras"
    net = model(RANK)
    net.compile(hvd.DistributedOptimizer(sgd()), "mse", **FEW_STEPS)
    more = [
        callbacks.BroadcastGlobalVariablesCallback(0), callbacks.MetricAverageCallback(),
        keras.callbacks.EarlyStopping("loss", min_delta=1e9),
    ]
    if RANK == 0:
        more += [keras.callbacks.CSVLogger(log), keras.callbacks.ModelCheckpoint(kept)]
    history = net.fit(*data([RANK], 4), batch_size=ROWS, epochs=3, verbose=0, callbacks=more)
    assert len(history.epoch) == 2, "all ranks stop after the same epoch"
    hvd.broadcast_object(None)
    assert log.read_text().splitlines()[1].split(",")[:2] == ["0", str(history.history["loss"][0])]
    assert far(keras.models.load_model(kept).get_weights(), net.get_weights()) == 0


@keras.saving.register_keras_serializable("tests")
class Custom(keras.optimizers.SGD):
    """A user-defined optimizer."""


def test_save_and_load(shared: Path) -> None:
    """The saved file holds a plain model. Once loaded, training continues as if it had never been saved."""
    path = shared / "model.keras"
    net = fit(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), [RANK])
    if RANK == 0:
        net.save(path)
    hvd.broadcast_object(None)
    saved = json.loads(zipfile.ZipFile(path).read("config.json"))["compile_config"]["optimizer"]
    assert (saved["module"], saved["class_name"]) == ("keras.optimizers", "Adam")
    loaded = hvd.load_model(path)
    assert type(loaded.optimizer).__name__ == "Adam"
    assert number(loaded.optimizer.iterations) == STEPS
    x, y = data([RANK])
    net.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    loaded.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    assert same_on_all_ranks(loaded.get_weights())
    assert far(loaded.get_weights(), net.get_weights()) < 1e-6
    plain = keras.models.load_model(path)
    assert not hasattr(plain.optimizer, "_reduction")
    config = net.optimizer.get_config()
    assert type(net.optimizer).from_config(config).get_config() == config


@pytest.mark.every_backend
def test_a_loaded_optimizer_reduces_as_the_saved_one(shared: Path) -> None:
    """A loaded optimizer sums over two passes and over the ranks, like the saved one."""
    path, net = shared / "options.keras", model()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.01), op=hvd.Sum, backward_passes_per_step=2, scale_local_gradients=False,
    )
    net.compile(optimizer, "mse")
    x, y = data([RANK], 4)
    net.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    if RANK == 0:
        net.save(path)
    hvd.broadcast_object(None)
    loaded = hvd.load_model(path)
    loaded.set_weights(net.get_weights())
    for network in (net, loaded):
        network.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    assert far(loaded.get_weights(), net.get_weights()) < 1e-6
    again = shared / f"again-{RANK}.keras"
    loaded.save(again)
    assert hvd.load_model(again).optimizer._options == optimizer._options


class WithAnother(keras.Model):
    """Holds its own optimizer, in addition to the one passed to compile()."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.dense = keras.layers.Dense(1)
        self.another = hvd.DistributedOptimizer(sgd(), "another", op=hvd.Sum)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)


def test_the_options_of_another_optimizer_are_not_taken(tmp_path: Path) -> None:
    net = WithAnother()
    net.compile(sgd(), "mse")
    net.fit(*data([RANK], 1), verbose=0)
    net.save(tmp_path / "model.keras")
    loaded = hvd.load_model(tmp_path / "model.keras", custom_objects={"WithAnother": WithAnother})
    assert loaded.optimizer._options["op"] == hvd.Average


class OwnFile(keras.optimizers.SGD):
    """An optimizer that saves its own file."""

    def save_assets(self, directory: str) -> None:
        Path(directory, "own.txt").write_text("own")


@pytest.mark.every_backend
def test_what_is_saved_beside_the_options(tmp_path: Path) -> None:
    net, path = model(), tmp_path / "model.keras"
    optimizer = hvd.DistributedOptimizer(OwnFile(0.1), gradient_predivide_factor=np.float32(2))
    net.compile(optimizer, "mse")
    optimizer.build(net.trainable_variables)
    net.save(path)
    with zipfile.ZipFile(path) as archive:
        assert "assets/optimizer/own.txt" in archive.namelist()
    loaded = hvd.load_model(path, custom_optimizers=[OwnFile])
    assert loaded.optimizer._options["gradient_predivide_factor"] == 2.0


@pytest.mark.ranks(2, 3)
def test_local_layers_and_process_sets_are_refused(tmp_path: Path) -> None:
    """With default options, loading would silently reduce them over all ranks, so saving is refused."""
    nets, first = [model(), model()], hvd.add_process_set([0])
    local = hvd.PartialDistributedOptimizer(sgd(), local_layers=nets[0].layers[-1])
    for net, optimizer in zip(nets, (local, hvd.DistributedOptimizer(sgd(), process_set=first)), strict=True):
        net.compile(optimizer, "mse")
        net.save(tmp_path / "model.keras")
        with pytest.raises(ArgumentError, match="again with the same arguments"):
            hvd.load_model(tmp_path / "model.keras")
    hvd.remove_process_set(first)


def test_files_without_options_give_the_defaults_with_a_warning(tmp_path: Path) -> None:
    net = model()
    net.compile(hvd.DistributedOptimizer(sgd(), op=hvd.Sum), keras.losses.MeanSquaredError())
    net.optimizer.build(net.trainable_variables)
    net.save(tmp_path / "old.h5")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert hvd.load_model(tmp_path / "old.h5").optimizer._options["op"] == hvd.Average
    said = [str(item.message) for item in caught if "does not contain options" in str(item.message)]
    assert len(said) == (RANK == 0)


class WithLate(keras.Model):
    """Its local layer comes after its optimizer in name order."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.dense, self.output_layer = keras.layers.Dense(4), keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.output_layer(self.dense(inputs))


def test_local_layers_are_saved_where_plain_keras_looks(tmp_path: Path) -> None:
    net = WithLate()
    net.compile(hvd.PartialDistributedOptimizer(sgd(), local_layers=net.output_layer), "mse")
    net.fit(*data([RANK], 1), verbose=0)
    net.save(tmp_path / "model.keras")
    plain = keras.models.load_model(tmp_path / "model.keras", custom_objects={"WithLate": WithLate})
    assert far(plain.get_weights(), net.get_weights()) == 0


def test_a_file_is_loaded_without_us(shared: Path) -> None:
    path = shared / "without.keras"
    net = model()
    net.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    net.optimizer.build(net.trainable_variables)
    if RANK == 0:
        net.save(path)
        lines = (
            "import sys; sys.modules['ringdance'] = None; import keras\n"
            f"optimizer = keras.models.load_model({str(path)!r}).optimizer\n"
            "assert isinstance(optimizer, keras.optimizers.Adam), optimizer"
        )
        # The file does not depend on a backend. JAX imports fastest, and torch would load our backend.
        backend = "jax" if find_spec("jax") else keras.backend.backend()
        without = os.environ | {"KERAS_BACKEND": backend, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        subprocess.run([sys.executable, "-c", lines], check=True, timeout=200, env=without)


def test_custom_optimizers_and_loss_scaling_are_loaded(tmp_path: Path) -> None:
    for optimizer in (Custom(0.1), keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1))):
        net = model()
        net.compile(hvd.DistributedOptimizer(optimizer), "mse")
        net.optimizer.build(net.trainable_variables)
        net.save(tmp_path / "model.keras")
        loaded = hvd.load_model(tmp_path / "model.keras", custom_optimizers=[Custom])
        assert type(loaded.optimizer).__name__ == type(optimizer).__name__
        assert loaded.optimizer.get_config() == net.optimizer.get_config()


def test_values() -> None:
    total = SIZE * (SIZE - 1) / 2
    assert number(hvd.allreduce(float(RANK))) == pytest.approx(total / SIZE)
    assert number(hvd.allreduce(np.float32(RANK), op=hvd.Sum, name="sum")) == total
    with pytest.warns(DeprecationWarning, match="op="):
        assert number(hvd.allreduce(np.float32(RANK), average=False)) == total
    gathered = keras.ops.convert_to_numpy(hvd.allgather(np.full((RANK + 1, 2), RANK, "float32")))
    assert gathered.shape == (SIZE * (SIZE + 1) // 2, 2)
    assert number(hvd.broadcast(np.float32(RANK), SIZE - 1)) == SIZE - 1
    part = keras.ops.convert_to_numpy(hvd.reducescatter(np.ones((SIZE, 2), "float32"), op=hvd.Sum))
    assert part.tolist() == [[SIZE, SIZE]]


@pytest.mark.every_backend
def test_elastic_state() -> None:
    net = model(RANK + 1)
    net.compile(hvd.DistributedOptimizer(sgd()), "mse")
    state = hvd.elastic.KerasState(net, epoch=0, batch=0)
    more = [
        hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
    ]
    attempts = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        attempts.append(net.get_weights())
        net.fit(*data([RANK], 4), batch_size=ROWS, shuffle=False, verbose=0, callbacks=more)
        if len(attempts) == 1:
            for variable in net.variables:
                variable.assign(variable.value * 0.0)
            raise CollectiveError("as if a collective had failed")

    train(state)
    assert same_on_all_ranks(attempts[0])
    assert same_on_all_ranks(attempts[1])
    assert far(attempts[1], attempts[0]) > 1e-4, "it continues from the last commit"
    assert (state.epoch, state.batch) == (2, 0)
    with pytest.raises(ArgumentError, match="weights"):
        hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))


@pytest.mark.every_backend
@pytest.mark.parametrize("absolute", [True, False])
def test_every_epoch_is_trained_once_though_some_fail(absolute: bool) -> None:
    net = model()
    net.compile(hvd.DistributedOptimizer(sgd()), "mse", **FEW_STEPS)
    state = hvd.elastic.KerasState(net, epoch=0, batch=0)
    failures, done = [2, 3], []

    class Failing(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if failures and state.epoch == failures[0] and batch == 1:
                failures.pop(0)
                raise CollectiveError("planted")

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            done.append(state.epoch)

    more = [
        Failing(), hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=0),
    ]

    @hvd.elastic.run
    def train(state: Any) -> None:
        numbers = {"initial_epoch": state.epoch, "epochs": 4} if absolute else {"epochs": 4 - state.epoch}
        net.fit(*data([RANK], 2), batch_size=ROWS, verbose=0, callbacks=more, **numbers)

    train(state)
    assert not failures
    assert done == [0, 1, 2, 3]
    assert (state.epoch, state.batch, int(number(net.optimizer.iterations))) == (4, 0, 8)


def _halfway() -> Any:
    """Return a model after the first of two passes, with different gradients on each rank."""
    net = model(RANK)
    net.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2), "mse")
    net.optimizer.build(net.trainable_variables)
    _half_step(net)
    return net


def _half_step(net: Any) -> None:
    gradients = [keras.ops.ones(variable.shape) * (RANK + 1.0) for variable in net.trainable_variables]
    net.optimizer.apply(gradients, net.trainable_variables)


@pytest.mark.every_backend
@pytest.mark.parametrize("how", ["callback", "values", "tensorflow", "rank zero alone", "state"])
def test_sums_between_passes_stay_each_ranks_own(how: str) -> None:
    """The step must use all ranks' gradients of both passes."""
    net = _halfway()
    sums = _private.accumulators(net.optimizer)
    mean = (SIZE + 1) / 2
    wanted = 2 * mean
    variables = [*net.variables, *net.optimizer.variables]
    if how == "tensorflow":
        if keras.backend.backend() != "tensorflow":
            pytest.skip("only for TensorFlow")
        import ringdance.tensorflow as hvd_tensorflow

        hvd_tensorflow.broadcast_variables(variables, root_rank=0)
    elif how == "callback":
        broadcast = callbacks.BroadcastGlobalVariablesCallback(0)
        broadcast.set_model(net)
        broadcast.on_train_begin()
    elif how == "state":
        state = hvd.elastic.KerasState(net)
        _half_step(net)
        state.restore()
        state.sync()
    else:
        if how == "rank zero alone" and RANK:  # as if only rank 0 had loaded the checkpoint
            for total in sums:
                total.assign(keras.ops.zeros(total.shape))
        if how == "rank zero alone":
            wanted = 1 + mean
        hvd.broadcast_variables(variables, root_rank=0)
    before = read(net.trainable_variables[0])
    _half_step(net)
    assert far([before - read(net.trainable_variables[0])], [np.full_like(before, wanted)]) < 1e-5
    assert same_on_all_ranks(net.get_weights())


def test_a_restore_drops_gradients_on_torch() -> None:
    if keras.backend.backend() != "torch":
        pytest.skip("other backends do not keep gradients")
    net = model()
    state = hvd.elastic.KerasState(net)
    net(np.ones((1, 8), "float32")).sum().backward()
    assert net.trainable_variables[0].value.grad is not None
    state.restore()
    assert net.trainable_variables[0].value.grad is None


@pytest.mark.ranks(2, 3, 4)
def test_ranks_that_write_to_one_path_are_noticed(shared: Path) -> None:
    net = model()
    net.compile(hvd.DistributedOptimizer(sgd()), "mse", **FEW_STEPS)

    def train(epochs: int, *more: Any) -> None:
        every = [callbacks.BroadcastGlobalVariablesCallback(0), *more]
        net.fit(*data([RANK], 1), batch_size=ROWS, epochs=epochs, verbose=0, callbacks=every)

    log = shared / "noticed.csv"
    for name, several in (("noticed.csv", True), (f"{RANK}.csv", False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(1, keras.callbacks.CSVLogger(shared / name))
        said = [str(warning.message) for warning in caught if "CSVLogger" in str(warning.message)]
        assert len(said) == (several and RANK == 0)
        for text in said:
            assert f"CSVLogger writes to {log} on ranks {ALL} of " in text
            assert "if hvd.rank() == 0: callbacks.append(keras.callbacks.CSVLogger(...))" in text
    assert dict(callbacks._PATHS) == {  # named as in Keras
        name: attribute for name, attribute in callbacks._PATHS.items()
        if hasattr(getattr(keras.callbacks, name)("a.keras"), attribute)
    }
    with pytest.raises(ArgumentError, match=r"one.*\[0, 1.*its own directory.*backup-{hvd.rank"):
        train(1, keras.callbacks.BackupAndRestore(shared / "one"))


@pytest.mark.every_backend
def test_a_backup_for_each_rank_goes_on_where_it_was(tmp_path: Path) -> None:
    """Separate backup directories, which the error recommends, resume training."""
    begun: list[int] = []

    def train(until: int) -> Any:
        def stop(epoch: int, logs: Any = None) -> None:
            begun.append(epoch)
            if epoch == until:
                raise ValueError("planted")

        net = model(RANK)
        net.compile(hvd.DistributedOptimizer(sgd()), "mse", **FEW_STEPS)
        every = [
            callbacks.BroadcastGlobalVariablesCallback(0), keras.callbacks.BackupAndRestore(str(tmp_path)),
            keras.callbacks.LambdaCallback(on_epoch_begin=stop),
        ]
        net.fit(*data([RANK], 1), batch_size=ROWS, epochs=3, verbose=0, callbacks=every)
        return net

    with pytest.raises(ValueError, match="planted"):
        train(2)
    assert same_on_all_ranks(train(3).get_weights())
    assert begun == [0, 1, 2, 2]
