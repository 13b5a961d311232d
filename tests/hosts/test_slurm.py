"""Training inside Slurm on simulated hosts: with `ringdance run`, and with srun only."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hosts
import pytest
import slurm
from hosts import Hosts, wait_until
from jobs import PLACES, SAVES, TRAINING
from slurm import Slurm

from ringdance.launch.mpi import find_mpi

pytestmark = pytest.mark.limit(300)
RUN = (sys.executable, "-m", "ringdance", "run")
SALLOC = ("salloc", "--quiet", "--nodes=3", "--ntasks-per-node=2")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    reason = hosts.why_not() or slurm.why_not()
    if reason:
        pytest.skip(f"a simulated Slurm: {reason}")
    with tempfile.TemporaryDirectory(prefix="rds-") as directory:
        there = Hosts(Path(directory) / "net", 3)
        try:
            yield Slurm(there, Path(directory) / "slurm")
        finally:
            there.down()


@pytest.fixture
def training(tmp_path: Path) -> str:
    (tmp_path / "training.py").write_text(TRAINING)
    return str(tmp_path / "training.py")


def test_the_allocation_is_the_plan(cluster: Slurm, tmp_path: Path) -> None:
    (tmp_path / "places.py").write_text(PLACES)
    done = cluster.run(*SALLOC, *RUN, "python", str(tmp_path / "places.py"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}]<h{rank // 2 + 1}> h{rank // 2 + 1} {rank} 6 {rank % 2} 2 {rank // 2} 3 15"
        for rank in range(6)
    ]
    assert wait_until(lambda: not cluster.leftovers(), 10.0) is not None, cluster.leftovers()


@pytest.mark.parametrize("words", [("-np", "2"), ("-H", "localhost:2")])
def test_ranks_on_one_host_of_an_allocation(cluster: Slurm, words: tuple[str, str], tmp_path: Path) -> None:
    """mpiexec does not start daemons on the other hosts."""
    (tmp_path / "places.py").write_text(PLACES)
    done = cluster.run(*SALLOC, *RUN, *words, "python", str(tmp_path / "places.py"))
    assert done.returncode == 0, done.stderr
    assert sorted(line.split()[1:3] for line in done.stdout.splitlines()) == [["h1", "0"], ["h1", "1"]]


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        (("--gpus-per-task=1", "--cpus-per-task=2"), "SRUN_CPUS_PER_TASK=2 SLURM_LABELIO=1"),
        (("--gpus=4", "--exclusive"), "SRUN_CPUS_PER_TASK=1"),
    ],
)
def test_ranks_have_all_cores_and_gpus_of_their_host(
    cluster: Slurm, tmp_path: Path, options: tuple[str, ...], variables: str
) -> None:
    (tmp_path / "step.py").write_text(
        "import os, subprocess\n"
        "steps = subprocess.check_output(['scontrol', 'show', 'step', os.environ['JOB']], text=True)\n"
        "cores = sorted({word for word in steps.split() if word.startswith('CPUs=')})\n"
        "sizes = {n: v for n, v in os.environ.items() if n.endswith('PER_TASK') or n == 'SLURM_GPUS'}\n"
        "print(cores, os.environ.get('CUDA_VISIBLE_DEVICES'), sorted(sizes.items()))\n"
    )
    run = f"JOB=$SLURM_JOB_ID {variables} exec {' '.join(RUN)} python {tmp_path}/step.py"
    done = cluster.run("salloc", "--quiet", "--nodes=2", "--ntasks=4", *options, "sh", "-c", run)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    there = [line.partition(" 0,1 ")[0] for line in lines if "<h2>" in line]
    assert there == [f"[{rank}]<h2> ['CPUs=4']" for rank in (2, 3)], done.stdout
    sizes = {line.partition("[(")[2] for line in lines}
    assert len(sizes) == 1, done.stdout
    assert "SLURM_" in sizes.pop()


def test_much_output_comes_whole(cluster: Slurm, tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text("for n in range(20000): print(n, 'x' * 60)\n")
    done = cluster.run(
        "salloc", "-Q", "-N2", "--ntasks-per-node=1", *RUN, "python", str(tmp_path / "talk.py")
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        mine = [line for line in done.stdout.splitlines() if line.startswith(f"[{rank}]")]
        assert mine == [f"[{rank}]<h{rank + 1}> {n} {'x' * 60}" for n in range(20000)]


def test_training_in_a_batch_job(cluster: Slurm, training: str, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\nexec {' '.join(RUN)} python {training}\n")
    out = tmp_path / "out"
    done = cluster.run("sbatch", "--wait", "-N3", "--ntasks-per-node=2", f"--output={out}", str(script))
    assert done.returncode == 0, out.read_text()
    assert len(set(re.findall(r"loss (\S+)", out.read_text()))) == 1
    assert out.read_text().count("loss") == 6


def test_a_rank_that_fails_ends_the_job(cluster: Slurm, tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text(
        "import os, time\n"
        "if os.environ['RINGDANCE_RANK'] == '3':\n    raise ValueError('boom')\n"
        "time.sleep(99)\n"
    )
    done = cluster.run(*SALLOC, *RUN, "python", str(tmp_path / "fail.py"))
    assert done.returncode == 1
    assert "first failure: rank 3 of 6 on h2" in done.stderr
    assert wait_until(lambda: not cluster.leftovers(), 10.0) is not None, cluster.leftovers()


def test_a_cancelled_job_leaves_nothing(cluster: Slurm, tmp_path: Path) -> None:
    (tmp_path / "sleep.py").write_text("import time\nprint('works', flush=True)\ntime.sleep(200)\n")
    out, script = tmp_path / "out", tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\nexec {' '.join(RUN)} python {tmp_path}/sleep.py\n")
    done = cluster.run("sbatch", "--parsable", "-N3", "-n6", f"--output={out}", str(script))
    assert wait_until(lambda: out.exists() and out.read_text().count("works") == 6, 60.0) is not None
    cluster.run("scancel", done.stdout.strip())
    assert wait_until(lambda: not cluster.leftovers(), 20.0) is not None, cluster.leftovers()


def test_ranks_of_a_cancelled_job_have_time_to_save(cluster: Slurm, tmp_path: Path) -> None:
    """Slurm sends SIGTERM to all the job's processes: its batch script's, and the agents' on other hosts."""
    (tmp_path / "saves.py").write_text(SAVES)
    out, script = tmp_path / "out", tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\nexec {' '.join(RUN)} --no-check python {tmp_path}/saves.py 20\n")
    done = cluster.run("sbatch", "--parsable", "-N3", "--ntasks-per-node=2", f"--output={out}", str(script))
    assert wait_until(lambda: out.exists() and out.read_text().count("ready") == 6, 60.0) is not None
    cluster.run("scancel", done.stdout.strip())
    assert wait_until(lambda: not cluster.leftovers(), 40.0) is not None, cluster.leftovers()
    assert out.read_text().count("saved after 1 signal") == 3, out.read_text()


def test_srun_alone(cluster: Slurm, training: str) -> None:
    way = "pmix" if find_mpi().family == "openmpi" else "pmi2"
    done = cluster.run("srun", f"--mpi={way}", "-N3", "--ntasks-per-node=2", sys.executable, training)
    if "can not load PMIx library" in done.stderr:
        pytest.skip("Slurm's part for Open MPI needs PMIx (Debian: libpmix-dev)")
    assert done.returncode == 0, done.stderr
    assert len(set(re.findall(r"loss (\S+)", done.stdout))) == 1
    assert done.stdout.count("of 6") == 6


def test_worlds_of_one_are_refused(cluster: Slurm, training: str) -> None:
    done = cluster.run("srun", "--mpi=none", "-N2", "--ntasks-per-node=1", sys.executable, training)
    assert done.returncode != 0
    assert "The launcher started 2 processes, but MPI sees only this one on host h" in done.stderr
    assert "loss" not in done.stdout
