"""The script of docs/tutorials/frameworks.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_jobs import check_shown_script

import ringdance.tensorflow as hvd

hvd.init()


@pytest.mark.ranks(2)
def test_the_page(tmp_path: Path) -> None:
    command = "TF_CPP_MIN_LOG_LEVEL=3 ringdance run -np 2 python train_tensorflow.py"
    check_shown_script("docs/tutorials/frameworks.md", command, tmp_path, hvd.rank())
