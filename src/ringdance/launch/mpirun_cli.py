"""``ringdance mpirun``: accept command lines written for Open MPI 4's ``mpirun``, with any MPI library."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringdance import __version__
from ringdance.errors import LaunchError
from ringdance.host.limits import usable_cores
from ringdance.host.schedulers.detect import detect
from ringdance.host.schedulers.hostfile import HostList
from ringdance.launch import cli
from ringdance.launch.mpi.library import find_mpi
from ringdance.launch.mpi.mpirun import MpirunLine, parse, slots_of
from ringdance.launch.output.stream import Style
from ringdance.launch.parser import as_program
from ringdance.launch.prepare import Check
from ringdance.launch.spec import CommandError

_NAME = "ringdance mpirun"
_HELP = """\
usage: ringdance mpirun [OPTIONS] COMMAND [ARGUMENTS...]
       ringdance mpirun --install-into DIR

Run a command line of Open MPI 4's mpirun with the MPI that Python uses here (Open MPI 5, MPICH, Intel MPI,
...) and the launcher of `ringdance run`. Options, with one dash or two: -np, -N, -npernode, -H, -hostfile,
-x, -mca, -bind-to, -map-by, -tag-output, -output-filename, -wdir, -oversubscribe and others. By default, the
scheduler's hosts are used, as with `ringdance run`. Unknown options are errors. Options without effect
produce a warning.

  --install-into DIR   write a program named mpirun into a directory, for tools that look for it in PATH
  --launch-agent PROG  name of Open MPI's daemon on the other hosts
  --no-check           skip the checks of the hosts before the start
  --dry-run            print the plan without starting any ranks
  --version, --help

Differences from mpirun: cores are bound only on request; ranks are numbered host by host, and -map-by node
only sets the number of ranks per host; `python` is the interpreter that ringdance is installed in;
parameters for how Open MPI 4 starts processes (-mca orte_*, oob_*, plm_*) are dropped with a warning.

examples:
  ringdance mpirun -np 4 -H h1:2,h2:2 -bind-to none -map-by slot -x NCCL_DEBUG=INFO python train.py
  ringdance mpirun --install-into /opt/shim && PATH=/opt/shim:$PATH some-tool-that-calls-mpirun
"""


def main(argv: Sequence[str], check: Check | None = None) -> int:
    """Run ``ringdance mpirun`` and return its exit code.

    Args:
        argv: Command-line arguments after ``mpirun``.
        check: Checks the hosts before the job starts. Called only if there are several hosts.
    """
    return as_program(_NAME, lambda: _main(list(argv), check))


def _main(words: list[str], check: Check | None) -> int:
    if words[:1] == ["--install-into"]:
        if len(words) != 2:
            raise CommandError("--install-into requires exactly one directory")
        print(*install(Path(words[1])), sep="\n")
        return 0
    line = parse(words, os.environ)
    if line.flags & {"help", "version"}:
        # Programs search the output of --version for the name of an MPI library, as library.py does. Our
        # output must not contain one.
        print(_HELP.rstrip() if "help" in line.flags else f"{_NAME} {__version__}")
        return 0
    for note in line.notes:
        _say(note)
    if "closed" in line.flags:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(line.cwd or ".")
    ssh = f"--ssh-args={shlex.join(line.ssh)}"
    arguments = cli.parser().parse_args([*line.options, ssh, "--", *line.command])
    spec = replace(cli.spec_of(arguments), **changes(line))
    return cli.run(spec, arguments, _say, check, show_map="display" in line.flags)


def changes(line: MpirunLine) -> dict[str, Any]:
    """Return the JobSpec fields that differ from what ``ringdance run`` would set.

    Raises:
        LaunchError: The hosts given by the scheduler cannot be parsed.
    """
    hosts: HostList | None = line.hosts
    ranks, source, options = line.ranks, line.source, line.mpi
    if hosts is None and (ranks is None or line.per_host or line.flags & {"spread", "oversubscribe"}):
        allocation = detect(os.environ)
        hosts = allocation.hosts if allocation else [("localhost", ranks or usable_cores())]
        source = allocation.source if allocation else "mpirun"
    if hosts is not None:
        hosts, ranks = slots_of(hosts, line)
    family = find_mpi().family
    if options and family != "openmpi":
        _say(f"no effect with {family}: {shlex.join(options)}")
        options = []
    # Open MPI 4's format: job, rank and stream. Without -tag-output, lines have no prefix.
    prefix = "[1,{rank}]<{stream}>:" if "tag" in line.flags else ""
    style = Style(prefix, clock="timestamp" in line.flags, closes=False)
    return {"ranks": ranks, "hosts": hosts, "source": source, "style": style, "mpi_args": options}


def install(directory: Path) -> list[Path]:
    """Install ``mpirun``, and Open MPI's daemon under its old name, in a directory. Return the files written.

    Raises:
        LaunchError: The directory contains a different program named mpirun, or no MPI library was found.
        OSError: The directory is not writable, or it contains an orted that is not a symbolic link.
    """
    mpi = find_mpi()
    mpirun, daemon = directory.absolute() / "mpirun", directory.absolute() / "orted"
    words = list[str]()
    prted = Path(mpi.mpiexec).parent / "prted"
    files = [mpirun]
    if mpirun.is_symlink() or (mpirun.exists() and _NAME not in mpirun.read_text(errors="replace")):
        raise LaunchError(f"{mpirun} exists and is a different program. Choose another directory.")
    directory.mkdir(parents=True, exist_ok=True)
    # SageMaker's toolkit waits for a process named orted on each host.
    if mpi.family == "openmpi" and prted.exists():
        if daemon.is_symlink():
            daemon.unlink()
        daemon.symlink_to(prted)
        words = ["--launch-agent", str(daemon)]
        files.append(daemon)
    # Avoid a shell unless the path requires one, because some shells drop environment variables whose names
    # are not valid shell identifiers.
    begin = f"#!{sys.executable} -P\n"
    if " " in sys.executable or len(begin) > 127:  # the file is both a shell script and a Python program
        begin = f"#!/bin/sh\n'''exec' {shlex.quote(sys.executable)} -P \"$0\" \"$@\"\n' '''\n"
    program = f"sys.exit(main(['mpirun', *{words}, *sys.argv[1:]]))\n"
    mpirun.write_text(f"{begin}# {_NAME}\nimport sys\nfrom ringdance.tools.cli import main\n{program}")
    mpirun.chmod(0o755)
    return files


def _say(text: str) -> None:
    print(f"{_NAME}: {text}", file=sys.stderr, flush=True)
