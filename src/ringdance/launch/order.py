"""What a person asks for, whichever way: ``ringdance run``, ``ringdance.run``, or another command line."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ringdance.errors import LaunchError
from ringdance.launch.cause import Verdict, render
from ringdance.launch.hosts import HostList, local_names
from ringdance.launch.job import Job
from ringdance.launch.linux import usable_cores
from ringdance.launch.mpi import find_mpi
from ringdance.launch.output import WITH_RANK, Style
from ringdance.launch.plan import Plan, build_plan
from ringdance.launch.running import Options, write_all

_RECORDS = "RINGDANCE_FLIGHT_RECORDER_DIR"


class CommandError(LaunchError):
    """The user's command cannot be run; `code` is the exit code."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Order:
    """A job to be run here and now.

    Attributes:
        command: program and its arguments.
        ranks: how many; None for all slots of `hosts`.
        hosts: names and slots, or None for this machine.
        exports: variables to set for the ranks.
        style: how the ranks' lines are shown.
        folder: for a copy of each rank's output, or "".
        start_timeout: seconds until all ranks must have started.
        verbose: tell what is done.
        binding: options of mpiexec in place of ours that bind ranks to no cores.
        mpi_args: more options of mpiexec.
    """

    command: Sequence[str]
    ranks: int | None = None
    hosts: HostList | None = None
    exports: Mapping[str, str] = field(default_factory=dict)
    style: Style = WITH_RANK
    folder: str = ""
    start_timeout: float = 60.0
    verbose: bool = False
    binding: Sequence[str] | None = None
    mpi_args: Sequence[str] = ()

    def plan(self) -> Plan:
        """What would be started; the command must have been resolved.

        Raises:
            LaunchError: it cannot be done; nothing has been started.
        """
        ranks = self.ranks
        if ranks is None:
            if not self.hosts:
                raise LaunchError("how many ranks? Give -np N, for example: -np 2 python train.py")
            ranks = sum(slots for _, slots in self.hosts)
        if not self.start_timeout > 0:
            raise LaunchError(f"--start-timeout {self.start_timeout:g}: it must be more than 0 seconds")
        exports = dict(self.exports)
        if self.folder and _RECORDS not in os.environ:  # what a failing rank records belongs to its output
            exports.setdefault(_RECORDS, os.path.abspath(self.folder))
        return build_plan(
            self.command,
            ranks=ranks,
            mpi=find_mpi(),
            cores=usable_cores(),
            environ=os.environ,
            hosts=self.hosts,
            exports=exports,
            local=local_names(name for name, _ in self.hosts or [("localhost", 0)]),
            root=os.getuid() == 0,
            binding=self.binding,
            mpi_args=self.mpi_args,
        )

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


def run_in_terminal(order: Order, plan: Plan) -> int:
    """Run `plan` with the output on this process's stdout and stderr; the exit code.

    Raises:
        LaunchError: nothing was started.
    """
    folder = order.make_folder()
    if order.verbose:
        print(plan.describe(), file=sys.stderr)
    sys.stdout.flush()
    options = Options(
        out=write_all(1),
        err=write_all(2),
        style=order.style,
        folder=folder,
        start_timeout=order.start_timeout,
        verbose=order.verbose,
        # Not a terminal: a prompt would wait for its line's end, a job in the background take its input.
        stdin=-1 if sys.stdin is None or sys.stdin.isatty() else 0,
    )
    outcome = Job(plan, options).run()
    if isinstance(outcome, Verdict):
        print(render(outcome, plan.ranks, order.folder), file=sys.stderr, flush=True)
        return outcome.code
    return outcome


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
