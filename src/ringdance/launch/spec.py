"""What a person asks for, whichever way: ``ringdance run``, ``ringdance.run``, or another command line."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ringdance.cluster.detect import detect
from ringdance.cluster.hostfile import HostList
from ringdance.errors import LaunchError
from ringdance.launch.cause import Verdict, render
from ringdance.launch.environment import ALL
from ringdance.launch.hosts import facts_from, local_names, place
from ringdance.launch.job import Job
from ringdance.launch.mpi import find_mpi
from ringdance.launch.options import Options
from ringdance.launch.output.screen import Screen
from ringdance.launch.output.stream import WITH_HOST, WITH_RANK, Sink, Style, guarded, write_all
from ringdance.launch.plan import Plan, build_plan
from ringdance.launch.remote.connect import Remote, connect
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
    """A job to be run from here, now.

    Attributes:
        command: program and its arguments.
        ranks: how many; None for all slots of `hosts`.
        hosts: names and slots, or None: those that a scheduler has given, else this machine.
        source: where `hosts` come from, for people.
        shell: how other hosts are reached, where no scheduler says.
        interfaces: names of the network interfaces to use; empty for those that lead to all hosts.
        chdir: directory of the ranks on other hosts, "" for one that is called as the launcher's.
        check: whether other hosts are asked before a plan is made; they always are before a start.
        exports: variables to set for the ranks.
        forward: which of the launcher's variables ranks on other hosts get, as of ``environment.forwarded``.
        style: how the ranks' lines are shown; None: with their rank, and their host if there are several.
        clock, colour: whether the time stands before each line, and whether ranks have colours, where no
            style is given.
        fold: whether equal lines of several ranks are shown once.
        folder: for a copy of each rank's output, or "".
        start_timeout: seconds until hosts must have answered, and then until all ranks must have started.
        silence: seconds after which a host that says nothing is lost.
        verbose: tell what is done.
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
    folder: str = ""
    start_timeout: float = 60.0
    silence: float = 6.0
    verbose: bool = False
    binding: Sequence[str] | None = None
    mpi_args: Sequence[str] = ()

    def resolved(self) -> JobSpec:
        """The same with its hosts and ranks decided: what a scheduler has given, where nothing is said.

        Raises:
            LaunchError: neither hosts nor a number of ranks are known.
        """
        order = self
        given = detect(os.environ)
        names = [name for name, _ in given.hosts] if given else []
        # On a single machine more ranks than a scheduler has counted tasks are nobody else's business.
        alone = order.ranks is not None and set(names) == local_names(names)
        # Hosts that the user picks from a job's are reached as these, unless it is said how.
        told = order.shell.port or order.shell.identity or order.shell.arguments
        picked = {name for name, _ in order.hosts or ()} <= set(names)
        if given and not alone and picked and (order.hosts is None or given.method == "ssh" or not told):
            shell = replace(
                order.shell,
                method=given.method,
                arguments=(*order.shell.arguments, *given.ssh_arguments),
                start_timeout=given.start_timeout,
            )
            order = replace(
                order,
                hosts=order.hosts or given.hosts,
                source=order.source or given.source,
                shell=shell,
            )
        if order.ranks is None:
            if not order.hosts:
                raise LaunchError("how many ranks? Give -np N, for example: -np 2 python train.py")
            order = replace(order, ranks=sum(slots for _, slots in order.hosts))
        if not self.start_timeout > 0:
            raise LaunchError(f"--start-timeout {self.start_timeout:g}: it must be more than 0 seconds")
        return order

    def prepare(
        self,
        say: Callable[[str], None] = lambda text: None,
        connect: Callable[..., list[Remote]] = connect,
    ) -> PreparedJob:
        """Plan the job and start an agent on each other host; the command must have been resolved.

        Args:
            say: is called with what is waited for.
            connect: starts the agents, as :func:`remote.connect.connect`.

        Raises:
            LaunchError: it cannot be done; nothing has been started.
        """
        check_machine()
        order = self.resolved()
        assert order.ranks is not None
        hosts = order.hosts or [("localhost", order.ranks)]
        local = local_names(name for name, _ in hosts)
        place(order.ranks, hosts)  # too few slots are told before anybody is asked
        others = list(dict.fromkeys(name for name, _ in hosts if name not in local))
        find_mpi()  # what is missing here is named before other hosts are asked
        remotes = connect(others, order.shell, order.start_timeout, say) if others and order.check else []
        facts = {remote.host: remote.facts for remote in remotes}
        here = facts_from(machine.facts())
        facts |= {name: here for name, _ in hosts if name in local}
        exports = dict(order.exports)
        if order.folder and _RECORDS not in os.environ:  # what a failing rank records belongs to its output
            exports.setdefault(_RECORDS, os.path.abspath(order.folder))
        try:
            plan = build_plan(
                replace(order, exports=exports),
                mpi=find_mpi(),
                cores=usable_cores(),
                environ=os.environ,
                facts=facts,
                local=local,
                root=os.getuid() == 0,
            )
        except BaseException:
            for remote in remotes:
                remote.close()
            raise
        wanted = {host.name for host in plan.hosts}
        for remote in remotes:
            if remote.host not in wanted:  # more slots than ranks
                remote.close()
        return PreparedJob(order, plan, [remote for remote in remotes if remote.host in wanted])

    def make_folder(self) -> Path | None:
        """The folder for the ranks' output, made if it is not there.

        Raises:
            LaunchError: it cannot be made.
        """
        if not self.folder:
            return None
        try:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"--output-filename {self.folder}: {error.strerror}") from None
        return Path(self.folder)


@dataclass
class PreparedJob:
    """An order with its plan, and with its agents waiting on the other hosts.

    Attributes:
        order: hosts and ranks decided.
        plan: what will be started.
        remotes: the agents.
    """

    order: JobSpec
    plan: Plan
    remotes: list[Remote]

    def close(self) -> None:
        """Start nothing after all."""
        for remote in self.remotes:
            remote.close()

    def options(
        self, out: Sink, err: Sink, terminals: Sequence[bool] = (False, False), **more: Any
    ) -> Options:
        """How it is run; a sink that fails, but for want of a reader, is left out from then on."""
        order = self.order

        def warn(line: bytes) -> None:
            guarded_err(line)

        guarded_out = guarded("stdout", out, warn)
        guarded_err = guarded("stderr", err, guarded_out)
        return Options(
            screen=Screen((guarded_out, guarded_err), terminals),
            style=order.style
            or replace(
                WITH_HOST if len(self.plan.hosts) > 1 else WITH_RANK,
                clock=order.clock,
                colour=int(order.colour),
            ),
            fold=order.fold,
            folder=order.make_folder(),
            start_timeout=order.start_timeout,
            silence=order.silence,
            verbose=order.verbose,
            needed=_needed(self.plan.command)[bool(self.plan.python) :],
            **more,
        )


def _needed(command: Sequence[str]) -> list[str]:
    """Files of the command that every host must have."""
    script = _script(command[1:]) if os.path.basename(command[0]).startswith("python") else None
    return [command[0], *([script] if script else [])]


def run_in_terminal(ready: PreparedJob) -> int:
    """Run it with the output on this process's stdout and stderr; the exit code.

    Raises:
        LaunchError: nothing was started.
    """
    plan = ready.plan
    if ready.order.verbose:
        print(plan.describe(os.environ), file=sys.stderr)
    sys.stdout.flush()
    # Not a terminal: a prompt would wait for its line's end, a job in the background take its input.
    stdin = -1 if sys.stdin is None or sys.stdin.isatty() else 0
    smart = os.environ.get("TERM", "dumb") != "dumb"
    terminals = [smart and os.isatty(descriptor) for descriptor in (1, 2)]
    options = ready.options(write_all(1), write_all(2), terminals, stdin=stdin)
    return show_outcome(Job(plan, options, ready.remotes).run(), ready, options.err)


def show_outcome(outcome: Verdict | int, ready: PreparedJob, err: Sink) -> int:
    """Show the verdict on a failed job, and return the exit code."""
    if isinstance(outcome, int):
        return outcome
    err(render(outcome, ready.plan.ranks, ready.order.folder).encode(errors="surrogateescape") + b"\n")
    return outcome.code


def as_program(name: str, action: Callable[[], int]) -> int:
    """The exit code of a command line's `action`; what it raises is told in one line."""
    try:
        return action()
    except SystemExit as end:  # argparse has said what is wrong, or shown the help
        return int(end.code or 0)
    except LaunchError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return getattr(error, "code", 2)
    except KeyboardInterrupt:  # before the job's own handling
        return 130
    except BrokenPipeError:  # whoever read our output has gone, as in `ringdance run ... | head`
        # Else the interpreter complains when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141


def check_machine() -> None:
    """Raise a CommandError if no job can start on this machine."""
    problem = machine.problem()
    if problem:
        raise CommandError(problem)


def parse_exports(texts: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """``NAME=VALUE``, or ``NAME`` for the value it has in `environ`.

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
    """The command with its program's path; checked, so that mistakes are told once and before the start.

    Raises:
        CommandError: no command, not found (code 127), not executable, or a Python script that is missing.
    """
    check_machine()
    command = list(command[1:] if command[:1] == ["--"] else command)
    if not command:
        raise CommandError("what is to be run? For example: ringdance run -np 2 python train.py")
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
    """The script among the arguments of a Python interpreter; None for -m, -c and standard input."""
    rest = iter(arguments)
    for word in rest:
        if word in ("-X", "-W", "--check-hash-based-pycs"):
            next(rest, None)
        elif word == "-" or word.startswith(("-m", "-c")):
            return None
        elif not word.startswith("-"):
            return word
    return None
