"""Keras' part of docs/howto/checkpoints.md: what was saved goes on where it was, on all ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from nets import same_on_all_ranks

import ringdance.keras as hvd

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from doc_blocks import blocks  # noqa: E402

PAGE = ROOT / "docs" / "howto" / "checkpoints.md"


def trained(text: str, epochs: int) -> Any:
    """Run the page's block on a fresh model, to the end of so many epochs; return the model."""
    keras.utils.set_random_seed(hvd.rank())  # the ranks begin differently
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    x = np.random.default_rng(hvd.rank()).normal(size=(64, 4)).astype("float32")
    names = {"model": model, "x": x, "y": x[:, :1]}
    exec(compile(text.replace("epochs=4", f"epochs={epochs}"), str(PAGE), "exec"), names)
    return model


@pytest.mark.every_backend
def test_training_goes_on_from_what_rank_0_has_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / str(hvd.rank())  # only rank 0 sees its files
    place.mkdir()
    monkeypatch.chdir(place)
    [block] = [one.text for one in blocks(PAGE) if "LambdaCallback" in one.text]
    whole = trained(block, 4)
    (place / "last.weights.h5").unlink(missing_ok=True)
    for epochs, iterations in ((2, 8), (4, 16)):
        model = trained(block, epochs)
        assert same_on_all_ranks(model.get_weights())
        assert int(model.optimizer.iterations) == iterations
    assert (place / "last.weights.h5").exists() == (hvd.rank() == 0)
    assert np.isfinite(whole.get_weights()[0]).all()
