"""The backend "ringdance" under torchrun, where MPI does not know the ranks, and a rank that dies in DDP."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import ROOT, environment, put_files

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs PyTorch")
TESTS = ROOT / "tests" / "ranks" / "test_torch_backend.py"
LIMIT = 240.0


def started(*words: str, cwd: Path = ROOT, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words], env=environment() | {"OMP_NUM_THREADS": "1"} | more, text=True,
        timeout=LIMIT, capture_output=True, cwd=cwd,
    )  # fmt: skip


def torchrun(size: int) -> list[str]:
    return ["torch.distributed.run", f"--nproc-per-node={size}", "--standalone"]


TOGETHER = """
import os, runpy, sys, torch, torch.distributed as dist

# Ranks that torchrun starts again meet each other, not what an earlier attempt has left in its store.
dist.init_process_group("ringdance")
dist.new_group([0, 1], use_local_synchronization=True)
for step in range(4):
    if step == 2 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), 9)
    dist.all_reduce(one := torch.ones(1))
assert one == 2
print("whole", flush=True)
dist.destroy_process_group()
runpy.run_path("train_ddp.py", run_name="__main__")
dist.destroy_process_group()
import pytest

code = pytest.main(["-q", "-p", "no:cacheprovider", "-m", "not slow", *sys.argv[1:]])
# A receive that stays pending aborts no rank when it exits.
if dist.get_rank() == 1:
    work = dist.irecv(torch.ones(4), 0)  # which no rank sends
dist.barrier()
dist.destroy_process_group()
sys.exit(code)
"""


@pytest.mark.limit(LIMIT)
def test_in_one_job_of_torchrun(tmp_path: Path) -> None:
    """After a restart, the page's script, the backend's tests and an exit with a pending receive work."""
    put_files(ROOT / "docs" / "howto" / "training" / "torch-distributed.md", tmp_path)
    (tmp_path / "together.py").write_text(TOGETHER)
    words = ["--max-restarts=1", "together.py", f"--rootdir={ROOT}", str(TESTS)]
    done = started(*torchrun(2), *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert done.stdout.count("whole") == 2
    assert done.stdout.count("of 2: loss below 0.01: True") == 2
    assert done.stdout.count(" passed") == 2


@pytest.mark.slow
@pytest.mark.limit(LIMIT)
@pytest.mark.parametrize("hosts", ["a a b", ""])
def test_the_tests_of_the_backend_on_three_ranks(hosts: str) -> None:
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS)]
    done = started(*torchrun(3), *words, HOSTS_OF_RANKS=hosts)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert done.stdout.count(" passed") == 3


@pytest.mark.limit(LIMIT)
def test_a_timeout_is_an_error_on_all_ranks_and_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    """Backward does not return with unreduced gradients, and neither does any later call."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, time, torch, torch.distributed as dist\n"
        "from datetime import timedelta\n"
        "dist.init_process_group('ringdance', timeout=timedelta(seconds=4))\n"
        "rank = dist.get_rank()\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "for step in range(3):\n"
        "    if step == 2 and rank == 1:\n"
        "        time.sleep(6)\n"
        "    try:\n"
        "        model(torch.ones(1, 2)).sum().backward()\n"
        "    except RuntimeError as error:\n"
        "        print('step', step, type(error).__name__, 'on rank 0' in str(error))\n"
        "late = torch.ones(1)\n"
        "try:\n"
        "    work = dist.all_reduce(late, async_op=True)\n"
        "    work.wait()\n"
        "except RuntimeError as error:\n"
        "    print('then', type(error).__name__, late.item(), flush=True)\n"
        "dist.destroy_process_group()\n"
        "import ringdance.torch as hvd\n"
        "hvd.shutdown()\n"
        "dist.init_process_group('ringdance')\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "for step in range(1000):\n"
        "    if step == 20 and rank == 1:\n"
        "        os._exit(3)\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
    )
    done = started("ringdance", "run", "-np", "2", sys.executable, str(script))
    for text in ("step 2 DistBackendError True", "step 2 StallError True", "then StallError 1.0"):
        assert text in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("step") == done.stdout.count("then") == 2
    assert done.returncode != 0
    assert "RankLostError: rank 1 on host" in done.stdout + done.stderr


@pytest.mark.limit(LIMIT)
def test_ranks_started_by_hand_that_begin_again(tmp_path: Path) -> None:
    """torch's store ends with its process group, but the job and a later group do not need it."""
    script = tmp_path / "again.py"
    script.write_text(
        "import time, torch, torch.distributed as dist\n"
        "for life in range(2):\n"
        "    dist.init_process_group('ringdance')\n"
        "    group = dist.new_group()\n"
        "    dist.all_reduce(one := torch.ones(1), group=group)\n"
        "    print(life, int(one))\n"
        "    del group\n"
        "    dist.destroy_process_group()\n"
        "    time.sleep(0.5)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    by_hand = environment() | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen([sys.executable, str(script)], env=by_hand | {"RANK": str(rank)}, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        assert rank.communicate(timeout=LIMIT) == ("0 2\n1 2\n", "")
