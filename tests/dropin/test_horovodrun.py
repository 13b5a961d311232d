"""horovodrun and horovod.run with two real processes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked import run_forked

import horovod
from horovod.runner.launch import parse_args, run_commandline
from ringdance.launch.mpi import find_mpi

pytestmark = pytest.mark.limit(120)

PLACE = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
COMMAND = [sys.executable, "-m", "horovod.runner.launch"]


def horovodrun(*words: str, **environ: str) -> subprocess.CompletedProcess[bytes]:
    """Run the command in a fork of this process. Later tests and the pages run its console script."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "RINGDANCE_"))}
    done = run_forked(run_commandline, ["horovodrun", *words], environ=clean | environ)
    texts = [text.encode(errors="surrogateescape") for text in (done.stdout, done.stderr)]
    return subprocess.CompletedProcess(done.args, done.returncode, *texts)


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that writes a program, which knows its rank, and returns the program's path."""

    def write(text: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(
            "import os, sys, time\nrank = int(os.environ['HOROVOD_RANK'])\n" + textwrap.dedent(text)
        )
        return str(path)

    return write


def lines(output: bytes, start: str) -> list[str]:
    """Return the lines that begin with `start`, without it."""
    return [line.removeprefix(start) for line in output.decode().splitlines() if line.startswith(start)]


def test_a_command_with_collectives(program):
    """README.md has a command with PyTorch, also started by horovodrun."""
    path = program(
        """
        import numpy as np, ringdance.numpy as hvd
        hvd.init()
        total = hvd.allreduce(np.full(2, hvd.rank() + 1.0), op=hvd.Sum)
        print(hvd.rank() == rank, hvd.size(), hvd.local_rank(), total.tolist())
        """
    )
    done = horovodrun("-np", "2", "-H", "localhost:4", "python", path)
    assert done.returncode == 0, done.stderr.decode()
    for rank in range(2):
        assert lines(done.stdout, f"[{rank}]<stdout>:") == [f"True 2 {rank} [3.0, 3.0]"]
    assert done.stderr == b""


def test_the_installed_command():
    beside = Path(sys.executable).with_name("horovodrun")
    done = subprocess.run([beside, "--version"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, horovod.__version__ + "\n")


def test_variables_of_the_processes(program, tmp_path):
    (tmp_path / "c.yaml").write_text("params: {cache_capacity: 77, cycle_time_ms: 5}\n")
    path = program(
        f"""
        print(*(os.environ["HOROVOD_" + name] for name in {PLACE}))
        print(*(os.environ.get("HOROVOD_" + name) for name in ("CYCLE_TIME", "CACHE_CAPACITY", "LOG_LEVEL")))
        print(os.environ["HOROVOD_HOSTNAME"] == os.uname().nodename, os.environ["PYTHONUNBUFFERED"])
        print(os.environ["OWN"], sys.argv[1:])
        """
    )
    done = horovodrun(
        "-np", "2", "--cycle-time-ms", "2", "--config-file", str(tmp_path / "c.yaml"),
        "python", path, "-np", "7",
        HOROVOD_CACHE_CAPACITY="5", HOROVOD_LOG_LEVEL="info", OWN="a b",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    for rank in range(2):
        assert lines(done.stdout, f"[{rank}]<stdout>:") == [
            f"{rank} 2 {rank} 2 0 1",
            "2.0 77 info",
            "True 1",
            "a b ['-np', '7']",
        ]


def test_settings_take_effect_in_the_processes(program):
    path = program(
        """
        import ringdance.numpy as hvd
        from ringdance.training import session
        hvd.init()
        s = session.engine().settings
        print(s.fusion_threshold, s.stall_check_disable, s.log_level, s.log_hide_time)
        """
    )
    words = [
        "--fusion-threshold-mb",
        "3",
        "--no-stall-check",
        "--log-level",
        "error",
        "--log-without-timestamp",
    ]
    done = horovodrun("-np", "2", *words, "python", path)
    assert lines(done.stdout, "[1]<stdout>:") == [f"{3 << 20} True error True"], done.stderr.decode()


@pytest.mark.parametrize("form", ["options", pytest.param("file", marks=pytest.mark.slow)])
def test_a_timeline(program, tmp_path, form):
    timeline, config = tmp_path / "timeline.json", tmp_path / "config.yaml"
    words = ["--timeline-filename", os.path.relpath(timeline), "--timeline-mark-cycles"]
    if form == "file":
        config.write_text(f"timeline: {{filename: {timeline}, mark_cycles: true}}\n")
        words = ["--config-file", str(config)]
    path = program(
        """
        import numpy as np, ringdance.numpy as hvd
        hvd.init()
        hvd.allreduce(np.ones(3), name="test_allreduce")
        until = time.monotonic() + 20
        while rank == 0 and '"ALLREDUCE"' not in open(sys.argv[1]).read() and time.monotonic() < until:
            time.sleep(0.05)
        if rank == 0:
            print(open(sys.argv[1]).read(), flush=True)
        """
    )
    done = horovodrun("-np", "2", *words, "python", path, str(timeline))
    assert done.returncode == 0, done.stderr
    for text in (done.stdout.decode(), timeline.read_text()):
        for word in ("allreduce.test_allreduce", '"NEGOTIATE_ALLREDUCE"', '"ALLREDUCE"', '"CYCLE_START"'):
            assert word in text
    assert json.loads(timeline.read_text())


def test_what_has_no_effect_is_said_once(program):
    path = program("import ringdance.numpy as hvd\nhvd.init()\n")
    done = horovodrun("-np", "2", "--gloo", "--torus-allreduce", "python", path, HOROVOD_CCL_CACHE="1")
    assert done.returncode == 0
    said = done.stderr.decode().splitlines()
    assert len(said) == 3, said
    assert said[0].startswith("horovodrun: --gloo: Gloo is not used")
    assert said[1].startswith("horovodrun: --torus-allreduce: no effect")
    assert said[2].startswith("horovodrun: HOROVOD_CCL_CACHE=1: no effect")


def test_what_scripts_set_by_themselves_is_answered_by_rank_0(program):
    path = program(
        """
        os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
        import ringdance.numpy as hvd
        hvd.init()
        """
    )
    done = horovodrun("-np", "2", "python", path)
    assert done.returncode == 0
    said = done.stderr.decode()
    assert said.count("HOROVOD_TIMELINE=DYNAMIC") <= 1
    assert "[1]<stderr>" not in said
    assert "PROCESS_SETS" not in said


def test_output_with_prefixes_and_files(program, tmp_path):
    path = program(
        """
        out = sys.stdout.buffer
        for piece in ("é".encode()[:1], "é".encode()[1:] + b" one", b"\\nbar 1\\rbar 2\\r\\nlast"):
            out.write(piece)
            out.flush()
            time.sleep(0.05)
        print("warned", file=sys.stderr)
        """
    )
    logs = tmp_path / "a" / "logs"
    done = horovodrun("-np", "2", "--output-filename", str(logs), "python", path)
    assert done.returncode == 0
    for rank in range(2):
        tag = f"[{rank}]<stdout>:"
        text = f"{tag}é one\n{tag}bar 1\r{tag}bar 2\r\n{tag}last"
        assert (logs / f"rank.{rank}" / "stdout").read_bytes().decode() == text
        for piece in text.replace("\r\n", "\n").splitlines(keepends=True):
            assert piece in done.stdout.decode().replace("\r\n", "\n")
        assert (logs / f"rank.{rank}" / "stderr").read_text() == f"[{rank}]<stderr>:warned\n"
    assert sorted(done.stderr.decode().splitlines()) == ["[0]<stderr>:warned", "[1]<stderr>:warned"]


def test_last_words_without_an_end_are_not_glued(program):
    done = horovodrun("-np", "2", "python", program("sys.stdout.write('no end')"))
    assert sorted(done.stdout.splitlines()) == [b"[0]<stdout>:no end", b"[1]<stdout>:no end"]


@pytest.mark.parametrize(("ranks", "name"), [(1, "rank.0"), (11, "rank.03")])
def test_names_of_output_folders(tmp_path, ranks, name):
    done = horovodrun("-np", str(ranks), "--output-filename", str(tmp_path / "logs"), "echo", "hello")
    assert done.returncode == 0
    assert len(list((tmp_path / "logs").glob("rank.*"))) == ranks
    assert (tmp_path / "logs" / name / "stdout").read_text().endswith("<stdout>:hello\n")


@pytest.mark.parametrize("option", ["-prefix-timestamp", "--prefix-output-with-timestamp"])
def test_timestamps(program, option):
    done = horovodrun("-np", "1", option, "python", program("print('hello')"))
    stamp, _, rest = done.stdout.decode().partition("[0]<stdout>:")
    assert rest == "hello\n"
    assert abs(time.mktime(time.strptime(stamp)) - time.time()) < 90


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        ("raise ValueError('boom')", 1, "ValueError: boom"),
        pytest.param("sys.exit(7)", 7, "exited with code 7", marks=pytest.mark.slow),
        pytest.param("os.kill(os.getpid(), 9)", 137, "SIGKILL", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_fails(program, ending, code, words):
    done = horovodrun("-np", "2", "python", program(f"if rank == 1: {ending}\ntime.sleep(60)"))
    said = done.stderr.decode()
    assert done.returncode == code, said
    assert re.search(rf"first failure: rank 1 of 2 on \S+, pid \d+: .*{words}", said), said
    assert said.count("Traceback (most recent call last)") == ("raise" in ending)
    assert f"exit code {code}" in said


def test_ctrl_c_ends_all(program):
    path = program("print('pid', os.getpid(), flush=True)\ntime.sleep(100)")
    job = subprocess.Popen(
        [*COMMAND, "-np", "2", "python", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert job.stdout
    pids = [int(job.stdout.readline().split()[-1]) for _ in range(2)]
    job.send_signal(signal.SIGINT)
    _, said = job.communicate(timeout=60)
    assert job.returncode == 130
    assert b"Traceback" not in said
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["true"], 2, "Specify -np N"),
        (["-np", "2"], 2, "missing COMMAND"),
        (["-np", "2", "-H", "localhost:1", "true"], 2, "-np 2 needs 2 slots, but the hosts given have 1"),
        (
            ["-np", "2", "-H", "elsewhere.invalid:2", "true"],
            2,
            "host elsewhere.invalid: ssh cannot connect",
        ),
        (["-np", "2", "-H", "localhost", "true"], 2, "form HOST:SLOTS"),
        (["-np", "2", "-hostfile", "/no/such", "true"], 2, "--hostfile /no/such: No such file"),
        (["-np", "2", "--config-file", "/no/such", "true"], 2, "--config-file /no/such: No such file"),
        (["-np", "2", "--cycle-time-ms", "-1", "true"], 2, "cycle_time_ms=-1.0 must be >= 0"),
        (["-np", "2", "no-such-program"], 127, "command not found: no-such-program"),
        (["-np", "2", "--gloo", "--mpi", "true"], 2, "not allowed with"),
    ],
)
def test_mistakes_are_told_in_a_sentence(words, code, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["horovodrun", *words])
    assert run_commandline() == code
    out, said = capsys.readouterr()
    assert message in said
    assert said.splitlines()[-1].startswith("horovodrun: ")
    assert out == ""


def test_the_exit_code_of_a_mistake():
    done = horovodrun("-np", "2", "-H", "localhost", "true")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"horovodrun: -H localhost: ")


def test_hosts_of_a_file_with_comments(program, tmp_path):
    (tmp_path / "hosts").write_text("# this machine\n\nlocalhost slots=2\n")
    done = horovodrun("-np", "2", "--hostfile", str(tmp_path / "hosts"), "python", program("print(rank)"))
    assert sorted(done.stdout.decode().split()) == ["[0]<stdout>:0", "[1]<stdout>:1"]


def test_as_many_processes_as_asked_for(program):
    done = horovodrun("-np", "1", "-H", "localhost:3", "python", program("print(os.environ['HOROVOD_SIZE'])"))
    assert done.stdout == b"[0]<stdout>:1\n"


def test_mpi_args_reach_mpiexec(program):
    path = program("from mpi4py import MPI\nprint(os.environ['GIVEN'], MPI.COMM_WORLD.size)")
    given = "-x GIVEN=yes" if find_mpi().family == "openmpi" else "-genv GIVEN yes"
    done = horovodrun("-np", "2", f"--mpi-args={given}", "--binding-args=-bind-to none", "python", path)
    assert sorted(done.stdout.decode().splitlines()) == [f"[{rank}]<stdout>:yes 2" for rank in range(2)]


def test_verbose_tells_what_is_done(program):
    done = horovodrun("-np", "1", "--verbose", "python", program("print('x')"))
    assert "rank 0 runs on" in done.stderr.decode()
    assert done.stdout == b"[0]<stdout>:x\n"


def there(framework: str) -> str:
    return "X" if importlib.util.find_spec(framework) else " "


def test_check_build():
    assert parse_args(["-cb"]).check_build
    done = horovodrun("--check-build", "--verbose")
    assert done.returncode == 0
    text, _, about = done.stdout.decode().partition("\nMPI: ")
    assert about
    assert text.replace("[X] NCCL", "[ ] NCCL") == textwrap.dedent(  # some PyTorch builds have NCCL
        f"""\
        Horovod v{horovod.__version__}:

        Available Frameworks:
            [{there("tensorflow")}] TensorFlow
            [{there("torch")}] PyTorch
            [{there("mxnet")}] MXNet

        Available Controllers:
            [X] MPI
            [ ] Gloo

        Available Tensor Operations:
            [ ] NCCL
            [ ] DDL
            [ ] CCL
            [X] MPI
            [ ] Gloo
        """
    )


def test_help_has_examples():
    done = horovodrun("--help")
    assert done.returncode == 0
    assert b"horovodrun -np 4 -H localhost:4 python train.py" in done.stdout


def test_run_gives_the_results_by_rank():
    def scaled(factor: float, offset: int = 0) -> tuple[int, int, float]:
        import ringdance.numpy as hvd

        hvd.init()
        total = hvd.allreduce(hvd.rank() + 1.0, op=hvd.Sum)
        return hvd.rank(), hvd.size(), factor * float(total) + offset

    assert horovod.run(scaled, (2.0,), {"offset": 1}, num_proc=2) == [(0, 2, 7.0), (1, 2, 7.0)]
    with pytest.warns(DeprecationWarning, match="np is deprecated"):
        assert horovod.run(scaled, (1.0,), np=2, use_mpi=True, hosts="localhost:2") == [
            (0, 2, 3.0),
            (1, 2, 3.0),
        ]


def test_run_of_a_job_that_could_be_elastic(capsys):
    def ranks() -> int:
        return int(os.environ["HOROVOD_SIZE"])

    assert horovod.run(ranks, num_proc=2, min_num_proc=1, max_num_proc=3, hosts="localhost:4") == [3, 3, 3]
    assert "adding or removing processes is not supported yet" in capsys.readouterr().err


def test_run_with_a_function_that_fails(capsys, tmp_path):
    def failing() -> None:
        if os.environ["HOROVOD_RANK"] == "1":
            print("last words")
            raise KeyError("what went wrong")
        time.sleep(60)

    with pytest.raises(RuntimeError, match="rank 1 of 2") as caught:
        horovod.run(
            failing, num_proc=2, output_filename=str(tmp_path / "logs"), start_timeout=60, verbose=True
        )
    assert "KeyError: 'what went wrong'" in str(caught.value)
    assert (tmp_path / "logs" / "rank.1" / "stdout").read_text() == "[1]<stdout>:last words\n"
    said: Any = capsys.readouterr()
    assert said.out == "[1]<stdout>:last words\n"
    assert "rank 0 runs on" in said.err
