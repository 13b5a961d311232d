"""Translate command lines of Open MPI 4's mpirun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringdance.errors import LaunchError
from ringdance.launch import cli as launch
from ringdance.launch import mpirun_cli
from ringdance.launch.mpi import Mpi, family_of
from ringdance.launch.mpi.mpirun import _VALUES, MpirunLine, parse, slots_of
from ringdance.launch.mpirun_cli import changes, install
from ringdance.tools import cli

SAGEMAKER = """
--host algo-1:2,algo-2:2 -np 4 --allow-run-as-root --display-map --tag-output -mca btl_tcp_if_include eth0
-mca oob_tcp_if_include eth0 -mca plm_rsh_no_tree_spawn 1 -bind-to none -map-by slot -mca pml ob1
-mca btl ^openib -mca orte_abort_on_non_zero_status 1 -mca btl_vader_single_copy_mechanism none
-x NCCL_MIN_NRINGS=4 -x NCCL_SOCKET_IFNAME=eth0 -x LD_PRELOAD=/x/gethostname.so -x PATH -x SM_HOSTS
"""
COMMAND = ["python", "-m", "mpi4py", "train.py", "--epochs", "3", "-x", "-np"]


def parsed(line: str, **environ: str) -> MpirunLine:
    return parse([*line.split(), *COMMAND], environ)


def test_the_line_of_sagemakers_toolkit() -> None:
    line = parse([*SAGEMAKER.split(), *COMMAND], {"PATH": "/bin", "SM_HOSTS": '["algo-1","algo-2"]'})
    assert line.command == COMMAND
    assert (line.ranks, line.hosts) == (4, [("algo-1", 2), ("algo-2", 2)])
    assert line.flags == {"tag", "display"}
    assert line.mpi == ["--mca", "pml", "ob1", "--mca", "btl", "^openib"]
    assert line.options == [
        "--network-interface", "eth0", "-x", "NCCL_MIN_NRINGS=4", "-x", "NCCL_SOCKET_IFNAME=eth0",
        "-x", "LD_PRELOAD=/x/gethostname.so", "-x", "PATH=/bin", "-x", 'SM_HOSTS=["algo-1","algo-2"]',
    ]  # fmt: skip
    dropped = "plm_rsh_no_tree_spawn, orte_abort_on_non_zero_status, btl_vader_single_copy_mechanism"
    assert line.notes == [f"-mca {dropped}: no effect, because this launcher starts the processes"]


@pytest.mark.parametrize(
    ("line", "hosts", "ranks"),
    [
        ("-H a:2,b:2", [("a", 2), ("b", 2)], 4),
        ("-np 3 -H a:2,b:2", [("a", 2), ("b", 2)], 3),
        ("-H a,b,a", [("a", 2), ("b", 1)], 3),
        ("-host a:1 --host b:3", [("a", 1), ("b", 3)], 4),
        ("-H [fe80::1]:2,b", [("fe80::1", 2), ("b", 1)], 3),
        ("-N 3 -H a:8,b:8", [("a", 3), ("b", 3)], 6),
        ("--map-by ppr:2:node -H a:8,b:8", [("a", 2), ("b", 2)], 4),
        ("-pernode -H a:8,b:8", [("a", 1), ("b", 1)], 2),
        ("-np 3 -map-by node -H a:4,b:4,c:4", [("a", 1), ("b", 1), ("c", 1)], 3),
        ("-np 5 -bynode -H a:4,b:1", [("a", 4), ("b", 1)], 5),
        ("-np 2 --bynode -H a:4,b:4,c:4", [("a", 1), ("b", 1)], 2),
        ("-np 7 -oversubscribe -H a,b", [("a", 4), ("b", 3)], 7),
        ("-np 4 --map-by node:oversubscribe -H a,b", [("a", 2), ("b", 2)], 4),
    ],
)
def test_where_ranks_go(line: str, hosts: list[tuple[str, int]], ranks: int) -> None:
    found = parsed(line)
    assert found.hosts is not None
    assert slots_of(found.hosts, found) == (hosts, ranks)


def test_host_files(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a slots=4 max_slots=8\nb slots=2\n")
    assert parsed(f"-hostfile {file}").hosts == [("a", 4), ("b", 2)]
    # Hosts chosen from a host file keep its slots.
    assert parsed(f"--machinefile {file} -H b").hosts == [("b", 2)]


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("-bind-to none -map-by slot", []),
        ("-bind-to core", ["--bind-to", "core"]),
        ("--bind-to=socket --map-by=socket", ["--bind-to", "socket", "--map-by", "socket"]),
        ("-bind-to core -map-by slot:PE=2", ["--bind-to", "core", "--map-by", "slot:PE=2"]),
        ("--map-by ppr:2:node:pe=4 -stdin 0", ["--map-by", "slot:PE=4", "--bind-to", "core"]),
        ("-map-by socket:PE=2", ["--map-by", "socket:PE=2", "--bind-to", "core"]),
        ("-bind-to hwthread -map-by slot:PE=2", ["--bind-to", "hwthread", "--map-by", "slot:PE=2"]),
        ("-map-by numa:span --rank-by fill", ["--map-by", "numa:span"]),
        ("--display bind", ["--display", "bind"]),
        ("--display map,bind", ["--display", "bind"]),
        ("-bind-to-core -bycore", ["--bind-to", "core", "--map-by", "core"]),
        ("-mca btl_tcp_if_exclude lo,docker0", ["--mca", "btl_tcp_if_exclude", "lo,docker0"]),
        ("-mca btl_tcp_if_include 10.0.0.0/8", ["--mca", "btl_tcp_if_include", "10.0.0.0/8"]),
        ("--gmca coll ^hcoll -mca orte_base_help_aggregate 0", ["--mca", "coll", "^hcoll"]),
        ("--report-bindings", ["--report-bindings"]),
        ("--launch-agent /x/orted", ["--prtemca", "prte_launch_agent", "/x/orted"]),
    ],
)
def test_options_of_mpi(line: str, options: list[str]) -> None:
    assert parsed(line).mpi == options
    assert all("orte_base" in note for note in parsed(line).notes)


def test_ssh_and_output_and_variables(tmp_path: Path) -> None:
    line = parsed("-x A=1=2 -x B -x NONE -wdir /w", B="b")
    assert line.options == ["-x", "A=1=2", "-x", "B=b"]
    assert line.notes == ["-x NONE: that variable is not set here"]
    assert line.cwd == "/w"
    agent = ["-mca", "plm_rsh_agent", "/usr/bin/ssh -v"]
    line = parse([*agent, "-mca", "plm_rsh_args", "-p 2222", "--output", "tag,dir=/logs", "x"], {})
    assert line.ssh == ["-v", "-p", "2222"]
    assert (line.flags, line.options) == ({"tag"}, ["--output-filename", "/logs"])
    line = parsed("-output-filename /logs,2:nojobid -timestamp-output")
    assert (line.flags, line.options) == ({"timestamp"}, ["--output-filename", "/logs,2"])


def test_a_variable_written_as_an_option() -> None:
    line = parsed("--NCCL_DEBUG=INFO")
    assert line.options == ["-x", "NCCL_DEBUG=INFO"]
    assert "treated as -x NCCL_DEBUG=INFO" in line.notes[0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-frobnicate 3", "unknown option -frobnicate"),
        ("-np", "requires a value"),
        ("-np two", "must be an integer"),
        ("-np 0", "at least 1"),
        ("-H a:x", "form HOST:SLOTS"),
        ("-H -oProxyCommand=x", "form HOST:SLOTS"),
        ("--map-by ppr:1:socket", r"ppr:1:socket: not supported; specify ranks per host with -N, and their"),
        ("-path /opt/bin", "-path /opt/bin: not supported; pass the full path of the program"),
        ("--stdin all", "--stdin all: not supported; only rank 0 reads stdin"),
        ("--app file", "unknown option --app"),
        ("-mca plm_rsh_agent /etc/mpi/kubexec.sh", "only supported remote shell"),
        ("-mca plm_rsh_args 'x", "not a valid list of shell words"),
        ("-mca plm_rsh_agent 'ssh", "not a valid list of shell words"),
        ("-np 1 a : -np 1 b", "several programs"),
    ],
)
def test_unsupported_options_are_errors(line: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        parse(line.split(), {})


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("--timeout 60", "--timeout: no effect; the job has no time limit"),
        ("--map-by seq", "--map-by seq: ranks are placed and numbered host by host"),
        ("--rank-by node", "--rank-by node: ranks are placed and numbered host by host"),
        ("-bynode", "--map-by node: ranks are placed and numbered host by host"),
        ("-map-by slot:hwtcpus,oversubscribe", "--map-by slot:hwtcpus,oversubscribe: hwtcpus has no effect"),
        ("--prefix /opt", "--prefix: no effect; all hosts use the MPI library that this Python loads"),
        ("--output tag,xml", "--output xml: no effect"),
        ("--output-filename /d:nocopy", "--output-filename /d:nocopy: the output is also shown here"),
        ("-merge-stderr-to-stdout", "-merge-stderr-to-stdout: no effect; the two streams stay separate"),
        ("-mca oob_tcp_port 9", "-mca oob_tcp_port: no effect, because this launcher starts the processes"),
        ("-bind-to none -map-by slot:PE=2", "--bind-to none: no effect, because PE=N binds ranks to N cores"),
    ],
)
def test_options_without_effect_are_named(line: str, note: str) -> None:
    assert parsed(line).notes == [note]


def test_each_option_does_something_or_is_named() -> None:
    """Only options that request the default behavior may be dropped without a message."""
    silent = []
    for name, count in _VALUES.items():
        try:
            parsed_line = parsed(" ".join([f"--{name}", *["2"] * count]))
        except LaunchError:  # the option is refused, or needs another value
            continue
        if parsed_line == MpirunLine(command=COMMAND):
            silent.append(name)
    assert silent == [
        "byslot", "nooversubscribe", "q", "quiet", "allow-run-as-root", "hetero-nodes",
        "noprefix", "disable-recovery", "leave-session-attached",
    ]  # fmt: skip


def test_other_libraries_get_no_options_of_open_mpi(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = parsed("-np 2 -H localhost:2 -mca btl self")
    monkeypatch.setattr(mpirun_cli, "find_mpi", lambda: Mpi("mpich", "/x/mpiexec", "test"))
    assert changes(line)["mpi_args"] == []
    assert "no effect with mpich: --mca btl self" in capsys.readouterr().err
    monkeypatch.setattr(mpirun_cli, "find_mpi", lambda: Mpi("openmpi", "/x/mpiexec", "test", 5))
    spec = changes(line)
    assert spec["mpi_args"] == ["--mca", "btl", "self"]
    assert (spec["ranks"], spec["hosts"], spec["source"]) == (2, [("localhost", 2)], "-H localhost:2")


def test_the_program_for_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = tmp_path / "prefix"
    prefix.mkdir()
    (prefix / "prted").write_text("")
    monkeypatch.setattr(
        mpirun_cli, "find_mpi", lambda: Mpi("openmpi", str(prefix / "mpiexec"), "test", 5)
    )
    directory = tmp_path / "bin"
    for _ in range(2):  # the second time over its own file
        assert install(directory) == [directory / "mpirun", directory / "orted"]
    assert (directory / "orted").resolve() == prefix / "prted"
    done = subprocess.run([directory / "mpirun", "--version"], capture_output=True, text=True, check=True)
    # A launcher that looks for Open MPI's or MPICH's mpirun in PATH must not mistake it for one.
    assert done.stdout.startswith("ringdance mpirun")
    assert family_of(done.stdout) is None
    assert str(sys.executable) in (directory / "mpirun").read_text()
    # Debian's shell drops variables whose names it cannot represent.
    words = [directory / "mpirun", "-np", "1", "-x", "SM_HP_LEARNING-RATE", "--dry-run", "true"]
    environ = {**os.environ, "SM_HP_LEARNING-RATE": "0.1"}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=True)
    assert "is not set here" not in done.stderr


def test_the_program_of_a_python_whose_path_has_a_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpirun_cli, "find_mpi", lambda: Mpi("mpich", "/x/mpiexec", "test"))
    python = tmp_path / "a b" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    [program] = install(tmp_path)
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ringdance mpirun")


@pytest.mark.parametrize("link", [False, True])
def test_another_mpirun_is_left_alone(tmp_path: Path, link: bool) -> None:
    other = tmp_path / "mpirun"
    if link:
        other.symlink_to("opal_wrapper")
    else:
        other.write_bytes(b"\x7fELF\xff")
    with pytest.raises(LaunchError, match="is a different program"):
        install(tmp_path)
    assert os.listdir(tmp_path) == ["mpirun"]


def test_a_map_shows_no_variables(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "run_in_terminal", lambda ready: 0)
    line = "mpirun -np 2 -H localhost:2 --display-map -x SM_HPS={'key':'not-for-logs'} python -V"
    assert cli.main(line.split()) == 0
    shown = capfd.readouterr().err
    assert "localhost  2      0-1" in shown
    assert "not-for-logs" not in shown


def test_help_and_unknown_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["mpirun", "--help"]) == 0
    assert "--install-into DIR" in capsys.readouterr().out
    assert cli.main(["mpirun", "--frobnicate", "x"]) == 2
    assert "ringdance mpirun: unknown option --frobnicate" in capsys.readouterr().err
