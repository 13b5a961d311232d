"""The script in docs/tutorials/frameworks.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from sampled import drawn
from script_jobs import check_shown_script

import ringdance.tensorflow as hvd

hvd.init()
today = drawn("page of TensorFlow", (True, False), 1)[0]


@pytest.mark.ranks(2)
@(pytest.mark.limit(120) if today else pytest.mark.slow)
def test_the_page(tmp_path: Path) -> None:
    command = "TF_CPP_MIN_LOG_LEVEL=3 ringdance run -np 2 python train_tensorflow.py"
    check_shown_script("docs/tutorials/frameworks.md", command, tmp_path, hvd.rank())
