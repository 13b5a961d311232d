"""Keras's part of docs/howto/data/checkpoints.md: training resumes where it was saved, on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from nets import same_on_all_ranks

import ringdance.keras as hvd

ROOT = Path(__file__).resolve().parents[3]

from doc_blocks import blocks  # noqa: E402

PAGE = ROOT / "docs" / "howto" / "data" / "checkpoints.md"


def trained(text: str, epochs: int, share: int) -> Any:
    """Run the page's block on a new model for `epochs` epochs, with `share` samples on each rank."""
    keras.utils.set_random_seed(hvd.rank())  # ranks start with different weights
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    x = np.random.default_rng(hvd.rank()).normal(size=(share, 4)).astype("float32")
    names = {"model": model, "x": x, "y": x[:, :1]}
    exec(compile(text.replace("epochs=4", f"epochs={epochs}"), str(PAGE), "exec"), names)
    return model


@pytest.mark.every_backend
def test_training_goes_on_from_what_rank_0_has_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / str(hvd.rank())  # other ranks do not see rank 0's files
    place.mkdir()
    monkeypatch.chdir(place)
    [block] = [item.text for item in blocks(PAGE) if "LambdaCallback" in item.text]
    # The second run has half as many samples per rank, as with twice as many ranks.
    for epochs, share, iterations in ((2, 64, 8), (4, 32, 12)):
        model = trained(block, epochs, share)
        assert same_on_all_ranks(model.get_weights())
        assert int(model.optimizer.iterations) == iterations
    files = [f"epoch-{epoch:04}.weights.h5" for epoch in range(1, 5)]
    assert sorted(path.name for path in place.iterdir()) == (files if hvd.rank() == 0 else [])
