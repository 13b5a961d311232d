"""Keras on each of its backends: the tests in tests/keras_jobs, in jobs of 2 and 3 ranks, and scripts."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from run import launcher, run_ranks

TESTS = Path(__file__).resolve().parents[1]
LIMIT = 500.0  # seconds for one job; plenty for a machine that does other things as well

pytestmark = [
    pytest.mark.limit(2 * LIMIT),
    pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="needs Keras"),
]
OF_THREE = "twenty_steps or (overflow and not accumulation) or aggregation or process_set or set_of_ranks"
each_backend = pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])


@pytest.fixture
def environ(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"needs {backend}")
    monkeypatch.setenv("KERAS_BACKEND", backend)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")


@pytest.mark.parametrize(("backend", "size", "which"), [
    ("tensorflow", 2, ""),
    ("torch", 2, ""),
    ("jax", 2, ""),
    ("tensorflow", 3, OF_THREE),
    pytest.param("torch", 3, OF_THREE, marks=pytest.mark.slow),
    pytest.param("jax", 3, OF_THREE, marks=pytest.mark.slow),
], ids=lambda value: "" if value == OF_THREE else None)
@pytest.mark.usefixtures("environ")
def test_on_ranks(size: int, which: str) -> None:
    # Keras itself warns a thousand times of how it converts arrays.
    options = ["-rfE", "-W", "ignore::DeprecationWarning", "-k", which]
    outcome = run_ranks(TESTS / "keras_jobs", size, options, LIMIT)
    assert not outcome.problems, outcome
    assert outcome.counts["passed"] >= 11


def job(way: str, size: int, *command: str) -> str:
    """What a script prints that is run on `size` ranks."""
    if way == "mpiexec":
        start, environ = launcher(size)
    else:
        start = [str(Path(sys.executable).parent / "horovodrun"), "-np", str(size), "-H", f"localhost:{size}"]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*start, sys.executable, *command], env=environ, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@each_backend
@pytest.mark.usefixtures("environ")
def test_the_example() -> None:
    pytest.importorskip("sklearn")
    said = job("mpiexec", 2, str(TESTS.parent / "examples" / "digits_keras.py"), "--epochs", "6")
    assert "all 2 ranks hold the same weights: yes" in said
    accuracy = re.search(r"test accuracy: ([\d.]+)%", said)
    assert accuracy is not None
    assert float(accuracy[1]) > 90
    assert said.count("Epoch 6/6") == 1


@pytest.mark.parametrize(("backend", "way"), [("tensorflow", "horovodrun"), ("torch", "mpiexec")])
@pytest.mark.usefixtures("environ")
def test_a_script_written_for_horovod(way: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("tensorflow")
    script = str(TESTS / "dropin" / "scripts" / "keras_mnist.py")
    said = job(way, 2, script, "--folder", str(tmp_path))
    assert "equal: True" in said
    assert "lr: 0.004000" in said
    assert float(re.findall(r"accuracy: ([\d.]+)", said)[-1]) > 0.8
    assert "loaded: Adam 168" in said
    assert said.count("finished gradual learning rate warmup to 0.004") == 1
    written = sorted(one.name for one in tmp_path.iterdir())
    assert written == [f"checkpoint-{epoch}.keras" for epoch in range(1, 7)]


@pytest.mark.parametrize(("name", "needs"), [("jax", "optax"), ("flax", "flax")])
def test_the_jax_examples(name: str, needs: str) -> None:
    for module in ("jax", "optax", "sklearn", needs):
        pytest.importorskip(module)
    said = job("mpiexec", 2, str(TESTS.parent / "examples" / f"digits_{name}.py"))
    assert "all 2 ranks hold the same weights: yes" in said
    assert float(re.findall(r"test accuracy: ([\d.]+)%", said)[0]) > 95


THREADS = """
import sys
from importlib import import_module
from pathlib import Path
from ringdance.training.options import share_of_cores
hvd = import_module(f"ringdance.{sys.argv[1]}")
hvd.init()
if sys.argv[2] == "jax":
    import jax
    jax.block_until_ready(jax.jit(lambda x: x @ x)(jax.numpy.ones((64, 64))))
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    threads = names.count("tf_XLAEigen")
else:
    import tensorflow as tf
    threads = tf.config.threading.get_intra_op_parallelism_threads()
print("threads", threads, "of", share_of_cores(hvd.local_size()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("binding", "backend"), [("jax", "jax"), ("keras", "jax"), ("keras", "tensorflow")])
@pytest.mark.usefixtures("environ")
def test_a_rank_computes_with_its_share_of_the_cores(binding: str, backend: str) -> None:
    if backend == "jax" and tuple(map(int, version("jax").split(".")[:2])) < (0, 8):
        pytest.skip("XLA's threads have no names in this JAX")
    found = re.findall(r"threads (\d+) of (\d+)", job("mpiexec", 2, "-c", THREADS, binding, backend))
    assert len(found) == 2
    assert all(threads == share for threads, share in found)
