"""Whole scripts: the one in docs/tutorials/frameworks.md, the example, and one written for Horovod."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path

import keras
import pytest
from sampled import drawn
from script_jobs import ROOT, SCRIPTS, check_shown_script, output_of

import ringdance.keras as hvd
from ringdance.training.gradients.options import share_of_cores

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
BACKEND = keras.backend.backend()
BACKENDS = ("tensorflow", "torch", "jax")


@pytest.mark.every_backend(daily=True)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(BACKEND == "torch", reason="the launcher sets the number of PyTorch's threads")
def test_a_rank_computes_with_its_share_of_the_cores() -> None:
    if BACKEND == "jax":
        if tuple(map(int, version("jax").split(".")[:2])) < (0, 8):
            pytest.skip("XLA's threads have no names in this JAX")
        keras.ops.matmul(keras.ops.ones((64, 64)), keras.ops.ones((64, 64)))
        names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        assert names.count("tf_XLAEigen") == share_of_cores()
    else:
        import tensorflow as tf

        assert tf.config.threading.get_intra_op_parallelism_threads() == share_of_cores()


@(pytest.mark.every_backend(daily=True) if BACKEND in drawn("page", BACKENDS, 1) else pytest.mark.slow)
@pytest.mark.ranks(2)
def test_the_page(tmp_path: Path) -> None:
    level = "TF_CPP_MIN_LOG_LEVEL=3 " if BACKEND == "tensorflow" else ""
    command = f"{level}KERAS_BACKEND={BACKEND} ringdance run -np 2 python train_keras.py"
    check_shown_script("docs/tutorials/frameworks.md", command, tmp_path, RANK)


@pytest.mark.slow
def test_the_example() -> None:
    pytest.importorskip("sklearn")
    out = output_of(ROOT / "examples" / "digits_keras.py", "--epochs", "6")
    if RANK == 0:
        assert f"all {SIZE} ranks hold the same weights: yes" in out
        accuracy = re.search(r"test accuracy: ([\d.]+)%", out)
        assert accuracy is not None
        assert float(accuracy[1]) > 90
        assert out.count("Epoch 6/6") == 1


@(pytest.mark.slow if BACKEND == "torch" else pytest.mark.every_backend(daily=True))
@pytest.mark.ranks(2)
@pytest.mark.skipif(BACKEND == "jax", reason="such scripts were written for TensorFlow")
def test_a_script_written_for_horovod(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("tensorflow")
    out = output_of(SCRIPTS / "keras_mnist.py", "--directory", str(tmp_path))
    if RANK == 0:
        assert "equal: True" in out
        assert "lr: 0.004000" in out
        assert float(re.findall(r"accuracy: ([\d.]+)", out)[-1]) > 0.8
        assert "loaded: Adam 168" in out
        assert out.count("finished gradual learning rate warmup to 0.004") == 1
        written = sorted(path.name for path in tmp_path.iterdir())
        assert written == [f"checkpoint-{epoch}.keras" for epoch in range(1, 7)]
