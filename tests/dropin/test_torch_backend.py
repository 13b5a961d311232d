"""The backend "ringdance" under torchrun, where MPI does not know the ranks; a rank that dies in DDP."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import ROOT, environment, put_files

pytest.importorskip("torch")
TESTS = ROOT / "tests" / "ranks" / "test_torch_backend.py"
LIMIT = 240.0


def started(*words: str, cwd: Path = ROOT, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words], env=environment() | {"OMP_NUM_THREADS": "1"} | more, text=True,
        timeout=LIMIT, capture_output=True, cwd=cwd,
    )  # fmt: skip


def torchrun(size: int) -> list[str]:
    return ["torch.distributed.run", f"--nproc-per-node={size}", "--standalone"]


@pytest.mark.limit(LIMIT)
@pytest.mark.parametrize(("size", "hosts"), [
    (2, ""), pytest.param(3, "a a b", marks=pytest.mark.slow), pytest.param(3, "", marks=pytest.mark.slow),
])  # fmt: skip
def test_the_tests_of_the_backend(size: int, hosts: str) -> None:
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS)]
    done = started(*torchrun(size), *words, HOSTS_OF_RANKS=hosts)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert done.stdout.count(" passed") == size


@pytest.mark.limit(LIMIT)
def test_the_script_of_the_page(tmp_path: Path) -> None:
    put_files(ROOT / "docs" / "howto" / "torch-distributed.md", tmp_path)
    done = started(*torchrun(2), "train_ddp.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("of 2: loss below 0.01: True") == 2


@pytest.mark.limit(LIMIT)
def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('ringdance')\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "for step in range(1000):\n"
        "    if step == 20 and dist.get_rank() == 1:\n"
        "        os._exit(3)\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
    )
    done = started("ringdance", "run", "-np", "2", sys.executable, str(script))
    assert done.returncode != 0
    assert "RankLostError: rank 1 on host" in done.stdout + done.stderr
