"""Scripts for TensorFlow as people write them for Horovod, run alone, by horovodrun and by mpiexec."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from run import launcher

SCRIPTS = Path(__file__).parent / "scripts"
BIN = Path(sys.executable).parent
LIMIT = 280.0  # seconds for one script; plenty for a machine that does other things as well

pytestmark = [
    pytest.mark.limit(3 * LIMIT),
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow"),
]
every_way = pytest.mark.parametrize(("way", "size"), [("alone", 1), ("horovodrun", 2), ("mpiexec", 3)])


def run(way: str, size: int, name: str, folder: Path) -> str:
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}
    if way == "mpiexec":
        line, environ = launcher(size)
        environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    else:
        start = ["-np", str(size), "-H", f"localhost:{size}"]
        line = [] if way == "alone" else [str(BIN / "horovodrun"), *start]
    done = subprocess.run(
        [*line, sys.executable, str(SCRIPTS / name)], cwd=folder, env=environ, capture_output=True, text=True,
        timeout=LIMIT, check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return re.sub(r"^\[\d+\](<\w+>:| )", "", done.stdout, flags=re.MULTILINE)


def of_ranks(out: str, pattern: str, size: int) -> set[str]:
    found = dict(re.findall(rf"rank (\d+): ({pattern})", out))
    assert sorted(found) == [str(rank) for rank in range(size)], out
    return set(found.values())


@every_way
def test_a_loop_with_a_tape(way: str, size: int, tmp_path: Path) -> None:
    out = run(way, size, "tensorflow_tape.py", tmp_path)
    assert len(of_ranks(out, r"weights [\d.]+", size)) == 1
    assert float(re.findall(r"last loss: ([\d.]+)", out)[0]) < 1.0
    assert len(re.findall(r"Step #\d+", out)) == -(-(240 // size) // 20)
    assert any(path.name.startswith("model") for path in (tmp_path / "checkpoints").iterdir())


@every_way
def test_a_session_with_the_hook(way: str, size: int, tmp_path: Path) -> None:
    out = run(way, size, "tensorflow_session.py", tmp_path)
    (mean,) = of_ranks(out, r"mean loss [\d.e-]+", size)
    assert float(mean.split()[-1]) < 0.5
    assert any(path.name.startswith("model.ckpt") for path in (tmp_path / "checkpoints").iterdir())
