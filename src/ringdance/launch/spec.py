"""What a user asks for: a job's hosts, options and command."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from ringdance.errors import LaunchError
from ringdance.host.schedulers.detect import detect
from ringdance.host.schedulers.hostfile import HostList
from ringdance.host.schedulers.this_machine import local_names
from ringdance.host.system import machine
from ringdance.launch.output.stream import Style
from ringdance.launch.remote.shell import RemoteShell


class CommandError(LaunchError):
    """The user's command cannot be run; `code` is the exit code."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


_LAUNCHERS = frozenset(("mpirun", "mpiexec", "orterun", "prterun", "srun", "torchrun", "horovodrun"))


@dataclass(frozen=True)
class JobSpec:
    """A job to be run from here.

    Attributes:
        command: program and its arguments.
        ranks: how many; None for all slots of `hosts`.
        hosts: names and slots, or None: those that a scheduler has allocated, else this machine.
        source: where `hosts` come from, for people.
        shell: how to reach other hosts, unless a scheduler defines it.
        interfaces: names of the network interfaces to use; empty for those that lead to all hosts.
        chdir: directory of the ranks, of those here if it is here; "" for the path of the launcher's.
        check: whether to ask other hosts before a plan is made; needed for a start.
        exports: variables to set for the ranks.
        forward: Whether ranks on other hosts get the launcher's variables. If not, settings only.
        style: how lines of ranks are shown; None: with their rank, and their host if there are several.
        clock, colour: whether lines begin with the time, and ranks have colours, if `style` is None.
        output_directory: for a copy of each rank's output, or "".
        timeline: file for a timeline of all ranks, or "".
        start_timeout: seconds until hosts must have answered, and then until all ranks must have started.
        heartbeat_timeout: seconds without a heartbeat after which a host is lost.
        grace: seconds that ranks have to end after a signal to the launcher; a second SIGINT ends them.
        verbose: whether to show steps.
        binding: options of mpiexec in place of ours that bind ranks to no cores.
        mpi_args: more options of mpiexec.
    """

    command: Sequence[str]
    ranks: int | None = None
    hosts: HostList | None = None
    source: str = ""
    shell: RemoteShell = field(default_factory=RemoteShell)
    interfaces: Collection[str] = ()
    chdir: str = ""
    check: bool = True
    exports: Mapping[str, str] = field(default_factory=dict)
    forward: bool = True
    style: Style | None = None
    clock: bool = False
    colour: bool = False
    output_directory: str = ""
    timeline: str = ""
    start_timeout: float = 60.0
    heartbeat_timeout: float = 30.0
    grace: float = 30.0
    verbose: bool = False
    binding: Sequence[str] | None = None
    mpi_args: Sequence[str] = ()

    def resolved(self) -> JobSpec:
        """Fill in hosts and ranks from the scheduler's allocation, if there is one.

        Raises:
            LaunchError: neither hosts nor a number of ranks are known.
        """
        if not self.start_timeout > 0:
            raise LaunchError(f"--start-timeout {self.start_timeout:g}: it must be more than 0 seconds")
        if not 0 <= self.grace < 1e9:
            raise LaunchError(f"--grace {self.grace:g}: it must be 0 seconds or more, and less than 1e9")
        spec, shell, found = self, self.shell, detect(os.environ)
        names = [name for name, _ in found.hosts] if found else []
        # Oversubscribing a single machine is allowed.
        alone = self.ranks is not None and set(names) == local_names(names)
        # Hosts that the user picks from the allocation are reached as it defines, unless options say how.
        own_ssh = shell.port or shell.identity or shell.arguments
        picked = {name for name, _ in self.hosts or ()} <= set(names)
        if found and not alone and picked and (self.hosts is None or found.method == "ssh" or not own_ssh):
            if found.refused and self.hosts is None:
                raise LaunchError(found.refused)
            arguments = (*shell.arguments, *found.ssh_arguments)
            shell = replace(
                shell, method=found.method, arguments=arguments, start_timeout=found.start_timeout
            )
            hosts, source = self.hosts or found.hosts, self.source or found.source
            spec = replace(self, hosts=hosts, source=source, shell=shell)
        if spec.ranks is None:
            if not spec.hosts:
                raise LaunchError("specify -np N, for example: -np 2 python train.py")
            spec = replace(spec, ranks=sum(slots for _, slots in spec.hosts))
        return spec


def refuse_launcher(command: Sequence[str]) -> None:
    """Raise a LaunchError if each rank would start ranks of its own, in a job of their own."""
    words = list(command[1:] if command[:1] == ["--"] else command) or [""]
    program = os.path.basename(words[0])
    options = " ".join(takewhile(lambda word: word != "-m" and not word.endswith(".py"), words))
    # One torchrun on each host is usual: they meet in one job.
    joins = program == "torchrun" and re.search(r"--(nnodes[= ](?!1( |$))|rdzv.endpoint)", options)
    if program in _LAUNCHERS and not joins:
        raise LaunchError(
            f"{program} starts ranks itself: each rank would run a job of its own. Leave {program} and its "
            "options out, and give what each rank runs, as in: -- python train.py"
        )


def check_machine() -> None:
    """Raise a CommandError if no job can start on this machine."""
    problem = machine.problem()
    if problem:
        raise CommandError(problem)


def parse_exports(texts: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Parse ``NAME=VALUE``, or ``NAME`` for its value in `environ`.

    Raises:
        CommandError: ``NAME`` alone that is not set, or no name.
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or "," in name or (not equals and name not in environ):
            wrong = "give each NAME=VALUE by itself" if "," in name else "that variable is not set here"
            raise CommandError(f"-x {text}: {wrong if name else 'the name is missing'}")
        found[name] = value if equals else environ[name]
    return found


def resolve_command(command: Sequence[str], directory: str = "") -> list[str]:
    """Return the command with its program's path, checked before the start.

    Args:
        command: program and arguments.
        directory: of the ranks, "" for this one; where it is only on other hosts, it is not looked into.

    Raises:
        CommandError: no command, not found (code 127), not executable, or a Python script that is missing.
    """
    check_machine()
    command = list(command[1:] if command[:1] == ["--"] else command)
    if not command:
        raise CommandError("missing COMMAND, for example: ringdance run -np 2 python train.py")
    program = command[0]
    if program in ("python", "python3"):
        path: str | None = sys.executable
    else:
        path = shutil.which(program)
    if path is None:
        if os.path.isdir(program) or os.path.isfile(program):
            hint = f"; did you mean `python {program}`?" if program.endswith(".py") else ""
            raise CommandError(f"{program} is not an executable program{hint}")
        raise CommandError(f"command not found: {program}", 127)
    if os.path.basename(path).startswith("python"):
        script = script_of(command[1:])
        there = os.path.join(os.getcwd(), directory)
        if script and os.path.isdir(there) and not os.path.exists(os.path.join(there, script)):
            raise CommandError(f"no such script: {script} (in {there})")
    return [os.path.abspath(path), *command[1:]]


def script_of(arguments: Sequence[str]) -> str | None:
    """Return the script among a Python interpreter's arguments; None for -m, -c and standard input."""
    rest = iter(arguments)
    for word in rest:
        if word in ("-X", "-W", "--check-hash-based-pycs"):
            next(rest, None)
        elif word == "-" or word.startswith(("-m", "-c")):
            return None
        elif not word.startswith("-"):
            return word
    return None
