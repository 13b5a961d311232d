"""``ringdance mpirun``: the command lines of Open MPI 4's ``mpirun``, whichever MPI is there."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ringdance import __version__
from ringdance.cluster.detect import detect
from ringdance.cluster.hostfile import HostList
from ringdance.errors import LaunchError
from ringdance.launch.cli import Look
from ringdance.launch.mpi import find_mpi
from ringdance.launch.mpi.mpirun import Asked, counts, understand
from ringdance.launch.order import CommandError, Order, as_program, resolve_command, run_in_terminal
from ringdance.launch.output.stream import Style
from ringdance.launch.ssh import Reach
from ringdance.launch.system.linux import usable_cores

_HELP = """\
usage: ringdance mpirun [OPTIONS] COMMAND [ARGUMENTS...]
       ringdance mpirun --install-into DIR

Does what a command line of Open MPI 4's mpirun asks for, with the MPI that Python uses here (Open MPI 5,
MPICH, Intel MPI, ...) and by the launcher of `ringdance run`: options with one dash or two, -np, -N,
-npernode, -H, -hostfile, -x, -mca, -bind-to, -map-by, -tag-output, -output-filename, -wdir, -oversubscribe
and others. Hosts that a scheduler has given are found as by `ringdance run`. An option that is not known is
an error, one that changes nothing here is named if that may matter.

  --install-into DIR   write a program called mpirun into a folder, for callers that look for it in PATH.
                       Nothing else finds it: put the folder first in PATH where it is wanted
  --launch-agent PROG  start Open MPI's daemon by this name on the other hosts
  --no-check           look for nothing wrong on the hosts before the start
  --dry-run            print the plan and start no rank
  --version, --help

Other than with mpirun: cores are not bound unless that is asked for; ranks are numbered host by host, and
-map-by node only says how many ranks each host gets; `python` is the interpreter that ringdance is
installed in; parameters of how Open MPI 4 starts processes (-mca orte_*, oob_*, plm_*) are left out.

examples:
  ringdance mpirun -np 4 -H h1:2,h2:2 -bind-to none -map-by slot -x NCCL_DEBUG=INFO python train.py
  ringdance mpirun --install-into /opt/shim && PATH=/opt/shim:$PATH some-tool-that-calls-mpirun
"""

_MARK = "ringdance mpirun"


def main(argv: Sequence[str], look: Look | None = None) -> int:
    """``ringdance mpirun``: `argv` without these words; returns the exit code.

    Args:
        argv: the words of the command line.
        look: looks for what is wrong with several hosts, before anything starts there.
    """
    return as_program("ringdance mpirun", lambda: _main(list(argv), look))


def _main(words: list[str], look: Look | None) -> int:
    if words[:1] == ["--install-into"]:
        if len(words) != 2:
            raise CommandError("--install-into DIR: give one folder")
        print("\n".join(map(str, install(Path(words[1])))))
        return 0
    asked = understand(words, os.environ)
    if asked.about:
        # Who asks for the version wants to know whose options it takes, or, as mpi.py does, whose it is.
        print(_HELP.rstrip() if asked.about == "help" else f"{_MARK} {__version__}")
        return 0
    for note in asked.notes:
        _say(note)
    if asked.cwd:
        try:
            os.chdir(asked.cwd)
        except OSError as error:
            raise CommandError(f"-wdir {asked.cwd}: {error.strerror}") from None
    ready = order_of(asked, resolve_command(asked.command)).prepare(_say)
    if asked.dry:
        ready.close()
        print(ready.plan.describe(os.environ))
        return 0
    if asked.show:  # where ranks go; variables are nobody's business who reads the log
        print(ready.plan.describe().partition("\nenvironment:")[0], file=sys.stderr)
    if look and ready.plan.wide and asked.check:
        look(ready, _say)
    return run_in_terminal(ready)


def order_of(asked: Asked, command: Sequence[str]) -> Order:
    """The order for what a line asks.

    Raises:
        LaunchError: the hosts cannot be understood.
    """
    hosts: HostList | None = asked.hosts
    ranks, source = asked.ranks, asked.source
    if hosts is None and (asked.per_host or asked.spread or asked.oversubscribe or ranks is None):
        given = detect(os.environ)
        hosts = given.hosts if given else [("localhost", ranks or usable_cores())]
        source = given.source if given else "mpirun"
    if hosts is not None:
        hosts, ranks = counts(hosts, asked)
    options = asked.mpi
    family = find_mpi().family
    if options and family != "openmpi":
        _say(f"no effect with {family}: {shlex.join(options)}")
        options = []
    return Order(
        command,
        ranks=ranks,
        hosts=hosts,
        source=source,
        reach=Reach(arguments=tuple(asked.ssh)),
        interfaces=asked.interfaces,
        exports=asked.exports,
        # As Open MPI 4 has it: job, rank and stream; without the option, nothing.
        style=Style("[1,{rank}]<{stream}>:" if asked.tag else "", clock=asked.clock, closes=False),
        folder=asked.folder,
        verbose=asked.verbose,
        mpi_args=options,
    )


def install(folder: Path) -> list[Path]:
    """Write ``mpirun`` into a folder, and a name for the daemon as Open MPI 4 has it; the files.

    Raises:
        LaunchError: another program is there already, or it cannot be written.
    """
    mpi = find_mpi()
    mpirun, daemon = folder.absolute() / "mpirun", folder.absolute() / "orted"
    words = [sys.executable, "-P", "-m", "ringdance", "mpirun"]
    prted = Path(mpi.mpiexec).parent / "prted"
    try:
        if mpirun.is_symlink() or (mpirun.exists() and _MARK not in mpirun.read_text(errors="replace")):
            raise LaunchError(f"{mpirun} is another program; choose a folder that is only for this one")
        folder.mkdir(parents=True, exist_ok=True)
        made = [mpirun]
        # SageMaker's toolkit waits on each host for a process that is called orted.
        if mpi.family == "openmpi" and prted.exists():
            if daemon.is_symlink():
                daemon.unlink()
            daemon.symlink_to(prted)
            words += ["--launch-agent", str(daemon)]
            made.append(daemon)
        mpirun.write_text(f'#!/bin/sh\n# {_MARK}\nexec {shlex.join(words)} "$@"\n')
        mpirun.chmod(0o755)
    except OSError as error:
        raise LaunchError(f"--install-into {folder}: {error.strerror}") from None
    return made


def _say(text: str) -> None:
    print(f"ringdance mpirun: {text}", file=sys.stderr, flush=True)
