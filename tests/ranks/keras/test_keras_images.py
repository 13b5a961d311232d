"""fit on batches of image_loader: each epoch's own order, all samples, exact weights, resumption."""

from __future__ import annotations

import io
from typing import Any

import keras
import numpy as np
import pytest
from PIL import Image
from sampled import sampled

import ringdance.keras as hvd
from ringdance.data.loader import Synthetic
from ringdance.errors import ArgumentError
from ringdance.keras.batches import _measuring
from ringdance.training.loaders.input_check import INPUT_MARK, WatchedLoader

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
every_backend, slow = pytest.mark.every_backend, pytest.mark.slow


class Memory:
    def __init__(self, length: int) -> None:
        self.data = []
        for number in range(length):
            file = io.BytesIO()
            Image.new("RGB", (8, 8), (number * 10, 0, 0)).save(file, "PNG")
            self.data.append(file.getvalue())
        self.rows = {"label": np.arange(length)}

    def __len__(self) -> int:
        return len(self.data)

    def read(self, number: int) -> bytes:
        return self.data[number]


def model() -> Any:
    made = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(1)])
    made.set_weights([np.full_like(weight, 1e-3) for weight in made.get_weights()])
    made.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1e-7)), "mse")
    return made


@pytest.mark.every_backend
def test_fit_is_that_of_all_samples_resumed_or_not() -> None:
    length = 4 * SIZE + 1
    data = Memory(length)
    trained = model()
    loader = hvd.image_loader(data, 2, image_size=8, seed=3)
    trained.fit(loader, epochs=2, shuffle=False, verbose=0, callbacks=[loader.callback])
    assert loader.loader.plan.epoch == 2

    # One process computes the mean gradient of each global batch, in the order of the epochs.
    weights = np.full(8 * 8 * 3 + 1, 1e-3)
    for epoch in range(2):
        order = np.random.RandomState([3, epoch]).permutation(length)
        for start in range(0, length, 2 * SIZE):
            numbers = order[start : start + 2 * SIZE]
            rows = np.zeros((len(numbers), 8 * 8 * 3 + 1))
            rows[:, :-1:3] = numbers[:, None] * 10
            rows[:, -1] = 1
            gradient = 2 * ((rows @ weights - numbers)[:, None] * rows).mean(0)
            weights -= 1e-7 * gradient
    flat = np.concatenate([weight.ravel() for weight in trained.get_weights()])
    assert np.abs(flat - 1e-3).max() > 1e-5
    np.testing.assert_allclose(flat, weights, rtol=1e-3, atol=1e-7)

    resumed = model()
    loader.set_epoch(0)
    first = [loader[0]]
    resumed.train_on_batch(*first[0])
    loader.set_epoch(0, loader.position_after(1))
    resumed.fit(loader, epochs=1, shuffle=False, verbose=0, callbacks=[loader.callback])
    resumed.fit(loader, initial_epoch=1, epochs=2, shuffle=False, verbose=0, callbacks=[loader.callback])
    again = np.concatenate([weight.ravel() for weight in resumed.get_weights()])
    np.testing.assert_allclose(again, flat, rtol=1e-5)


def test_wrong_uses_are_refused() -> None:
    loader = hvd.image_loader(Memory(6 * SIZE), 2, image_size=8)
    loader.set_epoch(0, 2 * SIZE)
    with pytest.raises(ArgumentError, match="separate fit"):
        model().fit(loader, epochs=2, shuffle=False, verbose=0, callbacks=[loader.callback])
    loader[0]
    with pytest.raises(ArgumentError, match="shuffle=False"):
        loader[2]
    loader.close()


X = np.ones((16, 3), np.float32), np.ones((16, 1), np.float32)


class Sequence(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        assert index in range(3)
        return X


def tf_data() -> Any:
    return pytest.importorskip("tensorflow").data.Dataset.from_tensor_slices(X).batch(4)


def torch_loader() -> Any:
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(*map(torch.tensor, X))
    return torch.utils.data.DataLoader(data, 4)


INPUTS = {"tf": tf_data, "torch": torch_loader, "py": Sequence, "py3": lambda: Sequence(workers=3)}
# Importing another framework takes seconds, so each backend gets its own kind of input.
OWN = {"tensorflow": "tf", "torch": "torch"}.get(keras.backend.backend(), "py")
MARKS = {"tf": [slow], "torch": [slow], "py": [], "py3": [every_backend]}


@pytest.mark.parametrize("part", sampled("input checks", ["loader", "step", "both"], 1))
@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=[every_backend(daily=True)] if kind == OWN else MARKS[kind]) for kind in INPUTS
])
def test_fit_takes_what_is_watched(
    kind: str, part: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(keras.Model, "fit", _measuring(keras.Model.fit))
    data = INPUTS[kind]()
    assert hvd.watch_input(data) is data
    monkeypatch.setenv("RINGDANCE_INPUT_CHECK", part)
    monkeypatch.setenv("RINGDANCE_INPUT_CHECK_TIME", "0.05")
    monkeypatch.setattr(WatchedLoader, "_measured", None)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    with pytest.raises(SystemExit):
        model.fit(hvd.watch_input(data), epochs=2, verbose=0)
    assert (INPUT_MARK in capfd.readouterr().out) == (hvd.rank() == 0)


@pytest.mark.parametrize("part", sampled("ends of fit", ["loader", "step", "both"], 1))
def test_fit_ends_when_its_input_has_been_measured(
    part: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RINGDANCE_INPUT_CHECK", part)
    monkeypatch.setenv("RINGDANCE_INPUT_CHECK_TIME", "0.05")
    monkeypatch.setattr(WatchedLoader, "_measured", None)
    loader = hvd.image_loader(Synthetic(9, range(5)), 2, image_size=8)
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(5)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "sparse_categorical_crossentropy")
    with pytest.raises(SystemExit):
        model.fit(loader, epochs=2, shuffle=False, callbacks=[loader.callback], verbose=0)
    assert (INPUT_MARK in capfd.readouterr().out) == (hvd.rank() == 0)
