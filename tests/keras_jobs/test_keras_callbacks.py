"""Callbacks, saving and loading, and the functions on values."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from contextlib import redirect_stdout
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

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
ALL = list(range(SIZE))
callbacks = hvd.callbacks


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory for all ranks."""
    return Path(hvd.broadcast_object(str(tmp_path_factory.mktemp("shared"))))


class Spy(keras.callbacks.Callback):
    """Notes the learning rate in each batch and the logs of each epoch."""

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
    found = fit(
        hvd.DistributedOptimizer(sgd()), [RANK], seed=RANK + 1,
        callbacks=[callbacks.BroadcastGlobalVariablesCallback(0)],
    ).get_weights()
    assert same_on_all_ranks(found)
    assert far(found, alone(sgd(), ALL, seed=1)) < 1e-6


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
        assert spy.logs[0][name] == pytest.approx(sum(one[name] for one in local) / SIZE)
    assert net.history.history["loss"] == [spy.logs[0]["loss"]]
    if SIZE > 1:
        with pytest.raises(MismatchError, match=r"rank 1 .* has \['a', 'b'\]"):
            average.on_epoch_end(0, {"a": 1.0} if RANK != 1 else {"a": 1.0, "b": 2.0})


def rates(*more: Any, epochs: int = 3, steps: int = 4) -> tuple[list[float], list[dict[str, float]]]:
    spy, net = Spy(), model()
    net.compile(hvd.DistributedOptimizer(sgd()), "mse", **FEW_STEPS)
    net.fit(*data([RANK], steps), batch_size=ROWS, epochs=epochs, verbose=0, callbacks=[*more, spy])
    return spy.rates, spy.logs


def test_warm_up() -> None:
    found, logs = rates(callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2))
    progress = [min((batch + 1) / 4 / 2, 1.0) for batch in range(12)]
    assert found == pytest.approx([0.1 / SIZE * (one * (SIZE - 1) + 1) for one in progress], rel=1e-5)
    assert [one["lr"] for one in logs] == pytest.approx([0.1 / SIZE * ((SIZE - 1) / 2 + 1), 0.1, 0.1])


def test_schedules() -> None:
    make = callbacks.LearningRateScheduleCallback
    found, _ = rates(make(0.1, 0.5, start_epoch=1))
    assert found == pytest.approx([0.05] * 4 + [0.1] * 4 + [0.05] * 4)
    found, _ = rates(make(0.1, lambda epoch: epoch + 1, end_epoch=2))
    assert found == pytest.approx([0.1] * 4 + [0.2] * 8)
    found, _ = rates(make(0.1, lambda epoch: epoch, staircase=False, steps_per_epoch=4), epochs=1)
    assert found == pytest.approx([0.0, 0.025, 0.05, 0.075])
    with pytest.raises(ArgumentError, match="initial_lr"):
        make(None, 0.5)


def test_progress_bar_on_rank_zero_only() -> None:
    net, out = model(), io.StringIO()
    net.compile(hvd.DistributedOptimizer(sgd()), "mse", **FEW_STEPS)
    with redirect_stdout(out):
        net.fit(*data([RANK], 4), batch_size=ROWS, epochs=2, callbacks=[callbacks.ProgressBar()])
    assert ("Epoch 2/2" in out.getvalue()) == (RANK == 0)


def test_best_model_is_written_by_rank_zero(tmp_path: Path) -> None:
    best = callbacks.BestModelCheckpoint(monitor="loss", filepath=str(tmp_path / "best.keras"))
    both = [callbacks.MetricAverageCallback(), best]
    fit(hvd.DistributedOptimizer(sgd()), [RANK], callbacks=both, epochs=2)
    assert [one.name for one in tmp_path.iterdir()] == (["best.keras"] if RANK == 0 else [])
    nowhere = callbacks.BestModelCheckpoint(monitor="loss")
    with pytest.raises(ArgumentError, match="filepath"):
        nowhere.on_epoch_end(0, {"loss": 1.0})


def test_what_writes_is_for_rank_zero(shared: Path) -> None:
    """The same list of callbacks on all ranks: files and lines come from rank 0 only."""
    log, kept = shared / "log.csv", shared / "kept.keras"
    only, out = callbacks.on_rank_zero, io.StringIO()
    net = model(RANK)
    net.compile(hvd.DistributedOptimizer(sgd()), "mse", **FEW_STEPS)
    more = [
        callbacks.BroadcastGlobalVariablesCallback(0), callbacks.MetricAverageCallback(),
        only(keras.callbacks.CSVLogger(log)), only(keras.callbacks.ModelCheckpoint(kept)),
        only(keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print(f"rank {RANK}"))),
        keras.callbacks.EarlyStopping("loss", min_delta=1e9), callbacks.ProgressBar(),
    ]
    with redirect_stdout(out):
        history = net.fit(*data([RANK], 4), batch_size=ROWS, epochs=3, verbose=2, callbacks=more)
    assert len(history.epoch) == 2, "all ranks stop after the same epoch"
    assert out.getvalue().count("rank 0") == 2 * (RANK == 0)
    assert ("Epoch 1/3" in out.getvalue()) == (RANK == 0)
    hvd.broadcast_object(None)
    assert log.read_text().splitlines()[1].split(",")[:2] == ["0", str(history.history["loss"][0])]
    assert far(keras.models.load_model(kept).get_weights(), net.get_weights()) == 0
    with pytest.raises(ArgumentError, match="EarlyStopping changes training"):
        only(keras.callbacks.EarlyStopping())


@keras.saving.register_keras_serializable("tests")
class Custom(keras.optimizers.SGD):
    """An optimizer of the user's own."""


def test_save_and_load(shared: Path) -> None:
    """What is saved is a plain model; loaded again, it goes on as if it had not been."""
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
        subprocess.run([sys.executable, "-c", lines], check=True, timeout=200)


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
            for one in net.variables:
                one.assign(one.value * 0.0)
            raise CollectiveError("as if a collective had failed")

    train(state)
    assert same_on_all_ranks(attempts[0])
    assert same_on_all_ranks(attempts[1])
    assert far(attempts[1], attempts[0]) > 1e-4, "it goes on from the last commit"
    assert (state.epoch, state.batch) == (2, 0)
    with pytest.raises(ArgumentError, match="weights"):
        hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))
