"""The loops of docs/howto/keras-loops.md: what the page shows for this backend trains all ranks equally."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest
from nets import same_on_all_ranks

import ringdance.keras as hvd

ROOT = Path(__file__).resolve().parents[3]

from doc_blocks import blocks  # noqa: E402

PAGE = ROOT / "docs" / "howto" / "keras-loops.md"
IMPORTS = {"tensorflow": "import tensorflow", "torch": "import torch", "jax": "import jax"}


@pytest.mark.every_backend
def test_the_loop_of_this_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = keras.backend.backend()
    others = [line for name, line in IMPORTS.items() if name != backend]
    shown = [block for block in blocks(PAGE) if not block.text.startswith(tuple(others))]
    assert len(shown) == 3
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for number, block in enumerate(shown):
        exec(compile("\n" * (block.line - 1) + block.text, str(PAGE), "exec"), names)
        assert same_on_all_ranks(names["model"].get_weights()), number
    assert names["mean"] < 0.5
    assert set(hvd.allgather_object(names["mean"])) == {names["mean"]}
    assert (tmp_path / "model.keras").exists() == (hvd.rank() == 0)
