"""What a user asks for, and how it is prepared: by ``ringdance run`` or ``ringdance.run``."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from ringdance.cluster.detect import detect
from ringdance.cluster.hostfile import HostList
from ringdance.errors import LaunchError
from ringdance.launch.cause import CAUSE_FILE, Verdict, render
from ringdance.launch.directories import METRICS_DIR, OWN_DIRECTORY, TIMELINE
from ringdance.launch.hosts import assign_ranks, facts_from, local_names
from ringdance.launch.job import Job
from ringdance.launch.mpi import find_mpi
from ringdance.launch.output.screen import Screen
from ringdance.launch.output.stream import WITH_HOST, WITH_RANK, Style, write_all
from ringdance.launch.plan import Plan, build_plan
from ringdance.launch.remote.connect import Remote, close_all, connect
from ringdance.launch.remote.environment import ALL
from ringdance.launch.remote.shell import RemoteShell
from ringdance.launch.system import machine
from ringdance.launch.system.linux import usable_cores

_RECORDS = "RINGDANCE_FLIGHT_RECORDER_DIR"


class CommandError(LaunchError):
    """The user's command cannot be run; `code` is the exit code."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


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
        chdir: directory of the ranks on other hosts, "" for the path of the launcher's.
        check: whether to ask other hosts before a plan is made; needed for a start.
        exports: variables to set for the ranks.
        forward: which of the launcher's variables ranks on other hosts get, as of ``environment.forwarded``.
        style: how lines of ranks are shown; None: with their rank, and their host if there are several.
        clock, colour: whether lines begin with the time, and ranks have colours, if `style` is None.
        fold: whether equal lines of several ranks are shown once.
        output_directory: for a copy of each rank's output, or "".
        timeline: file for a timeline of all ranks, or "".
        timeline_steps: of which it tells, as the setting; "" for all.
        start_timeout: seconds until hosts must have answered, and then until all ranks must have started.
        heartbeat_timeout: seconds without a heartbeat after which a host is lost.
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
    forward: Sequence[str] = ALL
    style: Style | None = None
    clock: bool = False
    colour: bool = False
    fold: bool = False
    output_directory: str = ""
    timeline: str = ""
    timeline_steps: str = ""
    start_timeout: float = 60.0
    heartbeat_timeout: float = 6.0
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
        spec, shell, found = self, self.shell, detect(os.environ)
        names = [name for name, _ in found.hosts] if found else []
        # Oversubscribing a single machine is allowed.
        alone = self.ranks is not None and set(names) == local_names(names)
        # Hosts that the user picks from the allocation are reached as it defines, unless options say how.
        own_ssh = shell.port or shell.identity or shell.arguments
        picked = {name for name, _ in self.hosts or ()} <= set(names)
        if found and not alone and picked and (self.hosts is None or found.method == "ssh" or not own_ssh):
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

    def prepare(
        self,
        log: Callable[[str], None] = lambda text: None,
        connect: Callable[..., list[Remote]] = connect,
        local: Collection[str] | None = None,
    ) -> PreparedJob:
        """Plan the job and start an agent on each other host; the command must have been resolved.

        Args:
            log: is called with what is waited for.
            connect: starts the agents, as :func:`remote.connect.connect`.
            local: which names are this machine; by default found out by their addresses.

        Raises:
            LaunchError: it cannot be done; nothing has been started.
        """
        check_machine()
        spec = self.resolved()
        assert spec.ranks is not None
        hosts = spec.hosts or [("localhost", spec.ranks)]
        local = local_names(name for name, _ in hosts) if local is None else local
        # What is wrong here is reported before other hosts are asked.
        assign_ranks(spec.ranks, hosts)
        mpi = find_mpi()
        others = list(dict.fromkeys(name for name, _ in hosts if name not in local))
        remotes = connect(others, spec.shell, spec.start_timeout, log) if others and spec.check else []
        facts = dict.fromkeys(local, facts_from(machine.facts()))
        facts |= {remote.host: remote.facts for remote in remotes}
        exports = dict(spec.exports)
        if spec.output_directory:  # records of a failing rank and figures over time are output too
            for name in (_RECORDS, METRICS_DIR):
                if name not in os.environ:
                    exports.setdefault(name, os.path.abspath(spec.output_directory))
        if spec.timeline:  # rank 0's host writes it; the agent there sends it if that is another one
            ending = os.path.splitext(spec.timeline)[1].lstrip(".") or "json"
            there = f"{OWN_DIRECTORY}/{TIMELINE}{ending}"
            exports["RINGDANCE_TIMELINE"] = os.path.abspath(spec.timeline) if hosts[0][0] in local else there
            if spec.timeline_steps:
                exports["RINGDANCE_TIMELINE_STEPS"] = spec.timeline_steps
        try:
            plan = build_plan(
                replace(spec, exports=exports),
                mpi=mpi,
                cores=usable_cores(),
                environ=os.environ,
                facts=facts,
                local=local,
                root=os.getuid() == 0,
            )
        except BaseException:
            close_all(remotes)
            raise
        used = {host.name for host in plan.hosts}  # not all, if there are more slots than ranks
        close_all(remote for remote in remotes if remote.host not in used)
        return PreparedJob(spec, plan, [remote for remote in remotes if remote.host in used])


Log = Callable[[str], None]
"""Shows a line to the user."""


@dataclass
class PreparedJob:
    """A job with its plan, and with its agents waiting on the other hosts.

    Attributes:
        spec: with hosts and ranks.
        plan: what will be started.
        remotes: the agents.
    """

    spec: JobSpec
    plan: Plan
    remotes: list[Remote]

    def close(self) -> None:
        """End the agents; nothing is started."""
        close_all(self.remotes)

    @property
    def style(self) -> Style:
        """How lines of ranks are shown."""
        style = WITH_HOST if len(self.plan.hosts) > 1 else WITH_RANK
        return self.spec.style or replace(style, clock=self.spec.clock, colour=int(self.spec.colour))

    @property
    def needed(self) -> list[str]:
        """Files that every host must have."""
        program, *arguments = self.plan.command
        script = _script(arguments) if os.path.basename(program).startswith("python") else None
        own = [] if self.plan.python and program == sys.executable else [program]
        return [*own, *([script] if script else [])]


Check = Callable[[PreparedJob, Log], None]
"""Checks a prepared job; raises a LaunchError if it must not start."""


def run_in_terminal(prepared: PreparedJob) -> int:
    """Run it with the output on this process's stdout and stderr; return the exit code.

    Raises:
        LaunchError: nothing was started.
    """
    if prepared.spec.verbose:
        print(prepared.plan.describe(os.environ), file=sys.stderr)
    sys.stdout.flush()
    # Not a terminal: a prompt would wait for its line's end, a job in the background take its input.
    stdin = -1 if sys.stdin is None or sys.stdin.isatty() else 0
    smart = os.environ.get("TERM", "dumb") != "dumb"
    terminals = [smart and os.isatty(descriptor) for descriptor in (1, 2)]
    screen = Screen((write_all(1), write_all(2)), terminals)
    return show_outcome(Job(prepared, screen, stdin=stdin).run(), prepared, screen)


def show_outcome(outcome: Verdict | int, prepared: PreparedJob, screen: Screen) -> int:
    """Show the verdict on a failed job; return the exit code."""
    if isinstance(outcome, int):
        return outcome
    directory = prepared.spec.output_directory
    text = render(outcome, prepared.plan.ranks, directory)
    if directory:
        with contextlib.suppress(OSError), open(os.path.join(directory, CAUSE_FILE), "w") as file:
            json.dump(asdict(outcome.cause), file)
    screen.of(1)(text.encode(errors="surrogateescape") + b"\n")
    return outcome.code


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
        if not name or (not equals and name not in environ):
            raise CommandError(
                f"-x {text}: " + ("that variable is not set here" if name else "the name is missing")
            )
        found[name] = value if equals else environ[name]
    return found


def resolve_command(command: Sequence[str]) -> list[str]:
    """Return the command with its program's path, checked before the start.

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
        script = _script(command[1:])
        if script and not os.path.exists(script):
            raise CommandError(f"no such script: {script} (in {os.getcwd()})")
    return [os.path.abspath(path), *command[1:]]


def _script(arguments: Sequence[str]) -> str | None:
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
