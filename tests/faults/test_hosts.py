"""Jobs on this machine and on simulated "hosts", to the extent possible without root: here_hosts.py."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import here_hosts
import psutil
import pytest
from processes import MARKER, script, wait_until

from ringdance.host.directories import host_name
from ringdance.launch.mpi import find_mpi

pytestmark = [
    pytest.mark.slow,
    pytest.mark.limit(150),
    pytest.mark.skipif(bool(here_hosts.why_not()), reason=f"hosts: {here_hosts.why_not()}"),
]
FRAME = "the job failed"
LINE = (sys.executable, "-m", "ringdance", "run")
THREE = ("-H", "localhost:1,other1:2,other2:1")


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    environ = here_hosts.environment(tmp_path / "bin")

    def run_(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(  # type: ignore[call-overload, no-any-return]
            [*LINE, *words],
            **{
                "capture_output": True,
                "text": True,
                "check": False,
                "timeout": 100.0,
                "env": environ,
                **options,
            },
        )

    return run_


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    return lambda text: script(
        tmp_path, "import os, sys, time\nrank = int(os.environ['RINGDANCE_RANK'])\n" + text
    )


def test_one_world_over_three_hosts(
    run: Callable[..., subprocess.CompletedProcess[str]], program: Callable[[str], str]
) -> None:
    path = program(
        "from mpi4py import MPI\n"
        "names = 'LOCAL_RANK', 'LOCAL_SIZE', 'CROSS_RANK', 'CROSS_SIZE'\n"
        "numbers = [os.environ['HOROVOD_' + name] for name in names]\n"
        "odd = os.environ['spark.env-1']\n"  # a shell cannot have a variable of this name
        "print(os.uname().nodename, *numbers, MPI.COMM_WORLD.allreduce(rank), odd, sys.stdin.read())\n"
    )
    done = run(*THREE, "--no-check", "-x", "spark.env-1=odd", "python", path, input="what is read")
    assert done.returncode == 0, done.stderr
    own = os.uname().nodename
    assert sorted(done.stdout.splitlines()) == [
        f"[0]<{own}> {own} 0 1 0 3 6 odd what is read",
        "[1]<other1> other1 0 2 1 3 6 odd ",
        "[2]<other1> other1 1 2 0 1 6 odd ",
        "[3]<other2> other2 0 1 2 3 6 odd ",
    ]
    assert done.stderr == ""


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="moves the virtual environment")
def test_another_environment_and_directory_on_another_host(tmp_path: Path) -> None:
    moved, there = tmp_path / "moved", tmp_path / "there"
    before = f"mkdir {moved}; mount --bind {sys.prefix} {moved}; mount -t tmpfs tmpfs {sys.prefix}"
    there.mkdir()
    text = "import os, sys\nfrom mpi4py import MPI\nprint(MPI.COMM_WORLD.size, sys.executable, os.getcwd())\n"
    for directory in (tmp_path, there):
        (directory / "program.py").write_text(text)
    words = ["--python", f"{moved}/bin/python", "--chdir", str(there), "python", "program.py"]
    done = subprocess.run(
        [*LINE, "-H", "localhost:1,other1:1", "--no-check", *words],
        cwd=tmp_path, env=here_hosts.environment(tmp_path / "bin", before),
        capture_output=True, text=True, check=False, timeout=100.0,
    )  # fmt: skip
    assert sorted(done.stdout.splitlines()) == [
        f"[0]<{os.uname().nodename}> 2 {sys.executable} {there}",  # which exists on this host too
        f"[1]<other1> 2 {moved}/bin/python {there}",
    ], done.stderr


def test_an_exception_on_another_host_is_the_cause(
    run: Callable[..., subprocess.CompletedProcess[str]], program: Callable[[str], str]
) -> None:
    path = program("if rank == 2:\n    raise ValueError('boom')\ntime.sleep(60)\n")
    done = run(*THREE, "python", path)
    assert done.returncode == 1
    assert "first failure: rank 2 of 4 on other1" in done.stderr
    assert done.stderr.count("ValueError: boom") >= 1
    assert done.stderr.count("Traceback") == 1


def test_hosts_that_do_not_answer_are_told_all_at_once(
    run: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run("-H", "localhost:1,nowhere1:1,other1:1,nowhere2:1", "python", "-c", "print('never')")
    assert done.returncode == 2
    assert "never" not in done.stdout
    for name in ("nowhere1", "nowhere2"):
        assert f"host {name}: ssh cannot connect: ssh: Could not resolve hostname {name}" in done.stderr


def test_a_script_that_calls_a_function_on_hosts(
    run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "call.py").write_text(
        "import ringdance\n"
        "def where(word):\n"
        "    import os\n"
        "    return os.uname().nodename, word\n"
        "print(ringdance.run(where, args=('w',), np=2, hosts='other1:1,other2:1'))\n"
    )
    environ = here_hosts.environment(tmp_path / "bin")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "call.py")],
        env=environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout == "[('other1', 'w'), ('other2', 'w')]\n", done.stderr


def find(marker: str, words: str = "") -> list[psutil.Process]:
    """Return the living processes of a test with `words` in their command line."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARKER) == marker and words in " ".join(process.cmdline()):
                processes.append(process)
        except (psutil.Error, OSError):
            continue
    return processes


def each(processes: list[psutil.Process], action: Callable[[psutil.Process], None]) -> None:
    """Apply an action to those processes that still exist."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            action(process)


def kill_daemon(marker: str) -> str:
    for process in find(marker, "prted"):
        if "unshare" not in process.cmdline()[0] and process.name() == "prted":
            process.kill()
            return "which is not a rank, was killed by SIGKILL"
    raise AssertionError("no daemon")


def kill_host(marker: str) -> str:
    find(marker, 'hostname "$1"; mount')[0].kill()
    return "connection closed"


def silence_host(marker: str) -> str:
    outer = find(marker, 'hostname "$1"; mount')[0]
    for process in [outer, *outer.children(recursive=True)]:
        process.suspend()
    return "no heartbeat for 3 s"


def kill_launcher(marker: str) -> str:
    find(marker, "ringdance run")[0].kill()
    return ""


def interrupt(marker: str) -> str:
    find(marker, "ringdance run")[0].send_signal(signal.SIGINT)
    return ""


def directories(names: list[str]) -> list[Path]:
    """Return the job directories of these hosts."""
    return [path for name in names for path in Path(tempfile.gettempdir()).glob(f"ringdance-*-{name}")]


@pytest.mark.parametrize("harm", [kill_host, silence_host, kill_daemon, kill_launcher, interrupt])
def test_harm_to_a_host(program: Callable[[str], str], tmp_path: Path, harm: Callable[[str], str]) -> None:
    path = program(
        "from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\nprint('works', flush=True)\ntime.sleep(100)\n"
    )
    marker, names = str(time.time()), [f"other{os.getpid()}x{number}" for number in (1, 2)]
    before = directories(names)
    log = tmp_path / "log"
    environ = {**here_hosts.environment(tmp_path / "bin"), MARKER: marker}
    with open(log, "wb") as file:
        job = subprocess.Popen(
            [*LINE, "-H", f"localhost:1,{names[0]}:2,{names[1]}:1", "--host-timeout", "3", "python", path],
            env=environ,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        assert wait_until(lambda: log.read_text().count("works") == 4, 60.0) is not None, log.read_text()
        words = harm(marker)
        assert job.wait(40.0) != 0
        assert words in log.read_text()
        assert (FRAME in log.read_text()) == (harm not in (kill_launcher, interrupt))
        # A stopped process cannot exit: such a host ends its processes once it continues.
        each(find(marker), psutil.Process.resume)
        assert wait_until(lambda: not find(marker), 30.0) is not None, find(marker)
        # A lost host keeps its files, which here are in the same directory as the others'.
        left = [path for path in directories(names) if path not in before]
        assert len(left) == (1 if harm in (kill_host, silence_host) else 0)
        for path in left:
            shutil.rmtree(path)
    finally:
        job.kill()
        job.wait()
        each(find(marker), psutil.Process.kill)


@pytest.mark.parametrize("once", [True, False])
def test_a_daemon_that_does_not_start(program: Callable[[str], str], tmp_path: Path, once: bool) -> None:
    daemon = Path(find_mpi().mpiexec).with_name("prted")
    if not daemon.exists():
        pytest.skip("only Open MPI 5 has a daemon of that name")
    (tmp_path / "broken").write_text(f"#!/bin/sh\n{f'umount -l {daemon}' if once else ':'}\nexit 1\n")
    (tmp_path / "broken").chmod(0o755)
    environ = here_hosts.environment(tmp_path / "bin", f"mount --bind {tmp_path}/broken {daemon}")
    # One other host: with two, the first daemon may fail before the second host's daemon is broken.
    line = [*LINE, "-H", "localhost:2,other1:2", "python", program("print('works')")]
    done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.stderr.count("retrying once") == 1
    assert done.stdout.count("works") == (4 if once else 0), done.stderr
    assert (done.returncode == 0) == once
    assert (FRAME in done.stderr) != once


def test_a_start_that_takes_too_long_names_hosts_and_ranks(
    program: Callable[[str], str], tmp_path: Path
) -> None:
    daemon = Path(find_mpi().mpiexec).with_name("prted")
    if not daemon.exists():
        pytest.skip("only Open MPI 5 has a daemon of that name")
    (tmp_path / "waits").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "waits").chmod(0o755)
    environ = here_hosts.environment(tmp_path / "bin", f"mount --bind {tmp_path}/waits {daemon}")
    line = [*LINE, *THREE, "--start-timeout", "4", "--no-check", "python", program("print('never')")]
    done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert (
        "only 0 of 4 ranks started within 4 s (--start-timeout)\n"
        "  host localhost (rank 0): the agent responds; mpiexec was started, but no rank connected\n"
        "  hosts other1 (ranks 1-2), other2 (rank 3): the agent responds; mpiexec's daemon was started, "
        "but no rank connected\n"
    ) in done.stderr, done.stderr


def copied_package(directory: Path, version: str) -> Path:
    """Copy what an agent runs, with another version."""
    package = Path(here_hosts.__file__).parents[2] / "src" / "ringdance"
    shutil.copytree(package / "host", directory / "ringdance" / "host")
    (directory / "ringdance" / "__init__.py").write_text(f'__version__ = "{version}"\n')
    return directory / "ringdance"


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ('echo "Permission denied (publickey)." >&2; exit 255', "ssh-copy-id other1"),
        ("exec /bin/sh -c '/no/such/python3 -I'", "does not exist on that host"),
        (
            """exec /bin/sh -c "$(printf %s "$3" | sed 's,[^ ]*src/ringdance,/nowhere,')" """,
            "has no ringdance in",
        ),
        (
            """exec /bin/sh -c "$(printf %s "$3" | sed 's,[^ ]*src/ringdance,COPY,')" """,
            "it has ringdance 0.0.7",
        ),
        ("exec sleep 100", "no answer within 3 s"),
        ("exec true", "ssh exited with code 0"),
    ],
)
def test_what_is_wrong_on_a_host_is_told(tmp_path: Path, does: str, words: str) -> None:
    does = does.replace("COPY", str(copied_package(tmp_path, "0.0.7")))
    environ = here_hosts.environment(tmp_path / "bin")
    (tmp_path / "bin" / "ssh").write_text(f'#!/bin/sh\nwhile [ "$1" != "--" ]; do shift; done\n{does}\n')
    line = [*LINE, "-H", "localhost:1,other1:1", "--start-timeout", "3", "python", "-c", "print('never')"]
    done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "host other1: " in done.stderr
    assert words in done.stderr
    assert done.stdout == ""


def test_tmpdir_holds_on_all_hosts(tmp_path: Path, program: Callable[[str], str]) -> None:
    """/tmp is read-only, so everything is written to the launcher's TMPDIR, on the other hosts too."""
    path = program("print(os.path.dirname(os.environ['RINGDANCE_JOB_DIRECTORY']))\n")
    with tempfile.TemporaryDirectory(prefix="rdt-") as place:  # a short path
        done = subprocess.run(
            here_hosts.without_temporary_files(place, *LINE, *THREE, "--no-check", "python", path),
            env={**here_hosts.environment(tmp_path / "bin"), "TMPDIR": place},
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()] == [place] * 4


def test_a_blank_in_tmpdir_is_no_obstacle(tmp_path: Path, program: Callable[[str], str]) -> None:
    """mpiexec splits the path of its ssh program at blanks."""
    with tempfile.TemporaryDirectory(prefix="rd t-") as place:
        done = subprocess.run(
            [*LINE, *THREE, "--no-check", "python", program("print('works')")],
            env={**here_hosts.environment(tmp_path / "bin"), "TMPDIR": place},
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
    assert done.stdout.count("works") == 4, done.stderr


@pytest.mark.parametrize("lost", [False, True])
def test_results_of_any_size_come_or_the_host_that_is_lost_is_named(tmp_path: Path, lost: bool) -> None:
    """Arguments and results exceed a message's limit, and no intermediate process holds them completely."""
    (tmp_path / "call.py").write_text(
        "import hashlib, os, resource, ringdance\n"
        "def large(blob):\n"
        "    return os.uname().nodename, blob, bytes(100 << 20)\n"
        "blob = os.urandom(1 << 20) * 80\n"
        "for host, got, more in ringdance.run(large, args=(blob,), np=2, hosts='other1:1,other2:1'):\n"
        "    print(host, got == blob, len(more) >> 20)\n"
    )
    environ = here_hosts.environment(tmp_path / "bin")
    with tempfile.TemporaryDirectory(prefix="rdt-") as place, open(tmp_path / "errors", "w+") as errors:
        environ |= {MARKER: str(tmp_path), "TMPDIR": place}
        line = [sys.executable, str(tmp_path / "call.py")]
        job = subprocess.Popen(line, env=environ, stdout=subprocess.PIPE, stderr=errors, text=True)
        if lost:
            coming = f"ringdance-*-{host_name()}/result.1.pkl.part"
            assert wait_until(lambda: bool(list(Path(place).glob(coming))), 60.0) is not None
            find(str(tmp_path), " ssh other2 ")[0].kill()
        out, _ = job.communicate(timeout=100)
        errors.seek(0)
        err = errors.read()
    if lost:
        assert "host other2 (rank 1): connection closed, before all" in err, err
    else:
        assert out == "other1 True 100\nother2 True 100\n", err
