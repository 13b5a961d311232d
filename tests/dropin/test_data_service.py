"""A training job whose data are computed by a job of workers, both started by horovodrun: sharding.md."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

LIMIT = 250.0
SCRIPT = Path(__file__).parent / "scripts" / "data_service.py"
RUN = [str(Path(sys.executable).parent / "horovodrun"), "-H", "localhost:2", "-np"]

pytestmark = [
    pytest.mark.slow,  # TensorFlow in four processes each; tests/unit/tensorflow covers the parts
    pytest.mark.limit(3 * LIMIT),
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow"),
]


@contextmanager
def workers(directory: Path, number: int, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run the compute job. It must exit on its own when the training job tells it to."""
    module = "horovod.tensorflow.data.compute_worker"
    command = [*RUN, str(number), sys.executable, "-m", module, "service.json"]
    with (directory / "workers.txt").open("w") as output:
        process = subprocess.Popen(
            [*command, *options], cwd=directory, stdout=output, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}, start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(30)


def train(directory: Path, *options: str) -> str:
    done = subprocess.run(
        [*RUN, "2", sys.executable, str(SCRIPT), "service.json", *options], cwd=directory,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}, text=True,
        capture_output=True, timeout=LIMIT, check=False,
    )
    said = done.stdout + done.stderr + (directory / "workers.txt").read_text()
    assert done.returncode == 0, said
    return said


def numbers(pattern: str, said: str) -> list[int]:
    (line,) = re.findall(pattern, said)
    return [int(number) for number in re.findall(r"\d+", line)]


@pytest.mark.parametrize(
    ("number", "options", "given", "times"),
    [
        # All ranks see all data, or they share one pass.
        (1, [], [], 2),
        (2, [], ["--reuse-dataset"], 1),
        # Each of two dispatchers hands out all data to one rank.
        (2, ["--dispatchers", "2"], ["--reuse-dataset"], 2),
        (2, ["--dispatcher-side", "training"], ["--reuse-dataset"], 1),
    ],
)
def test_the_workers_compute_for_the_ranks(
    number: int, options: list[str], given: list[str], times: int, tmp_path: Path
) -> None:
    with workers(tmp_path, number, *options, "--timeout", "200") as compute:
        said = train(tmp_path, *given)
        assert numbers(r"times each: (.*)", said) == [times], said
        assert sum(numbers(r"counts: (.*)", said)) == 60 * times
        assert compute.wait(LIMIT) == 0, (tmp_path / "workers.txt").read_text()


def test_in_turn(tmp_path: Path) -> None:
    with workers(tmp_path, 1, "--timeout", "200") as compute:
        said = train(tmp_path, "--reuse-dataset", "--round-robin")
        assert numbers(r"counts: (.*)", said) == [15, 15], said
        assert compute.wait(LIMIT) == 0, (tmp_path / "workers.txt").read_text()


def test_workers_that_cannot_be_shared_out(tmp_path: Path) -> None:
    with workers(tmp_path, 2, "--dispatchers", "3") as compute:
        assert compute.wait(LIMIT) != 0
    said = (tmp_path / "workers.txt").read_text()
    assert "2 workers cannot be shared out equally among 3 dispatchers" in said
