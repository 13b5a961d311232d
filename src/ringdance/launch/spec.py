"""A user's request for a job: its hosts, options and command."""

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
    """The user's command cannot be run. ``code`` is the exit code for the job."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


_LAUNCHERS = frozenset(("mpirun", "mpiexec", "orterun", "prterun", "srun", "torchrun", "horovodrun"))


@dataclass(frozen=True)
class JobSpec:
    """The specification of a job to start from this machine.

    Attributes:
        command: The program and its arguments.
        ranks: Number of ranks. None means all slots of ``hosts``.
        hosts: Host names and slots. None means the scheduler's allocation if there is one, otherwise this
            machine.
        source: Where ``hosts`` were specified, for display.
        shell: How to reach other hosts, unless a scheduler defines it.
        interfaces: Names of the network interfaces to use. If empty, use the ones that connect all hosts.
        chdir: Working directory of the ranks, used on this host only if it exists. Default: the launcher's.
        check: If True, query other hosts before planning. Must be True to start the job.
        exports: Variables to set for the ranks.
        forward: If True, ranks on other hosts get the launcher's variables, otherwise only settings.
        style: Format of the ranks' output lines.
        output_directory: Directory for a copy of each rank's output, if any.
        timeline: File for a timeline of all ranks, if any.
        start_timeout: Seconds within which all hosts must answer, and then again within which all ranks
            must start.
        heartbeat_timeout: Seconds without a heartbeat after which a host is considered lost.
        grace: Time in seconds for ranks to exit after a signal to the launcher. A second SIGINT ends them
            immediately.
        verbose: If True, show each step of the launch.
        binding: mpiexec options for binding. They replace the default of not binding ranks to cores.
        mpi_args: Further options for mpiexec.
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
    style: Style = field(default_factory=Style)
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
            LaunchError: A time limit is invalid, the allocation cannot be used, or the number of ranks is
                unknown.
        """
        if not self.start_timeout > 0:
            raise LaunchError(f"--start-timeout must be longer than 0 seconds, got {self.start_timeout:g}")
        if not 0 <= self.grace < 1e9:
            raise LaunchError(f"--grace must be at least 0 and less than 1e9 seconds, got {self.grace:g}")
        spec, shell, alloc = self, self.shell, detect(os.environ)
        names = [name for name, _ in alloc.hosts] if alloc else []
        # Oversubscribing a single machine is allowed.
        local = self.ranks is not None and set(names) == local_names(names)
        # If the user picks hosts from the allocation, reach them as the scheduler does, unless ssh options
        # are given.
        own_ssh = shell.port or shell.identity or shell.arguments
        picked = {name for name, _ in self.hosts or ()} <= set(names)
        if alloc and not local and picked and (self.hosts is None or alloc.method == "ssh" or not own_ssh):
            if alloc.refused and self.hosts is None:
                raise LaunchError(alloc.refused)
            arguments = (*shell.arguments, *alloc.ssh_arguments)
            shell = replace(
                shell, method=alloc.method, arguments=arguments, start_timeout=alloc.start_timeout
            )
            hosts, source = self.hosts or alloc.hosts, self.source or alloc.source
            spec = replace(self, hosts=hosts, source=source, shell=shell)
        if spec.ranks is None:
            if not spec.hosts:
                raise LaunchError(
                    "the number of ranks is unknown. Specify -np N, for example: -np 2 python train.py"
                )
            spec = replace(spec, ranks=sum(slots for _, slots in spec.hosts))
        return spec


def refuse_launcher(command: Sequence[str]) -> None:
    """Raise LaunchError if the command is itself a launcher, because each rank would start a separate job."""
    words = list(command[1:] if command[:1] == ["--"] else command) or [""]
    program = os.path.basename(words[0])
    options = " ".join(takewhile(lambda word: word != "-m" and not word.endswith(".py"), words))
    # Running one torchrun per host is common. All of them join the same job.
    joins = program == "torchrun" and re.search(r"--(nnodes[= ](?!1( |$))|rdzv.endpoint)", options)
    if program in _LAUNCHERS and not joins:
        raise LaunchError(
            f"{program} starts ranks itself, so each rank would run its own job. Remove {program} and its "
            "options, and give the command that each rank runs, for example: -- python train.py"
        )


def check_machine() -> None:
    """Raise CommandError if this machine cannot start jobs."""
    problem = machine.problem()
    if problem:
        raise CommandError(problem)


def parse_exports(texts: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Parse texts of the form ``NAME=VALUE``, or ``NAME``, whose value is taken from ``environ``.

    Raises:
        CommandError: A name is empty or contains a comma, or the value of ``NAME`` is not in ``environ``.
    """
    exports = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or "," in name or (not equals and name not in environ):
            wrong = "use one -x for each NAME=VALUE" if "," in name else "that variable is not set here"
            raise CommandError(f"-x {text}: {wrong if name else 'the name is missing'}")
        exports[name] = value if equals else environ[name]
    return exports


def resolve_command(command: Sequence[str], directory: str = "") -> list[str]:
    """Resolve the path of the command's program, and check the command before the job starts.

    Args:
        command: The program and its arguments.
        directory: Working directory of the ranks. Default: the current directory. The Python script is not
            checked if this directory exists only on other hosts.

    Raises:
        CommandError: The command is empty, its program is not found (code 127) or not executable, or its
            Python script does not exist.
    """
    check_machine()
    command = list(command[1:] if command[:1] == ["--"] else command)
    if not command:
        raise CommandError("missing COMMAND. Example: ringdance run -np 2 python train.py")
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
    """Return the script among a Python interpreter's arguments, or None for -m, -c and standard input."""
    rest = iter(arguments)
    for word in rest:
        if word in ("-X", "-W", "--check-hash-based-pycs"):
            next(rest, None)
        elif word == "-" or word.startswith(("-m", "-c")):
            return None
        elif not word.startswith("-"):
            return word
    return None
