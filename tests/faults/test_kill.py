"""SIGKILL any one process of a job at a random time.

Nothing may be left, nothing that belongs to others may be touched, and the exit code is never 0.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from processes import INTEL, SHARED, Job, Others, script, segments, start, wait_until
from sampled import sampled

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")

# Ranks with forked workers that ignore SIGTERM, like loader workers deep in native code, with an MPI window
# and a shared memory segment in each process.
PROGRAM = """
    import multiprocessing, os, signal, time
    from multiprocessing.shared_memory import SharedMemory

    def segment():
        memory = SharedMemory(create=True, size=1 << 16)
        with open(os.environ["SEGMENTS"], "a") as file:
            file.write(memory.name + chr(10))
        return memory

    def work():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        memory = segment()
        time.sleep(600)

    workers = [multiprocessing.get_context("fork").Process(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    memory = segment()
    import mpi4py
    mpi4py.rc.threads = True
    from mpi4py import MPI
    host = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    window = MPI.Win.Allocate_shared(1 << 20, 1, comm=host)
    if MPI.COMM_WORLD.rank == 0:
        time.sleep(600)
    MPI.COMM_WORLD.Barrier()
"""
# The same with PyTorch's data loader, which is slow to import.
LOADER_PROGRAM = """
    import time, torch
    from mpi4py import MPI

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 1 << 20
        def __getitem__(self, index):
            return torch.full((1000,), float(index))

    torch.multiprocessing.set_sharing_strategy("file_system")
    for batch in torch.utils.data.DataLoader(Data(), batch_size=8, num_workers=2):
        time.sleep(0.001)
"""
# If a process dies before MPI_Init, Intel's mpiexec waits for the others. If a rank's front is killed before
# the launcher knows about it, the start timeout has to pass.
START_S = 20
VICTIMS = ("rank", "launcher", "mpiexec")
OTHERS = ("agent", "front", "supervisor")


def role(process: psutil.Process) -> str:
    """Return a process's role in the job."""
    line = process.cmdline()
    text, name = " ".join(line), os.path.basename(line[0]) if line else ""
    if name.startswith(("prterun", "orterun", "mpiexec", "mpirun")):
        return "mpiexec"
    if "hydra" in name:
        return "proxy"
    parent = process.parent()
    above = parent.cmdline() if parent else []
    if "host.agent.main" in text:
        return "watcher" if above == line else "agent"  # the job continues without a watcher
    if "host.agent.rank" in text:
        return "supervisor" if above == line else "front"
    if "program.py" not in text:
        return "other"
    # The command line of mpiexec contains the wrapper's command line, too.
    return "rank" if "host.agent.rank" in " ".join(above[:5]) else "worker"


def find(job: Job, wanted: str, seconds: float = 20.0) -> psutil.Process | None:
    """Wait for the first process with this role and return it."""
    matches: list[psutil.Process] = []

    def look() -> bool:
        for process in job.processes():
            try:
                if process.pid != job.process.pid and role(process) == wanted:
                    matches.append(process)
            except psutil.Error:
                continue
        return bool(matches) or job.process.poll() is not None

    wait_until(look, seconds)
    return matches[0] if matches else None


def trial(
    directory: Path, seed: int, victims: tuple[str, ...], program: str = PROGRAM, longest: float = 2.0
) -> tuple[str, float]:
    """Start a job, kill a process, and wait until nothing is left. Return its role, and the seconds taken."""
    chance = random.Random(seed)
    wanted = chance.choice(victims)
    # Half of the kills come in the first moments, the others anywhere between start and end.
    delay = chance.choice((chance.uniform(0, 0.1), chance.uniform(0, longest)))
    directory.mkdir()
    others = Others(directory / "tmp")
    limit = START_S + 5 if wanted == "front" and INTEL else 5.0
    with open(directory / "output", "wb") as output:
        program = script(directory, program)
        words = ("-np", "2", "--start-timeout", str(START_S), "python", program)
        job = start(directory, *words, stdout=output, stderr=output)
    victim = psutil.Process(job.process.pid) if wanted == "launcher" else find(job, wanted)
    if victim is None:
        job.end()
    assert victim, f"no {wanted}: {(directory / 'output').read_text()}"
    others.change()
    time.sleep(delay)
    job.processes()
    victim.send_signal(signal.SIGKILL)
    seconds = wait_until(lambda: job.process.poll() is not None and not job.leftovers(), limit)
    said = (directory / "output").read_text()
    what = f"seed {seed}: {wanted} killed {delay:.3f} s after it appeared"
    print(f"{what}: gone after {seconds} s, exit code {job.process.poll()}")
    left = job.leftovers()
    missing = others.missing()
    job.end()
    assert not missing, f"{what}: another program's files were removed: {missing}"
    assert seconds is not None, f"{what}: {limit} s later there are still {left}\n{said}"
    assert job.process.returncode != 0, f"{what}: exit code 0\n{said}"
    assert wanted == "launcher" or "the job failed" in said, f"{what}: no cause reported\n{said}"
    return wanted, seconds


@pytest.mark.limit(120)
@pytest.mark.parametrize("victim", sampled("victims", [*VICTIMS, *OTHERS], 1, VICTIMS))
def test_kill_one(tmp_path: Path, victim: str) -> None:
    trial(tmp_path / "trial", random.SystemRandom().randrange(1 << 30), (victim,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "trials", "longest"), [(PROGRAM, 50, 2.0), (LOADER_PROGRAM, 10, 5.0)], ids=["mpi", "loader"]
)
def test_kill_at_random_times(program: str, trials: int, longest: float) -> None:
    first = int(os.environ.get("KILL_SEED") or random.SystemRandom().randrange(1 << 30))
    # Not tmp_path, which may be too long for the sockets of PyTorch's shared memory managers.
    with tempfile.TemporaryDirectory() as base:
        took = [trial(Path(base, str(n)), first + n, VICTIMS, program, longest) for n in range(trials)]
    slow = [(who, round(seconds, 2)) for who, seconds in took if seconds > 2.0]
    print(f"KILL_SEED={first}: {trials - len(slow)} of {trials} gone within 2 s; others: {slow}")
    # 19 out of 20 within 2 s, and all within 5 s.
    assert len(slow) * 20 <= trials, slow


def test_shared_memory_that_no_helper_knows_is_removed(tmp_path: Path) -> None:
    """Python's resource tracker unlinks what a killed process leaves, but here it forgets the segment."""
    program = """
        import os, time
        from multiprocessing import resource_tracker
        from multiprocessing.shared_memory import SharedMemory
        memory = SharedMemory(create=True, size=1 << 16)
        resource_tracker.unregister(memory._name, "shared_memory")
        with open(os.environ["SEGMENTS"], "a") as file:
            file.write(memory.name + chr(10))
        time.sleep(1 if os.environ["RINGDANCE_RANK"] == "1" else 60)
        os.kill(os.getpid(), 9)
    """
    with open(tmp_path / "output", "wb") as output:
        job = start(tmp_path, "-np", "2", "python", script(tmp_path, program), stdout=output, stderr=output)
    gone = wait_until(lambda: job.process.poll() is not None and not job.leftovers(), 20.0)
    left, names = job.leftovers(), segments(tmp_path / "tmp")
    job.end()
    for name in names:
        (SHARED / name).unlink(missing_ok=True)
    assert gone is not None, left
    assert len(names) == 2
    assert job.process.returncode == 137
